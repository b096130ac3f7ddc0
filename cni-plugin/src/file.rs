//! Files that are whole after any crash.

use std::fs::{self, File};
use std::io::{Result, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Writes a temporary file with a name of this process, syncs it, renames it, and syncs the directory.
pub fn replace(path: &Path, content: &[u8]) -> Result<()> {
    let mut aside = path.as_os_str().to_owned();
    aside.push(format!(".{}.tmp", std::process::id()));
    let written = write(Path::new(&aside), content)
        .and_then(|()| fs::rename(&aside, path))
        .and_then(|()| {
            path.parent()
                .map_or(Ok(()), |directory| File::open(directory)?.sync_all())
        });
    if written.is_err() {
        let _ = fs::remove_file(&aside);
    }
    written
}

fn write(path: &Path, content: &[u8]) -> Result<()> {
    let mut file = File::options()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(path)?;
    file.write_all(content)?;
    file.sync_all()
}
