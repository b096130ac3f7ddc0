//! Fills in `policy.nft`, the text of table `inet thuban-policy`, for `nft -f`: what ingress policies say of clients
//! outside, which the node's own stack leads to pods by ports of Services and of hosts (ADR 35).
//!
//! Invariant: a pod with an ingress set whose content isn't known takes no packet from outside. What a set says never
//! changes under its name in the kernel's table.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use thuban_api::identifiers::Vni;
use thuban_common::host_stack::{CONNECTION_REFUSED, NFT_POLICY_TABLE, policy_priority};
use thuban_common::packet::ipv4::{ICMP, SCTP, TCP, UDP};
use thuban_common::packet::ipv6::ICMPV6;
use thuban_common::policy::{LAST_POINT, REJECTIONS_PER_WINDOW, point};
use thuban_rows::PolicyId;

use super::host::from_pod;
use super::template::Values;
use crate::attachments::HOST_PREFIX;
use crate::netlink::host_end::HOST_END;
use crate::program::policy::{Outside, Points};

const TEMPLATE: &str = include_str!("policy.nft");
/// The reason of drops, and the counter's name.
pub(super) const FROM_OUTSIDE: &str = "policy_from_outside";
const PROTOCOLS: [u8; 3] = [TCP, UDP, SCTP];
/// More pods than a node has.
const MAX_PODS: u32 = 65_535;

pub(super) type Set = (Vni, PolicyId);

/// What the table is written for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Admission {
    /// The addresses of endpoints on this droplet that have an ingress set.
    pub pods: BTreeMap<IpAddr, Set>,
    /// Those of them whose VPC rejects.
    pub rejecting: BTreeSet<IpAddr>,
    /// The sets, without those that deny all.
    pub sets: BTreeMap<Set, Arc<Outside>>,
}

/// Returns the text of the whole table.
pub(super) fn ruleset(admission: &Admission) -> String {
    let mut values = Values::default();
    for (name, text) in [
        ("NFT_POLICY_TABLE", NFT_POLICY_TABLE),
        ("ADMIT", policy_priority::ADMIT),
        ("ASTRAY", policy_priority::ASTRAY),
        ("HOST_END", HOST_END),
        ("FROM_OUTSIDE", FROM_OUTSIDE),
        ("HOST_PREFIX", HOST_PREFIX),
    ] {
        values.one(name, text);
    }
    values.one("from_pod", from_pod("=="));
    values.one("MAX_PODS", MAX_PODS);
    values.one("MAX_REJECTIONS", REJECTIONS_PER_WINDOW);
    values.mark("CONNECTION_REFUSED", CONNECTION_REFUSED);
    let rejecting = admission.rejecting.iter();
    values.joined("rejecting", rejecting.clone().filter(|pod| pod.is_ipv4()));
    values.joined("rejecting6", rejecting.filter(|pod| pod.is_ipv6()));
    // The image has no names of protocols.
    values.one("ICMP", ICMP);
    values.one("ICMPV6", ICMPV6);
    let sets = admission.sets.iter();
    values.each("sets", sets.flat_map(|(set, outside)| objects(*set, outside)));
    let pods = |is_v6| {
        let pods = admission
            .pods
            .keys()
            .filter(move |address| address.is_ipv6() == is_v6);
        pods.map(|address| admission.element(*address))
    };
    values.joined("pods", pods(false));
    values.joined("pods6", pods(true));
    values.fill(TEMPLATE)
}

