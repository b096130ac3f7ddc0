//! A set: all that network policy says of an endpoint in one direction.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use thuban_api::identifiers::Vni;
use thuban_proto::transit as proto;

use crate::class::protocol;
use crate::fields::{self, InvalidRow, invalid};
use crate::policy_id::PolicyId;

/// The most rules of a set.
pub const MAX_RULES: usize = 16_383;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PolicySet {
    pub vni: Vni,
    pub id: PolicyId,
    /// The set is of packets from the endpoint, else of those to it.
    pub is_egress: bool,
    /// A `NetworkPolicy` applies: what none of them accepts is denied.
    pub is_isolated: bool,
    /// By tier, then in the order in which they are asked.
    pub rules: Vec<PolicyRule>,
}

/// A rule matches if the other side is any of its peers, and the packet any of its ports.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PolicyRule {
    pub tier: PolicyTier,
    pub action: PolicyAction,
    /// The policy's namespace/name, or its name: for those who ask why.
    pub policy: Arc<str>,
    /// The place of the rule in its policy.
    pub index: u32,
    /// The other side may be anybody.
    pub anyone: bool,
    pub groups: BTreeSet<u64>,
    pub blocks: Vec<Block>,
    /// None: all packets.
    pub ports: Vec<PolicyPorts>,
}

/// The tiers, in the order in which they are asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PolicyTier {
    Admin,
    NetworkPolicy,
    /// Asked only if the set isn't isolated.
    Baseline,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PolicyAction {
    Accept,
    Deny,
    /// On to the next tier.
    Pass,
}

/// The addresses of a range that are in none of the excepted ones.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Block {
    pub range: IpNet,
    /// Within the range.
    pub except: Vec<IpNet>,
}

impl Block {
    pub fn holds(&self, address: IpAddr) -> bool {
        self.range.contains(&address) && !self.except.iter().any(|except| except.contains(&address))
    }
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PolicyPorts {
    /// A protocol, and the first and last port.
    Range(u8, u16, u16),
    /// The destination's ports of a name: of a protocol, or of any. Only in a set of egress.
    Named(Arc<str>, Option<u8>),
}

impl TryFrom<proto::PolicySetRow> for PolicySet {
    type Error = InvalidRow;

