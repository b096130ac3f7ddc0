//! Detaching programs and emptying tables of any type, for which aya has no calls. Format of the calls: `union
//! bpf_attr` in the kernel's `include/uapi/linux/bpf.h`.

use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use anyhow::{Context, Result, anyhow, bail};
use aya::{
    maps::{Map, MapData, RingBuf},
    programs::links::FdLink,
};
use nix::errno::Errno;

// Commands of bpf(2).
const MAP_DELETE_ELEM: libc::c_long = 3;
const MAP_GET_NEXT_KEY: libc::c_long = 4;
const MAP_UPDATE_BATCH: libc::c_long = 26;
const LINK_GET_FD_BY_ID: libc::c_long = 30;
const LINK_DETACH: libc::c_long = 34;

/// An element of a map. Keys and values are addresses of memory.
#[repr(C)]
struct Element {
    map: u64,
    key: u64,
    /// Or where the next key is to be put.
    value: u64,
    flags: u64,
}

/// Many elements of a map.
#[repr(C)]
struct Batch {
    begin: u64,
    end: u64,
    keys: u64,
    values: u64,
    count: u32,
    map: u32,
    element_flags: u64,
    flags: u64,
}

/// A link, by its id or its file descriptor.
#[repr(C)]
struct Named {
    name: u32,
}

/// Detaches a link and waits until its program runs nowhere by it. A drop does so only if no other process has the
/// file descriptor, and for a moment each child of another test has it.
pub(super) fn detach(link: &FdLink) -> Result<()> {
    let mut id = Named {
        name: link.info()?.id(),
    };
    let fd = call(LINK_GET_FD_BY_ID, &mut id).context("BPF_LINK_GET_FD_BY_ID")?;
    // SAFETY: the kernel has made the descriptor for this call.
    #[allow(unsafe_code)]
    let fd = unsafe { OwnedFd::from_raw_fd(fd as libc::c_int) };
    let mut own = Named { name: number(&fd) };
    call(LINK_DETACH, &mut own).context("BPF_LINK_DETACH")?;
    Ok(())
}

/// Makes a map what it was when it was made. No program may run.
pub(super) fn empty(name: &str, map: &mut Map) -> Result<()> {
    match map {
        // The programs' constants, which nobody can change.
        Map::Array(_) if name.starts_with(".rodata") => Ok(()),
        Map::Array(_) if name.starts_with(".data") => bail!("it did not begin with zeros"),
        Map::Array(data) => zero(data, false),
        Map::PerCpuArray(data) => zero(data, true),
        Map::HashMap(data) | Map::LruHashMap(data) | Map::PerCpuHashMap(data) | Map::LpmTrie(data) => {
            remove_all(data)
        }
        Map::RingBuf(_) => {
            let mut ring: RingBuf<_> = map.try_into()?;
            while ring.next().is_some() {}
            Ok(())
        }
        _ => bail!("it is of a type that this does not know"),
    }
}

/// Writes zeros into all elements.
fn zero(data: &MapData, is_per_cpu: bool) -> Result<()> {
    let info = data.info()?;
    let count = info.max_entries();
    let size = if is_per_cpu {
        let cpus = aya::util::nr_cpus().map_err(|(path, error)| anyhow!("{path}: {error}"))?;
        (info.value_size() as usize).next_multiple_of(8) * cpus
    } else {
        info.value_size() as usize
    };
    let keys: Vec<u32> = (0..count).collect();
    let values = vec![0_u8; count as usize * size];
    let mut batch = Batch {
        begin: 0,
        end: 0,
        keys: keys.as_ptr() as u64,
        values: values.as_ptr() as u64,
        count,
        map: number(data.fd()),
        element_flags: 0,
        flags: 0,
    };
    call(MAP_UPDATE_BATCH, &mut batch).context("BPF_MAP_UPDATE_BATCH")?;
    if batch.count != count {
        bail!("only {} of {count} elements were written", batch.count);
    }
    Ok(())
}

/// Removes all elements.
fn remove_all(data: &MapData) -> Result<()> {
    let size = data.info()?.key_size() as usize;
    let map = number(data.fd()).into();
    let (mut key, mut next) = (vec![0_u8; size], vec![0_u8; size]);
    let mut has_key = false;
    loop {
        // Asked for while the key is still there: otherwise the kernel would begin again.
        let mut following = Element {
            map,
            key: if has_key { key.as_ptr() as u64 } else { 0 },
            value: next.as_mut_ptr() as u64,
            flags: 0,
        };
        let found = call(MAP_GET_NEXT_KEY, &mut following);
        if has_key {
            let mut own = Element {
                map,
                key: key.as_ptr() as u64,
                value: 0,
                flags: 0,
            };
            call(MAP_DELETE_ELEM, &mut own).context("BPF_MAP_DELETE_ELEM")?;
        }
        match found {
            Ok(_) => std::mem::swap(&mut key, &mut next),
            Err(Errno::ENOENT) => return Ok(()),
            Err(error) => return Err(error).context("BPF_MAP_GET_NEXT_KEY"),
        }
        has_key = true;
    }
}

/// Returns the number of a file descriptor.
fn number(fd: &impl AsFd) -> u32 {
    fd.as_fd().as_raw_fd().cast_unsigned()
}

fn call<T>(command: libc::c_long, attributes: &mut T) -> nix::Result<libc::c_long> {
    // SAFETY: the structures of this file are beginnings of `union bpf_attr`, and the memory that they name lives
    // longer than the call and is as long as the map's keys and values are.
    #[allow(unsafe_code)]
    let result = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            command,
            std::ptr::from_mut(attributes),
            size_of::<T>(),
        )
    };
    Errno::result(result)
}