/// Returns the commands that turn the table for `written` into one for `wanted`; `None` if the whole table must be
/// written, because a set has become another one.
pub(super) fn changes(written: &Admission, wanted: &Admission) -> Option<String> {
    let mut sets = wanted.sets.iter();
    if sets.any(|(set, outside)| written.sets.get(set).is_some_and(|old| old != outside)) {
        return None;
    }
    let come = wanted
        .sets
        .iter()
        .filter(|(set, _)| !written.sets.contains_key(*set));
    let come: Vec<String> = come.flat_map(|(set, outside)| objects(*set, outside)).collect();
    let mut lines = Vec::new();
    if !come.is_empty() {
        lines.push(format!(
            "table inet {NFT_POLICY_TABLE} {{\n{}\n}}",
            come.join("\n")
        ));
    }
    let of = |admission: &Admission, other: &Admission, verb: &'static str| {
        let elements = admission.pods.keys();
        let elements = elements.map(|address| (*address, admission.element(*address)));
        let others = |(address, element): &(IpAddr, String)| {
            !other.pods.contains_key(address) || other.element(*address) != *element
        };
        let commands = elements.filter(others).map(|(address, element)| {
            let map = if address.is_ipv6() { "pods6" } else { "pods" };
            format!("{verb} element inet {NFT_POLICY_TABLE} {map} {{ {element} }}")
        });
        let rejecting = admission.rejecting.difference(&other.rejecting);
        let rejecting = rejecting.map(|address| {
            let set = if address.is_ipv6() {
                "rejecting6"
            } else {
                "rejecting"
            };
            format!("{verb} element inet {NFT_POLICY_TABLE} {set} {{ {address} }}")
        });
        commands.chain(rejecting).collect::<Vec<_>>()
    };
    lines.extend(of(written, wanted, "delete"));
    lines.extend(of(wanted, written, "add"));
    let gone = written
        .sets
        .iter()
        .filter(|(set, _)| !wanted.sets.contains_key(*set));
    lines.extend(gone.flat_map(|(set, outside)| removal(*set, outside)));
    Some(lines.into_iter().map(|line| line + "\n").collect())
}

impl Admission {
    fn element(&self, pod: IpAddr) -> String {
        let set = self.pods[&pod];
        let chain = if self.sets.contains_key(&set) {
            name(set)
        } else {
            "closed".to_owned()
        };
        format!("{pod} : goto {chain}")
    }
}

/// Returns the name of a set's chain, with which the names of its other objects begin.
fn name((vni, id): Set) -> String {
    format!("set-{vni}-{id}")
}

/// The objects of a set besides its chain.
struct Parts<'a> {
    name: String,
    outside: &'a Outside,
    /// What is accepted, each with its number.
    points: BTreeMap<&'a Points, usize>,
}

impl<'a> Parts<'a> {
    fn new(set: Set, outside: &'a Outside) -> Self {
        let ranges = outside.ranges.iter().map(|(.., points)| points);
        let points: BTreeSet<&Points> = ranges.chain([&outside.rest]).collect();
        Self {
            name: name(set),
            outside,
            points: points.into_iter().zip(0..).collect(),
        }
    }

    /// Returns the chain of what is accepted.
    fn chain(&self, points: &Points) -> String {
        format!("{}-{}", self.name, self.points[points])
    }

    /// Returns the name of the map of a family's ranges.
    fn map(&self, is_v6: bool) -> String {
        format!("{}-ranges{}", self.name, if is_v6 { "6" } else { "" })
    }

    fn has_ranges(&self, is_v6: bool) -> bool {
        let mut ranges = self.outside.ranges.iter();
        ranges.any(|(first, ..)| first.is_ipv6() == is_v6)
    }

    fn elements(&self, is_v6: bool) -> String {
        let ranges = self.outside.ranges.iter();
        let ranges = ranges.filter(|(first, ..)| first.is_ipv6() == is_v6);
        let elements = ranges.map(|(first, last, points)| {
            let range = interval(first, last);
            format!("{range} : goto {}", self.chain(points))
        });
        elements.collect::<Vec<_>>().join(", ")
    }
}

fn interval<T: PartialEq + std::fmt::Display>(first: &T, last: &T) -> String {
    if first == last {
        first.to_string()
    } else {
        format!("{first}-{last}")
    }
}