    fn try_from(row: proto::PolicySetRow) -> Result<Self, InvalidRow> {
        let rules = row.rules.into_iter().map(|rule| read_rule(rule, row.egress));
        let mut rules: Vec<PolicyRule> = rules.collect::<Result<_, _>>()?;
        share_names(&mut rules);
        if rules.len() > MAX_RULES {
            return Err(invalid("policy_set.rules", "at most 16383"));
        }
        if !rules.is_sorted_by_key(|rule| rule.tier) {
            return Err(invalid("policy_set.rules", "rules in the order of their tiers"));
        }
        Ok(Self {
            vni: fields::vni(row.vni)?,
            id: PolicyId::read(row.id)?,
            is_egress: row.egress,
            is_isolated: row.isolated,
            rules,
        })
    }
}

/// Keeps the name of a policy once for all of its rules that follow each other.
fn share_names(rules: &mut [PolicyRule]) {
    let mut last: Option<Arc<str>> = None;
    for rule in rules {
        match &last {
            Some(last) if *last == rule.policy => rule.policy = Arc::clone(last),
            _ => last = Some(Arc::clone(&rule.policy)),
        }
    }
}

fn read_rule(rule: proto::PolicyRule, is_egress: bool) -> Result<PolicyRule, InvalidRow> {
    use proto::{PolicyAction as Action, PolicyTier as Tier};
    Ok(PolicyRule {
        tier: match rule.tier() {
            Tier::Admin => PolicyTier::Admin,
            Tier::NetworkPolicy => PolicyTier::NetworkPolicy,
            Tier::Baseline => PolicyTier::Baseline,
            Tier::Unspecified => return Err(invalid("policy_set.rules.tier", "a known tier")),
        },
        action: match rule.action() {
            Action::Accept => PolicyAction::Accept,
            Action::Deny => PolicyAction::Deny,
            Action::Pass => PolicyAction::Pass,
            Action::Unspecified => return Err(invalid("policy_set.rules.action", "a known action")),
        },
        policy: rule.policy.into(),
        index: rule.index,
        anyone: rule.anyone,
        groups: rule.groups.into_iter().collect(),
        blocks: rule.blocks.iter().map(read_block).collect::<Result<_, _>>()?,
        ports: rule
            .ports
            .into_iter()
            .map(|ports| read_ports(ports, is_egress))
            .collect::<Result<_, _>>()?,
    })
}

fn read_block(block: &proto::PolicyBlock) -> Result<Block, InvalidRow> {
    let range = std::slice::from_ref(&block.cidr);
    let range = fields::of_both_families(range, "policy_set.rules.blocks.cidr")?[0];
    let except = fields::of_both_families(&block.except, "policy_set.rules.blocks.except")?;
    if !except.iter().all(|inner| range.contains(inner)) {
        return Err(invalid(
            "policy_set.rules.blocks.except",
            "ranges within the block",
        ));
    }
    Ok(Block { range, except })
}

fn read_ports(ports: proto::PolicyPort, is_egress: bool) -> Result<PolicyPorts, InvalidRow> {
    let field = "policy_set.rules.ports";
    if !ports.name.is_empty() {
        if !is_egress {
            return Err(invalid(
                field,
                "numbers, because the endpoint's own names are resolved",
            ));
        }
        let number = (ports.protocol != 0).then(|| protocol(ports.protocol, field));
        return Ok(PolicyPorts::Named(ports.name.into(), number.transpose()?));
    }
    let port = |number| u16::try_from(number).map_err(|_| invalid(field, "0 to 65535"));
    let (first, last) = (port(ports.first)?, port(ports.last)?);
    if first > last {
        return Err(invalid(field, "a range whose last port isn't before its first"));
    }
    Ok(PolicyPorts::Range(protocol(ports.protocol, field)?, first, last))
}

impl From<&PolicySet> for proto::PolicySetRow {
    fn from(row: &PolicySet) -> Self {
        Self {
            vni: row.vni.get(),
            id: row.id.get(),
            egress: row.is_egress,
            isolated: row.is_isolated,
            rules: row.rules.iter().map(tell_rule).collect(),
        }
    }
}

fn tell_rule(rule: &PolicyRule) -> proto::PolicyRule {
    use proto::{PolicyAction as Action, PolicyTier as Tier};
    let tier = match rule.tier {
        PolicyTier::Admin => Tier::Admin,
        PolicyTier::NetworkPolicy => Tier::NetworkPolicy,
        PolicyTier::Baseline => Tier::Baseline,
    };
    let action = match rule.action {
        PolicyAction::Accept => Action::Accept,
        PolicyAction::Deny => Action::Deny,
        PolicyAction::Pass => Action::Pass,
    };
    let block = |block: &Block| proto::PolicyBlock {
        cidr: block.range.to_string(),
        except: fields::texts(&block.except),
    };
    let ports = |ports: &PolicyPorts| match ports {
        PolicyPorts::Range(protocol, first, last) => proto::PolicyPort {
            protocol: (*protocol).into(),
            first: (*first).into(),
            last: (*last).into(),
            name: String::new(),
        },
        PolicyPorts::Named(name, protocol) => proto::PolicyPort {
            protocol: protocol.unwrap_or_default().into(),
            first: 0,
            last: 0,
            name: name.to_string(),
        },
    };
    proto::PolicyRule {
        tier: tier.into(),
        action: action.into(),
        policy: rule.policy.to_string(),
        index: rule.index,
        anyone: rule.anyone,
        groups: rule.groups.iter().copied().collect(),
        blocks: rule.blocks.iter().map(block).collect(),
        ports: rule.ports.iter().map(ports).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::builders;

    #[test]
    fn a_set_that_no_droplet_can_judge_by_is_refused_by_field() {
        let refused = |change: &dyn Fn(&mut proto::PolicySetRow), field: &str| {
            let mut row = proto::PolicySetRow::from(&builders::policy_set());
            change(&mut row);
            let error = PolicySet::try_from(row).unwrap_err().to_string();
            assert!(error.starts_with(&format!("{field}: expected")), "{error}");
        };
        refused(&|row| row.id = 0, "id");
        refused(&|row| row.rules.reverse(), "policy_set.rules");
        refused(
            &|row| row.rules = vec![row.rules[0].clone(); MAX_RULES + 1],
            "policy_set.rules",
        );
        refused(&|row| row.rules[0].tier = 0, "policy_set.rules.tier");
        refused(&|row| row.rules[0].tier = 9, "policy_set.rules.tier");
        refused(&|row| row.rules[0].action = 9, "policy_set.rules.action");
        let cidr = |text: &str| text.to_owned();
        refused(
            &|row| row.rules[1].blocks[0].cidr = cidr("192.0.2.1/24"),
            "policy_set.rules.blocks.cidr",
        );
        refused(
            &|row| row.rules[1].blocks[0].except[0] = cidr("192.0.3.0/25"),
            "policy_set.rules.blocks.except",
        );
        refused(
            &|row| row.rules[1].ports[0].protocol = 1,
            "policy_set.rules.ports",
        );
        refused(&|row| row.rules[1].ports[0].last = 52, "policy_set.rules.ports");
        refused(
            &|row| row.rules[1].ports[0].last = 65_536,
            "policy_set.rules.ports",
        );
        refused(&|row| row.egress = false, "policy_set.rules.ports");
    }

    #[test]
    fn rules_of_a_policy_share_its_name() {
        let mut row = proto::PolicySetRow::from(&builders::policy_set());
        row.rules[2].policy = "red/other".to_owned();
        let rules = PolicySet::try_from(row).unwrap().rules;
        assert!(Arc::ptr_eq(&rules[0].policy, &rules[1].policy));
        assert_eq!([1, 2].map(|n| &*rules[n].policy), ["red/web", "red/other"]);
    }
}
