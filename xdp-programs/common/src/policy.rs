//! Network policy in packets and tables: the stamp by which a packet says whose it is, and what the rules say of it.
//!
//! A *class* is the endpoints of a VPC that the peer selectors of its policies don't tell apart. A *set* is all that
//! applies to an endpoint in one direction. Both have ids of 24 bits that are unique in their VPC. A set never changes:
//! other rules are another set.
//!
//! Invariant: as in [`crate::tables`]: `repr(C)`, integers only, explicit padding, sizes asserted. Numbers are host
//! order.

use crate::{
    packet::{
        ethernet::EthernetHeader,
        ipv4::{SCTP, TCP, UDP},
    },
    services::ConnectionKey,
    tables::Address,
};

/// The greatest id of a class or set.
pub const MAX_ID: u32 = 0xff_ffff;
/// The class of a packet that says none. No endpoint has it.
pub const UNKNOWN_CLASS: u32 = 0;
/// The class of what nodes send on for pods of other VPCs, which share a Service of the nodes' VPC. No endpoint has it.
pub const SHARED_SERVICE_CLASS: u32 = MAX_ID;

/// What a packet between droplets says of its sender. It is in the inner Ethernet header, whose addresses nobody
/// needs: the receiver writes the pod's own.
///
/// | bytes | inner destination | inner source |
/// |---|---|---|
/// | 0, low half | 6: a stamp | 2, and flags: 4 [`STAMP_REPLY`], 8 [`STAMP_GUARDED`] |
/// | 0, high half | reserved | flags: 1 [`STAMP_FRONT`]; else reserved |
/// | 1 to 3 | egress set, network order; 0: none | class, network order; 0: unknown |
/// | 4, 5 | reserved | reserved |
///
/// The reserved 39 bits are sent as 0 and not read. Both addresses are unicast and locally administered. All packets of
/// a flow have one stamp, or the kernel would not aggregate them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stamp {
    pub class: u32,
    pub egress_set: u32,
    pub flags: u16,
}

/// [`Stamp::flags`]: the sender's droplet knows the packet as an answer.
pub const STAMP_REPLY: u16 = 4;
/// [`Stamp::flags`]: the sender has an ingress set, so it takes answers only if the other side vouches for them.
pub const STAMP_GUARDED: u16 = 8;

/// [`Stamp::flags`]: a client outside sent the packet to a front. It has the front's address, and the droplet that gets
/// it chooses the backend.
pub const STAMP_FRONT: u16 = 0x10;

const STAMPED: u16 = 6;
const OF_SENDER: u16 = 2;
const HALF: u16 = 0xf;

impl Stamp {
    /// Returns the inner Ethernet header that bears the stamp.
    #[inline(always)]
    pub const fn header(self, ethertype: u16) -> EthernetHeader {
        EthernetHeader {
            destination: words(STAMPED, self.egress_set),
            source: words(OF_SENDER | self.flags, self.class),
            ethertype,
        }
    }

    /// Reads the stamp of an inner Ethernet header. A header without one says nothing of its sender.
    #[inline(always)]
    pub const fn read(header: &EthernetHeader) -> Self {
        let first = u16::from_be(header.destination[0]) >> 8;
        if first & HALF != STAMPED {
            return Self {
                class: UNKNOWN_CLASS,
                egress_set: 0,
                flags: 0,
            };
        }
        let flags = u16::from_be(header.source[0]) >> 8;
        Self {
            class: id(&header.source),
            egress_set: id(&header.destination),
            flags: flags & (STAMP_REPLY | STAMP_GUARDED | STAMP_FRONT),
        }
    }
}

#[inline(always)]
const fn words(first: u16, id: u32) -> [u16; 3] {
    [
        (first << 8 | (id >> 16) as u16 & 0xff).to_be(),
        (id as u16).to_be(),
        0,
    ]
}

