//! The rows of attachments in the tables.
//!
//! Invariant: an address's row leads to the newest attachment of its pod. Without such an endpoint in the program
//! there is no row.

use std::collections::BTreeSet;

use thuban_api::Dscp;
use thuban_common::meter::MeterKey;
use thuban_common::tables::{
    ATTACHMENT_HOST, ATTACHMENT_METERED, ATTACHMENT_REJECTS, ATTACHMENT_SHAPED, ATTACHMENT_VPC_METERED,
    AttachmentEntry, EndpointKey, LOCAL_HAS_POLICY, LOCAL_HOST, LOCAL_REJECTS, LOCAL_SHAPED, LOCAL_TAKES_XDP,
    LocalEntry, outer_dscp,
};
use thuban_rows::{ByteRate, Kept, LocalEndpoint, PolicyId, Vpc};

use super::State;
use crate::attachments::Attachment;
use crate::dataplane::tables::{TableEntry, TableError, TableKey};
use crate::shaped::Rates;

impl State {
    /// Returns the limits that an attachment should have. `None`: none are known, and the attachment keeps its limits.
    pub fn rates(&self, attachment: &Attachment) -> Option<Rates> {
        let endpoint = self.program.local_of_pod(&attachment.pod_uid)?;
        (!attachment.is_host()).then(|| endpoint.into())
    }

    /// Brings the table rows of a pod's attachments in line with its endpoint.
    pub fn refresh(&mut self, pod_uid: &str) -> Result<(), TableError> {
        let endpoint = self.program.local_of_pod(pod_uid).cloned();
        let mut attachments: Vec<Attachment> = self
            .attachments
            .values()
            .filter(|a| a.pod_uid == pod_uid)
            .cloned()
            .collect();
        attachments.sort_by_key(|attachment| attachment.generation);
        let newest = attachments.last().map(|attachment| attachment.generation);
        for attachment in &attachments {
            let own = endpoint.as_ref().filter(|e| {
                Some(attachment.generation) == newest
                    && e.vni.get() == attachment.vni
                    && e.address == attachment.address
            });
            match own {
                Some(endpoint) => self.wire(attachment, endpoint)?,
                None => self.fence(attachment)?,
            }
        }
        Ok(())
    }

    /// Writes an attachment's rows, and has flows judged anew if its class or sets are others.
    fn wire(&mut self, attachment: &Attachment, endpoint: &LocalEndpoint) -> Result<(), TableError> {
        let before = match self.tables.get(&TableKey::Attachment(attachment.host_ifindex)) {
            Some(TableEntry::Attachment(before)) => Some(*before),
            _ => None,
        };
        // After a restart the row of the VPC may come later.
        let vpc = self.program.vpc(endpoint.vni);
        let sending = match (vpc, &before) {
            (Some(vpc), _) => of_sending(vpc),
            (None, Some(before)) => (before.flags & OF_VPC, before.outer_dscp),
            (None, None) => (0, 0),
        };
        let mut entry = attachment_entry(attachment, endpoint, sending);
        if let (Some(vpc), Some(before)) = (vpc, &before) {
            keep(vpc.kept, before, &mut entry);
        }
        let of_policy = |entry: &AttachmentEntry| (entry.class, entry.ingress_set, entry.egress_set);
        let before = before.as_ref().map(of_policy);
        let written = self.write_rows(attachment, endpoint, entry);
        if before == Some(of_policy(&entry)) {
            return written;
        }
        written.and(self.policies.judge_anew())
    }