/// Returns the objects of a set, in an order in which each names only earlier ones.
fn objects(set: Set, outside: &Outside) -> Vec<String> {
    let parts = Parts::new(set, outside);
    let mut objects = Vec::new();
    for points in parts.points.keys() {
        let chain = parts.chain(points);
        let mut rules = Vec::new();
        if accepts(points, 0, LAST_POINT) {
            rules.push("accept".to_owned());
        } else {
            if has_ports(points) {
                objects.push(format!(
                    "  set {chain}-ports {{\n    type inet_proto . inet_service; flags interval\n    elements = {{ {} }}\n  }}",
                    ports(points).join(", ")
                ));
                rules.push(format!("meta l4proto . th dport @{chain}-ports accept"));
            }
            if accepts(points, 0, 0) {
                let protocols = PROTOCOLS.map(|protocol| protocol.to_string()).join(", ");
                rules.push(format!("meta l4proto != {{ {protocols} }} accept"));
            }
            rules.push("goto closed".to_owned());
        }
        objects.push(format!("  chain {chain} {{\n    {}\n  }}", rules.join("\n    ")));
    }
    let mut rules = Vec::new();
    for (is_v6, kind, family) in [(false, "ipv4_addr", "ip"), (true, "ipv6_addr", "ip6")] {
        if parts.has_ranges(is_v6) {
            let (map, elements) = (parts.map(is_v6), parts.elements(is_v6));
            objects.push(format!(
                "  map {map} {{\n    type {kind} : verdict; flags interval\n    elements = {{ {elements} }}\n  }}"
            ));
            rules.push(format!("{family} saddr vmap @{map}"));
        }
    }
    rules.push(format!("goto {}", parts.chain(&outside.rest)));
    objects.push(format!(
        "  chain {} {{\n    {}\n  }}",
        parts.name,
        rules.join("\n    ")
    ));
    objects
}

/// Returns the commands that remove a set, whose chain nobody names any more.
fn removal(set: Set, outside: &Outside) -> Vec<String> {
    let parts = Parts::new(set, outside);
    let delete = |kind, name| format!("delete {kind} inet {NFT_POLICY_TABLE} {name}");
    let mut commands = vec![delete("chain", parts.name.clone())];
    let maps = [false, true].into_iter().filter(|is_v6| parts.has_ranges(*is_v6));
    commands.extend(maps.map(|is_v6| delete("map", parts.map(is_v6))));
    for points in parts.points.keys() {
        let chain = parts.chain(points);
        commands.push(delete("chain", chain.clone()));
        if has_ports(points) {
            commands.push(delete("set", format!("{chain}-ports")));
        }
    }
    commands
}

fn has_ports(points: &Points) -> bool {
    !accepts(points, 0, LAST_POINT) && !ports(points).is_empty()
}

fn accepts(points: &Points, first: u32, last: u32) -> bool {
    let mut ranges = points.iter();
    ranges.any(|range| range.0 <= first && last <= range.1)
}

/// Returns the accepted protocols and ports as elements of a set.
fn ports(points: &Points) -> Vec<String> {
    let of_protocol = |protocol: u8| {
        let (begin, end) = (point(protocol, 0), point(protocol, u16::MAX));
        let ranges = points
            .iter()
            .map(move |(first, last)| (*first.max(&begin), *last.min(&end)));
        let ranges = ranges.filter(|(first, last)| first <= last);
        ranges.map(move |(first, last)| {
            let (first, last) = (first - begin, last - begin);
            format!("{protocol} . {}", interval(&first, &last))
        })
    };
    PROTOCOLS.into_iter().flat_map(of_protocol).collect()
}

#[cfg(test)]
mod tests {
    use thuban_rows::builders;

    use super::*;

    const WEB: (u32, u32) = (point(TCP, 80), point(TCP, 90));

    fn set(id: u32) -> Set {
        (builders::VNI, builders::policy_id(id))
    }

    fn points(ranges: &[(u32, u32)]) -> Points {
        ranges.into()
    }

