//! Dividers and bouncers: the droplets that hold the tables of a role, and the droplets that its users are told of.
//!
//! Invariant: users are told of a droplet only after [`Roles::publish`], and its tables stay until the role is set
//! again. A role is made ready before it is used, and no longer used before it is removed.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;

use super::{EndpointName, Key, Membership, Owner, World, remove_name};

/// A kind of roles. Both kinds have the same life; they differ in their tables and their users.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RoleKind {
    /// Serves a VPC.
    Divider,
    /// Serves a network.
    Bouncer,
}

impl RoleKind {
    /// Returns the kind of the role's objects.
    pub fn name(self) -> &'static str {
        match self {
            Self::Divider => "Divider",
            Self::Bouncer => "Bouncer",
        }
    }
}

impl fmt::Display for RoleKind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

/// A divider or bouncer as its object describes it; `parent` is the divider's VPC or the bouncer's network.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Role {
    /// The UID of the role's object.
    pub uid: String,
    pub parent: String,
    /// The droplet where its users have the role.
    pub serves_on: Option<String>,
    /// The droplet where the role should be.
    pub placed_on: Option<String>,
    /// Its object says that users forget the role.
    pub is_leaving: bool,
}

/// The identity of a role's object: a step of a deleted object says nothing about a later object of the same name.
#[derive(Clone, Copy, Debug)]
pub struct RoleId<'a> {
    pub kind: RoleKind,
    pub name: &'a str,
    pub uid: &'a str,
}

