//! The archive: a folder of files, as tar.gz, and its index. Its size is bounded.

use std::fmt::Write as _;
use std::io::{self, Write};

use serde::Serialize;
use tar::{Builder, Header};

use super::gzip::Gzip;

/// The most bytes of one file.
pub const MAX_FILE: usize = 8 << 20;
/// The most bytes of all files, before they are compressed.
const MAX_ARCHIVE: usize = 256 << 20;
/// The name of the index in the archive.
pub const INDEX: &str = "index.txt";

/// A file of the archive.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Entry {
    pub path: String,
    pub bytes: usize,
    /// Whether there was more.
    pub is_cut: bool,
}

/// Something that is not in the archive.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LeftOut {
    pub what: String,
    pub why: String,
}

/// What is in the archive, and what is not.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Index {
    pub files: Vec<Entry>,
    pub left_out: Vec<LeftOut>,
}

impl Index {
    /// Returns the index as text. The title says what was asked for.
    fn text(&self, title: &str) -> String {
        let mut text = format!("{title}\n\nFiles:\n");
        for Entry { path, bytes, is_cut } in &self.files {
            let cut = if *is_cut { ", cut: there was more" } else { "" };
            let _ = writeln!(text, "  {path}: {bytes} bytes{cut}");
        }
        text.push_str("\nLeft out:\n");
        for LeftOut { what, why } in &self.left_out {
            let _ = writeln!(text, "  {what}: {why}");
        }
        if self.left_out.is_empty() {
            text.push_str("  nothing\n");
        }
        text
    }
}

/// An archive that is being written.
pub struct Archive<W: Write> {
    tar: Builder<Gzip<W>>,
    folder: String,
    /// When it was made, in seconds since 1970.
    time: u64,
    /// The bytes that files may still have.
    room: usize,
    index: Index,
}

impl<W: Write> Archive<W> {
    /// Begins an archive of which all files are in a folder.
    pub fn new(to: W, folder: &str, time: u64) -> Self {
        Self {
            tar: Builder::new(Gzip::new(to)),
            folder: folder.to_owned(),
            time,
            room: MAX_ARCHIVE,
            index: Index::default(),
        }
    }

    /// Adds a file. One that is too long is cut.
    pub fn add(&mut self, path: &str, content: &[u8], is_cut: bool) -> io::Result<()> {
        let content_cut = &content[..content.len().min(MAX_FILE)];
        if content_cut.len() > self.room {
            self.leave_out(path, "the archive is full");
            return Ok(());
        }
        self.room -= content_cut.len();
        self.append(path, content_cut)?;
        self.index.files.push(Entry {
            path: path.to_owned(),
            bytes: content_cut.len(),
            is_cut: is_cut || content_cut.len() < content.len(),
        });
        Ok(())
    }

    /// Notes that something is not in the archive.
    pub fn leave_out(&mut self, what: impl Into<String>, why: impl Into<String>) {
        self.index.left_out.push(LeftOut {
            what: what.into(),
            why: why.into(),
        });
    }

    /// Adds the index and ends the archive.
    pub fn finish(mut self, title: &str) -> io::Result<(W, Index)> {
        let text = self.index.text(title);
        self.append(INDEX, text.as_bytes())?;
        Ok((self.tar.into_inner()?.finish()?, self.index))
    }

    fn append(&mut self, path: &str, content: &[u8]) -> io::Result<()> {
        let mut header = Header::new_gnu();
        header.set_size(content.len() as u64);
        header.set_mode(0o600);
        header.set_mtime(self.time);
        let path = format!("{}/{path}", self.folder);
        self.tar.append_data(&mut header, path, content)
    }
}

#[cfg(test)]
mod tests {
    use super::{Archive, MAX_ARCHIVE, MAX_FILE};
    use crate::testing::unpack;

    #[test]
    fn files_are_bounded_and_the_index_says_so() {
        let mut archive = Archive::new(Vec::new(), "dump", 1);
        archive.add("long", &vec![b'x'; MAX_FILE + 1], false).unwrap();
        archive.add("short", b"abc", false).unwrap();
        archive.add("half", b"ab", true).unwrap();
        archive.room = 2;
        archive.add("late", b"abc", false).unwrap();
        archive.leave_out("nodes", "you may not list nodes");
        let (packed, index) = archive.finish("Made by a test").unwrap();
        assert_eq!(index.files.len(), 3);
        let files = unpack(&packed);
        assert_eq!(files["dump/long"].len(), MAX_FILE);
        assert_eq!(files["dump/short"], "abc");
        assert!(!files.contains_key("dump/late"));
        let text = &files["dump/index.txt"];
        for line in [
            "Made by a test\n",
            "\n  long: 8388608 bytes, cut: there was more\n",
            "\n  short: 3 bytes\n",
            "\n  half: 2 bytes, cut: there was more\n",
            "\n  late: the archive is full\n",
            "\n  nodes: you may not list nodes\n",
        ] {
            assert!(text.contains(line), "{line}: {text}");
        }
        const { assert!(MAX_FILE < MAX_ARCHIVE) };
    }
}
