//! Fills in `limits.nft`, the text of table `inet thuban-limits`, for `nft -f`: the limits of connections that pods
//! make through the node's own stack. All pods share its conntrack and its source ports.
//!
//! Invariant: a pod or a VPC can have far fewer connections than the node has room for, and no change by a tenant
//! starts a count anew.

use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;
use std::ops::RangeInclusive;

use thuban_common::host_stack::{MARK_EGRESS, MARK_MASK, NFT_LIMITS_TABLE, limits_priority};

use super::host::from_pod;
use super::template::Values;

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
pub(super) fn ruleset(pods: &PodVpcs, dns: Option<Ipv4Addr>) -> String {
    let mut values = Values::default();
    for (name, text) in [
        ("NFT_LIMITS_TABLE", NFT_LIMITS_TABLE),
        ("BEGIN", limits_priority::BEGIN),
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
    values.each("dns", dns);
    values.one("from_pod", from_pod("=="));
    let from_tenant = format!("meta mark & {MARK_MASK:#x} == {MARK_EGRESS:#x}");
    values.one("from_tenant", from_tenant);
    values.joined("vpcs", pods.iter().map(element));
    let chains = vnis(pods).into_iter();
    values.each(
        "vpc_chains",
        chains.map(|vni| format!("  chain vpc-{vni} {{\n    {}\n  }}", vpc_rule())),
    );
    values.fill(TEMPLATE)
}

/// Returns the commands that turn a table for `written` into one for `pods`. All other counts go on.
pub(super) fn changes(written: &PodVpcs, pods: &PodVpcs) -> String {
    let (before, now) = (vnis(written), vnis(pods));
    let new = now.difference(&before).flat_map(|vni| {
        let chain = format!("{NFT_LIMITS_TABLE} vpc-{vni}");
        [
            format!("add chain inet {chain}"),
            format!("add rule inet {chain} {}", vpc_rule()),
        ]
    });
    let is_in = |pods: &PodVpcs, (interface, vni): (&u32, &u32)| pods.get(interface) == Some(vni);
    let element = |verb, pod| {
        format!(
            "{verb} element inet {NFT_LIMITS_TABLE} vpcs {{ {} }}",
            element(pod)
        )
    };
    let gone = written.iter().filter(|pod| !is_in(pods, *pod));
    let come = pods.iter().filter(|pod| !is_in(written, *pod));
    let old = before.difference(&now);
    let lines = new
        .chain(gone.map(|pod| element("delete", pod)))
        .chain(come.map(|pod| element("add", pod)))
        .chain(old.map(|vni| format!("delete chain inet {NFT_LIMITS_TABLE} vpc-{vni}")));
    lines.map(|line| line + "\n").collect()
}

fn vnis(pods: &PodVpcs) -> BTreeSet<u32> {
    pods.values().copied().collect()
}

fn element((interface, vni): (&u32, &u32)) -> String {
    format!("{interface} : jump vpc-{vni}")
}

fn vpc_rule() -> String {
    format!("ct count over {MAX_OF_VPC} add @full {{ iif }} counter name \"{VPC_CONNECTIONS}\" drop")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_placeholder_is_filled_in() {
        for pods in [PodVpcs::new(), [(5, 7), (6, 7)].into()] {
            let text = ruleset(&pods, Some(Ipv4Addr::LOCALHOST));
            assert!(!text.contains("{{") && !text.contains("}}"), "{text}");
            assert_eq!(text.contains("chain vpc-7"), !pods.is_empty());
        }
    }

    #[test]
    fn what_pods_come_and_go_changes_their_vpcs_alone() {
        let lines = |before: PodVpcs, after: PodVpcs| -> Vec<String> {
            let text = changes(&before, &after).replace("inet thuban-limits ", "");
            text.lines().map(|line| line.chars().take(40).collect()).collect()
        };
        let none = lines([(5, 7)].into(), [(5, 7)].into());
        assert!(none.is_empty(), "{none:?}");
        assert_eq!(
            lines([(5, 7)].into(), [(6, 7), (9, 8)].into()),
            [
                "add chain vpc-8",
                "add rule vpc-8 ct count over 8192 add @f",
                "delete element vpcs { 5 : jump vpc-7 }",
                "add element vpcs { 6 : jump vpc-7 }",
                "add element vpcs { 9 : jump vpc-8 }",
            ]
        );
        assert_eq!(
            lines([(5, 7)].into(), [(5, 8)].into())[2..],
            [
                "delete element vpcs { 5 : jump vpc-7 }",
                "add element vpcs { 5 : jump vpc-8 }",
                "delete chain vpc-7",
            ]
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
