//! Loads the object file and adopts or makes the pinned maps.
//!
//! Invariant: a pinned map is adopted only when type, key, value, size and flags are exactly those that the programs
//! were built for. aya 0.14 does not check, and the kernel would then write past the program's buffers. CONNECTIONS has
//! as many entries as the first transitd chose for its node. SEEN_FLOWS has as many as the mode wants.

use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use aya::maps::MapInfo;
use aya::programs::ProgramError;
use aya::{Ebpf, EbpfError, EbpfLoader};
use aya_obj::Object;
use nix::sys::sysinfo::sysinfo;
use thiserror::Error;

use super::bpffs::PinSettings;
use super::connections::{CONNECTIONS, entries_for};
use super::seen_flows::{self, SEEN_FLOWS};
use super::sk_buff::{self, LayoutError, SKB_LAYOUT};
use super::tables::TableError;
use crate::settings::FlowMode;

/// How often the verifier runs in all.
const MAX_ATTEMPTS: u32 = 10;
/// The pause after its first run. Each pause is twice as long as the one before: a second in all.
const ATTEMPT_PAUSE: Duration = Duration::from_millis(2);

/// Maps that are pinned under their names.
pub const PINNED_MAPS: [&str; 43] = [
    "CONFIG",
    "ON_LINK",
    "ATTACHMENTS",
    "ENDPOINTS",
    "SUBNETS",
    "SOURCE_RANGES",
    "VPCS",
    "DROPLETS",
    "PROBES",
    "MISSES",
    "DIRECT_WANTED",
    "COUNTERS",
    "DROPS",
    "PATH_MTUS",
    "PATH_MTU_LEARNT",
    "ANNOUNCED",
    "TRACED",
    "TRACE",
    "LOADS",
    "SERVICES",
    "SLOTS",
    "BACKENDS",
    "HOMES",
    "FRONTED",
    "CONNECTIONS",
    "SHARES",
    "QUOTAS",
    "AFFINITY",
    "PENDING",
    "FRAGMENTS",
    "METERS",
    "GATES",
    "GRANTS",
    "LISTS",
    "BLOCKS",
    "FLOWS",
    "POLICY",
    "DENIALS",
    "DENIED",
    "FOLLOWED",
    SEEN_FLOWS,
    "FLOW_BUDGETS",
    "FLOW_EVENTS",
];