impl Role {
    fn holders(&self) -> impl Iterator<Item = &str> {
        let second = self
            .placed_on
            .as_deref()
            .filter(|placed| self.serves_on.as_deref() != Some(placed));
        self.serves_on.as_deref().into_iter().chain(second)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    /// The role was unpublished and is needed again: its tables are filled again, and users are not told yet.
    Reinstated,
    /// Users have the role where it serves.
    Serving,
    /// Users are told of the new place.
    Published,
    /// Users are told to forget the role.
    Unpublished,
    /// The role's tables are gone; only its object is left.
    Purged,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Placed {
    role: Role,
    stage: Stage,
    /// The role will be unpublished, but no user is told yet.
    is_draining: bool,
}

impl Placed {
    fn member(&self) -> Option<&str> {
        match self.stage {
            Stage::Serving => self.role.serves_on.as_deref(),
            Stage::Published => self.role.placed_on.as_deref(),
            Stage::Reinstated | Stage::Unpublished | Stage::Purged => None,
        }
    }

    /// Returns the droplet that users are told of, unless they may be told to forget it at any moment.
    fn staying(&self) -> Option<&str> {
        self.member()
            .filter(|_| !self.is_draining && !self.role.is_leaving)
    }

    fn holders(&self) -> impl Iterator<Item = &str> {
        let is_there = self.stage != Stage::Purged;
        self.role.holders().filter(move |_| is_there)
    }
}

/// All roles of one kind.
#[derive(Debug, Default)]
pub struct Roles {
    placed: BTreeMap<String, Placed>,
    by_parent: HashMap<String, BTreeSet<String>>,
    /// Roles by the droplets where they are or should be.
    by_droplet: HashMap<String, BTreeSet<String>>,
}

impl Roles {
    /// Sets a role. Returns the parents that are touched.
    pub(super) fn set(&mut self, name: &str, role: Option<Role>) -> Vec<String> {
        let old = self.placed.get(name);
        if old.map(|placed| &placed.role) == role.as_ref() {
            return Vec::new();
        }
        let stage = match (old, &role) {
            (Some(old), _) if old.stage >= Stage::Unpublished || old.stage == Stage::Reinstated => old.stage,
            (Some(old), Some(new)) if old.role.placed_on == new.placed_on => old.stage,
            _ => Stage::Serving,
        };
        let is_draining = old.is_some_and(|old| old.is_draining);
        let mut touched = Vec::new();
        if let Some(old) = self.placed.remove(name) {
            remove_name(&mut self.by_parent, &old.role.parent, name);
            for droplet in old.role.holders() {
                remove_name(&mut self.by_droplet, droplet, name);
            }
            touched.push(old.role.parent);
        }
        if let Some(role) = role {
            touched.push(role.parent.clone());
            let names = self.by_parent.entry(role.parent.clone()).or_default();
            names.insert(name.to_owned());
            for droplet in role.holders() {
                let names = self.by_droplet.entry(droplet.to_owned()).or_default();
                names.insert(name.to_owned());
            }
            let placed = Placed {
                role,
                stage,
                is_draining,
            };
            self.placed.insert(name.to_owned(), placed);
        }
        touched
    }

    /// Lets users have the role at its new place. Returns its parent, if that changes anything.
    pub(super) fn publish(&mut self, id: RoleId) -> Option<String> {
        self.advance(id, Stage::Published)
    }

    /// Notes that the role will be unpublished: nothing counts on it any more, but its users still have it.
    pub(super) fn begin_drain(&mut self, id: RoleId) {
        if let Some(placed) = self.get_mut(id) {
            placed.is_draining = true;
        }
    }

    /// Makes users forget the role; its tables stay. Returns its parent, if that changes anything.
    pub(super) fn unpublish(&mut self, id: RoleId) -> Option<String> {
        self.advance(id, Stage::Unpublished)
    }

    /// Removes the role's tables. Returns its parent, if that changes anything.
    pub(super) fn purge(&mut self, id: RoleId) -> Option<String> {
        self.advance(id, Stage::Purged)
    }

    /// Reinstates a role that was unpublished, or was about to be, and is needed after all. Its tables come back;
    /// [`Self::publish`] tells users of it. Returns its parent, if that changes anything.
    pub(super) fn reinstate(&mut self, id: RoleId) -> Option<String> {
        let placed = self.get_mut(id)?;
        placed.is_draining = false;
        if placed.stage < Stage::Unpublished {
            return None;
        }
        placed.stage = Stage::Reinstated;
        Some(placed.role.parent.clone())
    }

    /// Whether users are told that the role is where it should be.
    pub fn is_published(&self, name: &str) -> bool {
        self.placed.get(name).is_some_and(|placed| {
            let member = placed.member();
            member.is_some() && member == placed.role.placed_on.as_deref()
        })
    }

    /// Whether users were told to forget the role.
    pub fn is_unpublished(&self, name: &str) -> bool {
        self.placed
            .get(name)
            .is_some_and(|placed| placed.stage >= Stage::Unpublished)
    }

    /// Whether the role's tables were removed.
    pub fn is_purged(&self, name: &str) -> bool {
        self.placed
            .get(name)
            .is_some_and(|placed| placed.stage == Stage::Purged)
    }

    /// Whether users have another role of the same parent, which stays and which the next leader knows.
    pub fn has_other(&self, name: &str) -> bool {
        let parent = self.placed.get(name).map(|placed| placed.role.parent.as_str());
        let names = parent
            .and_then(|parent| self.by_parent.get(parent))
            .into_iter()
            .flatten();
        let mut others = names
            .filter(|other| *other != name)
            .filter_map(|other| self.placed.get(other));
        others.any(|other| other.role.serves_on.is_some() && other.staying().is_some())
    }

    fn get_mut(&mut self, id: RoleId) -> Option<&mut Placed> {
        let placed = self.placed.get_mut(id.name)?;
        (placed.role.uid == id.uid).then_some(placed)
    }

    fn advance(&mut self, id: RoleId, stage: Stage) -> Option<String> {
        let placed = self.get_mut(id)?;
        if placed.stage >= stage {
            return None;
        }
        placed.stage = stage;
        Some(placed.role.parent.clone())
    }

    fn of<'a>(&'a self, parent: &str) -> impl Iterator<Item = &'a Placed> {
        let names = self.by_parent.get(parent).into_iter().flatten();
        names.filter_map(|name| self.placed.get(name))
    }

