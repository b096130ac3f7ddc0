//! Droplets with roles that do not answer. Other members of a role take their packets meanwhile.
//!
//! Pure. A silent member may still pass packets on, because others may hear it. If all members are silent, they are
//! used nevertheless: the fault may be in this droplet's own path to them.

use std::collections::BTreeSet;

use thuban_common::tables::{DropletAddress, Members};

use crate::dataplane::tables::TableEntry;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Silent(pub BTreeSet<DropletAddress>);

impl Silent {
    /// Returns the entry as it is to be while these droplets are silent.
    pub fn arrange(&self, entry: TableEntry) -> TableEntry {
        match entry {
            TableEntry::Subnet(mut subnet) => {
                self.put_behind(&mut subnet.bouncers);
                TableEntry::Subnet(subnet)
            }
            TableEntry::Vpc(mut vpc) => {
                self.put_behind(&mut vpc.dividers);
                TableEntry::Vpc(vpc)
            }
            other => other,
        }
    }

    /// Puts silent members behind the others. Only the first `count` are picked; those behind them may pass packets
    /// on.
    fn put_behind(&self, members: &mut Members) {
        let count = members.count as usize;
        let Some(picked) = members.droplets.get_mut(..count) else {
            return;
        };
        let living = picked.iter().filter(|droplet| !self.0.contains(*droplet)).count();
        if living > 0 && living < count {
            // The sort is stable: all droplets that hear the same members rank the same list.
            picked.sort_by_key(|droplet| self.0.contains(droplet));
            members.count = living as u32;
        }
    }
}

#[cfg(test)]
mod tests {
    use thuban_common::tables::{MAX_MEMBERS, SubnetEntry, VpcEntry};

    use super::*;

    fn members(count: u32, last: &[u8]) -> Members {
        let mut droplets = [[0; 4]; MAX_MEMBERS];
        for (slot, last) in droplets.iter_mut().zip(last) {
            *slot = [10, 0, 0, *last];
        }
        Members { count, droplets }
    }

    fn arranged(silent: &[u8], count: u32, last: &[u8]) -> Members {
        let silent = Silent(silent.iter().map(|last| [10, 0, 0, *last]).collect());
        let vpc = TableEntry::Vpc(VpcEntry::new(7, 0, members(count, last)));
        let subnet = TableEntry::Subnet(SubnetEntry {
            network: 5,
            flags: 0,
            bouncers: members(count, last),
        });
        match (silent.arrange(vpc), silent.arrange(subnet)) {
            (TableEntry::Vpc(vpc), TableEntry::Subnet(subnet)) => {
                assert_eq!(vpc.dividers, subnet.bouncers);
                vpc.dividers
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_silent_member_is_not_picked_but_may_still_pass_packets_on() {
        assert_eq!(arranged(&[2], 3, &[1, 2, 3, 9]), members(2, &[1, 3, 2, 9]));
        assert_eq!(arranged(&[1, 3], 3, &[1, 2, 3]), members(1, &[2, 1, 3]));
        let all: Vec<u8> = (1..=8).collect();
        assert_eq!(arranged(&[1], 8, &all), members(7, &[2, 3, 4, 5, 6, 7, 8, 1]));
    }

    #[test]
    fn where_nobody_answers_all_stay() {
        assert_eq!(arranged(&[1, 2], 2, &[1, 2, 9]), members(2, &[1, 2, 9]));
        assert_eq!(arranged(&[1], 1, &[1]), members(1, &[1]));
        assert_eq!(arranged(&[1], 0, &[1]), members(0, &[1]), "none is picked anyway");
        assert_eq!(arranged(&[], 2, &[1, 2]), members(2, &[1, 2]));
        assert_eq!(arranged(&[9], 2, &[1, 2, 9]), members(2, &[1, 2, 9]));
    }
}
