//! The rules of network policy of tenants' pods. All of them are about packets to pods.

use thuban_common::policy::MAX_RANGES;
use thuban_proto::transit::{
    ClassRow, PolicyAction, PolicyBlock, PolicyPort, PolicyRule, PolicySetRow, PolicyTier, row::Row,
};
use thuban_rows::MAX_RULES;

use super::site::{PORT, VICTIM, nobody};

/// The class of all pods of a VPC, what rules call it, and the set of all pods.
const CLASS: u32 = 2;
const GROUP: u64 = 0x77;
const SET: u32 = 1;
/// UDP ports from 1 on that a rule of its own denies, if there are [`Policies::Most`]: as many as a list has room for.
pub const DENIED_PORTS: u32 = MAX_RANGES as u32;
/// VPCs that have room for the most rules at the same time: each has a quarter of the tables, and a quarter is for
/// reserves.
pub const SHARES: u8 = 3;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policies {
    /// No pod has rules.
    None,
    /// Each pod has one: pods of its VPC reach it at [`PORT`].
    One,
    /// The same for pods of the VPC that measures. Attackers' pods have as many as a node takes, and all of them deny.
    Most,
}

impl Policies {
    /// Returns a VPC's class and set.
    pub fn rows(self, vni: u8) -> Vec<Row> {
        let rules = match self {
            Self::None => return Vec::new(),
            Self::Most if vni != VICTIM => most(vni),
            Self::One | Self::Most => vec![accepting()],
        };
        let class = ClassRow {
            vni: vni.into(),
            id: CLASS,
            groups: vec![GROUP],
            ..ClassRow::default()
        };
        let set = PolicySetRow {
            vni: vni.into(),
            id: SET,
            isolated: true,
            rules,
            ..PolicySetRow::default()
        };
        vec![Row::Class(class), Row::PolicySet(set)]
    }

    /// Returns the class and the ingress set of pods; 0: none.
    pub const fn of_pods(self) -> (u32, u32) {
        match self {
            Self::None => (0, 0),
            Self::One | Self::Most => (CLASS, SET),
        }
    }
}

/// Returns the rule that accepts the pods of the VPC. Their answers come to other ports: FLOWS must vouch for them.
fn accepting() -> PolicyRule {
    PolicyRule {
        tier: PolicyTier::NetworkPolicy.into(),
        action: PolicyAction::Accept.into(),
        policy: "bench/one".into(),
        groups: vec![GROUP],
        ports: vec![of_port(6, PORT.into()), of_port(17, PORT.into())],
        ..PolicyRule::default()
    }
}

/// Returns as many rules as a set may have. First each denies a port to everybody: one list of the most ranges. Each of
/// the others denies an address, by a list of its own. Together these are nine tenths of a VPC's share of LISTS, where
/// no second set with other rules has room.
fn most(vni: u8) -> Vec<PolicyRule> {
    let rule = |index| PolicyRule {
        tier: PolicyTier::Admin.into(),
        action: PolicyAction::Deny.into(),
        policy: "most".into(),
        index,
        ..PolicyRule::default()
    };
    let ports = (0..DENIED_PORTS).map(|index| PolicyRule {
        anyone: true,
        ports: vec![of_port(17, 1 + index)],
        ..rule(index)
    });
    // In the VPC's range, so that blocks are asked for each packet.
    let addresses = (DENIED_PORTS..MAX_RULES as u32).map(|index| PolicyRule {
        blocks: vec![PolicyBlock {
            cidr: format!("{}/32", nobody(vni, index)),
            ..PolicyBlock::default()
        }],
        ..rule(index)
    });
    ports.chain(addresses).collect()
}

fn of_port(protocol: u32, port: u32) -> PolicyPort {
    PolicyPort {
        protocol,
        first: port,
        last: port,
        ..PolicyPort::default()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use thuban_rows::PolicySet;

    use super::*;

    fn set(policies: Policies, vni: u8) -> PolicySet {
        let mut rows = policies.rows(vni).into_iter();
        let row = rows.find_map(|row| match row {
            Row::PolicySet(row) => Some(row),
            _ => None,
        });
        PolicySet::try_from(row.unwrap()).unwrap()
    }

    #[test]
    fn attackers_have_the_most_rules_and_others_have_one() {
        let most = set(Policies::Most, VICTIM + 1);
        assert_eq!(most.rules.len(), MAX_RULES);
        let blocks: BTreeSet<_> = most
            .rules
            .iter()
            .flat_map(|rule| &rule.blocks)
            .map(|block| block.range)
            .collect();
        assert_eq!(blocks.len(), MAX_RULES - MAX_RANGES);
        for set in [
            set(Policies::Most, VICTIM),
            set(Policies::One, VICTIM),
            set(Policies::One, VICTIM + 1),
        ] {
            assert_eq!(set.rules.len(), 1);
        }
        assert!(Policies::None.rows(VICTIM).is_empty());
    }
}