#[inline(always)]
const fn id(words: &[u16; 3]) -> u32 {
    ((u16::from_be(words[0]) & 0xff) as u32) << 16 | u16::from_be(words[1]) as u32
}

/// Returns a class or set of a VPC as keys have it.
#[inline(always)]
pub const fn of_vpc(vni: u32, id: u32) -> u64 {
    (vni as u64) << 24 | id as u64
}

/// Returns the VPC, and the class or set in it, of a number that [`of_vpc`] returned.
#[inline(always)]
pub const fn in_vpc(number: u64) -> (u32, u32) {
    ((number >> 24) as u32, number as u32 & MAX_ID)
}

/// Key of GRANTS.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GrantKey {
    /// [`of_vpc`].
    pub set: u64,
    /// The other side's class ([`of_vpc`]), or one of [`PEER_OTHER`] and the constants behind it.
    pub peer: u64,
}

/// [`GrantKey::peer`]: a class that has no entry of its own.
pub const PEER_OTHER: u64 = 0;
/// [`GrantKey::peer`]: an address outside of the VPC.
pub const PEER_OUTSIDE: u64 = 1;

/// GRANTS[(set, peer)]: what a set says of a peer whatever its address, and BLOCKS[(set, address)]: what it says of an
/// address. Without an entry, even of [`PEER_OTHER`], the set isn't known and all is denied.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Grant {
    /// The list; 0: no rule.
    pub list: u32,
    /// [`GRANT_DENIES`], [`GRANT_ASKS_BLOCKS`]. In GRANTS the other bits are those of [`Grant::of`].
    pub flags: u32,
}

/// [`Grant::flags`]: what no rule decides is denied.
pub const GRANT_DENIES: u32 = 1;
/// [`Grant::flags`]: BLOCKS may have more to say.
pub const GRANT_ASKS_BLOCKS: u32 = 2;
const GRANT_FLAGS: u32 = GRANT_DENIES | GRANT_ASKS_BLOCKS;

impl Grant {
    /// Returns the grant as GRANTS has it: with bits that tell whose it is. The kernel gives a removed element to the
    /// next key at once, while programs still read it. An entry is one word, so its parts are of one grant.
    #[inline(always)]
    #[must_use]
    pub const fn of(self, key: &GrantKey) -> Self {
        Self {
            list: self.list,
            flags: self.flags & GRANT_FLAGS | key.tag(),
        }
    }

    /// Returns the grant of an entry of GRANTS, if it is the key's.
    #[inline(always)]
    pub const fn read(self, key: &GrantKey) -> Option<Self> {
        if self.flags & !GRANT_FLAGS != key.tag() {
            return None;
        }
        Some(Self {
            list: self.list,
            flags: self.flags & GRANT_FLAGS,
        })
    }
}

impl GrantKey {
    #[inline(always)]
    const fn tag(&self) -> u32 {
        let set = self.set.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mixed = (set ^ set >> 32 ^ self.peer).wrapping_mul(0xff51_afd7_ed55_8ccd);
        (mixed >> 32) as u32 & !GRANT_FLAGS
    }
}

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

/// Data of the LPM key of BLOCKS. The set is network order, so that prefixes of 64 + n bits cover it whole.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockKey {
    /// [`of_vpc`].
    pub set: [u8; 8],
    pub address: Address,
}

/// Entries of GRANTS.
pub const GRANTS_CAPACITY: u32 = 131_072;
/// Entries of BLOCKS.
pub const BLOCKS_CAPACITY: u32 = 65_536;
/// Entries of LISTS.
pub const LISTS_CAPACITY: u32 = 32_768;

/// Key of LISTS: a part of a list.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ListKey {
    pub list: u32,
    /// 0 is the first part, which leads to the others.
    pub part: u32,
}

/// LISTS[(list, part)]: ranges in ascending order, none touched by another. A list with more than [`RANGES`] ranges is
/// a tree: the ranges of its inner parts lead to further parts, which hold all ranges within.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListEntry {
    pub count: u32,
    /// Whether the ranges lead to parts (1), or say what is decided (0).
    pub leads: u32,
    pub ranges: [PortRange; RANGES],
}