#[derive(Debug, Error)]
pub enum LoadError {
    #[error("cannot read the programs from {path}")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{path} is not an object file of eBPF programs")]
    Parse {
        path: PathBuf,
        source: aya_obj::ParseError,
    },
    #[error("the programs have no map {0}; transitd and its programs are of different versions")]
    MissingMap(&'static str),
    #[error("cannot create {path}; is a bpffs mounted there?")]
    Directory { path: PathBuf, source: std::io::Error },
    #[error("cannot look at the pinned map {path}")]
    Inspect {
        path: PathBuf,
        source: aya::maps::MapError,
    },
    #[error("cannot unpin {path}, which is of another mode of flows")]
    Unpin { path: PathBuf, source: std::io::Error },
    #[error(
        "the pinned map {path} does not fit these programs: {field} is {found}, expected {expected}; \
         drain the node and remove the pins, or install the version that made them"
    )]
    Incompatible {
        path: PathBuf,
        field: &'static str,
        found: u32,
        expected: u32,
    },
    #[error("cannot load the programs")]
    Load(#[source] EbpfError),
    #[error("the programs have no program {0}; transitd and its programs are of different versions")]
    MissingProgram(&'static str),
    #[error(transparent)]
    Layout(#[from] LayoutError),
    #[error(transparent)]
    Tables(Box<TableError>),
    #[error("the kernel refuses program {name}")]
    Verify {
        name: &'static str,
        source: ProgramError,
    },
}

/// Loads the object file. Afterwards the maps are pinned; the programs are parsed, but none is loaded into the kernel
/// yet.
pub fn load(programs: &Path, pins: &PinSettings, flows: FlowMode) -> Result<Ebpf, LoadError> {
    let data = std::fs::read(programs).map_err(|source| LoadError::Read {
        path: programs.to_owned(),
        source,
    })?;
    let object = Object::parse(&data).map_err(|source| LoadError::Parse {
        path: programs.to_owned(),
        source,
    })?;
    for directory in [pins.maps(), pins.links()] {
        std::fs::create_dir_all(&directory).map_err(|source| LoadError::Directory {
            path: directory,
            source,
        })?;
    }
    let layout = sk_buff::of_kernel()?;
    let mut loader = EbpfLoader::new();
    loader.override_global(SKB_LAYOUT, &layout, true);
    // A map that is pinned stays as it is.
    let memory = sysinfo().map_or(0, |info| info.ram_total());
    loader.map_max_entries(CONNECTIONS, entries_for(memory));
    loader.map_max_entries(SEEN_FLOWS, seen_flows::entries(flows));
    unpin_of_other_mode(pins.maps().join(SEEN_FLOWS), flows)?;
    for name in PINNED_MAPS {
        let path = pins.maps().join(name);
        let map = object.maps.get(name).ok_or(LoadError::MissingMap(name))?;
        compare(&path, map)?;
        loader.map_pin_path(name, path);
    }
    loader.load(&data).map_err(LoadError::Load)
}

/// Has a program verified. The verifier gives up with EAGAIN when a signal comes for the thread
/// (kernel/bpf/verifier.c, `do_check`). EAGAIN says nothing of the program, so the verifier is called again, as libbpf
/// does. Sixteen runs in a row were seen to end so, each within 4 ms: pauses let such a time pass.
pub fn verified(mut load: impl FnMut() -> Result<(), ProgramError>) -> Result<(), ProgramError> {
    let mut pause = ATTEMPT_PAUSE;
    for _ in 1..MAX_ATTEMPTS {
        match load() {
            Err(ProgramError::LoadError { io_error, .. })
                if io_error.raw_os_error() == Some(libc::EAGAIN) =>
            {
                thread::sleep(pause);
                pause *= 2;
            }
            result => return result,
        }
    }
    load()
}

/// Has the load make SEEN_FLOWS anew, if the mode of flows has changed.
fn unpin_of_other_mode(path: PathBuf, flows: FlowMode) -> Result<(), LoadError> {
    match seen_flows::is_of_other_mode(&path, flows) {
        Ok(false) => Ok(()),
        Ok(true) => std::fs::remove_file(&path).map_err(|source| LoadError::Unpin { path, source }),
        Err(source) => Err(LoadError::Inspect { path, source }),
    }
}

fn compare(path: &Path, map: &aya_obj::Map) -> Result<(), LoadError> {
    if !path.exists() {
        return Ok(());
    }
    let inspect = |source| LoadError::Inspect {
        path: path.to_owned(),
        source,
    };
    let info = MapInfo::from_pin(path).map_err(inspect)?;
    let entries = if path.ends_with(CONNECTIONS) || path.ends_with(SEEN_FLOWS) {
        info.max_entries()
    } else {
        map.max_entries()
    };
    let found_type = info.map_type().map_err(inspect)? as u32;
    for (field, found, expected) in [
        ("its type", found_type, map.map_type()),
        ("the key's size", info.key_size(), map.key_size()),
        ("the value's size", info.value_size(), map.value_size()),
        ("the number of entries", info.max_entries(), entries),
        ("its flags", info.map_flags(), map.map_flags()),
    ] {
        if found != expected {
            return Err(LoadError::Incompatible {
                path: path.to_owned(),
                field,
                found,
                expected,
            });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interrupted_verifier_is_retried_but_refusal_is_not() {
        let failure = |errno| {
            Err(ProgramError::LoadError {
                io_error: std::io::Error::from_raw_os_error(errno),
                verifier_log: aya_obj::VerifierLog::new(String::new()),
            })
        };
        let mut asked = 0;
        let result = verified(|| {
            asked += 1;
            if asked < 3 { failure(libc::EAGAIN) } else { Ok(()) }
        });
        assert!(result.is_ok() && asked == 3);
        for (errno, tries) in [(libc::EINVAL, 1), (libc::EAGAIN, MAX_ATTEMPTS)] {
            let mut asked = 0;
            let result = verified(|| {
                asked += 1;
                failure(errno)
            });
            assert!(result.is_err() && asked == tries, "{errno}: {asked}");
        }
    }
}
