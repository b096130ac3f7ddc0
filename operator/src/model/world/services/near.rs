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

/// The place of a droplet's clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place<'a> {
    /// The node, if a hint names it.
    pub node: Option<&'a str>,
    pub zone: Option<&'a str>,
}

/// The names of one kind in a backend's hints.
type Names = fn(&Hints) -> &BTreeSet<String>;

/// Returns those of a port's backends that are near a place: its node's, else its zone's, else all. A kind of hint counts
/// only if all backends have it.
pub(super) fn near(backends: &BTreeSet<Backend>, hints: &AllHints, place: Place) -> BTreeSet<Backend> {
    let kinds: [(Option<&str>, Names); 2] = [
        (place.node, |hints| &hints.nodes),
        (place.zone, |hints| &hints.zones),
    ];
    if hints.is_empty() {
        return backends.clone();
    }
    for (own, names) in kinds {
        let all_have = backends.iter().all(|backend| {
            hints
                .get(&backend.address)
                .is_some_and(|hints| !names(hints).is_empty())
        });
        let Some(own) = own.filter(|_| all_have) else {
            continue;
        };
        let is_near = |backend: &&Backend| {
            let hints = hints.get(&backend.address);
            hints.is_some_and(|hints| names(hints).contains(own))
        };
        let near: BTreeSet<Backend> = backends.iter().filter(is_near).copied().collect();
        if !near.is_empty() {
            return near;
        }
    }
    backends.clone()
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

    fn place<'a>(node: &'a str, zone: &'a str) -> Place<'a> {
        Place {
            node: Some(node),
            zone: Some(zone),
        }
    }

    #[test]
    fn own_node_comes_before_own_zone_and_all_others() {
        let all = backends(&[1, 2, 3]);
        let hints = hints(&[(1, &["a"], &["x"]), (2, &["b"], &["x"]), (3, &["c"], &["y"])]);
        let near = |node, zone| near(&all, &hints, place(node, zone));
        assert_eq!(near("a", "x"), backends(&[1]));
        assert_eq!(near("d", "x"), backends(&[1, 2]), "nothing on its node");
        assert_eq!(near("d", "z"), all, "nothing in its zone either");
    }

    #[test]
    fn hints_count_only_if_all_backends_have_them() {
        let all = backends(&[1, 2]);
        let some = hints(&[(1, &["a"], &["x"]), (2, &[], &["y"])]);
        assert_eq!(
            near(&all, &some, place("b", "y")),
            backends(&[2]),
            "nodes are ignored"
        );
        assert_eq!(near(&all, &some, place("a", "y")), backends(&[2]));
        let one = hints(&[(1, &["a"], &["x"])]);
        assert_eq!(near(&all, &one, place("a", "x")), all);
        let nowhere = Place {
            node: None,
            zone: None,
        };
        assert_eq!(near(&all, &some, nowhere), all, "a node without a zone");
        assert_eq!(near(&backends(&[]), &one, place("a", "x")), backends(&[]));
    }
}
