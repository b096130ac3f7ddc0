//! What each transitd of a test or benchmark has: its files in one folder, and its arguments.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use crate::operator::Operator;

/// The files of one transitd. The owner of the folder mounts a bpffs at `bpffs`, and removes both.
#[derive(Clone, Debug)]
pub struct Files(PathBuf);

impl Files {
    /// Makes the folders and the token in a folder.
    pub fn make(folder: &Path) -> io::Result<Self> {
        for part in ["bpf", "state", "run", "conf"] {
            fs::create_dir_all(folder.join(part))?;
        }
        fs::write(folder.join("token"), "a-token\n")?;
        Ok(Self(folder.to_owned()))
    }

    pub fn bpffs(&self) -> PathBuf {
        self.0.join("bpf")
    }

    pub fn state(&self) -> PathBuf {
        self.0.join("state")
    }

    /// The socket of the CNI plugin.
    pub fn socket(&self) -> PathBuf {
        self.0.join("run/cni.sock")
    }

    /// Opens the log; each start appends to it.
    pub fn log(&self) -> io::Result<File> {
        File::options().create(true).append(true).open(self.0.join("log"))
    }

    pub fn read_log(&self) -> String {
        fs::read_to_string(self.0.join("log")).unwrap_or_default()
    }

    /// Returns the arguments with which transitd runs on these files, on a node with that name and address.
    pub fn arguments(
        &self,
        (name, address): (&str, &str),
        programs: &Path,
        operator: &Operator,
    ) -> Vec<OsString> {
        let (token, conf) = (self.0.join("token"), self.0.join("conf"));
        let flags: [(&str, OsString); 10] = [
            ("--node-name", name.into()),
            ("--node-ip", address.into()),
            ("--programs", programs.into()),
            ("--bpffs", self.bpffs().into()),
            ("--state-dir", self.state().into()),
            ("--socket", self.socket().into()),
            ("--operator-address", operator.address.clone().into()),
            ("--operator-ca", operator.ca.clone().into()),
            ("--token-file", token.into()),
            ("--cni-conf-dir", conf.into()),
        ];
        let flags = flags.into_iter().flat_map(|(flag, value)| [flag.into(), value]);
        std::iter::once("run".into()).chain(flags).collect()
    }
}
