//! Flows that policy let in: entries of FLOWS, and how many of them there may be.

use crate::{services::ConnectionKey, tables::Address};

/// FLOWS[flow]: a flow that policy let in, by the key of its first direction. Delivery writes it if the flow's answers
/// must be vouched for: their receiver has an ingress set, or their sender an egress set.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlowEntry {
    /// A hash of the key ([`FlowEntry::tag`]). Together with the epoch it is the word that says whose the entry is.
    pub tag: u32,
    /// POLICY[0] as it was before the flow was judged. After a change the flow is judged anew.
    pub epoch: u32,
    /// The last time that was written for a packet of the client, ns since boot.
    pub time: u64,
    /// The client's class and egress set, by which the flow was judged.
    pub class: u32,
    pub egress_set: u32,
    /// What each direction has seen, as in [`crate::services::ConnectionEntry::state`].
    pub state: u16,
    pub answers: u16,
    pub padding: u32,
}

impl FlowEntry {
    /// Returns the tag of a flow.
    #[inline(always)]
    pub const fn tag(key: &ConnectionKey) -> u32 {
        let mut hash = key.vni as u64 ^ (key.protocol as u64) << 32;
        hash = mix(hash, (key.ports[0] as u64) << 16 | key.ports[1] as u64);
        let mut byte = 0;
        while byte < 16 {
            hash = mix(hash, word(&key.source, byte));
            hash = mix(hash, word(&key.destination, byte));
            byte += 8;
        }
        (hash >> 32) as u32
    }
}

#[inline(always)]
const fn mix(hash: u64, word: u64) -> u64 {
    let product = (hash ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    product ^ product >> 29
}

#[inline(always)]
const fn word(address: &Address, at: usize) -> u64 {
    u64::from_ne_bytes([
        address[at],
        address[at + 1],
        address[at + 2],
        address[at + 3],
        address[at + 4],
        address[at + 5],
        address[at + 6],
        address[at + 7],
    ])
}

/// How long after the client's last packet datagrams are answers, ns. An address rests as long before another pod gets
/// it.
pub const ANSWERED_LIFE: u64 = 30_000_000_000;
/// Entries of FLOWS.
pub const FLOWS_CAPACITY: u32 = 131_072;
/// The most entries of FLOWS that the flows of one VPC may have.
pub const FLOWS_OF_VPC: u32 = FLOWS_CAPACITY / 4;
/// Entries in FLOWS, of all VPCs, up to which a VPC may have more than its reserve.
pub const FLOWS_SHARED: u32 = FLOWS_CAPACITY / 2;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packet::ipv4::{TCP, UDP};

    #[test]
    fn every_part_of_a_flow_changes_its_tag() {
        let key = ConnectionKey {
            vni: 7,
            ports: [1, 2],
            source: [3; 16],
            destination: [4; 16],
            protocol: TCP,
            direction: 0,
            padding: 0,
        };
        let mut tags = vec![FlowEntry::tag(&key)];
        let mut push = |change: &dyn Fn(&mut ConnectionKey)| {
            let mut other = key;
            change(&mut other);
            tags.push(FlowEntry::tag(&other));
        };
        push(&|key| key.vni = 8);
        push(&|key| key.ports = [2, 1]);
        push(&|key| key.ports[0] = 0);
        push(&|key| std::mem::swap(&mut key.source, &mut key.destination));
        push(&|key| key.protocol = UDP);
        for byte in 0..16 {
            push(&|key| key.source[byte] = 9);
            push(&|key| key.destination[byte] = 9);
        }
        let count = tags.len();
        tags.sort_unstable();
        tags.dedup();
        assert_eq!(tags.len(), count);
    }
}
