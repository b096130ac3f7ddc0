//! Puts the CNI binary in place at start, and the conflist once the first snapshot is applied.
//!
//! Invariant: there is no conflist before this droplet can serve an ADD, because the conflist makes the node Ready.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::json;
use thiserror::Error;
use tokio::task::block_in_place;
use tracing::{error, info};

use crate::attachments::store::replace_file;
use crate::cni;
use crate::node::Node;

const CONFLIST: &str = "05-thuban.conflist";
const BINARY: &str = "thuban";
/// The name of a file beside the socket. The file is there once this transitd has applied a snapshot and the plugin
/// can know it.
pub const READY_FILE: &str = "ready";

/// The name of a file of the state. It says where the runtime's folders are on the node.
const FOLDERS_FILE: &str = "cni-folders";

#[derive(Debug, Error)]
#[error("cannot install {path}")]
pub struct InstallError {
    path: PathBuf,
    source: std::io::Error,
}

/// Installs by rename, because a running plugin's file cannot be written ("text file busy").
pub fn binary(source: &Path, directory: &Path) -> Result<(), InstallError> {
    let path = directory.join(BINARY);
    let failed = |source| InstallError {
        path: path.clone(),
        source,
    };
    let content = std::fs::read(source).map_err(|error| InstallError {
        path: source.to_owned(),
        source: error,
    })?;
    if std::fs::read(&path).is_ok_and(|held| held == content) {
        return Ok(());
    }
    std::fs::create_dir_all(directory).map_err(failed)?;
    replace_file(&path, &content, 0o755).map_err(failed)?;
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).map_err(failed)?;
    info!(path = %path.display(), "CNI binary installed");
    Ok(())
}

/// Notes the folders of the CNI plugin and of its configuration, as the node names them. `remove-from-node.sh` reads
/// the file; transitd works without it.
pub fn note_folders(state: &Path, (bin, conf): (&Path, &Path)) -> Result<(), InstallError> {
    let path = state.join(FOLDERS_FILE);
    let text = format!("bin={}\nconf={}\n", bin.display(), conf.display());
    if std::fs::read_to_string(&path).is_ok_and(|held| held == text) {
        return Ok(());
    }
    let written = std::fs::create_dir_all(state).and_then(|()| replace_file(&path, text.as_bytes(), 0o644));
    written.map_err(|source| InstallError { path, source })
}

/// The plugin that makes `hostPort`s, of containernetworking-plugins.
const PORTMAP: &str = "portmap";

/// Returns the network configuration list, with `socket` and `spool` only if they are not the default. portmap comes
/// last if the node has it, so that pods may have `hostPort`s.
pub fn conflist(socket: &Path, spool: &Path, has_portmap: bool) -> serde_json::Value {
    let mut plugin = json!({"type": BINARY});
    if socket != Path::new(thuban_proto::DEFAULT_CNI_SOCKET) {
        plugin["socket"] = json!(socket);
    }
    if spool != Path::new(thuban_proto::DEFAULT_CNI_SPOOL) {
        plugin["spool"] = json!(spool);
    }
    let mut plugins = vec![plugin];
    plugins.extend(has_portmap.then(|| json!({"type": PORTMAP, "capabilities": {"portMappings": true}})));
    json!({
        "cniVersion": "1.0.0",
        "cniVersions": ["0.4.0", "1.0.0", "1.1.0"],
        "name": "thuban",
        "plugins": plugins,
    })
}

/// Waits for the first snapshot, then writes the conflist and the ready file.
pub async fn when_synced(node: Arc<Node>) {
    let mut changes = node.watch();
    while !is_in_place(&node) {
        if changes.changed().await.is_err() {
            return;
        }
    }
    let settings = &node.settings;
    if let Err(failure) = tell_ready(&node) {
        error!(
            error = &failure as &dyn std::error::Error,
            "cannot write the ready file"
        );
    }
    if settings.cni_binary.is_none() {
        return;
    }
    let path = settings.cni_conf_dir.join(CONFLIST);
    let spool = settings.state_dir.join(cni::spool::DIRECTORY);
    let has_portmap = settings.cni_bin_dir.join(PORTMAP).exists();
    let text = format!("{:#}\n", conflist(&settings.socket, &spool, has_portmap));
    if std::fs::read_to_string(&path).is_ok_and(|held| held == text) {
        return;
    }
    let written = std::fs::create_dir_all(&settings.cni_conf_dir)
        .and_then(|()| replace_file(&path, text.as_bytes(), 0o644));
    match written {
        Ok(()) => info!(path = %path.display(), "conflist written, the node takes pods now"),
        Err(source) => {
            let failure = InstallError { path, source };
            error!(
                error = &failure as &dyn std::error::Error,
                "the node takes no pods"
            );
        }
    }
}

/// Whether the first snapshot is applied and this version's programs have taken their places.
fn is_in_place(node: &Node) -> bool {
    let state = node.state();
    state.synced && !state.is_replacing
}

/// Tells the plugin's STATUS whether transitd is ready. A transitd that cannot put this version's programs in place is
/// not ready: then a rolling update of the DaemonSet stops here.
fn tell_ready(node: &Node) -> std::io::Result<()> {
    let file = |name| node.settings.socket.with_file_name(name);
    if block_in_place(|| node.links().kept().next().is_some()) {
        return Ok(());
    }
    // The file is whole at any time, because a plugin may be reading it.
    replace_file(&file(thuban_proto::SERVED_FILE), node.boot_id.as_bytes(), 0o600)?;
    if let Err(error) = std::fs::remove_file(file(thuban_proto::AWAY_FILE))
        && error.kind() != std::io::ErrorKind::NotFound
    {
        return Err(error);
    }
    std::fs::write(file(READY_FILE), "")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_conflist_offers_every_version_and_runs_on_old_runtimes() {
        let list = conflist(
            Path::new("/run/thuban/cni.sock"),
            Path::new("/var/lib/thuban/spool"),
            false,
        );
        assert_eq!(list["cniVersion"], "1.0.0");
        assert_eq!(list["cniVersions"], json!(["0.4.0", "1.0.0", "1.1.0"]));
        assert_eq!(list["plugins"], json!([{"type": "thuban"}]));
        assert_eq!(
            conflist(Path::new("/x/y.sock"), Path::new("/x/spool"), true)["plugins"][0],
            json!({"type": "thuban", "socket": "/x/y.sock", "spool": "/x/spool"})
        );
        let list = conflist(Path::new("/x/y.sock"), Path::new("/x/spool"), true);
        assert_eq!(
            list["plugins"][1],
            json!({"type": "portmap", "capabilities": {"portMappings": true}})
        );
    }

    #[test]
    fn the_folders_of_the_runtime_are_noted_for_the_script() {
        let state = std::env::temp_dir().join(format!("thuban-folders-{}", std::process::id()));
        let note = |bin| {
            note_folders(&state, (Path::new(bin), Path::new("/etc/cni/net.d"))).unwrap();
            std::fs::read_to_string(state.join(FOLDERS_FILE)).unwrap()
        };
        assert_eq!(note("/opt/cni/bin"), "bin=/opt/cni/bin\nconf=/etc/cni/net.d\n");
        assert_eq!(
            note("/usr/libexec/cni"),
            "bin=/usr/libexec/cni\nconf=/etc/cni/net.d\n"
        );
        std::fs::remove_dir_all(&state).unwrap();
    }
}
