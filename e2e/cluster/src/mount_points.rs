//! Folders of the machine over which a node mounts its own. The folders that were missing are removed with the last
//! instance.
//!
//! A folder is never removed while an instance is up: that would take away the mount on it in the nodes too.

use std::{fs, path::Path};

use anyhow::{Context, Result};

use crate::instance::Instance;

/// Paths that each node has for itself.
pub const PRIVATE: [&str; 7] = [
    "/etc/cni",
    "/opt/cni",
    "/var/lib/cni",
    "/var/lib/containerd",
    "/var/lib/kubelet",
    "/var/lib/thuban",
    "/var/log",
];

const RECORD: &str = "made-mount-points";

/// Makes the missing folders, and records them.
pub fn create() -> Result<()> {
    let record = Instance::all_state().join(RECORD);
    let mut made = fs::read_to_string(&record).unwrap_or_default();
    for path in PRIVATE {
        if !Path::new(path).exists() {
            made.push_str(path);
            made.push('\n');
            fs::write(&record, &made).with_context(|| format!("writing {}", record.display()))?;
            fs::create_dir_all(path).with_context(|| format!("making {path}"))?;
        }
    }
    Ok(())
}

/// Removes what [`create`] made, and the folder of all state, if no instance is left.
pub fn remove_unused() {
    let state = Instance::all_state();
    let Ok(entries) = fs::read_dir(state) else {
        return;
    };
    // An instance has a folder, and even before that a lock.
    if entries.flatten().any(|entry| entry.file_name() != RECORD) {
        return;
    }
    for path in fs::read_to_string(state.join(RECORD)).unwrap_or_default().lines() {
        // The folder is not empty: somebody else uses it.
        let _ = fs::remove_dir(path);
    }
    // This fails if an instance has come up meanwhile, and then it is right to leave the folder.
    let _ = fs::remove_file(state.join(RECORD));
    let _ = fs::remove_dir(state);
}
