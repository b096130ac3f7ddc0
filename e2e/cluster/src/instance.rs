//! Names, addresses, ports and paths of one instance. All are a function of its name.

use std::{
    net::Ipv4Addr,
    path::{Path, PathBuf},
};

use anyhow::{Result, bail};

/// Node names, in order of their addresses (.11, .12, .13).
pub const NODES: [&str; 3] = ["node-a", "node-b", "node-c"];

const STATE: &str = "/var/lib/thuban-cluster";

/// One cluster. Two instances with different names can be up at once.
#[derive(Clone, Debug)]
pub struct Instance {
    name: &'static str,
    bridge: &'static str,
    /// Third octet of 172.31.x.0/24.
    subnet: u8,
    /// Added to every port.
    port_offset: u16,
}

impl Instance {
    /// `demo` or `test`.
    pub fn named(name: &str) -> Result<Self> {
        match name {
            "demo" => Ok(Self {
                name: "demo",
                bridge: "thuban-demo",
                subnet: 77,
                port_offset: 0,
            }),
            "test" => Ok(Self {
                name: "test",
                bridge: "thuban-test",
                subnet: 78,
                port_offset: 100,
            }),
            _ => bail!("no cluster is called {name}: take demo or test"),
        }
    }

    pub fn name(&self) -> &'static str {
        self.name
    }

    /// The bridge that plays the underlay; also the prefix of the nodes' network namespaces.
    pub fn bridge(&self) -> &'static str {
        self.bridge
    }

    /// The bridge's own address: the control plane's, and the nodes' default gateway.
    pub fn gateway(&self) -> Ipv4Addr {
        Ipv4Addr::new(172, 31, self.subnet, 1)
    }

    /// The underlay in CIDR notation.
    pub fn subnet(&self) -> String {
        format!("172.31.{}.0/24", self.subnet)
    }

    /// The nodes' address, or an error for a name that is not a node's.
    pub fn node_address(&self, node: &str) -> Result<Ipv4Addr> {
        match NODES.iter().position(|name| *name == node) {
            Some(index) => Ok(Ipv4Addr::new(172, 31, self.subnet, 11 + index as u8)),
            None => bail!(
                "cluster {} has no node {node}: it has {}",
                self.name,
                NODES.join(", ")
            ),
        }
    }

    pub fn api_port(&self) -> u16 {
        16443 + self.port_offset
    }

    pub fn etcd_port(&self) -> u16 {
        12379 + self.port_offset
    }

    pub fn etcd_peer_port(&self) -> u16 {
        12380 + self.port_offset
    }

    pub fn controller_manager_port(&self) -> u16 {
        20257 + self.port_offset
    }

    pub fn scheduler_port(&self) -> u16 {
        20259 + self.port_offset
    }

    /// URL of the API server.
    pub fn api_url(&self) -> String {
        format!("https://{}:{}", self.gateway(), self.api_port())
    }

    /// Folder of the state of all instances.
    pub(crate) fn all_state() -> &'static Path {
        Path::new(STATE)
    }

    /// Everything that this instance keeps on disk.
    pub fn state(&self) -> PathBuf {
        Self::all_state().join(self.name)
    }

    /// Folder with the cluster's own kubectl.
    pub fn bin(&self) -> PathBuf {
        self.state().join("bin")
    }

    /// kubeconfig of an administrator.
    pub fn kubeconfig(&self) -> PathBuf {
        self.state().join("admin.conf")
    }

    pub fn logs(&self) -> PathBuf {
        self.state().join("logs")
    }

    pub(crate) fn kubectl_cache(&self) -> PathBuf {
        self.state().join("kubectl-cache")
    }

    pub(crate) fn pki(&self) -> PathBuf {
        self.state().join("pki")
    }

    pub(crate) fn node_state(&self, node: &str) -> PathBuf {
        self.state().join("nodes").join(node)
    }

    /// Name of the cgroup in every hierarchy, without the slash.
    pub(crate) fn cgroup(&self) -> String {
        format!("thuban-{}", self.name)
    }

    pub(crate) fn network_namespace(&self, node: &str) -> String {
        format!("{}-{node}", self.bridge)
    }

    /// The bridge's end of a node's uplink, short enough for a link's name.
    pub(crate) fn uplink(&self, node: &str) -> String {
        format!("v{}-{}", self.name, node.trim_start_matches("node-"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instances_share_no_name_and_no_port() {
        let [demo, test] = ["demo", "test"].map(|name| Instance::named(name).unwrap());
        let ports = |instance: &Instance| {
            [
                instance.api_port(),
                instance.etcd_port(),
                instance.etcd_peer_port(),
                instance.controller_manager_port(),
                instance.scheduler_port(),
            ]
        };
        assert!(ports(&demo).iter().all(|port| !ports(&test).contains(port)));
        assert_ne!(demo.subnet(), test.subnet());
        assert_ne!(demo.state(), test.state());
        assert_ne!(demo.cgroup(), test.cgroup());
    }

    #[test]
    fn link_names_fit() {
        for name in ["demo", "test"] {
            let instance = Instance::named(name).unwrap();
            assert!(instance.bridge().len() <= 15);
            assert!(NODES.iter().all(|node| instance.uplink(node).len() <= 15));
        }
    }
}