impl ListEntry {
    /// Returns a part with these ranges, at most [`RANGES`].
    #[cfg(any(test, feature = "user"))]
    pub fn new(of: &[PortRange], leads: u32) -> Self {
        let mut ranges = [PortRange::default(); RANGES];
        ranges[..of.len()].copy_from_slice(of);
        Self {
            count: of.len() as u32,
            leads,
            ranges,
        }
    }
}

/// A range of [`point`]s and what is decided there.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct PortRange {
    pub first: u32,
    /// The last one is in the range.
    pub last: u32,
    /// The [`Decision`]; in an inner part, the number of the part.
    pub decision: u32,
}

/// Ranges in a part of a list.
pub const RANGES: usize = 10;
/// The most parts on the way to a range.
pub const DEPTH: usize = 4;
/// The most ranges of a list.
pub const MAX_RANGES: usize = RANGES.pow(DEPTH as u32);
/// All points: any protocol and port.
pub const LAST_POINT: u32 = 0x3_ffff;

/// Key of DENIALS: what denied packets of an endpoint.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DenialKey {
    /// [`of_vpc`]; 0: nothing.
    pub set: u64,
    /// The host's end of the veth of the endpoint on this droplet: the one that the packets are for, of
    /// [`DENIAL_OUTSIDE`] the one that they come from.
    pub interface: u32,
    /// The rank of the rule that denies; [`NO_RULE`]: none does, and none accepts.
    pub rank: u16,
    /// [`DENIAL_EGRESS`], [`DENIAL_OUTSIDE`].
    pub flags: u16,
}

/// [`DenialKey::flags`]: the sender's egress set denies, else the destination's ingress set.
pub const DENIAL_EGRESS: u16 = 1;
/// [`DenialKey::flags`]: the packets are for an address outside of the VPC. The agent marks them, and the node drops
/// them unless they answer somebody or are for the node itself.
pub const DENIAL_OUTSIDE: u16 = 2;

/// DENIALS[[`DenialKey`]], LRU: how many packets were denied so, and one of them.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DenialEntry {
    /// The time of the packet that the entry shows, ns since boot. It is the first one of a [`DENIAL_WINDOW`].
    pub time: u64,
    /// All packets so far. Some are not counted where several CPUs deny at once.
    pub packets: u64,
    /// The flow that was judged: behind the translation of a Service. Of an ICMP error, the flow of the answers to the
    /// packet that it quotes.
    pub source: Address,
    pub destination: Address,
    /// Packets in the window.
    pub recent: u32,
    /// Network order, as in keys of FLOWS: an echo has its identifier in the place of a port.
    pub ports: [u16; 2],
    pub protocol: u8,
    /// Whether the packet is an ICMP error (1).
    pub is_error: u8,
    pub padding: [u8; 6],
}

/// Record of the ring buffer DENIED: a denied packet. Its entry counts the packets up to this one. At most
/// [`DENIALS_PER_WINDOW`] are written for a key, and only until the time in FOLLOWED.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DenialRecord {
    pub key: DenialKey,
    pub entry: DenialEntry,
}

/// A second, ns.
pub const DENIAL_WINDOW: u64 = 1_000_000_000;
pub const DENIALS_PER_WINDOW: u32 = 16;
/// How many packets that a rule denies to or from a pod are answered in a second, if they are answered.
pub const REJECTIONS_PER_WINDOW: u32 = 100;
/// Entries of DENIALS.
pub const DENIALS_CAPACITY: u32 = 4096;

/// Returns a protocol with a destination port (host order) as a number. Protocols that policies know no ports of are
/// all 0.
#[inline(always)]
pub const fn point(protocol: u8, port: u16) -> u32 {
    let number = match protocol {
        TCP => 1,
        UDP => 2,
        SCTP => 3,
        _ => return 0,
    };
    number << 16 | port as u32
}

