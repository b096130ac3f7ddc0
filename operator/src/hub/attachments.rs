//! What droplets say that pods have: attachments, and the addresses in them.
//!
//! Invariant: a droplet's word counts for that droplet alone.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;

use thuban_proto::transit::Attachment;

use crate::model::rows;

/// (droplet, container id, interface name).
type Key = (String, String, String);

#[derive(Clone, Debug, PartialEq, Eq)]
struct Attached {
    vni: u32,
    addresses: Vec<IpAddr>,
}

/// By UID of the pod, as kubelet tells the CNI plugin.
#[derive(Debug, Default)]
pub struct Attachments {
    pods: HashMap<String, BTreeMap<Key, Attached>>,
    /// Who has an address: UIDs of pods.
    live: HashMap<(u32, IpAddr), BTreeSet<String>>,
}

impl Attachments {
    /// All that a droplet has, instead of what it said before.
    pub fn replace(&mut self, droplet: &str, attachments: &[Attachment]) {
        let mut gone = Vec::new();
        for (pod, attached) in &self.pods {
            let here = attached.keys().filter(|(at, ..)| at == droplet);
            gone.extend(here.map(|key| (pod.clone(), key.clone())));
        }
        for (pod, key) in gone {
            self.forget(&pod, &key);
        }
        for attachment in attachments {
            self.add(droplet, attachment);
        }
    }

    pub fn add(&mut self, droplet: &str, attachment: &Attachment) {
        let key = key(droplet, attachment);
        let pod = &attachment.pod_uid;
        self.forget(pod, &key);
        let addresses = [&attachment.address, &attachment.address6];
        let attached = Attached {
            vni: attachment.vni,
            addresses: addresses
                .into_iter()
                .filter_map(|bytes| rows::address(bytes))
                .collect(),
        };
        for address in &attached.addresses {
            let pods = self.live.entry((attached.vni, *address)).or_default();
            pods.insert(pod.clone());
        }
        self.pods.entry(pod.clone()).or_default().insert(key, attached);
    }

    pub fn remove(&mut self, droplet: &str, attachment: &Attachment) {
        self.forget(&attachment.pod_uid, &key(droplet, attachment));
    }

    fn forget(&mut self, pod: &str, key: &Key) {
        let Some(all) = self.pods.get_mut(pod) else { return };
        let Some(gone) = all.remove(key) else { return };
        for address in gone.addresses {
            let is_left = |other: &Attached| other.vni == gone.vni && other.addresses.contains(&address);
            if all.values().any(is_left) {
                continue;
            }
            if let Some(pods) = self.live.get_mut(&(gone.vni, address)) {
                pods.remove(pod);
                if pods.is_empty() {
                    self.live.remove(&(gone.vni, address));
                }
            }
        }
        if all.is_empty() {
            self.pods.remove(pod);
        }
    }

    /// Whether the droplet said that the pod has a network there.
    pub fn has(&self, pod: &str, droplet: &str) -> bool {
        let attached = self.pods.get(pod).into_iter().flat_map(BTreeMap::keys);
        attached.into_iter().any(|(at, ..)| at == droplet)
    }

    /// The addresses in a VPC that a pod has on a droplet.
    pub fn addresses(&self, pod: &str, droplet: &str, vni: u32) -> Vec<IpAddr> {
        let attached = self.pods.get(pod).into_iter().flatten();
        let mut here = attached.filter(|((at, ..), attached)| at == droplet && attached.vni == vni);
        here.next_back()
            .map(|(_, attached)| attached.addresses.clone())
            .unwrap_or_default()
    }

    /// All (VNI, address) that pods have.
    pub fn live(&self) -> impl Iterator<Item = (u32, IpAddr)> {
        self.live.keys().copied()
    }

    /// Whether another pod has the address.
    pub fn is_live(&self, vni: u32, address: IpAddr, except: &str) -> bool {
        let pods = self.live.get(&(vni, address));
        pods.is_some_and(|pods| pods.iter().any(|pod| pod != except))
    }
}

fn key(droplet: &str, attachment: &Attachment) -> Key {
    let (container, interface) = (attachment.container_id.clone(), attachment.ifname.clone());
    (droplet.to_owned(), container, interface)
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use thuban_api::identifiers::mapped;
    use thuban_proto::transit::Attachment;

    use super::Attachments;

    fn attachment(container: &str, pod: &str, last: u8) -> Attachment {
        Attachment {
            container_id: container.into(),
            ifname: "eth0".into(),
            pod_uid: pod.into(),
            vni: 7,
            address: mapped(IpAddr::from([10, 0, 0, last])).to_vec(),
            ..Attachment::default()
        }
    }

    #[test]
    fn an_address_is_live_while_an_attachment_of_any_sandbox_has_it() {
        let mut attachments = Attachments::default();
        let address = IpAddr::from([10, 0, 0, 2]);
        attachments.add("a", &attachment("c1", "p", 2));
        attachments.add("a", &attachment("c2", "p", 2));
        assert!(attachments.is_live(7, address, "other") && !attachments.is_live(7, address, "p"));
        assert!(!attachments.is_live(8, address, "other"));
        assert_eq!(attachments.addresses("p", "a", 7), [address]);
        assert_eq!(attachments.addresses("p", "b", 7), [] as [IpAddr; 0]);
        attachments.remove("a", &attachment("c1", "p", 2));
        assert!(attachments.has("p", "a") && attachments.is_live(7, address, ""));
        attachments.replace("a", &[attachment("c3", "q", 3)]);
        assert!(!attachments.has("p", "a") && attachments.has("q", "a") && !attachments.has("q", "b"));
        assert!(!attachments.is_live(7, address, ""));
    }
}
