//! The mirror of the maps: what an address has in them.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use thuban_common::services::{BackendEntry, FRONTS, ServiceEntry, ServiceKey};

use super::super::maglev;
use super::super::quota::Usage;
use super::wanted::{Target, WantedPort};

/// The entries of one address.
#[derive(Debug, Default)]
pub(super) struct Address {
    /// The address has its own entry (port 0), which says that the address is known.
    pub(super) has_own: bool,
    /// The number of ports with backends that the own entry names, only of a front.
    pub(super) fronted_ports: u32,
    pub(super) payer: u32,
    /// See [`Wanted::service`]; empty after a start, until the front is written.
    pub(super) service: String,
    pub(super) ports: HashMap<ServiceKey, Held>,
}

/// The tables of a port: the one in use, and of a front the one before the last change of its backends.
#[derive(Debug)]
pub(super) struct Held {
    pub(super) now: Table,
    pub(super) former: Option<Table>,
}

/// A table's entry and its backends by index.
#[derive(Clone, Debug)]
pub(super) struct Table {
    pub(super) entry: ServiceEntry,
    pub(super) targets: BTreeMap<u32, Target>,
    /// Those of them that have no slots, but are still the former backends of some. After a start they are forgotten.
    pub(super) resting: BTreeSet<BackendEntry>,
}

impl Address {
    pub(super) fn rows(&self) -> Usage {
        let own = if self.has_own {
            Usage::OWN
        } else {
            Usage::default()
        };
        let ports = self.ports.iter().map(|(key, held)| held.rows(key.vni));
        ports.fold(own, Usage::plus)
    }

    /// Returns the VNI of a front's backends.
    pub(super) fn vni(&self) -> Option<u32> {
        let tables = self.ports.values().flat_map(Held::tables);
        let mut homes = tables.flat_map(|table| table.targets.values().filter_map(|target| target.home));
        homes.next().map(|(vni, _)| vni)
    }
}

impl Held {
    pub(super) fn tables(&self) -> impl Iterator<Item = &Table> {
        std::iter::once(&self.now).chain(&self.former)
    }

    /// Returns the rows of the tables, of an address in a VPC or of a front.
    pub(super) fn rows(&self, vni: u32) -> Usage {
        let former = self.former.as_ref().map(|former| former.targets.len());
        rows(vni, self.now.targets.len(), former)
    }

    /// Returns the index of each backend of both tables.
    pub(super) fn indexes(&self) -> BTreeMap<Target, u32> {
        let both = self.tables().flat_map(|table| &table.targets);
        both.map(|(index, target)| (*target, *index)).collect()
    }
}

impl Table {
    pub(super) fn targets(&self) -> BTreeSet<Target> {
        self.targets.values().copied().collect()
    }

    /// Whether the table has the backends that a port is to have, and the same of them get no new connections.
    pub(super) fn leads_as(&self, port: &WantedPort) -> bool {
        self.targets() == port.targets && self.resting == port.resting
    }

    pub(super) fn indexes(&self) -> impl Iterator<Item = u32> {
        self.targets.keys().copied()
    }

    /// Whether a packet has the same slot of both tables, if they have as many.
    pub(super) fn hashes_as(&self, other: &Self) -> bool {
        (self.entry.affinity == 0) == (other.entry.affinity == 0)
    }
}

/// Returns the index of the backend of each slot of a table.
pub(super) fn slots(of: &Table) -> Vec<u16> {
    let places = of.targets.iter();
    let places = places.map(|(index, target)| (target.backend, *index));
    let mut places: Vec<(BackendEntry, u32)> = places
        .filter(|(backend, _)| !of.resting.contains(backend))
        .collect();
    places.sort_unstable();
    let backends: Vec<BackendEntry> = places.iter().map(|(backend, _)| *backend).collect();
    let slots = maglev::table(&backends, of.entry.slots).into_iter();
    let index = |slot: u32| places.get(slot as usize).map_or(0, |(_, index)| *index as u16);
    slots.map(index).collect()
}

/// Returns the rows of a port with so many backends. A front's port has the table before the last change, too. Both
/// count as large as the larger one, so that a change of backends never lacks room.
pub(super) fn rows(vni: u32, backends: usize, former: Option<usize>) -> Usage {
    if vni == FRONTS {
        let most = Usage::of_front(backends.max(former.unwrap_or_default()));
        most.plus(most)
    } else {
        Usage::of_port(backends)
    }
}
