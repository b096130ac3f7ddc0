//! Attachments: made by CNI ADD, removed by DEL, and kept on disk between.

pub mod report;
pub mod store;

use std::net::{IpAddr, Ipv4Addr};

use ipnet::Ipv6Net;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use thuban_common::tables::EndpointKey;

/// Prefix of the host's end of every pod's veth.
pub const HOST_PREFIX: &str = "thb";
/// The container id of the node's own endpoint; refused from runtimes.
pub const HOST_ID: &str = "host";

/// An attachment's key in every CNI verb. Both parts are checked: safe in file names and as interface names.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct AttachmentId {
    pub container_id: String,
    pub ifname: String,
}

/// One attachment. DEL goes by it when nothing else answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attachment {
    pub id: AttachmentId,
    pub netns: String,
    pub pod_uid: String,
    pub pod_namespace: String,
    pub pod_name: String,
    pub vni: u32,
    pub network: u32,
    pub address: Ipv4Addr,
    pub prefix_length: u8,
    pub gateway: Ipv4Addr,
    /// The IPv6 address with the length of its network's prefix; none without IPv6, and in files of a transitd that
    /// knew none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address6: Option<Ipv6Net>,
    pub mac: [u8; 6],
    pub mtu: u32,
    pub host_interface: String,
    pub host_ifindex: u32,
    /// Grows with every ADD: of two attachments of one pod the higher one carries its traffic.
    pub generation: u64,
    /// The agent was at XDP when the attachment was made: the pod's end takes frames that XDP redirects to it.
    #[serde(default)]
    pub takes_xdp: bool,
    /// When the runtime asked for it, nanoseconds since boot: a DEL that was spooled before that is not meant for this
    /// attachment.
    #[serde(default)]
    pub asked_at: u64,
    /// The CNI network that it was asked for in; empty in files of a transitd that kept none.
    #[serde(default)]
    pub cni_network: String,
    /// The boot in which the veth was made; after another boot nothing of it exists.
    pub boot_id: String,
}

impl Attachment {
    /// Whether it is the node's own endpoint, which no runtime asks for.
    pub fn is_host(&self) -> bool {
        self.id.container_id == HOST_ID
    }

    /// Returns the pod as namespace/name.
    pub fn pod(&self) -> String {
        format!("{}/{}", self.pod_namespace, self.pod_name)
    }

    pub fn key(&self) -> EndpointKey {
        EndpointKey {
            vni: self.vni,
            address: self.address.to_ipv6_mapped().octets(),
        }
    }

    pub fn key6(&self) -> Option<EndpointKey> {
        self.address6.map(|net| EndpointKey {
            vni: self.vni,
            address: net.addr().octets(),
        })
    }

    /// Returns the IPv4 address, then the IPv6 address.
    pub fn addresses(&self) -> impl Iterator<Item = IpAddr> + use<> {
        let second = self.address6.map(|net| IpAddr::from(net.addr()));
        std::iter::once(IpAddr::from(self.address)).chain(second)
    }

    /// Returns the keys of all addresses.
    pub fn keys(&self) -> impl Iterator<Item = EndpointKey> + use<> {
        [Some(self.key()), self.key6()].into_iter().flatten()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidId {
    #[error("container_id: expected a letter or digit followed by letters, digits, _ . -, at most 128 bytes")]
    ContainerId,
    #[error("ifname: expected an interface name of 1 to 15 bytes without / : or spaces")]
    Ifname,
}

impl AttachmentId {
    pub fn new(container_id: &str, ifname: &str) -> Result<Self, InvalidId> {
        let mut characters = container_id.chars();
        let first = characters.next().is_some_and(|c| c.is_ascii_alphanumeric());
        let rest = characters.all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-'));
        if !first || !rest || container_id.len() > 128 || container_id == HOST_ID {
            return Err(InvalidId::ContainerId);
        }
        let bad = ifname.is_empty() || ifname.len() > 15 || ifname == "." || ifname == "..";
        if bad
            || ifname
                .chars()
                .any(|c| c == '/' || c == ':' || c.is_whitespace() || c.is_control())
        {
            return Err(InvalidId::Ifname);
        }
        Ok(Self {
            container_id: container_id.to_owned(),
            ifname: ifname.to_owned(),
        })
    }

    /// Returns the attachment id of the node's own endpoint.
    pub fn host(ifname: &str) -> Self {
        Self {
            container_id: HOST_ID.to_owned(),
            ifname: ifname.to_owned(),
        }
    }

    /// Returns the name of the host's end, 14 bytes. It depends on the key alone, so that DEL finds it without any
    /// state.
    pub fn host_interface(&self) -> String {
        let digest = Sha256::digest(format!("{}/{}", self.container_id, self.ifname));
        let mut name = String::from(HOST_PREFIX);
        name.push_str(&hex(&digest)[..11]);
        name
    }

    pub fn file_name(&self) -> String {
        format!("{}_{}.json", self.container_id, self.ifname)
    }
}

pub fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::new(), |mut text, byte| {
        // Writing to a String does not fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

pub fn mac_text(mac: [u8; 6]) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

#[cfg(test)]
pub mod tests {
    use super::*;

    pub(crate) fn attachment(container_id: &str, generation: u64) -> Attachment {
        let id = AttachmentId::new(container_id, "eth0").unwrap();
        Attachment {
            host_interface: id.host_interface(),
            id,
            netns: "/run/netns/x".into(),
            pod_uid: "uid-1".into(),
            pod_namespace: "red".into(),
            pod_name: "web".into(),
            vni: 7,
            network: 0x0a00_0100,
            address: Ipv4Addr::new(10, 0, 1, 5),
            prefix_length: 24,
            gateway: Ipv4Addr::new(10, 0, 1, 1),
            address6: None,
            mac: [2, 0, 10, 0, 1, 5],
            mtu: 1450,
            host_ifindex: 9,
            generation,
            takes_xdp: false,
            asked_at: 0,
            cni_network: String::new(),
            boot_id: "boot".into(),
        }
    }

    #[test]
    fn a_file_keeps_the_ipv6_address_and_one_without_it_is_read() {
        let mut dual = attachment("a", 1);
        let without = serde_json::to_string(&dual).unwrap();
        assert!(!without.contains("address6"), "as before: {without}");
        assert_eq!(serde_json::from_str::<Attachment>(&without).unwrap(), dual);
        dual.address6 = Some("fd00:1::5/64".parse().unwrap());
        let with = serde_json::to_string(&dual).unwrap();
        assert_eq!(serde_json::from_str::<Attachment>(&with).unwrap(), dual);
        let keys: Vec<_> = dual.keys().map(|key| key.address[15]).collect();
        assert_eq!((keys, dual.keys().count()), (vec![5, 5], 2));
    }

    #[test]
    fn host_names_fit_linux_and_differ_by_container_and_interface() {
        let names: std::collections::BTreeSet<_> = [("a", "eth0"), ("a", "eth1"), ("b", "eth0")]
            .map(|(c, i)| AttachmentId::new(c, i).unwrap().host_interface())
            .into();
        assert_eq!(names.len(), 3);
        assert!(
            names
                .iter()
                .all(|name| name.len() == 14 && name.starts_with("thb"))
        );
    }

    #[test]
    fn keys_that_could_leave_their_directory_are_refused() {
        for id in ["", "../x", "a/b", ".hidden", HOST_ID] {
            assert_eq!(AttachmentId::new(id, "eth0"), Err(InvalidId::ContainerId));
        }
        for name in ["", "..", "a/b", "0123456789abcdef"] {
            assert_eq!(AttachmentId::new("c", name), Err(InvalidId::Ifname));
        }
    }
}
