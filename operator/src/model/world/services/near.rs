//! Backends that are near: the ones that the hints of slices name for a node or its zone, as kube-proxy reads them.
//!
//! Invariant: a droplet that has no near backend is told all of them.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use thuban_rows::Backend;

use super::{Owner, World};

/// The nodes and zones whose clients a ready backend is for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hints {
    pub nodes: BTreeSet<String>,
    pub zones: BTreeSet<String>,
}

/// The hints of each ready backend that has some.
pub type AllHints = BTreeMap<IpAddr, Hints>;

/// The zone of each node that is in one.
pub(in super::super) type Zones = BTreeMap<String, String>;

/// The place of a droplet's clients, as far as hints tell it from others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place<'a> {
    pub node: Option<&'a str>,
    pub zone: Option<&'a str>,
}

/// The backends that each node or zone has.
type ByName<'a> = BTreeMap<&'a str, BTreeSet<Backend>>;

/// A port's backends by place. A kind of hint counts only if all backends have it.
struct Near<'a> {
    by_node: ByName<'a>,
    by_zone: ByName<'a>,
}

impl<'a> Near<'a> {
    pub fn new(backends: &BTreeSet<Backend>, hints: &'a AllHints) -> Self {
        Self {
            by_node: by_name(backends, hints, |hints| &hints.nodes),
            by_zone: by_name(backends, hints, |hints| &hints.zones),
        }
    }

    /// Returns the backends that are near a place: its node's, else its zone's; none if all are.
    pub fn of(&self, place: Place) -> Option<&BTreeSet<Backend>> {
        let node = place.node.and_then(|node| self.by_node.get(node));
        node.or_else(|| self.by_zone.get(place.zone?))
    }
}

fn by_name<'a>(
    backends: &BTreeSet<Backend>,
    hints: &'a AllHints,
    names: fn(&'a Hints) -> &'a BTreeSet<String>,
) -> ByName<'a> {
    let mut found = ByName::new();
    for backend in backends {
        let own = hints.get(&backend.address).map(names);
        let Some(own) = own.filter(|own| !own.is_empty()) else {
            return ByName::new();
        };
        for name in own {
            found.entry(name).or_default().insert(*backend);
        }
    }
    found
}

/// What the hints of a service's slices say: the backends of each port by place.
pub(super) struct Nearness<'a> {
    ports: Vec<Near<'a>>,
}

/// The most backends of a service that are told to nodes for themselves, all its ports and all such nodes together. If
/// the hints ask for more, those for nodes have no effect.
const MAX_TOLD: usize = 262_144;

impl<'a> Nearness<'a> {
    /// `ports`: the backends of each port.
    pub fn new<'b>(ports: impl Iterator<Item = &'b BTreeSet<Backend>>, hints: &'a AllHints) -> Self {
        let mut told = 0;
        let mut nodes = BTreeSet::new();
        let ports = ports.map(|backends| {
            let near = Near::new(backends, hints);
            nodes.extend(near.by_node.keys().copied());
            if near.by_node.is_empty() {
                told += backends.len();
            }
            near
        });
        let mut ports: Vec<_> = ports.collect();
        // A port without hints for nodes is told whole to every node that another port names.
        if told.saturating_mul(nodes.len()) > MAX_TOLD {
            for port in &mut ports {
                port.by_node.clear();
            }
        }
        Self { ports }
    }

    /// Returns the place of a droplet: droplets of one place are told the same.
    pub fn place(&self, node: &'a str, zone: Option<&'a str>) -> Place<'a> {
        Place {
            node: Some(node).filter(|node| self.ports.iter().any(|port| port.by_node.contains_key(node))),
            zone: zone.filter(|zone| self.ports.iter().any(|port| port.by_zone.contains_key(zone))),
        }
    }

    /// Returns a port's backends that are near a place; none if all are.
    pub fn near(&self, port: usize, place: Place) -> Option<&BTreeSet<Backend>> {
        self.ports.get(port)?.of(place)
    }
}

