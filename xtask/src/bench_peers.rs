//! `cargo xtask bench peers`: builds other network plugins from their Go modules, brings up a cluster for Thuban and
//! one for each of them, and measures all in turns.

use std::{ops::ControlFlow, path::PathBuf, process::ExitCode};

use anyhow::Result;
use clap::Parser;

use crate::{
    bench::{OwnClusters, ensure_known, options},
    bench_services::KUBE_PROXY,
    build::{root, step},
    cluster, cni_tools, deps,
    go_tools::GoTools,
    install, progress,
};

/// Peers by name, as the benchmark knows them, each with the name of its cluster.
const PEERS: [(&str, &str); 4] = [
    (THUBAN, "peers"),
    (FLANNEL, "peersfl"),
    ("cilium", "peersci"),
    ("cilium-native", "peerscn"),
];
const THUBAN: &str = "thuban";
const FLANNEL: &str = "flannel";

const FLANNELD: GoTools = GoTools {
    name: "flannel",
    modules: "e2e/peers/flannel",
    files: &[
        "go.mod",
        "go.sum",
        "tencentvpc/go.mod",
        "tencentvpc/v20170312/vpc.go",
    ],
    tags: "",
    // Its UDP backend is partly in C, whether it is used or not.
    needs_c: true,
    flags: "-X github.com/flannel-io/flannel/pkg/version.Version=v0.28.10",
    packages: &["tool"],
    tests: &[],
    binaries: &["flannel"],
};

const FLANNEL_PLUGIN: GoTools = GoTools {
    name: "flannel-cni",
    modules: "e2e/peers/flannel-cni",
    files: &["go.mod", "go.sum"],
    tags: "",
    needs_c: false,
    flags: "",
    packages: &["tool"],
    tests: &[],
    binaries: &["flannel"],
};

const CILIUM: GoTools = GoTools {
    name: "cilium",
    modules: "e2e/peers/cilium",
    files: &["go.mod", "go.sum"],
    tags: "osusergo",
    needs_c: false,
    flags: "-X github.com/cilium/cilium/pkg/version.ciliumVersion=1.20.2",
    packages: &["tool"],
    tests: &[],
    binaries: &["cilium-cni", "daemon"],
};
const CILIUM_MODULE: &str = "github.com/cilium/cilium";

/// Measures Thuban beside other network plugins, in turns, each on a cluster of its own
///
/// It measures packets from pod to pod and by a Service, 50 pods that come and go, and memory and CPU time of the
/// plugins' programs at rest and while pods come and go.
#[derive(Parser)]
#[command(name = "cargo xtask bench peers")]
struct Arguments {
    /// Number of turns of each peer
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Duration in seconds of each measure of packets
    #[arg(long, default_value_t = 3.0)]
    time: f64,
    /// Duration in seconds of the measure of programs at rest
    #[arg(long, default_value_t = 20.0)]
    rest: f64,
    /// Number of pods that come and go at once
    #[arg(long, default_value_t = 50)]
    pods: u32,
    /// Measure only these peers, separated by commas: thuban, flannel, cilium, cilium-native. Default: all
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Check only that everything works: one short round. The figures mean nothing
    #[arg(long)]
    quick: bool,
    #[command(flatten)]
    clusters: OwnClusters,
}

pub fn run(arguments: &[String]) -> Result<ExitCode> {
    let mut given: Arguments = match options("bench peers", arguments)? {
        ControlFlow::Continue(given) => given,
        ControlFlow::Break(code) => return Ok(code),
    };
    ensure_known(&given.only, &PEERS.map(|(name, _)| name))?;
    if given.quick {
        (given.rounds, given.time, given.rest, given.pods) = (1, 1.0, 2.0, 5);
    }
    let mut peers = PEERS.to_vec();
    peers.retain(|(name, _)| given.only.is_empty() || given.only.iter().any(|only| only == name));
    deps::ensure_more(&deps::TRAFFIC_PACKAGES)?;
    let parts = parts(&peers)?;
    let (names, clusters): (Vec<&str>, Vec<String>) = peers
        .iter()
        .map(|(name, cluster)| (*cluster, format!("{name}={cluster}")))
        .unzip();
    let mut own = vec![
        format!("--clusters={}", clusters.join(",")),
        format!("--rounds={}", given.rounds),
        format!("--time={}", given.time),
        format!("--rest={}", given.rest),
        format!("--pods={}", given.pods),
    ];
    own.extend(parts);
    given.clusters.measure(&names, "peers-bench", || up(&peers), own)
}

/// Builds the peers that are asked for; returns the benchmark's arguments that name their programs and folders.
fn parts(peers: &[(&str, &str)]) -> Result<Vec<String>> {
    let wants = |prefix: &str| peers.iter().any(|(name, _)| name.starts_with(prefix));
    let mut paths = Vec::new();
    if wants(FLANNEL) {
        step("plugins that flannel calls", cni_tools::ensure)?;
        paths.push(("plugins", root().join("target/cni-tools")));
        paths.push(("kube-proxy", build(&KUBE_PROXY)?.join("kube-proxy")));
        paths.push(("flanneld", build(&FLANNELD)?.join("flannel")));
        paths.push(("flannel-plugin", build(&FLANNEL_PLUGIN)?.join("flannel")));
    }
    if wants("cilium") {
        deps::ensure_more(&deps::CILIUM_PACKAGES)?;
        paths.push(("cilium", build(&CILIUM)?));
        paths.push(("cilium-sources", CILIUM.folder_of(CILIUM_MODULE)?));
        paths.push(("clang", deps::CLANG.into()));
    }
    Ok(paths
        .iter()
        .map(|(name, path)| format!("--path={name}={}", path.display()))
        .collect())
}

fn build(tools: &GoTools) -> Result<PathBuf> {
    step(tools.name, || {
        progress::watched(&format!("building {}", tools.name), || tools.ensure())
    })
}

fn up(peers: &[(&str, &str)]) -> Result<()> {
    for (name, cluster) in peers {
        cluster::up(cluster)?;
        if *name == THUBAN {
            install::run(cluster)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use thuban_cluster::Instance;

    use super::PEERS;

    #[test]
    fn the_clusters_of_all_peers_can_be_up_at_once() {
        let subnets = PEERS.map(|(_, cluster)| Instance::named(cluster).unwrap().subnet());
        assert_eq!(BTreeSet::from(subnets.clone()).len(), PEERS.len(), "{subnets:?}");
    }
}
