//! Fills in `limits.nft`, the text of table `inet thuban-limits`, for `nft -f`: the limits of connections that pods
//! make through the node's own stack, and each VPC's source ports. All pods share its conntrack and its ports.
//!
//! Invariant: a pod or a VPC can have far fewer connections than the node has room for, and no change by a tenant
//! starts a count anew.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;

use thuban_api::cluster_dns::ClusterDns;
use thuban_common::host_stack::{MARK_EGRESS, MARK_MASK, NFT_LIMITS_TABLE, limits_priority};

use super::host::from_pod;
use super::ruleset::family;
use super::template::Values;
use crate::attachments::HOST_PREFIX;

const TEMPLATE: &str = include_str!("limits.nft");

/// The connections that a pod may open a second, and as many at once after a rest.
const MAX_POD_RATE: u32 = 500;
const MAX_POD_BURST: u32 = 1000;
/// The connections that a pod may have, and as many again to the cluster's DNS.
const MAX_OF_POD: u32 = 4096;
/// The connections that all pods of a VPC on this node may have.
const MAX_OF_VPC: u32 = 8192;
/// The most pods that are counted at a time: more than a node has.
const MAX_PODS: u32 = 65_535;

/// Reasons of drops.
const POD_RATE: &str = "pod_connection_rate";
const POD_CONNECTIONS: &str = "pod_connections";
const VPC_CONNECTIONS: &str = "vpc_connections";
pub(super) const REASONS: [&str; 3] = [POD_RATE, POD_CONNECTIONS, VPC_CONNECTIONS];

/// The least source port of pods' connections, if the node's own ports are elsewhere. The overlay's port and those of
/// other tunnels are below.
const MIN_PORT: u16 = 10_000;
/// The fewest source ports that are enough.
const MIN_PORTS: u16 = 4096;

/// VNIs of pods, by their interface at the host's end.
pub type PodVpcs = BTreeMap<u32, u32>;

/// The source ports of each VPC, by VNI. No ports: those of the node's own connections.
pub type VpcPorts = BTreeMap<u32, RangeInclusive<u16>>;

/// What the table is written for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Limited {
    pub pods: PodVpcs,
    pub ports: VpcPorts,
}

/// Returns the source ports for connections of pods. They are apart from `own`, the ports of the node's own
/// connections. Returns `None` if those leave too few.
pub fn pod_ports(own: &RangeInclusive<u16>) -> Option<RangeInclusive<u16>> {
    let below = MIN_PORT..=own.start().saturating_sub(1);
    let above = own.end().saturating_add(1).max(MIN_PORT)..=u16::MAX;
    let size = |ports: &RangeInclusive<u16>| ports.end().saturating_sub(*ports.start());
    let larger = if size(&below) >= size(&above) {
        below
    } else {
        above
    };
    (size(&larger) >= MIN_PORTS).then_some(larger)
}

/// Returns the text of the whole table.
pub(super) fn ruleset(limited: &Limited, dns: Option<ClusterDns>) -> String {
    let mut values = Values::default();
    for (name, text) in [
        ("NFT_LIMITS_TABLE", NFT_LIMITS_TABLE),
        ("HOST_PREFIX", HOST_PREFIX),
        ("BEGIN", limits_priority::BEGIN),
        ("LEAVE", limits_priority::LEAVE),
        ("POD_RATE", POD_RATE),
        ("POD_CONNECTIONS", POD_CONNECTIONS),
        ("VPC_CONNECTIONS", VPC_CONNECTIONS),
    ] {
        values.one(name, text);
    }
    for (name, number) in [
        ("MAX_PODS", MAX_PODS),
        ("MAX_POD_RATE", MAX_POD_RATE),
        ("MAX_POD_BURST", MAX_POD_BURST),
        ("MAX_OF_POD", MAX_OF_POD),
    ] {
        values.one(name, number);
    }
    let dns = dns.into_iter().flat_map(ClusterDns::addresses);
    values.each(
        "to_dns",
        dns.map(|address| format!("{} daddr {address}", family(address))),
    );
    values.one("from_pod", from_pod("=="));
    let from_tenant = format!("meta mark & {MARK_MASK:#x} == {MARK_EGRESS:#x}");
    values.one("from_tenant", from_tenant);
    let pods = &limited.pods;
    for kind in Kind::ALL {
        values.joined(kind.map(), pods.iter().map(|pod| kind.element(pod)));
    }
    let chain = |kind: Kind, vni: u32| {
        let rule = kind.rule(vni, limited);
        format!("  chain {} {{\n    {rule}\n  }}", kind.chain(vni))
    };
    let chains = Kind::ALL.map(|kind| vnis(pods).into_iter().map(move |vni| chain(kind, vni)));
    values.each("vpc_chains", chains.into_iter().flatten());
    values.fill(TEMPLATE)
}

