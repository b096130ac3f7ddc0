//! Opens the user's browser. Other users of this machine see the arguments of programs, so the browser gets the path of
//! a file that only this user may read. The file leads the browser to the URL.

use std::env::temp_dir;
use std::fs::{OpenOptions, remove_file};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use tokio::process::Command;

use super::door::{Door, random};
use crate::observe::ObserveError;

/// What opens a file with the program that the user has chosen for it.
const OPENER: &str = if cfg!(target_os = "macos") {
    "open"
} else {
    "xdg-open"
};

/// The file. It is deleted when it is dropped.
pub struct Lead(PathBuf);

impl Lead {
    /// Writes the file, and has the browser open it.
    pub fn open(door: &Door) -> Result<Self, ObserveError> {
        let path = temp_dir().join(format!("thuban-ui-{}.html", random()?));
        let failed = |what: &str, error| ObserveError::Browser {
            what: what.to_owned(),
            error,
        };
        write(&path, &door.url()).map_err(|error| failed(&path.display().to_string(), error))?;
        let lead = Self(path);
        Command::new(OPENER)
            .arg(&lead.0)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|error| failed(OPENER, error))?;
        Ok(lead)
    }
}

impl Drop for Lead {
    fn drop(&mut self) {
        let _ = remove_file(&self.0);
    }
}

fn write(path: &Path, url: &str) -> io::Result<()> {
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)?;
    writeln!(
        file,
        "<!doctype html><html lang=\"en\"><title>Thuban</title><meta http-equiv=\"refresh\" content=\"0;url={url}\">\
         <p><a href=\"{url}\">Thuban</a></p></html>"
    )
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::{Lead, random, write};

    #[test]
    fn the_file_is_its_users_alone_and_does_not_stay() {
        let path = std::env::temp_dir().join(format!("thuban-ui-{}.html", random().unwrap()));
        write(&path, "http://127.0.0.1:1/?key=k").unwrap();
        let lead = Lead(path.clone());
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.contains("url=http://127.0.0.1:1/?key=k\""), "{text}");
        assert!(write(&path, "").is_err(), "a file of somebody else is used");
        drop(lead);
        assert!(!path.exists());
    }
}
