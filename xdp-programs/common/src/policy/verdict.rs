//! Judges a packet by a set: by what the set says of the other side's class, and of its address.

use super::{
    decision::NO_RULE,
    grants::{BlockKey, GRANT_ASKS_BLOCKS, GRANT_DENIES, Grant, GrantKey, PEER_OTHER},
    lists::{ListEntry, ListKey, look_up},
};
use crate::tables::Address;

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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        packet::ipv4::TCP,
        policy::{Action, Decision, PEER_OUTSIDE, PortRange, point, ranked},
    };

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
