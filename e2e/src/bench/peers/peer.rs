//! What a network plugin is to this benchmark.

use std::{net::Ipv4Addr, path::Path, process::Command};

use anyhow::{Context, Result, bail};
use serde_json::json;
use thuban_cluster::{Cluster, NODES};

use super::{
    Parts,
    cilium::{Cilium, Routing},
    flannel::Flannel,
    thuban::Thuban,
};

/// A network plugin with its way to serve Services.
pub trait Peer {
    /// Its name among the results.
    fn name(&self) -> &'static str;

    /// Whether its packets between nodes are in a tunnel. Thuban's are, so goals are for peers with one.
    fn is_overlay(&self) -> bool;

    /// The link that all packets between nodes pass, if there is one: the proof that they are in a tunnel.
    fn tunnel(&self) -> Option<&'static str>;

    /// Programs that run on each node for as long as the node has pods.
    fn daemons(&self) -> &'static [&'static str];

    /// Programs that serve the whole cluster.
    fn controllers(&self) -> &'static [&'static str];

    /// Installs it on a cluster without a network. Returns versions and settings, one a line.
    fn install(&self, cluster: &Cluster, parts: &Parts) -> Result<Vec<String>>;
}

/// Gives every node the range of its pods, as a controller manager would: `10.NUMBER.0.0/24` and so on.
pub fn give_ranges(cluster: &Cluster, number: u8) -> Result<()> {
    for (index, node) in (0..).zip(NODES) {
        let range = format!("{}/24", Ipv4Addr::new(10, number, index, 0));
        let patch = json!({"spec": {"podCIDR": range, "podCIDRs": [range]}});
        cluster.kubectl(&["patch", "node", node, "-p", &patch.to_string()])?;
    }
    Ok(())
}

/// Starts a peer's program on a node, unless an earlier run has left it running. It has its output in a log of its
/// name.
pub fn start(cluster: &Cluster, node: &str, name: &str, program: &Path, arguments: &[String]) -> Result<()> {
    if cluster.exec_on_node(node, &["pgrep", "-x", name]).is_ok() {
        return Ok(());
    }
    cluster.start_on_node(node, &format!("{name}-{node}.log"), program, arguments)
}

/// Returns what a program prints as its version, on either of its outputs.
pub fn version(program: &Path) -> Result<String> {
    let output = Command::new(program).arg("--version").output();
    let output = output.with_context(|| format!("starting {}", program.display()))?;
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text);
    Ok(text.lines().next().unwrap_or_default().trim().to_owned())
}

pub fn named(name: &str) -> Result<Box<dyn Peer>> {
    Ok(match name {
        "thuban" => Box::new(Thuban),
        "flannel" => Box::new(Flannel),
        "cilium" => Box::new(Cilium(Routing::Vxlan)),
        "cilium-native" => Box::new(Cilium(Routing::Native)),
        other => bail!("no peer is called {other}"),
    })
}
