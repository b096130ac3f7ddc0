//! Names, addresses, ports and paths of one instance. All of them follow from its name.

use std::{
    net::Ipv4Addr,
    path::{Path, PathBuf},
};

use anyhow::{Result, bail};

/// Node names, in order of their addresses (.11, .12, .13).
pub const NODES: [&str; 3] = ["node-a", "node-b", "node-c"];

/// The length of an instance's name is limited because `thuban-<name>` is the name of a link.
const LONGEST_NAME: usize = 8;
const FIRST_SUBNET: u8 = 77;
/// The number of subnets and sets of ports, those of demo and test included.
const NUMBERS: u8 = 100;
const STATE: &str = "/var/lib/thuban-cluster";

/// One cluster. Two instances with different names can be up at once.
#[derive(Clone, Debug)]
pub struct Instance {
    name: String,
    bridge: String,
    /// Third octet of the subnet 172.31.x.0/24.
    subnet: u8,
    /// A number that is added to every port.
    port_offset: u16,
}

impl Instance {
    /// Returns the instance `demo`, `test`, or one of another name of at most 8 letters and digits, whose numbers
    /// follow from the name.
    pub fn named(name: &str) -> Result<Self> {
        let is_short = (1..=LONGEST_NAME).contains(&name.len());
        if !is_short
            || !name
                .bytes()
                .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit())
        {
            bail!("no cluster can be called {name:?}: take 1 to {LONGEST_NAME} of a-z and 0-9");
        }
        let number = number(name);
        Ok(Self {
            name: name.to_owned(),
            bridge: format!("thuban-{name}"),
            subnet: FIRST_SUBNET + number,
            port_offset: 100 * u16::from(number),
        })
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the name of the bridge that plays the underlay. It is also the prefix of the nodes' network namespaces.
    pub fn bridge(&self) -> &str {
        &self.bridge
    }

    /// Returns the bridge's own address. It is the control plane's address and the nodes' default gateway.
    pub fn gateway(&self) -> Ipv4Addr {
        Ipv4Addr::new(172, 31, self.subnet, 1)
    }

    /// Returns the underlay in CIDR notation.
    pub fn subnet(&self) -> String {
        format!("172.31.{}.0/24", self.subnet)
    }

    /// Returns the node's address, or an error for a name that is not a node's.
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

    /// Returns the URL of the API server.
    pub fn api_url(&self) -> String {
        format!("https://{}:{}", self.gateway(), self.api_port())
    }

    /// Returns the folder of the state of all instances.
    pub(crate) fn all_state() -> &'static Path {
        Path::new(STATE)
    }

    /// Returns the folder of everything that this instance keeps on disk.
    pub fn state(&self) -> PathBuf {
        Self::all_state().join(&self.name)
    }

    /// Returns the folder with the cluster's own kubectl.
    pub fn bin(&self) -> PathBuf {
        self.state().join("bin")
    }

    /// Returns the path of an administrator's kubeconfig.
    pub fn kubeconfig(&self) -> PathBuf {
        self.state().join("admin.conf")
    }

    pub fn logs(&self) -> PathBuf {
        self.state().join("logs")
    }

    /// Returns the path of the certificate by which clients check the API server's.
    pub fn authority(&self) -> PathBuf {
        self.pki().join("ca.crt")
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

    /// Returns the name of the cgroup in every hierarchy, without the slash.
    pub(crate) fn cgroup(&self) -> String {
        format!("thuban-{}", self.name)
    }

    pub(crate) fn network_namespace(&self, node: &str) -> String {
        format!("{}-{node}", self.bridge)
    }

    /// Returns the name of the bridge's end of a node's uplink, short enough for a link's name.
    pub fn uplink(&self, node: &str) -> String {
        format!("v{}-{}", self.name, node.trim_start_matches("node-"))
    }
}

/// Returns the number that tells instances apart. 0 and 1 are demo and test. The others share the rest by the sum of
/// their letters, weighted by place. Two instances with equal numbers can't be up at once.
fn number(name: &str) -> u8 {
    match name {
        "demo" => 0,
        "test" => 1,
        _ => {
            let sum = name
                .bytes()
                .fold(0_u32, |sum, byte| sum.wrapping_mul(31).wrapping_add(byte.into()));
            2 + (sum % u32::from(NUMBERS - 2)) as u8
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instances_share_no_name_and_no_port() {
        let [demo, test, other] = ["demo", "test", "other"].map(|name| Instance::named(name).unwrap());
        let ports = |instance: &Instance| {
            [
                instance.api_port(),
                instance.etcd_port(),
                instance.etcd_peer_port(),
                instance.controller_manager_port(),
                instance.scheduler_port(),
            ]
        };
        for (one, another) in [(&demo, &test), (&demo, &other), (&test, &other)] {
            assert!(ports(one).iter().all(|port| !ports(another).contains(port)));
        }
        assert!(
            ports(&Instance::named("zzzzzzzz").unwrap())
                .iter()
                .all(|port| *port < 32768)
        );
        assert_ne!(demo.subnet(), test.subnet());
        assert_ne!(demo.state(), test.state());
        assert_ne!(demo.cgroup(), test.cgroup());
    }

    #[test]
    fn names_that_are_no_links_are_refused() {
        for name in ["", "nineteen9", "Test", "a-b", "a/b"] {
            assert!(Instance::named(name).is_err(), "{name}");
        }
    }

    #[test]
    fn link_names_fit() {
        for name in ["demo", "test", "8letters"] {
            let instance = Instance::named(name).unwrap();
            assert!(instance.bridge().len() <= 15);
            assert!(NODES.iter().all(|node| instance.uplink(node).len() <= 15));
        }
    }
}
