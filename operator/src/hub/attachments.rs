//! Stores what droplets report of pods: attachments, and the addresses in them.
//!
//! Invariant: a droplet's report counts for that droplet alone, and takes no room of another droplet's reports.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;

use thuban_api::identifiers::Vni;
use thuban_proto::transit::Attachment;

use crate::model::rows;

/// The most pods of a droplet, and the most attachments of a pod there. A droplet that reports more is not believed: no
/// node has so many, and going through them delays everybody.
const MAX_PODS: usize = 4096;
const MAX_ATTACHMENTS_OF_POD: usize = 64;

#[derive(Clone, Debug, PartialEq, Eq)]
struct Attached {
    droplet: Arc<str>,
    container: Box<str>,
    interface: Box<str>,
    /// Namespace and name of the pod.
    pod: (Box<str>, Box<str>),
    /// The VNI; none for a number that no VPC has.
    vni: Option<Vni>,
    addresses: Box<[IpAddr]>,
}

/// One droplet's report that a pod has an address.
#[derive(Clone, Copy, Debug)]
pub struct Report<'a> {
    pub droplet: &'a str,
    /// UID of the pod, as kubelet tells it to the CNI plugin.
    pub uid: &'a str,
    pub namespace: &'a str,
    pub name: &'a str,
    pub vni: Vni,
}

impl Attached {
    fn is(&self, droplet: &str, attachment: &Attachment) -> bool {
        *self.droplet == *droplet
            && *self.container == *attachment.container_id
            && *self.interface == *attachment.ifname
    }

    /// Yields the addresses of the attachment, each with its VNI.
    fn keys(&self) -> impl Iterator<Item = (Vni, IpAddr)> {
        let addresses = self
            .vni
            .map(|vni| self.addresses.iter().map(move |address| (vni, *address)));
        addresses.into_iter().flatten()
    }
}

/// All attachments. The lists are small, most have one element: a cluster has as many lists as pods.
#[derive(Debug, Default)]
pub struct Attachments {
    /// Attachments by UID of the pod, as kubelet tells it to the CNI plugin.
    pods: HashMap<Arc<str>, Vec<Attached>>,
    /// UIDs of the pods that have an address.
    live: HashMap<(Vni, IpAddr), Vec<Arc<str>>>,
    /// UIDs of the pods of a droplet.
    on: HashMap<Arc<str>, HashSet<Arc<str>>>,
}

impl Attachments {
    /// Replaces all attachments of a droplet.
    pub fn replace(&mut self, droplet: &str, attachments: &[Attachment]) {
        for pod in self.on.remove(droplet).unwrap_or_default() {
            self.forget(&pod, |attached| *attached.droplet == *droplet);
        }
        for attachment in attachments.iter().take(MAX_PODS * 2) {
            self.add(droplet, attachment);
        }
    }

    pub fn add(&mut self, droplet: &str, attachment: &Attachment) {
        self.forget(&attachment.pod_uid, |attached| attached.is(droplet, attachment));
        let of_pod = self.pods.get(attachment.pod_uid.as_str()).into_iter().flatten();
        let of_pod = of_pod.filter(|other| *other.droplet == *droplet).count();
        let here = self.on.get(droplet);
        let is_new = here.is_none_or(|here| !here.contains(attachment.pod_uid.as_str()));
        if of_pod >= MAX_ATTACHMENTS_OF_POD || is_new && here.map_or(0, HashSet::len) >= MAX_PODS {
            return;
        }
        let pod: Arc<str> = match self.pods.get_key_value(attachment.pod_uid.as_str()) {
            Some((pod, _)) => pod.clone(),
            None => attachment.pod_uid.as_str().into(),
        };
        let droplet: Arc<str> = match self.on.get_key_value(droplet) {
            Some((droplet, _)) => droplet.clone(),
            None => droplet.into(),
        };
        let addresses = [&attachment.address, &attachment.address6];
        let attached = Attached {
            droplet: droplet.clone(),
            container: attachment.container_id.as_str().into(),
            interface: attachment.ifname.as_str().into(),
            pod: (
                attachment.pod_namespace.as_str().into(),
                attachment.pod_name.as_str().into(),
            ),
            vni: Vni::new(attachment.vni),
            addresses: addresses
                .into_iter()
                .filter_map(|bytes| rows::address(bytes))
                .collect(),
        };
        for key in attached.keys() {
            let pods = self.live.entry(key).or_default();
            if !pods.contains(&pod) {
                pods.reserve_exact(1);
                pods.push(pod.clone());
            }
        }
        self.on.entry(droplet).or_default().insert(pod.clone());
        let all = self.pods.entry(pod).or_default();
        all.reserve_exact(1);
        all.push(attached);
    }

    pub fn remove(&mut self, droplet: &str, attachment: &Attachment) {
        self.forget(&attachment.pod_uid, |attached| attached.is(droplet, attachment));
    }

