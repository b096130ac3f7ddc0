//! The text of table `inet thuban-overlay`, for `nft -f`: UDP port 6081 is the overlay's.
//!
//! Droplets believe Geneve by its outer source. Agents and transit write theirs past netfilter, so whatever comes through
//! netfilter for that port is somebody else's packet: translated, forwarded, reflected, or sent by a process of the node.
//!
//! Invariant: the rules depend on nothing that a tenant can change, and are in force before the first row is here.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::net::Ipv4Addr;
use std::path::Path;
use std::process::{Command, Stdio};

use thuban_common::tables::GENEVE_PORT;

use super::served::{chain, set};
use crate::attachments::HOST_PREFIX;
use crate::netlink::host_end::HOST_END;

/// What the operator refuses is what the data plane guards.
const _: () = assert!(thuban_api::OVERLAY_PORT == GENEVE_PORT);

pub const TABLE: &str = "thuban-overlay";

/// RFC 1191.
const FRAGMENTATION_NEEDED: &str = "icmp type destination-unreachable icmp code frag-needed";

/// Those that the kernel's table has; none if there is no table.
pub fn droplets(program: &Path) -> BTreeSet<Ipv4Addr> {
    let listed = Command::new(program)
        .args(["-j", "list", "set", "inet", TABLE, "droplets"])
        .stderr(Stdio::null())
        .output();
    let listed = listed.ok().filter(|output| output.status.success());
    let text = listed.map(|output| output.stdout).unwrap_or_default();
    let set: serde_json::Value = serde_json::from_slice(&text).unwrap_or_default();
    let objects = set["nftables"].as_array().into_iter().flatten();
    let elements = objects
        .filter_map(|object| object["set"]["elem"].as_array())
        .flatten();
    elements
        .filter_map(|element| element.as_str()?.parse().ok())
        .collect()
}

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
                    // Droplets believe it of any router, and no endpoint is one.
                    format!("iifname \"{HOST_PREFIX}*\" {FRAGMENTATION_NEEDED} counter drop"),
                    format!("ip daddr @droplets {FRAGMENTATION_NEEDED} counter drop"),
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
        // Chains that stay and are refilled: between the rules of two transactions there is no moment without any.
        let mut text = format!("table inet {TABLE} {{\n");
        set(&mut text, "set droplets", "type ipv4_addr", &[]);
        for (name, hook, _) in &chains {
            chain(&mut text, name, Some(hook), &[]);
        }
        let _ = write!(
            text,
            "}}\nflush table inet {TABLE}\nflush set inet {TABLE} droplets\ntable inet {TABLE} {{\n"
        );
        let droplets: Vec<_> = self.droplets.iter().map(ToString::to_string).collect();
        set(&mut text, "set droplets", "type ipv4_addr", &droplets);
        for (name, _, rules) in &chains {
            chain(&mut text, name, None, rules);
        }
        text.push_str("}\n");
        text
    }
}