impl World {
    /// Sets the zone of a node.
    pub fn set_zone(&mut self, node: &str, zone: Option<&str>) {
        let zones = &mut self.services.zones;
        let old = match zone {
            Some(zone) => zones.insert(node.to_owned(), zone.to_owned()),
            None => zones.remove(node),
        };
        if old.as_deref() == zone {
            return;
        }
        let hinted: Vec<_> = self.services.hinted.iter().cloned().collect();
        for name in hinted {
            self.touch_users(&name);
            self.dirty.insert(Owner::Service(name));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn backends(last: &[u8]) -> BTreeSet<Backend> {
        let address = |last: &u8| IpAddr::from([10, 0, 0, *last]);
        let backends = last.iter().map(|last| Backend {
            address: address(last),
            port: 80,
        });
        backends.collect()
    }

    fn hints(of: &[(u8, &[&str], &[&str])]) -> AllHints {
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        of.iter()
            .map(|(last, nodes, zones)| {
                let hints = Hints {
                    nodes: names(nodes),
                    zones: names(zones),
                };
                (IpAddr::from([10, 0, 0, *last]), hints)
            })
            .collect()
    }

    /// Returns the backends of the only port that a droplet is told.
    fn near(
        all: &BTreeSet<Backend>,
        hints: &AllHints,
        (node, zone): (&str, Option<&str>),
    ) -> BTreeSet<Backend> {
        let nearness = Nearness::new([all].into_iter(), hints);
        let place = nearness.place(node, zone);
        nearness.near(0, place).unwrap_or(all).clone()
    }

    #[test]
    fn own_node_comes_before_own_zone_and_all_others() {
        let all = backends(&[1, 2, 3]);
        let hints = hints(&[(1, &["a"], &["x"]), (2, &["b"], &["x"]), (3, &["c"], &["y"])]);
        let near = |node, zone| near(&all, &hints, (node, Some(zone)));
        assert_eq!(near("a", "x"), backends(&[1]));
        assert_eq!(near("d", "x"), backends(&[1, 2]), "nothing on its node");
        assert_eq!(near("d", "z"), all, "nothing in its zone either");
    }

    #[test]
    fn hints_count_only_if_all_backends_have_them() {
        let all = backends(&[1, 2]);
        let some = hints(&[(1, &["a"], &["x"]), (2, &[], &["y"])]);
        assert_eq!(
            near(&all, &some, ("b", Some("y"))),
            backends(&[2]),
            "nodes are ignored"
        );
        assert_eq!(near(&all, &some, ("a", Some("y"))), backends(&[2]));
        let one = hints(&[(1, &["a"], &["x"])]);
        assert_eq!(near(&all, &one, ("a", Some("x"))), all);
        assert_eq!(near(&all, &some, ("a", None)), all, "a node without a zone");
        assert_eq!(near(&backends(&[]), &one, ("a", Some("x"))), backends(&[]));
    }

    #[test]
    fn nodes_that_are_told_the_same_are_one_place() {
        let some = hints(&[(1, &["a", "b"], &["x"]), (2, &[], &["y"])]);
        let all = backends(&[1, 2]);
        let nearness = Nearness::new([&all].into_iter(), &some);
        assert_eq!(nearness.place("a", Some("x")), nearness.place("b", Some("x")));
        assert_eq!(
            nearness.place("c", Some("z")),
            nearness.place("c", None),
            "no hint names z"
        );
    }

    #[test]
    fn hints_for_nodes_that_would_cost_too_many_rows_are_ignored() {
        let names: Vec<String> = (0..8).map(|node| format!("n{node}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let hints = hints(&[(1, &names, &["x"])]);
        let small = backends(&[1]);
        let large = |count: u16| -> BTreeSet<Backend> {
            let backend = |port| Backend {
                address: IpAddr::from([10, 0, 0, 2]),
                port,
            };
            (0..count).map(backend).collect()
        };
        let fits = large((MAX_TOLD / names.len()) as u16);
        let nearness = Nearness::new([&small, &fits].into_iter(), &hints);
        assert_eq!(nearness.place("n1", None).node, Some("n1"));
        let too_many = large((MAX_TOLD / names.len() + 1) as u16);
        let nearness = Nearness::new([&small, &too_many].into_iter(), &hints);
        assert_eq!(nearness.place("n1", None).node, None);
        assert_eq!(
            nearness.place("n1", Some("x")).zone,
            Some("x"),
            "zones still count"
        );
    }
}
