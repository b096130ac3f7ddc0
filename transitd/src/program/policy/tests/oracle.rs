//! What rows say of a packet, read rule by rule as their comments have it: nothing here knows points, classes' entries,
//! prefixes or lists.

use std::net::IpAddr;

use thuban_common::policy::NO_RULE;
use thuban_rows::{Class, PolicyAction, PolicyPorts, PolicyRule, PolicySet, PolicyTier};

/// The other side of a packet.
#[derive(Clone, Copy, Debug)]
pub enum Peer<'a> {
    Class(&'a Class),
    /// Of a class without a row.
    Unknown,
    /// An address outside of the VPC.
    Outside,
}

#[derive(Clone, Copy, Debug)]
pub struct Packet<'a> {
    pub peer: Peer<'a>,
    /// The other side's.
    pub address: IpAddr,
    pub protocol: u8,
    /// The destination's; 0 if the protocol has none.
    pub port: u16,
}

/// Returns whether the packet passes, and the rank of the rule that says so.
pub fn judge(set: &PolicySet, packet: Packet<'_>) -> (bool, u16) {
    let first = |tier| {
        let mut rules = (0..).zip(&set.rules).filter(|(_, rule)| rule.tier == tier);
        rules.find_map(|(rank, rule)| Some((matched(rule, packet)?, rank)))
    };
    match first(PolicyTier::Admin) {
        Some((PolicyAction::Accept, rank)) => return (true, rank),
        Some((PolicyAction::Deny, rank)) => return (false, rank),
        Some((PolicyAction::Pass, _)) | None => {}
    }
    if let Some((action, rank)) = first(PolicyTier::NetworkPolicy) {
        return (action == PolicyAction::Accept, rank);
    }
    if set.is_isolated {
        return (false, NO_RULE);
    }
    match first(PolicyTier::Baseline) {
        // Nothing is behind the tier that could deny.
        Some((action, rank)) => (action != PolicyAction::Deny, rank),
        None => (true, NO_RULE),
    }
}

/// Returns what a rule does with the packet; `None` if the rule doesn't match.
fn matched(rule: &PolicyRule, packet: Packet<'_>) -> Option<PolicyAction> {
    let ports = &rule.ports;
    let is_number = ports.is_empty()
        || ports.iter().any(|ports| match *ports {
            PolicyPorts::Range(protocol, first, last) => {
                protocol == packet.protocol && (first..=last).contains(&packet.port)
            }
            PolicyPorts::Named(..) => false,
        });
    let is_name = |has: &dyn Fn(&str) -> bool| {
        ports.iter().any(|ports| match ports {
            PolicyPorts::Range(..) => false,
            PolicyPorts::Named(name, protocol) => {
                let is_protocol = protocol.map_or([6, 17, 132].contains(&packet.protocol), |protocol| {
                    protocol == packet.protocol
                });
                is_protocol && has(name)
            }
        })
    };
    let is_by_peer = match packet.peer {
        Peer::Class(class) => {
            let is_peer = rule.anyone || !rule.groups.is_disjoint(&class.groups);
            let has = |name: &str| {
                let mut names = class.names.iter();
                names.any(|known| {
                    (&*known.name, known.protocol, known.port) == (name, packet.protocol, packet.port)
                })
            };
            is_peer && (is_number || is_name(&has))
        }
        Peer::Unknown => {
            let may_be = rule.anyone || !rule.groups.is_empty();
            let is_certain = rule.anyone && is_number && !is_name(&|_| true);
            // Behind the last tier everything passes.
            let accepts = match rule.action {
                PolicyAction::Accept => true,
                PolicyAction::Deny => false,
                PolicyAction::Pass => rule.tier == PolicyTier::Baseline,
            };
            if !accepts && may_be && !is_certain && (is_number || is_name(&|_| true)) {
                return Some(PolicyAction::Deny);
            }
            rule.anyone && is_number
        }
        Peer::Outside => rule.anyone && is_number,
    };
    let is_in_block = rule.blocks.iter().any(|block| {
        let is_excepted = block.except.iter().any(|except| except.contains(&packet.address));
        block.range.contains(&packet.address) && !is_excepted
    });
    (is_by_peer || is_in_block && is_number).then_some(rule.action)
}
