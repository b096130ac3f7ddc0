//! Where roles are, as the store shows it or as they were placed a moment ago, and how many each droplet carries.
//!
//! Invariant: droplets are kept in the order of their number of roles, so that a role finds a droplet without going
//! through all of them.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::controller::cache::index::set_member;
use crate::model::world::RoleKind;

/// The kind and the name of a role, or the name of its parent.
type RoleName = (RoleKind, String);

/// A Node's labels as far as they decide where roles are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Site {
    pub zone: Option<String>,
    /// The Node is labelled for transit.
    pub is_preferred: bool,
}

#[derive(Debug, Default)]
pub struct Placed {
    /// The droplets of roles by their stored objects.
    stored: HashMap<RoleName, String>,
    /// The droplets of roles that were placed a moment ago, which their store may not show yet.
    recent: HashMap<RoleName, String>,
    /// The names of the roles of each parent that are somewhere.
    siblings: HashMap<RoleName, BTreeSet<String>>,
    /// Known droplets, and those that carry roles, each with the number of its roles.
    carried: HashMap<String, usize>,
    /// The same droplets, those with the fewest roles first.
    order: BTreeSet<(usize, String)>,
    known: BTreeSet<String>,
    sites: HashMap<String, Site>,
    /// How many Nodes each zone has.
    zones: HashMap<Option<String>, usize>,
    preferred: usize,
}

/// The droplets that carry roles, and where they are.
#[derive(Debug, Default)]
pub struct Placements(Mutex<Placed>);

impl Placed {
    /// Returns where a role is, or will be soon.
    pub fn droplet_of(&self, kind: RoleKind, name: &str) -> Option<&str> {
        let name = (kind, name.to_owned());
        let droplet = self.recent.get(&name).or_else(|| self.stored.get(&name));
        droplet.map(String::as_str)
    }

    /// Yields the droplets of the other roles of a parent.
    pub fn siblings(&self, kind: RoleKind, parent: &str, name: &str) -> impl Iterator<Item = &str> {
        let names = self
            .siblings
            .get(&(kind, parent.to_owned()))
            .into_iter()
            .flatten();
        names
            .filter(move |sibling| *sibling != name)
            .filter_map(move |sibling| self.droplet_of(kind, sibling))
    }

    /// Yields the droplets with their number of roles, those with the fewest first, then by name.
    pub fn by_load(&self) -> impl Iterator<Item = (usize, &str)> {
        self.order.iter().map(|(roles, name)| (*roles, name.as_str()))
    }

    pub fn zone(&self, droplet: &str) -> Option<&str> {
        self.sites.get(droplet)?.zone.as_deref()
    }

    pub fn is_preferred(&self, droplet: &str) -> bool {
        self.sites.get(droplet).is_some_and(|site| site.is_preferred)
    }

    /// Whether any Node is labelled for transit.
    pub fn has_preferred(&self) -> bool {
        self.preferred > 0
    }

    /// Yields the zones that have Nodes; none: that of Nodes without one.
    pub fn zones(&self) -> impl Iterator<Item = Option<&str>> {
        self.zones.keys().map(Option::as_deref)
    }

    /// Remembers where a role was placed until its store shows it.
    pub fn place(&mut self, kind: RoleKind, (parent, name): (&str, &str), droplet: &str) {
        self.change(kind, (parent, name), |placed, role| {
            placed.recent.insert(role, droplet.to_owned());
        });
    }

    fn change(
        &mut self,
        kind: RoleKind,
        (parent, name): (&str, &str),
        change: impl FnOnce(&mut Self, RoleName),
    ) {
        let old = self.droplet_of(kind, name).map(str::to_owned);
        change(self, (kind, name.to_owned()));
        let new = self.droplet_of(kind, name).map(str::to_owned);
        if old == new {
            return;
        }
        let parent = (kind, parent.to_owned());
        set_member(&mut self.siblings, parent, name.to_owned(), new.is_some());
        if let Some(old) = old {
            let roles = self.carried.get(&old).copied().unwrap_or_default();
            self.count(&old, roles.saturating_sub(1));
        }
        if let Some(new) = new {
            let roles = self.carried.get(&new).copied().unwrap_or_default();
            self.count(&new, roles + 1);
        }
    }

    /// Sets the number of a droplet's roles. A droplet that is not known is left out once it has none.
    fn count(&mut self, droplet: &str, roles: usize) {
        if let Some(old) = self.carried.remove(droplet) {
            self.order.remove(&(old, droplet.to_owned()));
        }
        if roles > 0 || self.known.contains(droplet) {
            self.carried.insert(droplet.to_owned(), roles);
            self.order.insert((roles, droplet.to_owned()));
        }
    }

    fn count_site(&mut self, site: &Site, is_there: bool) {
        let add = |number: &mut usize| {
            *number = if is_there {
                *number + 1
            } else {
                number.saturating_sub(1)
            };
        };
        let nodes = self.zones.entry(site.zone.clone()).or_default();
        add(nodes);
        if *nodes == 0 {
            self.zones.remove(&site.zone);
        }
        if site.is_preferred {
            add(&mut self.preferred);
        }
    }
}

impl Placements {
    pub fn lock(&self) -> MutexGuard<'_, Placed> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes where a role is by its object; none: its object has no droplet, or is gone. Roles are named by their
    /// parent and their name.
    pub fn store(&self, kind: RoleKind, role: (&str, &str), droplet: Option<&str>) {
        self.lock().change(kind, role, |placed, role| {
            match droplet {
                Some(droplet) => placed.stored.insert(role, droplet.to_owned()),
                None => placed.stored.remove(&role),
            };
        });
    }

