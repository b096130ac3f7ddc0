//! The pinned links that a transitd of another layout left in place: their programs use maps of that layout.
//!
//! Invariant: until the maps of this layout are filled, nothing of another layout changes, except links of interfaces
//! that are gone.

use std::path::{Path, PathBuf};

use aya::programs::links::FdLink;

use super::hook::Hook;
use super::pins::{LinkingError, names, open, unpin};

/// The final state that is wanted of a hook.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Wanted {
    Here,
    Gone,
}

#[derive(Debug)]
pub(super) struct Inherited {
    layouts: Vec<PathBuf>,
    /// The directories of links, one a layout.
    pub directories: Vec<PathBuf>,
    /// This layout's maps are filled.
    pub is_ready: bool,
    pub waiting: Vec<(Hook, String, Wanted)>,
}

impl Inherited {
    pub fn new(layouts: Vec<PathBuf>) -> Self {
        let directories = layouts.iter().map(|layout| layout.join("links")).collect();
        Self {
            layouts,
            directories,
            is_ready: false,
            waiting: Vec::new(),
        }
    }

    /// Whether programs of another layout must still be left alone.
    pub fn is_in_place(&self) -> bool {
        let has_links = |directory: &PathBuf| names(directory).is_ok_and(|names| !names.is_empty());
        !self.is_ready && self.directories.iter().any(has_links)
    }

    pub fn wait(&mut self, hook: Hook, interface: &str, wanted: Wanted) {
        self.waiting.push((hook, interface.to_owned(), wanted));
    }

    /// Opens the link that is pinned under that name.
    pub fn open(&self, name: &str) -> Result<Option<(PathBuf, FdLink)>, LinkingError> {
        let Some(path) = self.find(name) else {
            return Ok(None);
        };
        Ok(open(&path)?.map(|link| (path, link)))
    }

    /// Releases the link of that name. A missing link is success.
    pub fn release(&self, name: &str) -> Result<(), LinkingError> {
        self.directories
            .iter()
            .try_for_each(|directory| unpin(&directory.join(name)))
    }

    /// Removes everything that the other layouts left: links that no hook asked for, and then the maps.
    pub fn remove(&mut self) -> Result<(), LinkingError> {
        for layout in self.layouts.drain(..) {
            for part in ["links", "maps"] {
                let directory = layout.join(part);
                for name in names(&directory)? {
                    unpin(&directory.join(name))?;
                }
                remove_directory(&directory)?;
            }
            remove_directory(&layout)?;
        }
        self.directories.clear();
        Ok(())
    }

    fn find(&self, name: &str) -> Option<PathBuf> {
        let paths = self.directories.iter().map(|directory| directory.join(name));
        paths.into_iter().find(|path| path.exists())
    }
}

fn remove_directory(path: &Path) -> Result<(), LinkingError> {
    match std::fs::remove_dir(path) {
        Err(source) if source.kind() != std::io::ErrorKind::NotFound => Err(LinkingError::Unpin {
            path: path.to_owned(),
            source,
        }),
        _ => Ok(()),
    }
}