    /// Writes an attachment's rows. An attachment made by a transitd that knew no IPv6 goes on with IPv4 alone.
    fn write_rows(
        &mut self,
        attachment: &Attachment,
        endpoint: &LocalEndpoint,
        entry: AttachmentEntry,
    ) -> Result<(), TableError> {
        // Meter and sets come before the flags that have programs look for them.
        let meter = TableKey::Meter(MeterKey::of_endpoint(attachment.host_ifindex));
        let metered = endpoint.egress_rate.filter(|_| !attachment.is_host());
        if let Some(rate) = metered {
            self.tables.set(meter, TableEntry::Meter(metered_at(rate)))?;
        }
        self.tables.set(
            TableKey::Attachment(attachment.host_ifindex),
            TableEntry::Attachment(entry),
        )?;
        if metered.is_none() {
            self.tables.remove(&meter)?;
        }
        let kind = if attachment.is_host() {
            LOCAL_HOST
        } else if endpoint.ingress_rate.is_some() {
            LOCAL_SHAPED
        } else if attachment.takes_xdp {
            LOCAL_TAKES_XDP
        } else {
            0
        };
        let policy = match [entry.ingress_set, entry.egress_set] {
            [0, 0] => 0,
            _ => LOCAL_HAS_POLICY,
        };
        let rejects = match entry.flags & ATTACHMENT_REJECTS {
            0 => 0,
            _ => LOCAL_REJECTS,
        };
        let entry = LocalEntry {
            vni: attachment.vni,
            ifindex: attachment.host_ifindex,
            mac: attachment.mac,
            flags: kind | policy | rejects,
        };
        self.tables
            .set(TableKey::Local(attachment.key()), TableEntry::Local(entry))?;
        match attachment.key6() {
            Some(key6) if attachment.address6 == endpoint.address6 => {
                self.tables.set(TableKey::Local(key6), TableEntry::Local(entry))
            }
            Some(key6) => self.remove_local(key6, attachment.host_ifindex),
            None => Ok(()),
        }
    }

    /// Removes the row of an address if it leads to this interface.
    fn remove_local(&mut self, key: EndpointKey, ifindex: u32) -> Result<(), TableError> {
        let key = TableKey::Local(key);
        match self.tables.get(&key) {
            Some(TableEntry::Local(entry)) if entry.ifindex == ifindex => self.tables.remove(&key),
            _ => Ok(()),
        }
    }

    /// Removes an attachment's rows from the tables, as many as can be removed, but never those of a newer attachment
    /// with the same addresses.
    pub fn fence(&mut self, attachment: &Attachment) -> Result<(), TableError> {
        let ifindex = attachment.host_ifindex;
        let mut result = Ok(());
        for key in attachment.keys() {
            result = result.and(self.remove_local(key, ifindex));
        }
        let meter = TableKey::Meter(MeterKey::of_endpoint(ifindex));
        let result = self.tables.remove(&TableKey::Attachment(ifindex)).and(result);
        self.tables.remove(&meter).and(result)
    }

    /// Removes all rows that lead to an interface from the tables.
    pub fn fence_interface(&mut self, ifindex: u32) -> Result<(), TableError> {
        let rows: Vec<TableKey> = self
            .tables
            .held()
            .filter(|(k, e)| leads_to(k, e) == Some(ifindex))
            .map(|(k, _)| *k)
            .collect();
        rows.iter().try_for_each(|key| self.tables.remove(key))
    }

    /// Returns the interfaces that rows lead to.
    pub fn interfaces(&self) -> BTreeSet<u32> {
        self.tables
            .held()
            .filter_map(|(key, entry)| leads_to(key, entry))
            .collect()
    }
}

/// Returns the rate that a pod's meter allows: a twentieth more than the queue at the pod's end, of which nothing is to
/// be lost.
fn metered_at(rate: ByteRate) -> u64 {
    rate.get().saturating_add(rate.get() / 20)
}

/// The flags that a VPC gives to all its attachments.
const OF_VPC: u8 = ATTACHMENT_VPC_METERED | ATTACHMENT_REJECTS;

/// Returns what a VPC says of what its endpoints send: the flags of attachments, and the DSCP of outer headers.
pub(super) fn of_sending(vpc: &Vpc) -> (u8, u8) {
    let metered = vpc.egress_rate.map_or(0, |_| ATTACHMENT_VPC_METERED);
    let rejects = if vpc.reject { ATTACHMENT_REJECTS } else { 0 };
    (metered | rejects, outer_dscp(vpc.dscp.map(Dscp::get)))
}

