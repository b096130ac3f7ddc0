//! kube-proxy on nodes of a cluster, for one turn. Everything that it made is removed at the end.

use std::{
    env,
    fs::{self, File},
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use anyhow::{Context, Result};
use thuban_cluster::Cluster;

use super::routes::POD_RANGE;
use crate::bench::kube_proxy::{Mode, arguments};

/// Input of iptables-restore: no rules and no chains.
const EMPTY: &str = "*nat\\nCOMMIT\\n*filter\\nCOMMIT\\n*mangle\\nCOMMIT\\n";

/// The kube-proxy of the nodes; it ends with its owner.
#[derive(Debug)]
pub struct KubeProxy<'a> {
    cluster: &'a Cluster,
    /// Nodes, each with nsenter's process.
    running: Vec<(&'static str, Child)>,
}

impl<'a> KubeProxy<'a> {
    pub fn start(cluster: &'a Cluster, program: &Path, mode: Mode, nodes: &[&'static str]) -> Result<Self> {
        let legacy = legacy(cluster)?;
        let mut folders = vec![legacy];
        folders.extend(env::split_paths(&env::var_os("PATH").unwrap_or_default()));
        let path = env::join_paths(folders).context("PATH")?;
        let mut proxy = Self {
            cluster,
            running: Vec::new(),
        };
        let instance = cluster.instance();
        for &node in nodes {
            let log = instance.logs().join(format!("kube-proxy-{node}.log"));
            let log = File::create(&log).with_context(|| format!("making {}", log.display()))?;
            let mut command = Command::new("nsenter");
            command
                .env("PATH", &path)
                .args(["-t", &cluster.node_pid(node)?.to_string(), "-a", "--"])
                .arg(program)
                .args(arguments(instance, node, mode, POD_RANGE))
                .stdin(Stdio::null())
                .stdout(log.try_clone()?)
                .stderr(log);
            let child = command.spawn().context("starting kube-proxy")?;
            proxy.running.push((node, child));
        }
        Ok(proxy)
    }

    /// Whether it still runs on all nodes.
    pub fn is_running(&mut self) -> bool {
        self.running
            .iter_mut()
            .all(|(_, child)| matches!(child.try_wait(), Ok(None)))
    }
}

impl Drop for KubeProxy<'_> {
    fn drop(&mut self) {
        for (node, child) in &mut self.running {
            let _ = self.cluster.signal(node, "kube-proxy", "KILL");
            let _ = child.wait();
            // No other program has rules on these nodes.
            let _ = self.cluster.exec_on_node(node, &["nft", "flush", "ruleset"]);
            for family in ["iptables", "ip6tables"] {
                let restore = format!("printf '{EMPTY}' | {family}-legacy-restore");
                let _ = self.cluster.exec_on_node(node, &["sh", "-c", &restore]);
            }
        }
    }
}

/// Makes a folder with the legacy iptables. It writes tens of thousands of rules in seconds; the iptables over nftables
/// (1.8.9) takes minutes.
fn legacy(cluster: &Cluster) -> Result<PathBuf> {
    let folder = cluster.instance().state().join("iptables-legacy");
    fs::create_dir_all(&folder).with_context(|| format!("making {}", folder.display()))?;
    for family in ["iptables", "ip6tables"] {
        for verb in ["", "-save", "-restore"] {
            let link = folder.join(format!("{family}{verb}"));
            if !link.is_symlink() {
                let target = format!("/usr/sbin/{family}-legacy{verb}");
                symlink(&target, &link).with_context(|| format!("linking {}", link.display()))?;
            }
        }
    }
    Ok(folder)
}