/// Returns the commands that turn the table for `written` into one for `limited`. All other counts go on.
pub(super) fn changes(written: &Limited, limited: &Limited) -> String {
    let mut lines = Vec::new();
    let (before, now) = (vnis(&written.pods), vnis(&limited.pods));
    let is_in = |pods: &PodVpcs, (interface, vni): (&u32, &u32)| pods.get(interface) == Some(vni);
    for kind in Kind::ALL {
        for vni in &now {
            let rule = kind.rule(*vni, limited);
            let chain = format!("inet {NFT_LIMITS_TABLE} {}", kind.chain(*vni));
            if !before.contains(vni) {
                lines.push(format!("add chain {chain}"));
            } else if kind.rule(*vni, written) == rule {
                continue;
            } else {
                lines.push(format!("flush chain {chain}"));
            }
            lines.push(format!("add rule {chain} {rule}"));
        }
        let gone = written.pods.iter().filter(|pod| !is_in(&limited.pods, *pod));
        let come = limited.pods.iter().filter(|pod| !is_in(&written.pods, *pod));
        let moves = gone
            .map(|pod| ("delete", pod))
            .chain(come.map(|pod| ("add", pod)));
        lines.extend(moves.map(|(verb, pod)| {
            let (map, element) = (kind.map(), kind.element(pod));
            format!("{verb} element inet {NFT_LIMITS_TABLE} {map} {{ {element} }}")
        }));
        let old = before.difference(&now);
        lines.extend(old.map(|vni| format!("delete chain inet {NFT_LIMITS_TABLE} {}", kind.chain(*vni))));
    }
    lines.into_iter().map(|line| line + "\n").collect()
}

pub(super) fn vnis(pods: &PodVpcs) -> BTreeSet<u32> {
    pods.values().copied().collect()
}

/// The two chains that each VPC has, with the map that leads its pods there.
#[derive(Clone, Copy)]
enum Kind {
    /// How many connections it has.
    Vpc,
    /// Its source ports.
    Ports,
}

impl Kind {
    const ALL: [Self; 2] = [Self::Vpc, Self::Ports];

    fn map(self) -> &'static str {
        match self {
            Self::Vpc => "vpcs",
            Self::Ports => "shares",
        }
    }

    fn chain(self, vni: u32) -> String {
        match self {
            Self::Vpc => format!("vpc-{vni}"),
            Self::Ports => format!("ports-{vni}"),
        }
    }

    fn element(self, (interface, vni): (&u32, &u32)) -> String {
        format!("{interface} : jump {}", self.chain(*vni))
    }

    fn rule(self, vni: u32, limited: &Limited) -> String {
        match (self, limited.ports.get(&vni)) {
            (Self::Vpc, _) => format!(
                "ct count over {MAX_OF_VPC} add @full {{ iif }} counter name \"{VPC_CONNECTIONS}\" drop"
            ),
            (Self::Ports, Some(ports)) => {
                let (first, last) = (ports.start(), ports.end());
                format!("meta l4proto {{ tcp, udp, sctp }} masquerade to :{first}-{last}")
            }
            (Self::Ports, None) => "return".to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    fn limited(pods: impl IntoIterator<Item = (u32, u32)>) -> Limited {
        Limited {
            pods: pods.into_iter().collect(),
            ports: [(7, 10_000..=10_999)].into(),
        }
    }

    #[test]
    fn every_placeholder_is_filled_in() {
        for pods in [vec![], vec![(5, 7), (6, 7)]] {
            let is_empty = pods.is_empty();
            let text = ruleset(&limited(pods), Some(ClusterDns::new(Ipv4Addr::LOCALHOST.into())));
            assert!(!text.contains("{{") && !text.contains("}}"), "{text}");
            for part in ["chain vpc-7", "chain ports-7", "masquerade to :10000-10999"] {
                assert_eq!(text.contains(part), !is_empty, "{part}");
            }
        }
    }

    /// Returns the begins of the commands, without the table.
    fn lines(before: &Limited, after: &Limited) -> Vec<String> {
        let text = changes(before, after).replace("inet thuban-limits ", "");
        text.lines().map(|line| line.chars().take(40).collect()).collect()
    }

    #[test]
    fn what_pods_come_and_go_changes_their_vpcs_alone() {
        let none = lines(&limited([(5, 7)]), &limited([(5, 7)]));
        assert!(none.is_empty(), "{none:?}");
        assert_eq!(
            lines(&limited([(5, 7)]), &limited([(6, 7), (9, 8)])),
            [
                "add chain vpc-8",
                "add rule vpc-8 ct count over 8192 add @f",
                "delete element vpcs { 5 : jump vpc-7 }",
                "add element vpcs { 6 : jump vpc-7 }",
                "add element vpcs { 9 : jump vpc-8 }",
                "add chain ports-8",
                "add rule ports-8 return",
                "delete element shares { 5 : jump ports-7",
                "add element shares { 6 : jump ports-7 }",
                "add element shares { 9 : jump ports-8 }",
            ]
        );
        assert_eq!(
            lines(&limited([(5, 7)]), &limited([(5, 8)]))[2..5],
            [
                "delete element vpcs { 5 : jump vpc-7 }",
                "add element vpcs { 5 : jump vpc-8 }",
                "delete chain vpc-7",
            ]
        );
    }

    #[test]
    fn other_ports_change_no_count() {
        let mut other = limited([(5, 7)]);
        other.ports = [(7, 10_000..=10_499)].into();
        assert_eq!(
            lines(&limited([(5, 7)]), &other),
            ["flush chain ports-7", "add rule ports-7 meta l4proto { tcp, udp"]
        );
    }

    #[test]
    fn ports_of_pods_are_apart_from_the_nodes_own() {
        assert_eq!(pod_ports(&(32_768..=60_999)), Some(10_000..=32_767));
        assert_eq!(pod_ports(&(1024..=40_000)), Some(40_001..=65_535));
        assert_eq!(pod_ports(&(1024..=65_535)), None);
        assert_eq!(pod_ports(&(12_000..=63_000)), None);
        assert_eq!(pod_ports(&(1024..=5000)), Some(10_000..=65_535));
    }
}