/// What rules say of a packet: the first rule that matches in tier Admin, and the first one that matches behind it. A
/// lower number comes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decision {
    /// [`ranked`], or [`NO_RULE`].
    pub admin: u16,
    pub rest: u16,
}

/// No rule matches.
pub const NO_RULE: u16 = u16::MAX;
/// The greatest rank of a rule.
pub const MAX_RANK: u16 = 0x3ffe;

#[repr(u16)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Action {
    Accept = 0,
    Deny = 1,
    /// On to what comes behind tier Admin.
    Pass = 2,
}

/// Returns a rule of the given place in its set.
#[inline(always)]
pub const fn ranked(rank: u16, action: Action) -> u16 {
    rank << 2 | action as u16
}

impl Decision {
    pub const NONE: Self = Self {
        admin: NO_RULE,
        rest: NO_RULE,
    };

    #[inline(always)]
    pub const fn read(word: u32) -> Self {
        Self {
            admin: (word >> 16) as u16,
            rest: word as u16,
        }
    }

    #[inline(always)]
    pub const fn word(self) -> u32 {
        (self.admin as u32) << 16 | self.rest as u32
    }

    /// Returns what both together say.
    #[inline(always)]
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self {
            admin: least(self.admin, other.admin),
            rest: least(self.rest, other.rest),
        }
    }

    /// Returns whether the packet passes, and the rank of the rule that says so; [`NO_RULE`] if none does.
    #[inline(always)]
    pub const fn verdict(self, denies: bool) -> (bool, u16) {
        let mut rule = self.admin;
        if rule == NO_RULE || rule & 3 == Action::Pass as u16 {
            rule = self.rest;
        }
        if rule == NO_RULE {
            return (!denies, NO_RULE);
        }
        (rule & 3 == Action::Accept as u16, rule >> 2)
    }
}

#[inline(always)]
const fn least(a: u16, b: u16) -> u16 {
    if a < b { a } else { b }
}

/// Returns what a list says of a point. `part` looks a part up; one that isn't there ends the list with none.
#[inline(always)]
pub fn look_up<'a>(
    list: u32,
    point: u32,
    part: impl Fn(&ListKey) -> Option<&'a ListEntry>,
) -> Option<Decision> {
    if list == 0 {
        return Some(Decision::NONE);
    }
    let mut key = ListKey { list, part: 0 };
    for _ in 0..DEPTH {
        let entry = part(&key)?;
        let Some(found) = find(entry, point) else {
            return Some(Decision::NONE);
        };
        if entry.leads == 0 {
            return Some(Decision::read(found));
        }
        key.part = found;
    }
    None
}

#[inline(always)]
fn find(entry: &ListEntry, point: u32) -> Option<u32> {
    for (index, range) in entry.ranges.iter().enumerate() {
        if index >= entry.count as usize {
            break;
        }
        if range.first <= point && point <= range.last {
            return Some(range.decision);
        }
    }
    None
}

/// The tables by which packets are judged.
pub trait Lookups {
    fn grant(&self, key: &GrantKey) -> Option<Grant>;
    /// Returns the entry of BLOCKS with the longest prefix that holds the key.
    fn block(&self, key: &BlockKey) -> Option<Grant>;
    fn part(&self, key: &ListKey) -> Option<&ListEntry>;
}

/// Returns whether a set lets a packet pass, and the rank of the rule that says so; [`NO_RULE`] if none does. `peer`
/// ([`GrantKey::peer`]) and `address` are the other side's, `point` is the destination's. A list that isn't whole
/// denies all, as an unknown set does.
#[inline(always)]
pub fn judge(tables: &impl Lookups, set: u64, peer: u64, address: &Address, point: u32) -> (bool, u16) {
    try_judge(tables, set, peer, address, point).unwrap_or((false, NO_RULE))
}