/// `sending`: see [`of_sending`].
fn attachment_entry(attachment: &Attachment, endpoint: &LocalEndpoint, sending: (u8, u8)) -> AttachmentEntry {
    let number = |id: Option<PolicyId>| id.map_or(0, PolicyId::get);
    let shaped = endpoint.ingress_rate.map_or(0, |_| ATTACHMENT_SHAPED);
    let metered = endpoint.egress_rate.map_or(0, |_| ATTACHMENT_METERED);
    // The node itself has no limits.
    let (flags, outer_dscp) = match sending {
        _ if attachment.is_host() => (ATTACHMENT_HOST, 0),
        (vpc_metered, dscp) => (shaped | metered | vpc_metered, dscp),
    };
    AttachmentEntry {
        ifindex: attachment.host_ifindex,
        vni: attachment.vni,
        address: attachment.key().address,
        network: attachment.network,
        mac: attachment.mac,
        flags,
        outer_dscp,
        class: number(endpoint.class),
        ingress_set: number(endpoint.ingress_set),
        egress_set: number(endpoint.egress_set),
    }
}

/// Has an entry say what the one before it said of policy, as far as that is kept.
fn keep(kept: Kept, before: &AttachmentEntry, entry: &mut AttachmentEntry) {
    let of = |entry: &AttachmentEntry| (entry.vni, entry.address, entry.mac);
    if of(before) != of(entry) {
        return;
    }
    if kept >= Kept::Sets {
        (entry.ingress_set, entry.egress_set) = (before.ingress_set, before.egress_set);
    }
    if kept == Kept::All {
        entry.class = before.class;
    }
}

fn leads_to(key: &TableKey, entry: &TableEntry) -> Option<u32> {
    match (key, entry) {
        (TableKey::Local(_), TableEntry::Local(entry)) => Some(entry.ifindex),
        _ => key.interface(),
    }
}

#[cfg(test)]
mod tests {
    use thuban_rows::builders;

    use super::*;
    use crate::attachments::HOST_ID;
    use crate::attachments::tests::attachment;

    #[test]
    fn an_entry_keeps_what_the_one_before_said_of_policy() {
        let attachment = attachment("a", 1);
        let entry = |policy: u32| AttachmentEntry {
            class: policy,
            ingress_set: policy + 1,
            egress_set: policy + 2,
            ..attachment_entry(&attachment, &builders::local(), (0, 0))
        };
        let kept = |kept, before: &AttachmentEntry| {
            let mut entry = entry(20);
            keep(kept, before, &mut entry);
            [entry.class, entry.ingress_set, entry.egress_set]
        };
        assert_eq!(kept(Kept::Nothing, &entry(10)), [20, 21, 22]);
        assert_eq!(kept(Kept::Sets, &entry(10)), [20, 11, 12]);
        assert_eq!(kept(Kept::All, &entry(10)), [10, 11, 12]);
        // An interface's number had another pod.
        let other = AttachmentEntry {
            mac: [2; 6],
            ..entry(10)
        };
        assert_eq!(kept(Kept::All, &other), [20, 21, 22]);
    }

    #[test]
    fn an_entry_says_which_limits_there_are_and_a_nodes_has_none() {
        let entry = |container_id: &str, egress_rate, ingress_rate| {
            let mut attachment = attachment("a", 1);
            container_id.clone_into(&mut attachment.id.container_id);
            let endpoint = LocalEndpoint {
                egress_rate,
                ingress_rate,
                ..builders::local()
            };
            let entry = attachment_entry(&attachment, &endpoint, of_sending(&builders::vpc()));
            (entry.flags, entry.outer_dscp)
        };
        let rate = builders::local().egress_rate;
        assert!(rate.is_some());
        let of_vpc = ATTACHMENT_VPC_METERED | ATTACHMENT_REJECTS;
        for (egress, ingress, flags) in [
            (None, None, of_vpc),
            (None, rate, of_vpc | ATTACHMENT_SHAPED),
            (rate, None, of_vpc | ATTACHMENT_METERED),
        ] {
            // The VPC's DSCP is 46.
            assert_eq!(entry("a", egress, ingress), (flags, 47));
            assert_eq!(entry(HOST_ID, egress, ingress), (ATTACHMENT_HOST, 0));
        }
        let plain = Vpc {
            reject: false,
            dscp: None,
            egress_rate: None,
            ..builders::vpc()
        };
        assert_eq!(of_sending(&plain), (0, 0));
        assert_eq!(metered_at(ByteRate::new(2000).unwrap()), 2100);
    }
}