    /// Returns the droplets with tables of the parent's roles.
    pub fn holders<'a>(&'a self, parent: &str) -> BTreeSet<&'a str> {
        self.of(parent).flat_map(Placed::holders).collect()
    }

    /// Returns the droplets that users of the parent's roles are told of. `is_there`: whether a droplet exists. A role
    /// whose new place is gone is used where it serves.
    pub fn members<'a>(&'a self, parent: &str, is_there: impl Fn(&str) -> bool) -> BTreeSet<&'a str> {
        let member = |placed: &'a Placed| {
            let member = placed.member()?;
            if placed.stage == Stage::Published && !is_there(member) {
                return placed.role.serves_on.as_deref();
            }
            Some(member)
        };
        self.of(parent).filter_map(member).collect()
    }

    /// Returns the droplets that a new user of the parent's roles can count on.
    fn staying<'a>(&'a self, parent: &str) -> BTreeSet<&'a str> {
        self.of(parent).filter_map(Placed::staying).collect()
    }

    pub(super) fn get(&self, name: &str) -> Option<&Role> {
        self.placed.get(name).map(|placed| &placed.role)
    }

    /// Yields the names of the roles with tables on a droplet.
    pub(super) fn on<'a>(&'a self, droplet: &str) -> impl Iterator<Item = &'a String> + use<'a> {
        let names = self.by_droplet.get(droplet).into_iter().flatten();
        names.filter(|name| {
            let placed = self.placed.get(*name);
            placed.is_some_and(|placed| placed.stage != Stage::Purged)
        })
    }

    /// Returns the parents of the roles with tables on a droplet.
    pub(super) fn parents_on(&self, droplet: &str) -> BTreeSet<String> {
        self.on(droplet)
            .filter_map(|name| self.get(name))
            .map(|role| role.parent.clone())
            .collect()
    }

    pub(super) fn is_parent(&self, parent: &str) -> bool {
        self.of(parent).any(|placed| placed.stage != Stage::Purged)
    }

    /// Returns a copy, for comparison.
    #[cfg(test)]
    pub(super) fn copy(&self) -> Self {
        Self {
            placed: self.placed.clone(),
            by_parent: self.by_parent.clone(),
            by_droplet: self.by_droplet.clone(),
        }
    }
}

impl World {
    /// Returns all roles of a kind.
    pub fn roles(&self, kind: RoleKind) -> &Roles {
        match kind {
            RoleKind::Divider => &self.dividers,
            RoleKind::Bouncer => &self.bouncers,
        }
    }

    fn roles_mut(&mut self, kind: RoleKind) -> &mut Roles {
        match kind {
            RoleKind::Divider => &mut self.dividers,
            RoleKind::Bouncer => &mut self.bouncers,
        }
    }

    /// Sets a role as its object describes it; none: the object is gone.
    pub fn set_role(&mut self, kind: RoleKind, name: &str, role: Option<Role>) {
        for parent in self.roles_mut(kind).set(name, role) {
            self.touch_tables(kind, &parent);
        }
    }

    /// Publishes a role that is ready at its new place: users may have it there.
    pub fn publish_role(&mut self, id: RoleId) {
        let parent = self.roles_mut(id.kind).publish(id);
        self.touch_published(id.kind, parent);
    }

    /// Notes that the role will be unpublished: nothing counts on it any more, but its users still have it.
    pub fn begin_role_drain(&mut self, id: RoleId) {
        self.roles_mut(id.kind).begin_drain(id);
    }

    /// Makes users forget the role; its tables stay.
    pub fn unpublish_role(&mut self, id: RoleId) {
        let parent = self.roles_mut(id.kind).unpublish(id);
        self.touch_published(id.kind, parent);
    }

    /// Makes an unpublished role serve again: its tables come back, and [`Self::publish_role`] tells users of it.
    pub fn reinstate_role(&mut self, id: RoleId) {
        if let Some(parent) = self.roles_mut(id.kind).reinstate(id) {
            self.touch_tables(id.kind, &parent);
        }
    }

    /// Removes the role's tables.
    pub fn purge_role(&mut self, id: RoleId) {
        if let Some(parent) = self.roles_mut(id.kind).purge(id) {
            self.touch_tables(id.kind, &parent);
        }
    }

    /// Touches the owner of the row that tells users where the parent's roles are.
    fn touch_published(&mut self, kind: RoleKind, parent: Option<String>) {
        self.dirty.extend(parent.map(|parent| published_by(kind, parent)));
    }

    /// Touches the owners of the tables of the parent's roles: other droplets have these tables now.
    fn touch_tables(&mut self, kind: RoleKind, parent: &str) {
        match kind {
            RoleKind::Divider => self.touch_vpc(parent),
            RoleKind::Bouncer => {
                self.touch_network(parent);
                if let Some(network) = self.networks.get(parent) {
                    let vpc = network.vpc.clone();
                    self.touch_services(&vpc);
                }
            }
        }
    }

    /// Touches the roles on a droplet: the droplet's address is in the rows of all of them.
    pub(super) fn touch_roles_on(&mut self, droplet: &str) {
        for kind in [RoleKind::Divider, RoleKind::Bouncer] {
            let parents = self.roles(kind).parents_on(droplet).into_iter();
            self.dirty
                .extend(parents.map(|parent| published_by(kind, parent)));
        }
    }