    /// Forgets the attachments of the pod for which `is_gone` is true.
    fn forget(&mut self, pod: &str, is_gone: impl Fn(&Attached) -> bool) {
        let Some(all) = self.pods.get_mut(pod) else { return };
        let gone: Vec<Attached> = all.extract_if(.., |attached| is_gone(attached)).collect();
        for attached in &gone {
            for (vni, address) in attached.keys() {
                let is_left = |other: &Attached| other.vni == Some(vni) && other.addresses.contains(&address);
                if all.iter().any(is_left) {
                    continue;
                }
                if let Some(pods) = self.live.get_mut(&(vni, address)) {
                    pods.retain(|other| **other != *pod);
                    if pods.is_empty() {
                        self.live.remove(&(vni, address));
                    }
                }
            }
            if !all.iter().any(|other| other.droplet == attached.droplet)
                && let Some(pods) = self.on.get_mut(&attached.droplet)
            {
                pods.remove(pod);
                if pods.is_empty() {
                    self.on.remove(&attached.droplet);
                }
            }
        }
        if all.is_empty() {
            self.pods.remove(pod);
        }
    }

    /// Whether the droplet said that the pod has a network there.
    pub fn has(&self, pod: &str, droplet: &str) -> bool {
        let attached = self.pods.get(pod);
        attached.is_some_and(|all| all.iter().any(|attached| *attached.droplet == *droplet))
    }

    /// Returns the addresses in a VPC that a pod has on a droplet: if it has several sandboxes, those of the last one
    /// by name.
    pub fn addresses(&self, pod: &str, droplet: &str, vni: Vni) -> Vec<IpAddr> {
        let attached = self.pods.get(pod).into_iter().flatten();
        let here = attached.filter(|attached| *attached.droplet == *droplet && attached.vni == Some(vni));
        let last = here.max_by_key(|attached| (&attached.container, &attached.interface));
        last.map(|attached| attached.addresses.to_vec())
            .unwrap_or_default()
    }

    /// Yields every (VNI, address) that a pod has.
    pub fn live(&self) -> impl Iterator<Item = (Vni, IpAddr)> {
        self.live.keys().copied()
    }

    /// Yields the reports that pods have the address.
    pub fn at(&self, vni: Vni, address: IpAddr) -> impl Iterator<Item = Report<'_>> {
        let pods = self.live.get(&(vni, address)).into_iter().flatten();
        let reports = pods.flat_map(move |uid| {
            let all = self.pods.get(uid).into_iter().flatten();
            all.map(move |attached| (uid, attached))
        });
        let here = reports
            .filter(move |(_, attached)| attached.vni == Some(vni) && attached.addresses.contains(&address));
        here.map(move |(uid, attached)| Report {
            droplet: &attached.droplet,
            uid,
            namespace: &attached.pod.0,
            name: &attached.pod.1,
            vni,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use thuban_api::identifiers::mapped;
    use thuban_proto::transit::Attachment;
    use thuban_rows::builders::vni;

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

    /// Whether another pod has the address, whoever says so.
    fn is_live(attachments: &Attachments, number: u32, address: IpAddr, except: &str) -> bool {
        attachments
            .at(vni(number), address)
            .any(|report| report.uid != except)
    }

    #[test]
    fn an_address_is_live_while_an_attachment_of_any_sandbox_has_it() {
        let mut attachments = Attachments::default();
        let address = IpAddr::from([10, 0, 0, 2]);
        attachments.add("a", &attachment("c1", "p", 2));
        attachments.add("a", &attachment("c2", "p", 2));
        assert!(is_live(&attachments, 7, address, "other") && !is_live(&attachments, 7, address, "p"));
        assert!(!is_live(&attachments, 8, address, "other"));
        assert_eq!(attachments.addresses("p", "a", vni(7)), [address]);
        assert_eq!(attachments.addresses("p", "b", vni(7)), [] as [IpAddr; 0]);
        attachments.remove("a", &attachment("c1", "p", 2));
        assert!(attachments.has("p", "a") && is_live(&attachments, 7, address, ""));
        attachments.replace("a", &[attachment("c3", "q", 3)]);
        assert!(!attachments.has("p", "a") && attachments.has("q", "a") && !attachments.has("q", "b"));
        assert!(!is_live(&attachments, 7, address, ""));
    }

    #[test]
    fn a_droplet_is_not_believed_without_end() {
        let mut attachments = Attachments::default();
        for number in 0..200 {
            attachments.add("a", &attachment(&format!("c{number}"), "p", 2));
        }
        assert_eq!(attachments.pods["p"].len(), super::MAX_ATTACHMENTS_OF_POD);
        for number in 0..super::MAX_PODS * 2 {
            attachments.add("a", &attachment("c", &format!("p{number}"), 3));
        }
        assert_eq!(attachments.on["a"].len(), super::MAX_PODS);
        attachments.add("b", &attachment("c", "q", 4));
        assert!(attachments.has("q", "b"), "another one is");
        attachments.replace("a", &[]);
        assert!(attachments.pods.len() == 1 && attachments.live.len() == 1 && attachments.on.len() == 1);
    }

    #[test]
    fn a_droplet_takes_no_room_of_anothers_reports_on_a_pod() {
        let mut attachments = Attachments::default();
        for number in 0..200 {
            attachments.add("thief", &attachment(&format!("c{number}"), "p", 2));
        }
        attachments.add("home", &attachment("c", "p", 3));
        assert!(attachments.has("p", "home"));
        assert_eq!(
            attachments.addresses("p", "home", vni(7)),
            [IpAddr::from([10, 0, 0, 3])]
        );
        let reports: Vec<_> = attachments.at(vni(7), [10, 0, 0, 3].into()).collect();
        assert!(reports.len() == 1 && reports[0].droplet == "home");
        attachments.replace("thief", &[]);
        assert!(attachments.has("p", "home") && !is_live(&attachments, 7, [10, 0, 0, 2].into(), ""));
    }
}