    fn address(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    /// Returns a set that accepts ports 80 to 90 of a range, and pings of everybody else.
    fn outside(first: &str, last: &str) -> Arc<Outside> {
        Arc::new(Outside {
            rest: points(&[(0, 0)]),
            ranges: vec![(address(first), address(last), points(&[WEB]))],
        })
    }

    fn admission(pods: &[(&str, u32)], sets: &[(u32, &Arc<Outside>)]) -> Admission {
        let pods = pods.iter().map(|(pod, id)| (address(pod), set(*id)));
        let sets = sets.iter().map(|(id, outside)| (set(*id), Arc::clone(outside)));
        Admission {
            pods: pods.collect(),
            sets: sets.collect(),
            rejecting: BTreeSet::new(),
        }
    }

    #[test]
    fn pods_of_a_vpc_that_rejects_are_told_from_others() {
        let quiet = admission(&[("10.0.0.5", 9), ("10.0.0.6", 8), ("fd00::5", 9)], &[]);
        let text = ruleset(&quiet);
        let set = "set rejecting {\n    type ipv4_addr\n";
        assert!(text.contains(&format!("{set}  }}")), "{text}");
        let telling = Admission {
            rejecting: ["10.0.0.5", "fd00::5"].map(address).into(),
            ..quiet.clone()
        };
        let text = ruleset(&telling);
        for part in [
            format!("{set}    elements = {{ 10.0.0.5 }}").as_str(),
            "type ipv6_addr\n    elements = { fd00::5 }",
            "    meta mark & 0x1ffd == 0x54 drop\n",
            "limit rate 100/second burst 100 packets } ct mark set 0x4f reject with tcp reset\n    drop",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(!text.contains("{{"), "{text}");
        let element = "element inet thuban-policy rejecting";
        let lines = |verb| format!("{verb} {element} {{ 10.0.0.5 }}\n{verb} {element}6 {{ fd00::5 }}\n");
        assert_eq!(changes(&quiet, &telling), Some(lines("add")));
        assert_eq!(changes(&telling, &quiet), Some(lines("delete")));
    }

    #[test]
    fn a_pod_is_led_to_by_its_set_and_closed_without() {
        let web = outside("192.0.2.0", "192.0.2.255");
        let text = ruleset(&admission(
            &[("10.0.0.5", 9), ("10.0.0.6", 8), ("fd00::5", 9)],
            &[(9, &web)],
        ));
        for part in [
            "elements = { 10.0.0.5 : goto set-7-000009, 10.0.0.6 : goto closed }",
            "elements = { fd00::5 : goto set-7-000009 }",
            "elements = { 192.0.2.0-192.0.2.255 : goto set-7-000009-1 }",
            "elements = { 6 . 80-90 }",
            "meta l4proto . th dport @set-7-000009-1-ports accept\n    goto closed",
            "chain set-7-000009-0 {\n    meta l4proto != { 6, 17, 132 } accept\n    goto closed",
            "ip saddr vmap @set-7-000009-ranges\n    goto set-7-000009-0",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(!text.contains("{{") && !text.contains("ranges6"), "{text}");
    }

    #[test]
    fn only_what_changes_is_written() {
        let (web, host) = (outside("192.0.2.0", "192.0.2.255"), outside("fd00::1", "fd00::1"));
        let before = admission(&[("10.0.0.5", 9), ("10.0.0.6", 9)], &[(9, &web)]);
        assert_eq!(changes(&before, &before), Some(String::new()));
        let after = admission(&[("10.0.0.5", 8), ("10.0.0.6", 7)], &[(8, &host)]);
        let text = changes(&before, &after).unwrap();
        let element = "element inet thuban-policy pods";
        for lines in [
            "chain set-7-000008 {\n    ip6 saddr vmap @set-7-000008-ranges6".to_owned(),
            format!(
                "delete {element} {{ 10.0.0.5 : goto set-7-000009 }}\ndelete {element} {{ 10.0.0.6 : goto"
            ),
            format!(
                "add {element} {{ 10.0.0.5 : goto set-7-000008 }}\nadd {element} {{ 10.0.0.6 : goto closed }}"
            ),
            "delete set inet thuban-policy set-7-000009-1-ports\n".to_owned(),
        ] {
            assert!(text.contains(&lines), "{lines}: {text}");
        }
        let other = admission(&[("10.0.0.5", 9)], &[(9, &host)]);
        assert_eq!(changes(&before, &other), None, "another set of the same name");
    }

    #[test]
    fn what_passes_is_told_by_protocol_and_ports() {
        let all = points(&[(0, LAST_POINT)]);
        assert!(accepts(&all, 0, LAST_POINT) && !has_ports(&all));
        let tcp_and_some = points(&[(point(TCP, 0), point(UDP, 1)), (point(SCTP, 7), point(SCTP, 7))]);
        assert_eq!(ports(&tcp_and_some), ["6 . 0-65535", "17 . 0-1", "132 . 7"]);
        assert!(!has_ports(&points(&[])) && !has_ports(&points(&[(0, 0)])));
    }
}