/// Does what [`judge`] does. `None`: the set is unknown, or a list isn't whole.
#[inline(always)]
pub fn try_judge(
    tables: &impl Lookups,
    set: u64,
    peer: u64,
    address: &Address,
    point: u32,
) -> Option<(bool, u16)> {
    let part = |key: &ListKey| tables.part(key);
    let grant = match tables.grant(&GrantKey { set, peer }) {
        Some(grant) => grant,
        None => tables.grant(&GrantKey {
            set,
            peer: PEER_OTHER,
        })?,
    };
    let mut decision = look_up(grant.list, point, part)?;
    if grant.flags & GRANT_ASKS_BLOCKS != 0 {
        let key = BlockKey {
            set: set.to_be_bytes(),
            address: *address,
        };
        if let Some(block) = tables.block(&key) {
            decision = decision.and(look_up(block.list, point, part)?);
        }
    }
    Some(decision.verdict(grant.flags & GRANT_DENIES != 0))
}

const _: () = {
    assert!(size_of::<GrantKey>() == 16);
    assert!(size_of::<BlockKey>() == 24);
    assert!(size_of::<Grant>() == 8 && align_of::<Grant>() == 8);
    assert!(size_of::<FlowEntry>() == 32);
    assert!(size_of::<ListKey>() == 8);
    assert!(size_of::<PortRange>() == 12);
    assert!(size_of::<ListEntry>() == 128);
    assert!(size_of::<DenialKey>() == 16);
    assert!(size_of::<DenialEntry>() == 64);
    assert!(size_of::<DenialRecord>() == 80);
};

