//! `kubectl thuban sysdump`: it holds what helpers ask for, no Secret's data, and of a tenant nothing of others.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::command_line::{Namespace, Said, plugin};
use crate::actor::Actor;
use crate::support::{apply, netexec_manifest, running};
use crate::tenants::tenants;

/// What must be in no archive.
const MARKER: &str = "marker-of-a-secret-5f1c";

/// A folder that goes when this is dropped.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Result<Self> {
        let state = tenants().cluster.instance().state();
        let path = state.join(format!("sysdump-{name}-{}", std::process::id()));
        fs::create_dir_all(&path)?;
        Ok(Self(path))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Returns what the plugin said, and the archive's files by their paths in it.
fn collected(kubeconfig: &Path, name: &str, flags: &str) -> Result<(Said, BTreeMap<String, String>)> {
    let folder = Folder::new(name)?;
    let archive = folder.0.join("archive.tar.gz");
    let kubectl = tenants().cluster.instance().bin().join("kubectl");
    let line = format!(
        "sysdump -o json --file {} --kubectl {} {flags}",
        archive.display(),
        kubectl.display()
    );
    let said = plugin(kubeconfig, &line)?;
    let unpacked = Command::new("tar")
        .arg("-xzf")
        .arg(&archive)
        .args(["--strip-components=1", "-C"])
        .arg(&folder.0)
        .output()
        .context("tar")?;
    ensure!(unpacked.status.success(), "{unpacked:?}: {said:?}");
    fs::remove_file(&archive)?;
    let mut files = BTreeMap::new();
    read(&folder.0, "", &mut files)?;
    Ok((said, files))
}

/// Reads all files of a folder.
fn read(folder: &Path, prefix: &str, files: &mut BTreeMap<String, String>) -> Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let name = format!("{prefix}{}", entry.file_name().to_string_lossy());
        if entry.file_type()?.is_dir() {
            read(&entry.path(), &format!("{name}/"), files)?;
        } else {
            let text = String::from_utf8_lossy(&fs::read(entry.path())?).into_owned();
            files.insert(name, text);
        }
    }
    Ok(())
}

/// Returns objects that have the marker where secrets are.
fn secrets(namespace: &str) -> [Value; 3] {
    let metadata = json!({"name": "hidden", "namespace": namespace});
    let mut pod = netexec_manifest(namespace, "client", "node-a", None);
    pod["spec"]["containers"][0]["env"] = json!([{"name": "PASSWORD", "value": MARKER}]);
    pod["metadata"]["annotations"]["example.com/token"] = json!(MARKER);
    [
        json!({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": {"key": MARKER}}),
        json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"key": MARKER}}),
        pod,
    ]
}

#[test]
fn a_sysdump_has_what_helpers_ask_for_and_no_secret() {
    const SPACE: &str = "cli-sysdump";
    let cluster = &tenants().cluster;
    let _namespace = Namespace::new(cluster, SPACE).unwrap();
    apply(cluster, &secrets(SPACE)).unwrap();
    running(cluster, SPACE, "client").unwrap();
    let kubeconfig = cluster.instance().kubeconfig();
    let (said, files) = collected(&kubeconfig, "admin", "--node node-a").unwrap();
    // What this cluster does not have is left out, such as a table of nftables that no pod needs.
    assert!(matches!(said.code, Some(0 | 2)), "{said:?}");
    assert!(said.error.contains("collecting node node-a"), "{said:?}");
    for (path, part) in [
        ("index.txt", "objects/vpcs.thuban.dev.jsonl"),
        ("objects/vpcs.thuban.dev.jsonl", "\"red\""),
        ("objects/pods.jsonl", SPACE),
        ("objects/events.jsonl", "\"reason\""),
        (
            "objects/leases.coordination.k8s.io-of-thuban.jsonl",
            "thuban-operator",
        ),
        ("status.json", "\"droplets\""),
        ("check.json", "\"versions\""),
        ("nodes/node-a/counters.json", "{"),
        ("nodes/node-a/metrics.txt", "# HELP"),
        ("nodes/node-a/rows.jsonl", "vni"),
        ("nodes/node-a/nft-thuban.txt", "table inet thuban"),
    ] {
        let text = files.get(path);
        assert!(text.is_some_and(|text| text.contains(part)), "{path}: {said:?}");
    }
    let has_log = |of: &str| {
        let is_its = |path: &&String| path.starts_with("logs/") && path.ends_with(&format!("/{of}.log"));
        files.keys().any(|path| is_its(&path))
    };
    assert!(has_log("transitd"), "{said:?}");
    assert!(
        !files.keys().any(|path| path.starts_with("nodes/node-b/")),
        "{said:?}"
    );
    for (path, text) in &files {
        assert!(!text.contains(MARKER), "{path}");
    }
}

#[test]
fn a_tenants_sysdump_has_nothing_of_others() {
    const SPACE: &str = "cli-sysdump-tenant";
    let cluster = &tenants().cluster;
    let _namespace = Namespace::new(cluster, SPACE).unwrap();
    apply(cluster, &secrets(SPACE)).unwrap();
    running(cluster, SPACE, "client").unwrap();
    let account = format!("--serviceaccount={SPACE}:editor");
    for arguments in [
        &["create", "serviceaccount", "-n", SPACE, "editor"][..],
        &[
            "create",
            "rolebinding",
            "-n",
            SPACE,
            "editor",
            "--clusterrole=edit",
            &account,
        ],
    ] {
        cluster.kubectl(arguments).unwrap();
    }
    let tenant = Actor::service_account(cluster, SPACE, "editor").unwrap();
    // The API server may learn of the rights a moment later.
    cluster
        .wait_for("the tenant's rights", Duration::from_secs(20), || {
            Ok(plugin(&tenant.kubeconfig, &format!("endpoints -n {SPACE}"))?.code == Some(0))
        })
        .unwrap();
    let (said, files) = collected(&tenant.kubeconfig, "tenant", &format!("-n {SPACE}")).unwrap();
    assert_eq!(said.code, Some(2), "{said:?}");
    assert!(files["objects/pods.jsonl"].contains("\"client\""), "{said:?}");
    assert!(
        files["objects/endpoints.thuban.dev.jsonl"].contains(SPACE),
        "{said:?}"
    );
    let index = &files["index.txt"];
    for what in ["vpcs.thuban.dev: ", "nodes: ", "logs and nodes: "] {
        assert!(index.contains(&format!("\n  {what}")), "{what}: {index}");
    }
    for (path, text) in &files {
        assert!(
            !path.starts_with("logs/") && !path.starts_with("nodes/"),
            "{path}"
        );
        assert!(!text.contains(MARKER), "{path}");
        for other in ["\"blue\"", "blue-db"] {
            assert!(!text.contains(other), "{other} in {path}");
        }
    }
}