    /// Returns the roles with tables on a droplet, dividers first.
    pub fn roles_on(&self, droplet: &str) -> Vec<(RoleKind, String)> {
        let on = |kind| self.roles(kind).on(droplet).map(move |name| (kind, name.clone()));
        on(RoleKind::Divider).chain(on(RoleKind::Bouncer)).collect()
    }

    /// Returns the tables of the parent's role on a droplet.
    pub fn role_tables(&self, kind: RoleKind, parent: &str, droplet: &str) -> Vec<(String, Key)> {
        let owners = match kind {
            RoleKind::Divider => self.divider_owners(parent),
            RoleKind::Bouncer => self.bouncer_owners(parent),
        };
        let keys = owners.iter().flat_map(|owner| self.keys_of(owner));
        keys.filter(|(at, key)| at == droplet && !matches!(key, Key::Local(..) | Key::Direct(..)))
            .cloned()
            .collect()
    }

    /// Returns the owners of a divider's tables: its VPC and all networks of the VPC.
    fn divider_owners(&self, vpc: &str) -> Vec<Owner> {
        let owners = self.networks_of(vpc).cloned().map(Owner::Network);
        owners.chain([Owner::Vpc(vpc.to_owned())]).collect()
    }

    /// Returns the owners of a bouncer's tables: its network and VPC, the network's endpoints, and the VPC's services.
    fn bouncer_owners(&self, network: &str) -> Vec<Owner> {
        let members = self.members.get(network).into_iter().flat_map(BTreeMap::values);
        let endpoints = members.flatten().cloned().map(Owner::Endpoint);
        let vpc = self.networks.get(network).map(|network| network.vpc.as_str());
        let services = vpc.into_iter().flat_map(|vpc| self.services_of_vpc(vpc));
        endpoints
            .chain([Owner::Network(network.to_owned())])
            .chain(vpc.map(|vpc| Owner::Vpc(vpc.to_owned())))
            .chain(services.cloned().map(Owner::Service))
            .collect()
    }

    /// Returns the rows that tell users where the parent's roles are.
    pub fn published_rows(&self, kind: RoleKind, parent: &str) -> Vec<(String, Key)> {
        self.keys_of(&published_by(kind, parent.to_owned()))
            .cloned()
            .collect()
    }

    /// Returns the rows by which the listed bouncers, or dividers, pass packets on to an endpoint: those that stay. A
    /// role may leave only while no endpoint uses it, and this endpoint may use it from now on.
    pub fn serving_rows(&self, kind: RoleKind, name: &EndpointName) -> Vec<(String, Key)> {
        let rows = || {
            let endpoint = self.endpoints.get(name)?;
            let Membership::Member(member) = &endpoint.membership else {
                return None;
            };
            let network = self.networks.get(&endpoint.network)?;
            let vni = self.vni(&network.vpc)?;
            let (parent, key) = match kind {
                RoleKind::Divider => (&network.vpc, Key::Vpc(vni)),
                RoleKind::Bouncer => (&endpoint.network, Key::Bouncer(vni, member.address.into())),
            };
            let keys = [Key::Network(vni, network.id), key];
            let staying = self.roles(kind).staying(parent).into_iter();
            let rows = staying.flat_map(|droplet| keys.clone().map(|key| (droplet.to_owned(), key)));
            Some(rows.collect())
        };
        rows().unwrap_or_default()
    }
}

