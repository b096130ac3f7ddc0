//! flannel with its VXLAN backend and rules of nftables, and kube-proxy in nftables mode. Both run as programs on the
//! nodes, with the arguments that flannel's manifest and kubeadm give them.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result};
use serde_json::json;
use thuban_cluster::{Cluster, NODES};

use super::{
    Parts,
    peer::{Peer, give_ranges, start, version},
};
use crate::bench::kube_proxy::{self, Mode};

pub struct Flannel;

/// The range of all pods.
const POD_RANGE: &str = "10.201.0.0/16";
const CONFLIST: &str = "/etc/cni/net.d/10-flannel.conflist";
const READY_TIMEOUT: Duration = Duration::from_mins(2);

impl Peer for Flannel {
    fn name(&self) -> &'static str {
        "flannel"
    }

    fn is_overlay(&self) -> bool {
        true
    }

    fn tunnel(&self) -> Option<&'static str> {
        Some("flannel.1")
    }

    fn daemons(&self) -> &'static [&'static str] {
        &["flannel", "kube-proxy"]
    }

    fn controllers(&self) -> &'static [&'static str] {
        &[]
    }

    fn install(&self, cluster: &Cluster, parts: &Parts) -> Result<Vec<String>> {
        let instance = cluster.instance();
        let settings = json!({
            "Network": POD_RANGE, "EnableNFTables": true, "Backend": {"Type": "vxlan"},
        });
        let file = instance.state().join("flannel-net-conf.json");
        fs::write(&file, settings.to_string()).with_context(|| format!("writing {}", file.display()))?;
        give_ranges(cluster, 201)?;
        let (flanneld, kube_proxy) = (parts.path("flanneld")?, parts.path("kube-proxy")?);
        for node in NODES {
            plugins(cluster, node, parts)?;
            // A NIC's driver has it on, and transitd turns it on in Thuban's cluster.
            cluster.exec_on_node(node, &["ethtool", "-K", "eth0", "gro", "on"])?;
            let arguments = [
                format!("NODE_NAME={node}"),
                flanneld.display().to_string(),
                "--kube-subnet-mgr".to_owned(),
                format!("--kubeconfig-file={}", instance.kubeconfig().display()),
                format!("--net-config-path={}", file.display()),
                "--ip-masq".to_owned(),
                "--iface=eth0".to_owned(),
            ];
            start(cluster, node, "flannel", Path::new("/usr/bin/env"), &arguments)?;
            let arguments = kube_proxy::arguments(instance, node, Mode::Nftables, POD_RANGE);
            start(cluster, node, "kube-proxy", kube_proxy, &arguments)?;
        }
        cluster.wait_nodes_ready(READY_TIMEOUT)?;
        Ok(vec![
            format!("flannel {}, {settings}, --ip-masq", version(flanneld)?),
            format!("kube-proxy: {}, mode nftables", version(kube_proxy)?),
        ])
    }
}

/// Gives a node flannel's plugin, those that it calls, and the configuration of flannel's manifest.
fn plugins(cluster: &Cluster, node: &str, parts: &Parts) -> Result<()> {
    let folder = parts.path("plugins")?;
    let others = ["bridge", "host-local", "portmap"].map(|name| folder.join(name));
    let own = parts.path("flannel-plugin")?;
    for plugin in others.iter().map(PathBuf::as_path).chain([own]) {
        cluster.exec_on_node(node, &["cp", &plugin.display().to_string(), "/opt/cni/bin/"])?;
    }
    let conflist = json!({
        "name": "cbr0", "cniVersion": "0.3.1",
        "plugins": [
            {"type": "flannel", "delegate": {"hairpinMode": true, "isDefaultGateway": true}},
            {"type": "portmap", "capabilities": {"portMappings": true}},
        ],
    });
    let write = format!("printf %s '{conflist}' > {CONFLIST}.tmp && mv {CONFLIST}.tmp {CONFLIST}");
    cluster.exec_on_node(node, &["sh", "-c", &write]).map(drop)
}
