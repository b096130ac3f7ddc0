//! Pinned links in bpffs, and what can go wrong with links.

use std::path::{Path, PathBuf};

use aya::programs::ProgramError;
use aya::programs::links::{FdLink, LinkError, PinnedLink};
use thiserror::Error;

use super::hook::Hook;
use super::loader::LoadError;

#[derive(Debug, Error)]
pub enum LinkingError {
    #[error(transparent)]
    Load(#[from] LoadError),
    #[error("cannot attach {program} to {interface}")]
    Attach {
        program: &'static str,
        interface: String,
        source: ProgramError,
    },
    #[error("cannot take the link of {program} on {interface}")]
    Take {
        program: &'static str,
        interface: String,
        source: LinkError,
    },
    #[error("the old {program} stays on {interface}: this version's cannot take its place")]
    Kept {
        program: &'static str,
        interface: String,
        source: Box<LinkingError>,
    },
    #[error("cannot open the pinned link {path}")]
    Open { path: PathBuf, source: LinkError },
    #[error("cannot ask which programs {interface} has")]
    Query { interface: String, source: ProgramError },
    #[error("cannot pin {path}")]
    Pin {
        path: PathBuf,
        source: aya::pin::PinError,
    },
    #[error("cannot remove the pin {path}")]
    Unpin { path: PathBuf, source: std::io::Error },
    #[error("cannot list {path}")]
    List { path: PathBuf, source: std::io::Error },
}

impl LinkingError {
    pub(super) fn kept(self, hook: Hook, interface: &str) -> Self {
        Self::Kept {
            program: hook.program(),
            interface: interface.to_owned(),
            source: Box::new(self),
        }
    }

    /// Whether the link's interface is gone. Another interface may have its name now.
    pub(super) fn is_dead_link(&self) -> bool {
        let number = match self {
            Self::Attach {
                source: ProgramError::SyscallError(error),
                ..
            } => error.io_error.raw_os_error(),
            _ => None,
        };
        number == Some(libc::ENOLINK)
    }
}

pub(super) fn pin(link: FdLink, path: PathBuf) -> Result<(), LinkingError> {
    link.pin(&path)
        .map(drop)
        .map_err(|source| LinkingError::Pin { path, source })
}

pub(super) fn open(path: &Path) -> Result<Option<FdLink>, LinkingError> {
    match PinnedLink::from_pin(path) {
        Ok(pinned) => Ok(Some(pinned.into())),
        Err(LinkError::SyscallError(error)) if error.io_error.kind() == std::io::ErrorKind::NotFound => {
            Ok(None)
        }
        Err(source) => Err(LinkingError::Open {
            path: path.to_owned(),
            source,
        }),
    }
}

pub(super) fn unpin(path: &Path) -> Result<(), LinkingError> {
    match std::fs::remove_file(path) {
        Err(source) if source.kind() != std::io::ErrorKind::NotFound => Err(LinkingError::Unpin {
            path: path.to_owned(),
            source,
        }),
        _ => Ok(()),
    }
}

pub(super) fn names(directory: &Path) -> Result<Vec<String>, LinkingError> {
    let failed = |source| LinkingError::List {
        path: directory.to_owned(),
        source,
    };
    let entries = match std::fs::read_dir(directory) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(failed)?,
    };
    let name =
        |entry: std::io::Result<std::fs::DirEntry>| Ok(entry?.file_name().to_string_lossy().into_owned());
    entries.map(name).collect::<Result<_, _>>().map_err(failed)
}
