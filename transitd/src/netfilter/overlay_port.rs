//! The text of table `inet thuban-overlay`, for `nft -f`: UDP port 6081 is the overlay's.
//!
//! Droplets believe Geneve by its outer source. Agents and transit write theirs past netfilter, so whatever comes through
//! netfilter for that port is somebody else's packet: translated, forwarded, reflected, or sent by a process of the node.
//!
//! Invariant: the rules depend on nothing that a tenant can change, and are in force before the first row is here.

use std::collections::BTreeSet;
use std::net::Ipv4Addr;

use thuban_common::tables::GENEVE_PORT;

use super::replace;
use super::served::{chain, set};
use crate::attachments::HOST_PREFIX;
use crate::netlink::host_end::HOST_END;

/// What the operator refuses is what the data plane guards.
const _: () = assert!(thuban_api::OVERLAY_PORT == GENEVE_PORT);

pub const TABLE: &str = "thuban-overlay";

/// What the rules are made of.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OverlayPort {
    /// Underlay addresses of the other droplets.
    pub droplets: BTreeSet<Ipv4Addr>,
    /// The device that aggregates Geneve has the port on this node; else tunnels of the node's own may.
    pub is_claimed: bool,
}

impl OverlayPort {
    pub fn ruleset(&self) -> String {
        let geneve = format!("udp dport {GENEVE_PORT}");
        // Endpoints may use the port among themselves: inside the overlay it is a port like any other.
        let leaves = format!("oifname != \"{HOST_PREFIX}*\" oifname != \"{HOST_END}\"");
        let chains = [
            (
                "forwarded",
                "type filter hook forward priority filter + 10",
                vec![
                    format!("{geneve} {leaves} counter drop"),
                    // What a router may say of the overlay's packets, which conntrack knows nothing of: no endpoint is one.
                    format!("iifname \"{HOST_PREFIX}*\" meta l4proto icmp ct state invalid counter drop"),
                ],
            ),
            (
                // After all translation, of what the node itself sends as well.
                "sent",
                "type filter hook postrouting priority srcnat + 10",
                vec![
                    format!("{geneve} oifname != \"lo\" {leaves} ct status dnat counter drop"),
                    // A server of the node that answers whoever asked from the port.
                    format!(
                        "{geneve} oifname != \"lo\" {leaves} udp sport != {GENEVE_PORT} ct direction reply counter drop"
                    ),
                    format!("{geneve} ip daddr @droplets counter drop"),
                ],
            ),
            (
                // Fragments are whole here, and addresses translated. What transit takes never comes so far.
                "received",
                "type filter hook input priority filter - 10",
                if self.is_claimed {
                    vec![format!("{geneve} counter drop")]
                } else {
                    vec![
                        format!("{geneve} iifname \"{HOST_PREFIX}*\" counter drop"),
                        format!("{geneve} iifname \"{HOST_END}\" counter drop"),
                        format!("{geneve} ct status dnat counter drop"),
                    ]
                },
            ),
        ];
        let mut text = replace(TABLE);
        let droplets: Vec<_> = self.droplets.iter().map(ToString::to_string).collect();
        set(&mut text, "set droplets", "type ipv4_addr", &droplets);
        for (name, hook, rules) in chains {
            chain(&mut text, name, Some(hook), &rules);
        }
        text.push_str("}\n");
        text
    }
}
