//! A wall clock that tests move: it is ahead by as many seconds as the file named by `CLOCK_STEP` says at that moment.
//! Only in builds with the feature `clock-steps`; the binary is static, so nothing can be preloaded into it.

#![allow(unsafe_code)] // a function of the C library is replaced

use libc::{CLOCK_REALTIME, CLOCK_REALTIME_COARSE, c_int, clockid_t, timespec};

/// Stands in for the C library's function of this name.
///
/// # Safety
///
/// `time` must be valid, as for the C library's function.
#[unsafe(no_mangle)]
unsafe extern "C" fn clock_gettime(clock: clockid_t, time: *mut timespec) -> c_int {
    // SAFETY: the kernel checks its arguments.
    let result = unsafe { libc::syscall(libc::SYS_clock_gettime, clock, time) };
    if result == 0
        && matches!(clock, CLOCK_REALTIME | CLOCK_REALTIME_COARSE)
        && let Some(seconds) = step()
    {
        // SAFETY: the kernel has written there.
        unsafe { (*time).tv_sec += seconds };
    }
    result as c_int
}

fn step() -> Option<i64> {
    let path = std::env::var_os("CLOCK_STEP")?;
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}