#[cfg(feature = "user")]
mod pod {
    use super::{
        BlockKey, DenialEntry, DenialKey, DenialRecord, FlowEntry, Grant, GrantKey, ListEntry, ListKey,
    };
    macro_rules! pod {
        ($($t:ty),*) => {
            // SAFETY: repr(C) of integers and arrays without implicit padding (sizes asserted above).
            $(unsafe impl aya::Pod for $t {})*
        };
    }
    pod!(
        BlockKey,
        DenialEntry,
        DenialKey,
        DenialRecord,
        FlowEntry,
        Grant,
        GrantKey,
        ListEntry,
        ListKey
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{packet::ethernet, tables::GATEWAY_MAC, testing::Random};

    fn bytes(words: [u16; 3]) -> [u8; 6] {
        words.map(u16::to_ne_bytes).concat().try_into().unwrap()
    }

    #[test]
    fn a_stamp_has_these_bytes() {
        let stamp = Stamp {
            class: 0x0a_0b0c,
            egress_set: 0x01_0203,
            flags: STAMP_GUARDED,
        };
        let header = stamp.header(ethernet::IPV6);
        assert_eq!(bytes(header.destination), [0x06, 1, 2, 3, 0, 0]);
        assert_eq!(bytes(header.source), [0x0a, 0x0a, 0x0b, 0x0c, 0, 0]);
        assert_eq!(header.ethertype, ethernet::IPV6);
        assert_eq!(Stamp::read(&header), stamp);
    }

    #[test]
    fn stamps_are_read_back_whatever_the_reserved_bits_say() {
        let mut random = Random::from_clock();
        for _ in 0..100_000 {
            let stamp = Stamp {
                class: random.u32() & MAX_ID,
                egress_set: random.u32() & MAX_ID,
                flags: (random.u32() as u16) & (STAMP_REPLY | STAMP_GUARDED | STAMP_FRONT),
            };
            let mut header = stamp.header(ethernet::IPV4);
            for address in [&mut header.destination, &mut header.source] {
                let first = bytes(*address)[0];
                assert_eq!(first & 3, 2, "unicast, locally administered");
                address[0] |= (0xe000_u16 & random.u32() as u16).to_be();
                address[2] = random.u32() as u16;
            }
            assert_eq!(Stamp::read(&header), stamp, "seed {}", random.seed());
        }
    }

    #[test]
    fn the_addresses_of_a_pod_are_no_stamp() {
        for destination in [
            GATEWAY_MAC,
            [0xff; 6],
            [0; 6],
            [2, 0, 10, 0, 1, 5],
            [0x04, 0, 0, 0, 0, 1],
        ] {
            let header = EthernetHeader::new(destination, [0x0e, 0, 10, 0, 1, 5], ethernet::IPV4);
            assert_eq!(Stamp::read(&header), Stamp::default(), "{destination:x?}");
        }
    }

    #[test]
    fn ids_of_other_vpcs_are_others() {
        assert_ne!(of_vpc(1, MAX_ID), of_vpc(2, 0));
        assert!(of_vpc(1, 0) > PEER_OUTSIDE, "no class is a constant");
        assert_eq!(of_vpc(0xff_ffff, MAX_ID), 0xffff_ffff_ffff);
    }

    #[test]
    fn an_element_that_another_key_has_by_now_is_no_grant() {
        let mut random = Random::from_clock();
        for _ in 0..10_000 {
            let mut key = || GrantKey {
                set: of_vpc(random.u32() & 0xff, random.u32() & 0xff),
                peer: of_vpc(7, random.u32() & 0xff),
            };
            let (own, other) = (key(), key());
            let grant = Grant {
                list: random.u32(),
                flags: random.u32() & GRANT_FLAGS,
            };
            assert_eq!(grant.of(&own).read(&own), Some(grant));
            let is_read = grant.of(&own).read(&other).is_some();
            assert_eq!(is_read, own == other, "seed {}: {own:?} {other:?}", random.seed());
        }
    }

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

    #[test]
    fn protocols_with_ports_share_no_point() {
        assert_eq!([point(1, 9), point(58, 0), point(0, 7)], [0; 3]);
        assert_eq!(
            [point(TCP, 0), point(UDP, 0), point(SCTP, 0xffff)],
            [0x1_0000, 0x2_0000, LAST_POINT]
        );
    }

    #[test]
    fn tier_admin_decides_first_and_the_lower_rank_within_a_tier() {
        let rule = |admin, rest| Decision { admin, rest };
        let [accept, deny] = [Action::Accept, Action::Deny].map(|action| ranked(5, action));
        let pass = ranked(5, Action::Pass);
        assert_eq!(rule(accept, deny).verdict(true), (true, 5));
        assert_eq!(rule(deny, accept).verdict(false), (false, 5));
        assert_eq!(rule(pass, accept).verdict(true), (true, 5));
        assert_eq!(rule(pass, NO_RULE).verdict(true), (false, NO_RULE));
        assert_eq!(Decision::NONE.verdict(false), (true, NO_RULE));
        let (earlier, later) = (ranked(6, Action::Deny), ranked(7, Action::Accept));
        let both = rule(earlier, later).and(rule(later, earlier));
        assert_eq!(both, rule(earlier, earlier));
        assert_eq!(Decision::read(both.word()), both);
        assert!(ranked(MAX_RANK, Action::Pass) < NO_RULE);
    }

    /// Tables of a set, 9, with these grants, one block and lists of one part.
    struct Tables {
        grants: Vec<(u64, Grant)>,
        block: Option<Grant>,
        numbers: Vec<u32>,
        entries: Vec<ListEntry>,
    }

    impl Tables {
        fn new(grants: &[(u64, u32, u32)], block: Option<u32>, lists: &[(u32, u16)]) -> Self {
            let entry = |(_, rest): &(u32, u16)| {
                let range = PortRange {
                    first: point(TCP, 80),
                    last: point(TCP, 90),
                    decision: Decision {
                        admin: NO_RULE,
                        rest: *rest,
                    }
                    .word(),
                };
                ListEntry::new(&[range], 0)
            };
            let grant = |(peer, list, flags): &(u64, u32, u32)| {
                let (list, flags) = (*list, *flags);
                (*peer, Grant { list, flags })
            };
            Self {
                grants: grants.iter().map(grant).collect(),
                block: block.map(|list| Grant { list, flags: 0 }),
                numbers: lists.iter().map(|(number, _)| *number).collect(),
                entries: lists.iter().map(entry).collect(),
            }
        }

        fn judge(&self, set: u64, peer: u64) -> (bool, u16) {
            judge(self, set, peer, &[7; 16], point(TCP, 85))
        }
    }

    impl Lookups for Tables {
        fn grant(&self, key: &GrantKey) -> Option<Grant> {
            let mut grants = self.grants.iter().filter(|_| key.set == 9);
            grants
                .find(|(peer, _)| *peer == key.peer)
                .map(|(_, grant)| *grant)
        }

        fn block(&self, key: &BlockKey) -> Option<Grant> {
            assert_eq!((key.set, key.address), ([0, 0, 0, 0, 0, 0, 0, 9], [7; 16]));
            self.block
        }

        fn part(&self, key: &ListKey) -> Option<&ListEntry> {
            let mut lists = self.numbers.iter().zip(&self.entries);
            lists
                .find(|(number, _)| **number == key.list)
                .map(|(_, entry)| entry)
        }
    }

    #[test]
    fn a_set_or_list_that_is_not_there_denies() {
        let tables = Tables::new(&[(PEER_OTHER, 0, 0), (5, 1, 0)], None, &[]);
        assert_eq!(tables.judge(9, 4), (true, NO_RULE));
        assert_eq!(tables.judge(8, 4), (false, NO_RULE));
        assert_eq!(tables.judge(9, 5), (false, NO_RULE), "no list");
        let tables = Tables::new(&[(PEER_OTHER, 0, GRANT_ASKS_BLOCKS)], Some(1), &[]);
        assert_eq!(tables.judge(9, 4), (false, NO_RULE), "no list of the block");
        let tables = Tables::new(&[(5, 0, 0)], None, &[]);
        assert_eq!(tables.judge(9, 5), (true, NO_RULE));
        assert_eq!(tables.judge(9, 4), (false, NO_RULE), "the set isn't whole");
    }

    #[test]
    fn a_peer_is_judged_by_its_own_grant_or_by_that_of_others() {
        let [accept, deny] = [Action::Accept, Action::Deny].map(|action| ranked(3, action));
        let grants = [
            (PEER_OTHER, 1, 0),
            (PEER_OUTSIDE, 2, GRANT_DENIES),
            (5, 0, GRANT_DENIES),
        ];
        let tables = Tables::new(&grants, None, &[(1, deny), (2, accept)]);
        assert_eq!(tables.judge(9, 4), (false, 3));
        assert_eq!(tables.judge(9, PEER_OUTSIDE), (true, 3));
        assert_eq!(tables.judge(9, 5), (false, NO_RULE));
    }

    #[test]
    fn the_first_rule_wins_and_a_block_is_asked_if_the_grant_asks() {
        let [accept, deny] =
            [(3, Action::Accept), (4, Action::Deny)].map(|(rank, action)| ranked(rank, action));
        let judge = |flags, grant, block| {
            let tables = Tables::new(&[(PEER_OTHER, 1, flags)], Some(2), &[(1, grant), (2, block)]);
            tables.judge(9, 4)
        };
        assert_eq!(judge(GRANT_ASKS_BLOCKS, deny, accept), (true, 3));
        assert_eq!(judge(GRANT_ASKS_BLOCKS, accept, deny), (true, 3));
        assert_eq!(judge(0, deny, accept), (false, 4));
        let tables = Tables::new(&[(PEER_OTHER, 1, GRANT_ASKS_BLOCKS)], None, &[(1, deny)]);
        assert_eq!(tables.judge(9, 4), (false, 4), "no block holds the address");
    }
}
