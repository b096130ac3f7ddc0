//! The parts of a packet, and who denies it, in words: for verbs that print packets.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

use serde_json::{Value, json};
use thuban_common::packet::ipv4::{SCTP, TCP, UDP, protocol_word};
use thuban_common::tables::Address;

use crate::program::policy::Denier;

pub fn address(bytes: Address) -> IpAddr {
    Ipv6Addr::from(bytes).to_canonical()
}

/// Returns an address with its port (network order); without it, if it is 0.
pub fn end(bytes: Address, port: u16) -> String {
    match u16::from_be(port) {
        0 => address(bytes).to_string(),
        port => SocketAddr::new(address(bytes), port).to_string(),
    }
}

/// Returns the ports of a flow, 0 for protocols without ports: they have an echo's identifier there.
pub fn ports(protocol: u8, ports: [u16; 2]) -> [u16; 2] {
    match protocol {
        TCP | UDP | SCTP => ports,
        _ => [0; 2],
    }
}

pub fn protocol(number: u8) -> String {
    protocol_word(number).map_or_else(|| format!("protocol {number}"), str::to_owned)
}

/// Returns who denies, as JSON. `denier`: `None` if the daemon gives no answer. `set`: the id of the set.
pub fn by(denier: Option<&Denier>, set: u32) -> Value {
    let (reason, policies, more, rule) = match denier {
        Some(Denier::Rule { policy, index }) => ("Rule", vec![&**policy], 0, Some(*index)),
        Some(Denier::NoRule { policies, more }) => (
            "NoRule",
            policies.iter().map(|name| &**name).collect(),
            *more,
            None,
        ),
        Some(Denier::NoRoom) => ("NoRoom", vec![], 0, None),
        Some(Denier::Unknown) => ("UnknownSet", vec![], 0, None),
        None => ("NoAnswer", vec![], 0, None),
    };
    json!({
        "reason": reason,
        "policies": policies,
        "morePolicies": more,
        "rule": rule,
        "set": format!("{set:06x}"),
    })
}

/// Returns who denies, behind "denied" or "dropped".
pub fn denied_by(denier: Option<&Denier>, set: u32) -> String {
    match denier {
        Some(Denier::Rule { policy, index }) => format!("by {policy} rule {index}"),
        Some(Denier::NoRule { policies, .. }) if policies.is_empty() => {
            "by policies without rules".to_owned()
        }
        Some(Denier::NoRule { policies, more }) => format!("by {}", names(policies, *more)),
        Some(Denier::NoRoom) => format!("by set {set:06x}, whose rules have no room on this node"),
        Some(Denier::Unknown) => format!("by set {set:06x}, whose rules are not on this node"),
        None => format!("by set {set:06x}, whose rules only a running transitd knows"),
    }
}

/// Returns a list of policies.
pub fn names(policies: &[Arc<str>], more: u32) -> String {
    let names = policies.join(", ");
    if more == 0 {
        names
    } else {
        format!("{names} and {more} more")
    }
}
