//! Walks over the entries of a hash map that programs change meanwhile, by batches (`BPF_MAP_LOOKUP_BATCH`).
//!
//! Invariant: a walk visits each bucket once. So it ends, and meets no key twice. `BPF_MAP_GET_NEXT_KEY` would begin
//! again at the first bucket if a program has removed the key from which the walk goes on.
#![allow(unsafe_code)] // a system call that aya has no function for

use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;

use aya::Pod;
use aya::maps::{MapData, MapError};

use super::tables::{TableError, access, data};

/// `bpf_cmd` of linux/bpf.h.
const BPF_MAP_LOOKUP_BATCH: libc::c_long = 24;
/// Entries of a batch, unless a single bucket has more.
const BATCH: u32 = 4096;

/// The hash map, LRU or not.
#[derive(Debug)]
pub struct Walk<K, V> {
    map: MapData,
    name: &'static str,
    entry: PhantomData<(K, V)>,
}

/// The arguments of the system call: `batch` of linux/bpf.h's `union bpf_attr`.
#[repr(C)]
struct Attributes {
    in_batch: u64,
    out_batch: u64,
    keys: u64,
    values: u64,
    count: u32,
    map: u32,
    element_flags: u64,
    flags: u64,
}

impl<K: Pod, V: Pod> Walk<K, V> {
    /// Opens a pinned map, which must have these keys and values.
    pub fn open(maps: &Path, name: &'static str) -> Result<Self, TableError> {
        let map = data(maps, name)?;
        let info = map.info().map_err(super::tables::open(name))?;
        let sizes = [info.key_size(), info.value_size()];
        if sizes != [size_of::<K>(), size_of::<V>()].map(|size| size as u32) {
            return Err(TableError::Mismatch { name });
        }
        Ok(Self {
            map,
            name,
            entry: PhantomData,
        })
    }

    /// Visits once every entry that is there from the begin to the end of the walk, and each other entry once or not
    /// at all.
    pub fn each(&self, mut visit: impl FnMut(K, V) -> Result<(), TableError>) -> Result<(), TableError> {
        let failed = |error| access("read", self.name)(MapError::IoError(error));
        let mut room = BATCH;
        let (mut keys, mut values) = (Vec::new(), Vec::new());
        let mut from = None;
        loop {
            let mut to = 0;
            match self.read(from, &mut to, room, &mut keys, &mut values) {
                Ok(()) => {}
                Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {
                    return keys.iter().zip(&values).try_for_each(|(k, v)| visit(*k, *v));
                }
                // One bucket has more entries than there is room for.
                Err(error) if error.raw_os_error() == Some(libc::ENOSPC) && room < u32::MAX / 2 => {
                    room *= 2;
                    continue;
                }
                Err(error) => return Err(failed(error)),
            }
            keys.iter().zip(&values).try_for_each(|(k, v)| visit(*k, *v))?;
            if from.is_some_and(|from| to <= from) {
                return Err(failed(io::Error::other("the kernel's walk went back")));
            }
            from = Some(to);
        }
    }

    /// Reads one batch, starting at a bucket (`None`: the first). Afterwards `to` is the bucket to go on from. ENOENT
    /// says that this was the last batch. After any result but ENOSPC the vectors have the entries that were read.
    fn read(
        &self,
        from: Option<u32>,
        to: &mut u32,
        room: u32,
        keys: &mut Vec<K>,
        values: &mut Vec<V>,
    ) -> io::Result<()> {
        keys.clear();
        values.clear();
        keys.reserve(room as usize);
        values.reserve(room as usize);
        let mut attributes = Attributes {
            in_batch: from.as_ref().map_or(0, |from| std::ptr::from_ref(from) as u64),
            out_batch: std::ptr::from_mut(to) as u64,
            keys: keys.as_mut_ptr() as u64,
            values: values.as_mut_ptr() as u64,
            count: room,
            map: self.map.fd().as_fd().as_raw_fd().cast_unsigned(),
            element_flags: 0,
            flags: 0,
        };
        // SAFETY: all that the kernel reads and writes lives until it returns. Both vectors have room for `count`
        // entries of the map's sizes (see `open`). A hash map's place in a walk has 32 bits.
        let result = unsafe {
            libc::syscall(
                libc::SYS_bpf,
                BPF_MAP_LOOKUP_BATCH,
                &raw mut attributes,
                size_of::<Attributes>(),
            )
        };
        let error = io::Error::last_os_error();
        if result != 0 && error.raw_os_error() != Some(libc::ENOENT) {
            return Err(error);
        }
        let count = attributes.count.min(room) as usize;
        // SAFETY: the kernel has written so many entries, and an entry is any bytes (`Pod`).
        unsafe {
            keys.set_len(count);
            values.set_len(count);
        }
        if result == 0 { Ok(()) } else { Err(error) }
    }
}
