//! The heap's profile: jemalloc keeps the stacks of sampled allocations, and writes which stacks hold how much memory.

use std::ffi::CString;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::ptr;

/// Writes the profile to a file, as text that jeprof and pprof read. May block.
pub fn dump(file: &Path) -> io::Result<()> {
    let file = CString::new(file.as_os_str().as_bytes())?;
    let mut name = file.as_ptr();
    // SAFETY: jemalloc reads a `const char *` from the address, of that size; the text lives longer than the call.
    #[allow(unsafe_code)]
    let code = unsafe {
        tikv_jemalloc_sys::mallctl(
            c"prof.dump".as_ptr(),
            ptr::null_mut(),
            ptr::null_mut(),
            ptr::from_mut(&mut name).cast(),
            size_of_val(&name),
        )
    };
    match code {
        0 => Ok(()),
        code => Err(io::Error::from_raw_os_error(code)),
    }
}

#[cfg(test)]
mod tests {
    use std::hint::black_box;

    use super::dump;

    #[test]
    fn a_profile_has_the_memory_that_is_held() {
        let held: Vec<Vec<u8>> = (0..64).map(|_| black_box(vec![1; 1 << 20])).collect();
        let file = std::env::temp_dir().join(format!("thuban-heap-{}", std::process::id()));
        dump(&file).unwrap();
        let profile = std::fs::read_to_string(&file).unwrap();
        std::fs::remove_file(&file).unwrap();
        assert_eq!(black_box(held).len(), 64);
        // Each stack has a line with `t*`: its live samples' count and bytes.
        let stacks = profile
            .lines()
            .filter_map(|line| line.trim().strip_prefix("t*: "));
        let bytes = stacks.filter_map(|stack| {
            let (_, bytes) = stack.split_once(": ")?;
            bytes.split(' ').next()?.parse::<u64>().ok()
        });
        let bytes = bytes.max().unwrap();
        assert!(profile.starts_with("heap_v2/2097152\n"), "{profile}");
        assert!(bytes >= 8 << 20, "{bytes} of 64 MiB");
    }
}
