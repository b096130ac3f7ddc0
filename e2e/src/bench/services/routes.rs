//! The network of the cluster with kube-proxy: pods by ptp, plain routes between the nodes' ranges, no tunnel, no
//! masquerading.

use std::{net::Ipv4Addr, path::Path, time::Duration};

use anyhow::Result;
use serde_json::json;
use thuban_cluster::{Cluster, NODES};

/// The range of all pods.
pub const POD_RANGE: &str = "10.201.0.0/16";
const CONFLIST: &str = "/etc/cni/net.d/10-ptp.conflist";
const READY_TIMEOUT: Duration = Duration::from_mins(2);

fn range(index: usize) -> String {
    format!("{}/24", Ipv4Addr::new(10, 201, index as u8, 0))
}

/// Lays the routes, which makes all nodes Ready.
pub fn lay(name: &str, plugins: &Path) -> Result<()> {
    let cluster = Cluster::named(name)?;
    for (index, node) in NODES.iter().enumerate() {
        for plugin in ["ptp", "host-local"] {
            let built = plugins.join(plugin).display().to_string();
            cluster.exec_on_node(node, &["cp", &built, "/opt/cni/bin/"])?;
        }
        for (other, neighbour) in NODES.iter().enumerate() {
            if other != index {
                let (to, via) = (range(other), cluster.node_address(neighbour)?.to_string());
                cluster.exec_on_node(node, &["ip", "route", "replace", &to, "via", &via])?;
            }
        }
        // A NIC's driver has it on, and transitd turns it on in the other cluster.
        cluster.exec_on_node(node, &["ethtool", "-K", "eth0", "gro", "on"])?;
        let conflist = json!({
            "cniVersion": "1.0.0", "name": "ptp",
            "plugins": [{
                "type": "ptp", "ipMasq": false,
                "ipam": {"type": "host-local", "ranges": [[{"subnet": range(index)}]],
                         "routes": [{"dst": "0.0.0.0/0"}]},
            }],
        });
        let write = format!("printf %s '{conflist}' > {CONFLIST}.tmp && mv {CONFLIST}.tmp {CONFLIST}");
        cluster.exec_on_node(node, &["sh", "-c", &write])?;
    }
    cluster.wait_nodes_ready(READY_TIMEOUT)
}