/// Returns the owner of the rows that tell users where the roles of a parent are.
fn published_by(kind: RoleKind, parent: String) -> Owner {
    match kind {
        RoleKind::Divider => Owner::Vpc(parent),
        RoleKind::Bouncer => Owner::Network(parent),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::{Role, RoleId, RoleKind, Roles};

    fn role(serves_on: Option<&str>, placed_on: &str) -> Role {
        Role {
            uid: "first".into(),
            parent: "web".into(),
            serves_on: serves_on.map(str::to_owned),
            placed_on: Some(placed_on.to_owned()),
            is_leaving: false,
        }
    }

    fn id(name: &str) -> RoleId<'_> {
        RoleId {
            kind: RoleKind::Bouncer,
            name,
            uid: "first",
        }
    }

    fn seen(roles: &Roles) -> (Vec<&str>, Vec<&str>) {
        let members = roles.members("web", |_| true).into_iter().collect();
        (members, roles.holders("web").into_iter().collect())
    }

    #[test]
    fn role_is_published_once_ready_and_purged_once_unpublished() {
        let mut roles = Roles::default();
        roles.set("web-b0", Some(role(None, "a")));
        assert_eq!(seen(&roles), (vec![], vec!["a"]));
        assert_eq!(roles.publish(id("web-b0")).as_deref(), Some("web"));
        assert_eq!(roles.publish(id("web-b0")), None);
        roles.set("web-b0", Some(role(Some("a"), "a")));
        assert_eq!(seen(&roles), (vec!["a"], vec!["a"]));
        // The role moves.
        roles.set("web-b0", Some(role(Some("a"), "b")));
        assert_eq!(seen(&roles), (vec!["a"], vec!["a", "b"]));
        roles.publish(id("web-b0"));
        assert_eq!(seen(&roles), (vec!["b"], vec!["a", "b"]));
        // Its new place is lost on the way: the role goes back to the old one.
        roles.set("web-b0", Some(role(Some("a"), "c")));
        assert_eq!(seen(&roles), (vec!["a"], vec!["a", "c"]));
        roles.publish(id("web-b0"));
        roles.set("web-b0", Some(role(Some("c"), "c")));
        assert_eq!(seen(&roles), (vec!["c"], vec!["c"]));
        roles.unpublish(id("web-b0"));
        assert_eq!(seen(&roles), (vec![], vec!["c"]));
        assert_eq!(roles.publish(id("web-b0")), None, "there is no way back");
        roles.purge(id("web-b0"));
        roles.set("web-b0", Some(role(Some("c"), "d")));
        assert_eq!(seen(&roles), (vec![], vec![]), "its object may still change");
        assert_eq!(roles.set("web-b0", None), ["web"]);
        assert_eq!(seen(&roles), (vec![], vec![]));
        assert!(!roles.is_parent("web"));
        // A decision about the deleted role arrives late.
        let another = Role {
            uid: "second".into(),
            ..role(Some("a"), "a")
        };
        roles.set("web-b0", Some(another));
        roles.begin_drain(id("web-b0"));
        roles.unpublish(id("web-b0"));
        roles.purge(id("web-b0"));
        assert_eq!(seen(&roles), (vec!["a"], vec!["a"]));
        assert!(!roles.placed["web-b0"].is_draining);
    }

    #[test]
    fn a_role_whose_new_place_is_gone_is_used_where_it_serves() {
        let mut roles = Roles::default();
        roles.set("web-b0", Some(role(Some("a"), "b")));
        roles.publish(id("web-b0"));
        let members = |roles: &Roles, gone: &str| -> Vec<String> {
            let members = roles.members("web", |droplet| droplet != gone);
            members.into_iter().map(str::to_owned).collect()
        };
        assert_eq!(members(&roles, ""), ["b"]);
        assert_eq!(members(&roles, "b"), ["a"]);
        roles.unpublish(id("web-b0"));
        assert!(members(&roles, "b").is_empty());
    }

    #[test]
    fn role_drains_only_if_another_neither_drains_nor_leaves() {
        let mut roles = Roles::default();
        roles.set("web-b0", Some(role(Some("a"), "a")));
        roles.set("web-b1", Some(role(Some("b"), "b")));
        roles.begin_drain(id("web-b0"));
        assert!(!roles.has_other("web-b1"));
        assert_eq!(seen(&roles), (vec!["a", "b"], vec!["a", "b"]), "users have both");
        assert_eq!(
            roles.staying("web"),
            BTreeSet::from(["b"]),
            "new users count on one"
        );
        assert!(!roles.is_unpublished("web-b0"));
        assert_eq!(roles.reinstate(id("web-b0")), None);
        assert!(roles.has_other("web-b1"));
        roles.begin_drain(id("web-b0"));
        roles.unpublish(id("web-b0"));
        assert!(roles.is_unpublished("web-b0"));
        roles.reinstate(id("web-b0"));
        assert!(!roles.is_unpublished("web-b0") && !roles.has_other("web-b1"));
        roles.publish(id("web-b0"));
        assert!(roles.has_other("web-b1"));
        let leaving = Role {
            is_leaving: true,
            ..role(Some("a"), "a")
        };
        roles.set("web-b0", Some(leaving));
        assert!(!roles.has_other("web-b1"));
        // Users are being told of a third role, of which the next leader knows nothing.
        roles.set("web-b2", Some(role(None, "c")));
        roles.publish(id("web-b2"));
        assert!(!roles.has_other("web-b1"));
        roles.set("web-b2", Some(role(Some("c"), "c")));
        assert!(roles.has_other("web-b1"));
    }
}
