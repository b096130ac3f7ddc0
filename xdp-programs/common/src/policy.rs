//! Network policy in packets and tables: the stamp by which a packet says whose it is, and what the rules say of it.
//!
//! A *class* is the endpoints of a VPC that the peer selectors of its policies don't tell apart. A *set* is all that
//! applies to an endpoint in one direction. Both have ids of 24 bits that are unique in their VPC. A set never changes:
//! other rules are another set.
//!
//! Invariant: as in [`crate::tables`]: `repr(C)`, integers only, explicit padding, sizes asserted. Numbers are host
//! order.

use core::mem::offset_of;

use crate::{
    packet::{
        ethernet::EthernetHeader,
        ipv4::{SCTP, TCP, UDP},
    },
    tables::Address,
};

/// The greatest id of a class or set.
pub const MAX_ID: u32 = 0xff_ffff;
/// The class of a packet that says none. No endpoint has it.
pub const UNKNOWN_CLASS: u32 = 0;

/// What a packet between droplets says of its sender. It is in the inner Ethernet header, whose addresses nobody
/// needs: the receiver writes the pod's own.
///
/// | bytes | inner destination | inner source |
/// |---|---|---|
/// | 0, low half | 6: a stamp | 2, and flags: 4 [`STAMP_REPLY`], 8 [`STAMP_GUARDED`] |
/// | 0, high half | reserved | reserved |
/// | 1 to 3 | egress set, network order; 0: none | class, network order; 0: unknown |
/// | 4, 5 | reserved | reserved |
///
/// The reserved 40 bits are sent as 0 and not read. Both addresses are unicast and locally administered. All packets of
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
            flags: flags & (STAMP_REPLY | STAMP_GUARDED),
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
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Grant {
    /// The list; 0: no rule.
    pub list: u32,
    /// [`GRANT_DENIES`], [`GRANT_ASKS_BLOCKS`].
    pub flags: u32,
}

/// [`Grant::flags`]: what no rule decides is denied.
pub const GRANT_DENIES: u32 = 1;
/// [`Grant::flags`]: BLOCKS may have more to say.
pub const GRANT_ASKS_BLOCKS: u32 = 2;

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
/// Entries of FLOWS.
pub const FLOWS_CAPACITY: u32 = 131_072;
/// Entries of FLOWS that the endpoints of one VPC may have: a quarter of the table.
pub const FLOWS_OF_VPC: u32 = FLOWS_CAPACITY / 4;

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

/// FLOWS[flow]: a flow that the droplet of its server let pass. The key is the flow from client to server, as the
/// server's droplet sees it, with direction [`crate::services::FORWARD`]. Programs write the entry at a change, else at
/// most each [`crate::services::refresh`]. transitd removes idle entries.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlowEntry {
    /// The key's VNI. Together with the epoch it is the word that says whose the entry is.
    pub vni: u32,
    /// The element of POLICY when the flow was judged. A flow of another epoch is judged anew.
    pub epoch: u32,
    /// The last time that was written for a packet, ns since boot.
    pub time: u64,
    /// The client's class and egress set, as its packets said when the flow was judged.
    pub class: u32,
    pub egress_set: u32,
    /// What was seen of the flow: [`crate::services::SEEN`], [`crate::services::FINISHED`],
    /// [`crate::services::RESET`].
    pub state: u8,
    pub padding: [u8; 7],
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
    decide(tables, set, peer, address, point).unwrap_or((false, NO_RULE))
}

#[inline(always)]
fn decide(tables: &impl Lookups, set: u64, peer: u64, address: &Address, point: u32) -> Option<(bool, u16)> {
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
    assert!(size_of::<Grant>() == 8);
    assert!(size_of::<ListKey>() == 8);
    assert!(size_of::<PortRange>() == 12);
    assert!(size_of::<ListEntry>() == 128);
    assert!(size_of::<FlowEntry>() == 32 && offset_of!(FlowEntry, vni) == 0);
};

#[cfg(feature = "user")]
mod pod {
    use super::{BlockKey, FlowEntry, Grant, GrantKey, ListEntry, ListKey};
    macro_rules! pod {
        ($($t:ty),*) => {
            // SAFETY: repr(C) of integers and arrays without implicit padding (sizes asserted above).
            $(unsafe impl aya::Pod for $t {})*
        };
    }
    pod!(BlockKey, FlowEntry, Grant, GrantKey, ListEntry, ListKey);
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
                flags: (random.u32() as u16) & (STAMP_REPLY | STAMP_GUARDED),
            };
            let mut header = stamp.header(ethernet::IPV4);
            for address in [&mut header.destination, &mut header.source] {
                let first = bytes(*address)[0];
                assert_eq!(first & 3, 2, "unicast, locally administered");
                address[0] |= (0xf000_u16 & random.u32() as u16).to_be();
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
                let mut ranges = [PortRange::default(); RANGES];
                ranges[0] = PortRange {
                    first: point(TCP, 80),
                    last: point(TCP, 90),
                    decision: Decision {
                        admin: NO_RULE,
                        rest: *rest,
                    }
                    .word(),
                };
                ListEntry {
                    count: 1,
                    leads: 0,
                    ranges,
                }
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
