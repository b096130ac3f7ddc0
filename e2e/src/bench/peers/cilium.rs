//! Cilium without kube-proxy: its agent on the nodes, with the programs compiled there from its module's sources, and
//! its CNI plugin. Packets between nodes are in VXLAN, or routed by plain routes.
//!
//! Cilium's operator is not there. Its part here is done by hand: the CRDs, and a range of addresses for each node.

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result};
use thuban_cluster::{Cluster, Instance, NODES};

use super::{
    Parts,
    peer::{Peer, give_ranges, start, version},
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Routing {
    Vxlan,
    Native,
}

pub struct Cilium(pub Routing);

const POD_RANGE: &str = "10.202.0.0/16";
const POD_RANGE_NUMBER: u8 = 202;
const CONFLIST: &str = "/etc/cni/net.d/05-cilium.conflist";
const CRDS: [&str; 2] = ["v2", "v2alpha1"];
/// The agent's folders. `/run` is the node's own.
const STATE: &str = "/run/cilium";
const READY_TIMEOUT: Duration = Duration::from_mins(5);

/// What Cilium's tuning guide recommends, as far as the kernel has it, and nothing that a network does not need: no
/// policies of layer 7, no flow logs, no health checks.
const SETTINGS: [&str; 15] = [
    "--ipam=kubernetes",
    "--enable-ipv4=true",
    "--enable-ipv6=false",
    "--kube-proxy-replacement=true",
    "--bpf-lb-sock=true",
    "--enable-bpf-masquerade=true",
    "--enable-host-legacy-routing=false",
    "--bpf-map-dynamic-size-ratio=0.0025",
    "--devices=eth0",
    "--identity-allocation-mode=crd",
    // By default the agent delays a burst of pods, to half a pod a second and less.
    "--api-rate-limit=endpoint-create=rate-limit:100/s,rate-burst:100,parallel-requests:8,auto-adjust:false",
    "--enable-hubble=false",
    "--enable-l7-proxy=false",
    "--enable-health-checking=false",
    "--enable-endpoint-health-checking=false",
];

impl Peer for Cilium {
    fn name(&self) -> &'static str {
        match self.0 {
            Routing::Vxlan => "cilium",
            Routing::Native => "cilium-native",
        }
    }

    fn is_overlay(&self) -> bool {
        self.0 == Routing::Vxlan
    }

    fn tunnel(&self) -> Option<&'static str> {
        self.is_overlay().then_some("cilium_vxlan")
    }

    fn daemons(&self) -> &'static [&'static str] {
        &["cilium-agent"]
    }

    fn controllers(&self) -> &'static [&'static str] {
        &[]
    }

    fn install(&self, cluster: &Cluster, parts: &Parts) -> Result<Vec<String>> {
        let sources = parts.path("cilium-sources")?;
        for folder in CRDS {
            let folder = sources.join("pkg/k8s/apis/cilium.io/client/crds").join(folder);
            // A client's copy of a whole CRD would be too long for an annotation.
            cluster.kubectl(&["apply", "--server-side", "-f", &folder.display().to_string()])?;
        }
        give_ranges(cluster, POD_RANGE_NUMBER)?;
        let programs = programs(cluster.instance(), parts)?;
        let agent = programs.join("cilium-agent");
        for node in NODES {
            prepare(cluster, node, parts)?;
            let mut arguments = vec![
                format!("PATH={}:/usr/sbin:/usr/bin:/sbin:/bin", programs.display()),
                format!("K8S_NODE_NAME={node}"),
                "CILIUM_K8S_NAMESPACE=kube-system".to_owned(),
                agent.display().to_string(),
                format!(
                    "--k8s-kubeconfig-path={}",
                    cluster.instance().kubeconfig().display()
                ),
                format!("--state-dir={STATE}"),
                format!("--lib-dir={STATE}/lib"),
                format!("--cgroup-root={STATE}/cgroup"),
                format!("--write-cni-conf-when-ready={CONFLIST}"),
            ];
            arguments.extend(SETTINGS.map(str::to_owned));
            arguments.extend(self.routing());
            start(
                cluster,
                node,
                "cilium-agent",
                Path::new("/usr/bin/env"),
                &arguments,
            )?;
        }
        cluster.wait_nodes_ready(READY_TIMEOUT)?;
        Ok(vec![
            version(&agent)?,
            version(&programs.join("clang"))?,
            SETTINGS.join(" "),
            self.routing().join(" "),
        ])
    }
}

impl Cilium {
    fn routing(&self) -> Vec<String> {
        match self.0 {
            Routing::Vxlan => vec![
                "--routing-mode=tunnel".to_owned(),
                "--tunnel-protocol=vxlan".to_owned(),
            ],
            Routing::Native => vec![
                "--routing-mode=native".to_owned(),
                "--auto-direct-node-routes=true".to_owned(),
                format!("--ipv4-native-routing-cidr={POD_RANGE}"),
            ],
        }
    }
}

/// Makes a folder with the agent and the compiler under the names that they need.
fn programs(instance: &Instance, parts: &Parts) -> Result<PathBuf> {
    let folder = instance.state().join("cilium");
    fs::create_dir_all(&folder).with_context(|| format!("making {}", folder.display()))?;
    let links = [
        ("cilium-agent", parts.path("cilium")?.join("daemon")),
        ("clang", parts.path("clang")?.to_owned()),
    ];
    for (name, target) in links {
        let link = folder.join(name);
        if !link.is_symlink() {
            symlink(target, &link).with_context(|| format!("linking {}", link.display()))?;
        }
    }
    Ok(folder)
}

/// Gives a node the plugin and the sources of the programs. Services are for the cgroup of the node's pods: the cgroup
/// of all nodes together would be the machine's.
fn prepare(cluster: &Cluster, node: &str, parts: &Parts) -> Result<()> {
    let plugin = parts.path("cilium")?.join("cilium-cni").display().to_string();
    let sources = parts.path("cilium-sources")?.join("bpf").display().to_string();
    let pods = cluster.pods_cgroup(node)?.display().to_string();
    let script = format!(
        "set -e; cp {plugin} /opt/cni/bin/; ethtool -K eth0 gro on; [ ! -e {STATE}/lib ] || exit 0; \
         mkdir -p {STATE}/lib {STATE}/cgroup; cp -r {sources} {STATE}/lib/; mount --bind {pods} {STATE}/cgroup"
    );
    cluster.exec_on_node(node, &["sh", "-c", &script]).map(drop)
}