    /// Forgets where a role was placed: the store shows its place, or it is gone.
    pub fn forget(&self, kind: RoleKind, role: (&str, &str)) {
        self.lock().change(kind, role, |placed, role| {
            placed.recent.remove(&role);
        });
    }

    /// Notes whether there is a Droplet.
    pub fn droplet(&self, name: &str, is_there: bool) {
        let placed = &mut *self.lock();
        let is_news = if is_there {
            placed.known.insert(name.to_owned())
        } else {
            placed.known.remove(name)
        };
        if is_news {
            let roles = placed.carried.get(name).copied().unwrap_or_default();
            placed.count(name, roles);
        }
    }

    /// Notes what decides of a Node; none: the Node is gone.
    pub fn node(&self, name: &str, site: Option<Site>) {
        let placed = &mut *self.lock();
        if placed.sites.get(name) == site.as_ref() {
            return;
        }
        if let Some(site) = &site {
            placed.count_site(site, true);
        }
        let old = match site {
            Some(site) => placed.sites.insert(name.to_owned(), site),
            None => placed.sites.remove(name),
        };
        if let Some(old) = old {
            placed.count_site(&old, false);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIND: RoleKind = RoleKind::Bouncer;
    /// A parent and one of its roles.
    const ONE: (&str, &str) = ("web", "one");

    fn by_load(placements: &Placements) -> Vec<(usize, String)> {
        let placed = placements.lock();
        placed
            .by_load()
            .map(|(roles, name)| (roles, name.to_owned()))
            .collect()
    }

    fn wanted(droplets: &[(usize, &str)]) -> Vec<(usize, String)> {
        let droplets = droplets.iter();
        droplets
            .map(|(roles, name)| (*roles, (*name).to_owned()))
            .collect()
    }

    #[test]
    fn a_role_counts_once_where_it_was_placed_last() {
        let placements = Placements::default();
        for droplet in ["a", "b", "c"] {
            placements.droplet(droplet, true);
        }
        placements.store(KIND, ONE, Some("a"));
        placements.store(RoleKind::Divider, ONE, Some("a"));
        assert_eq!(by_load(&placements), wanted(&[(0, "b"), (0, "c"), (2, "a")]));
        placements.lock().place(KIND, ONE, "b");
        assert_eq!(by_load(&placements), wanted(&[(0, "c"), (1, "a"), (1, "b")]));
        assert_eq!(placements.lock().droplet_of(KIND, "one"), Some("b"));
        // The store shows an older place for a moment.
        placements.store(KIND, ONE, Some("c"));
        assert_eq!(by_load(&placements), wanted(&[(0, "c"), (1, "a"), (1, "b")]));
        placements.forget(KIND, ONE);
        assert_eq!(by_load(&placements), wanted(&[(0, "b"), (1, "a"), (1, "c")]));
        placements.droplet("c", false);
        placements.droplet("b", false);
        assert_eq!(by_load(&placements), wanted(&[(1, "a"), (1, "c")]));
        placements.store(KIND, ONE, None);
        placements.store(RoleKind::Divider, ONE, None);
        assert_eq!(by_load(&placements), wanted(&[(0, "a")]));
        let placed = placements.lock();
        assert!(placed.stored.is_empty() && placed.recent.is_empty() && placed.siblings.is_empty());
    }

    #[test]
    fn roles_that_no_store_shows_yet_are_siblings() {
        let placements = Placements::default();
        let siblings = |name: &str| {
            let placed = placements.lock();
            let siblings = placed.siblings(KIND, "web", name).map(str::to_owned);
            siblings.collect::<Vec<_>>()
        };
        placements.lock().place(KIND, ONE, "a");
        placements.store(KIND, ("web", "two"), Some("b"));
        placements.store(KIND, ("db", "three"), Some("c"));
        placements.store(RoleKind::Divider, ("web", "four"), Some("d"));
        assert_eq!(
            (siblings("one"), siblings("two")),
            (vec!["b".to_owned()], vec!["a".to_owned()])
        );
        placements.store(KIND, ONE, Some("a"));
        placements.forget(KIND, ONE);
        assert_eq!(siblings(""), ["a", "b"]);
        placements.store(KIND, ("web", "two"), None);
        assert_eq!(siblings(""), ["a"]);
    }

    #[test]
    fn zones_and_labels_last_as_long_as_their_nodes() {
        let placements = Placements::default();
        let site = |zone: &str, is_preferred| {
            Some(Site {
                zone: Some(zone.to_owned()),
                is_preferred,
            })
        };
        placements.node("a", site("east", true));
        placements.node("b", site("east", false));
        placements.node("a", site("west", true));
        let zones = |placements: &Placements| {
            let placed = placements.lock();
            let mut zones: Vec<_> = placed.zones().map(|zone| zone.map(str::to_owned)).collect();
            zones.sort();
            zones
        };
        assert_eq!(
            zones(&placements),
            [Some("east".to_owned()), Some("west".to_owned())]
        );
        assert!(placements.lock().has_preferred() && placements.lock().is_preferred("a"));
        placements.node("a", None);
        placements.node("b", Some(Site::default()));
        assert_eq!(zones(&placements), [None]);
        assert!(!placements.lock().has_preferred());
    }
}
