//! The root of a virtual machine: programs with their libraries, in an archive that the kernel unpacks into memory
//! (cpio's format "newc", Documentation/driver-api/early-userspace/buffer-format.rst in Linux).

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};

use crate::images::libraries;

const FOLDER: u32 = 0o040_755;
const PROGRAM: u32 = 0o100_755;
/// The name of the last entry.
const END: &str = "TRAILER!!!";

#[derive(Debug, Default)]
pub struct Archive {
    bytes: Vec<u8>,
    /// The paths that are there.
    paths: BTreeSet<PathBuf>,
}

impl Archive {
    /// Adds a folder, with those that it is in.
    pub fn folder(&mut self, path: &Path) {
        if let Some(parent) = path.parent() {
            self.folder(parent);
        }
        if path.file_name().is_some() && self.paths.insert(path.to_owned()) {
            self.entry(&path.to_string_lossy(), FOLDER, &[]);
        }
    }

    /// Adds a file that may be run, with the folders that it is in.
    pub fn file(&mut self, path: &Path, content: &[u8]) {
        if let Some(parent) = path.parent() {
            self.folder(parent);
        }
        if self.paths.insert(path.to_owned()) {
            self.entry(&path.to_string_lossy(), PROGRAM, content);
        }
    }

    /// Adds a file of this machine.
    pub fn copy(&mut self, from: &Path, to: &Path) -> Result<()> {
        let content = fs::read(from).with_context(|| format!("reading {}", from.display()))?;
        self.file(to, &content);
        Ok(())
    }

    /// Adds a program of this machine, and the libraries that it loads.
    pub fn program(&mut self, from: &Path, to: &Path) -> Result<()> {
        self.copy(from, to)?;
        for library in libraries(from)? {
            self.copy(Path::new(&library), Path::new(&library))?;
        }
        Ok(())
    }

    /// Returns the whole archive.
    pub fn finish(mut self) -> Vec<u8> {
        self.entry(END, 0, &[]);
        self.bytes
    }

    fn entry(&mut self, path: &str, mode: u32, content: &[u8]) {
        let name = path.trim_start_matches('/');
        let number = self.paths.len() as u32;
        let fields = [
            number,
            mode,
            // Links, user, group, time.
            1,
            0,
            0,
            0,
            content.len() as u32,
            // Devices.
            0,
            0,
            0,
            0,
            name.len() as u32 + 1,
            // Checksum: none in this format.
            0,
        ];
        self.bytes.extend(b"070701");
        for field in fields {
            self.bytes.extend(format!("{field:08x}").bytes());
        }
        self.bytes.extend(name.bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend(content);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_come_before_what_is_in_them_and_only_once() {
        let mut archive = Archive::default();
        archive.file(Path::new("/a/b/c"), b"one");
        archive.file(Path::new("/a/b/d"), b"two");
        archive.folder(Path::new("/a/b"));
        let bytes = archive.finish();
        let text = String::from_utf8_lossy(&bytes);
        let names: Vec<&str> = text.split("070701").skip(1).map(|entry| &entry[104..]).collect();
        let names: Vec<&str> = names
            .iter()
            .map(|rest| rest.split('\0').next().unwrap())
            .collect();
        assert_eq!(names, ["a", "a/b", "a/b/c", "a/b/d", END]);
    }

    #[test]
    fn headers_and_contents_begin_at_multiples_of_four() {
        let mut archive = Archive::default();
        archive.file(Path::new("/odd"), b"12345");
        let bytes = archive.finish();
        assert_eq!(bytes.len() % 4, 0);
        // 110 bytes of header, "odd" and a zero, 2 of padding.
        assert_eq!(&bytes[116..121], b"12345");
        assert_eq!(&bytes[124..130], b"070701");
        assert_eq!(&bytes[54..62], b"00000005", "the length");
    }
}
