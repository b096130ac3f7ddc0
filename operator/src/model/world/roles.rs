//! Dividers and bouncers: which droplets hold the tables of a role, and which of them its users are told of.
//!
//! Invariant: users are told of a droplet only after [`Roles::list`], and its tables stay until the role is set anew:
//! a role is made ready before it is used, and not used any more before it goes.

use std::collections::{BTreeMap, BTreeSet, HashMap};

/// A divider or bouncer as its object says; `parent` is the divider's VPC or the bouncer's network.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Role {
    /// Of its object.
    pub uid: String,
    pub parent: String,
    /// Where its users have it.
    pub serves_on: Option<String>,
    /// Where it should be.
    pub placed_on: Option<String>,
    /// Its object says that users forget it.
    pub is_leaving: bool,
}

/// Which object of a name: a step of one that is gone says nothing of another that was made since.
#[derive(Clone, Copy, Debug)]
pub struct RoleId<'a> {
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
    /// It left and is taken back: its tables are filled again, users are not told yet.
    Returning,
    /// Users have it where it serves.
    Serving,
    /// Users are told of the new place.
    Listed,
    /// Users are told to forget it.
    Leaving,
    /// Its tables are gone; only its object is left.
    Gone,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Placed {
    role: Role,
    stage: Stage,
    /// It is going to leave, which nobody is told yet.
    is_parting: bool,
}

impl Placed {
    fn member(&self) -> Option<&str> {
        match self.stage {
            Stage::Serving => self.role.serves_on.as_deref(),
            Stage::Listed => self.role.placed_on.as_deref(),
            Stage::Returning | Stage::Leaving | Stage::Gone => None,
        }
    }

    fn holders(&self) -> impl Iterator<Item = &str> {
        let is_there = self.stage != Stage::Gone;
        self.role.holders().filter(move |_| is_there)
    }
}

/// All dividers, or all bouncers.
#[derive(Debug, Default)]
pub(super) struct Roles {
    roles: BTreeMap<String, Placed>,
    by_parent: HashMap<String, BTreeSet<String>>,
}

impl Roles {
    /// Answers the parents that are touched.
    pub fn set(&mut self, name: &str, role: Option<Role>) -> Vec<String> {
        let old = self.roles.get(name);
        if old.map(|placed| &placed.role) == role.as_ref() {
            return Vec::new();
        }
        let stage = match (old, &role) {
            (Some(old), _) if old.stage >= Stage::Leaving || old.stage == Stage::Returning => old.stage,
            (Some(old), Some(new)) if old.role.placed_on == new.placed_on => old.stage,
            _ => Stage::Serving,
        };
        let is_parting = old.is_some_and(|old| old.is_parting);
        let mut touched = Vec::new();
        if let Some(old) = self.roles.remove(name) {
            if let Some(names) = self.by_parent.get_mut(&old.role.parent) {
                names.remove(name);
                if names.is_empty() {
                    self.by_parent.remove(&old.role.parent);
                }
            }
            touched.push(old.role.parent);
        }
        if let Some(role) = role {
            touched.push(role.parent.clone());
            let names = self.by_parent.entry(role.parent.clone()).or_default();
            names.insert(name.to_owned());
            let placed = Placed {
                role,
                stage,
                is_parting,
            };
            self.roles.insert(name.to_owned(), placed);
        }
        touched
    }

    /// Users may have it at its new place. Answers its parent, if that changes anything.
    pub fn list(&mut self, id: RoleId) -> Option<String> {
        self.change(id, Stage::Listed)
    }

    /// It is going to leave: nobody counts on it any more, its users have it still.
    pub fn part(&mut self, id: RoleId) {
        if let Some(placed) = self.get_mut(id) {
            placed.is_parting = true;
        }
    }

    /// Users are to forget it. Answers its parent, if that changes anything.
    pub fn leave(&mut self, id: RoleId) -> Option<String> {
        self.change(id, Stage::Leaving)
    }

    /// Its tables go. Answers its parent, if that changes anything.
    pub fn forget(&mut self, id: RoleId) -> Option<String> {
        self.change(id, Stage::Gone)
    }

    /// One that left, or was going to, is needed after all. Answers its parent, if that changes anything.
    pub fn take_back(&mut self, id: RoleId) -> Option<String> {
        let placed = self.get_mut(id)?;
        placed.is_parting = false;
        if placed.stage < Stage::Leaving {
            return None;
        }
        placed.stage = Stage::Returning;
        Some(placed.role.parent.clone())
    }

    /// Whether users are told of it where it should be.
    pub fn is_listed(&self, name: &str) -> bool {
        self.roles.get(name).is_some_and(|placed| {
            let member = placed.member();
            member.is_some() && member == placed.role.placed_on.as_deref()
        })
    }

    /// Whether users were told to forget it.
    pub fn has_left(&self, name: &str) -> bool {
        self.roles
            .get(name)
            .is_some_and(|placed| placed.stage >= Stage::Leaving)
    }

    /// Whether users have another role of the same parent, one that stays, and of which the next leader knows.
    pub fn has_other(&self, name: &str) -> bool {
        let parent = self.roles.get(name).map(|placed| placed.role.parent.as_str());
        let names = parent
            .and_then(|parent| self.by_parent.get(parent))
            .into_iter()
            .flatten();
        let mut others = names
            .filter(|other| *other != name)
            .filter_map(|other| self.roles.get(other));
        others.any(|other| {
            let serves = other.member().is_some() && other.role.serves_on.is_some();
            serves && !other.is_parting && !other.role.is_leaving
        })
    }

    fn get_mut(&mut self, id: RoleId) -> Option<&mut Placed> {
        let placed = self.roles.get_mut(id.name)?;
        (placed.role.uid == id.uid).then_some(placed)
    }

    fn change(&mut self, id: RoleId, stage: Stage) -> Option<String> {
        let placed = self.get_mut(id)?;
        if placed.stage >= stage {
            return None;
        }
        placed.stage = stage;
        Some(placed.role.parent.clone())
    }

    fn of<'a>(&'a self, parent: &str) -> impl Iterator<Item = &'a Placed> {
        let names = self.by_parent.get(parent).into_iter().flatten();
        names.filter_map(|name| self.roles.get(name))
    }

    /// Droplets with tables of the parent's roles.
    pub fn holders<'a>(&'a self, parent: &str) -> BTreeSet<&'a str> {
        self.of(parent).flat_map(Placed::holders).collect()
    }

    /// Droplets that users of the parent's roles are told of.
    pub fn members<'a>(&'a self, parent: &str) -> BTreeSet<&'a str> {
        self.of(parent).filter_map(Placed::member).collect()
    }

    pub fn get(&self, name: &str) -> Option<&Role> {
        self.roles.get(name).map(|placed| &placed.role)
    }

    /// Names of the roles with tables on a droplet.
    pub fn on<'a>(&'a self, droplet: &str) -> impl Iterator<Item = &'a String> {
        self.roles
            .iter()
            .filter(move |(_, placed)| placed.holders().any(|holder| holder == droplet))
            .map(|(name, _)| name)
    }

    /// Parents of the roles with tables on a droplet.
    pub fn parents_on(&self, droplet: &str) -> BTreeSet<String> {
        self.on(droplet)
            .filter_map(|name| self.get(name))
            .map(|role| role.parent.clone())
            .collect()
    }

    pub fn is_parent(&self, parent: &str) -> bool {
        self.of(parent).any(|placed| placed.stage != Stage::Gone)
    }

    /// A copy, for comparison.
    #[cfg(test)]
    pub fn copy(&self) -> Self {
        Self {
            roles: self.roles.clone(),
            by_parent: self.by_parent.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Role, RoleId, Roles};

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
        RoleId { name, uid: "first" }
    }

    fn seen(roles: &Roles) -> (Vec<&str>, Vec<&str>) {
        let members = roles.members("web").into_iter().collect();
        (members, roles.holders("web").into_iter().collect())
    }

    #[test]
    fn a_role_is_ready_before_it_is_listed_and_unlisted_before_it_goes() {
        let mut roles = Roles::default();
        roles.set("web-b0", Some(role(None, "a")));
        assert_eq!(seen(&roles), (vec![], vec!["a"]));
        assert_eq!(roles.list(id("web-b0")).as_deref(), Some("web"));
        assert_eq!(roles.list(id("web-b0")), None);
        roles.set("web-b0", Some(role(Some("a"), "a")));
        assert_eq!(seen(&roles), (vec!["a"], vec!["a"]));
        // It moves.
        roles.set("web-b0", Some(role(Some("a"), "b")));
        assert_eq!(seen(&roles), (vec!["a"], vec!["a", "b"]));
        roles.list(id("web-b0"));
        assert_eq!(seen(&roles), (vec!["b"], vec!["a", "b"]));
        // Its new place is lost on the way: back to the old one.
        roles.set("web-b0", Some(role(Some("a"), "c")));
        assert_eq!(seen(&roles), (vec!["a"], vec!["a", "c"]));
        roles.list(id("web-b0"));
        roles.set("web-b0", Some(role(Some("c"), "c")));
        assert_eq!(seen(&roles), (vec!["c"], vec!["c"]));
        roles.leave(id("web-b0"));
        assert_eq!(seen(&roles), (vec![], vec!["c"]));
        assert_eq!(roles.list(id("web-b0")), None, "there is no way back");
        roles.forget(id("web-b0"));
        roles.set("web-b0", Some(role(Some("c"), "d")));
        assert_eq!(seen(&roles), (vec![], vec![]), "its object may still change");
        assert_eq!(roles.set("web-b0", None), ["web"]);
        assert_eq!(seen(&roles), (vec![], vec![]));
        assert!(!roles.is_parent("web"));
        // What was decided about the one that is gone comes late.
        let another = Role {
            uid: "second".into(),
            ..role(Some("a"), "a")
        };
        roles.set("web-b0", Some(another));
        roles.part(id("web-b0"));
        roles.leave(id("web-b0"));
        roles.forget(id("web-b0"));
        assert_eq!(seen(&roles), (vec!["a"], vec!["a"]));
        assert!(!roles.roles["web-b0"].is_parting);
    }

    #[test]
    fn of_two_that_part_one_stays_and_nobody_counts_on_one_whose_object_leaves() {
        let mut roles = Roles::default();
        roles.set("web-b0", Some(role(Some("a"), "a")));
        roles.set("web-b1", Some(role(Some("b"), "b")));
        roles.part(id("web-b0"));
        assert!(!roles.has_other("web-b1"));
        assert_eq!(seen(&roles), (vec!["a", "b"], vec!["a", "b"]), "users have both");
        assert!(!roles.has_left("web-b0"));
        assert_eq!(roles.take_back(id("web-b0")), None);
        assert!(roles.has_other("web-b1"));
        roles.part(id("web-b0"));
        roles.leave(id("web-b0"));
        assert!(roles.has_left("web-b0"));
        roles.take_back(id("web-b0"));
        assert!(!roles.has_left("web-b0") && !roles.has_other("web-b1"));
        roles.list(id("web-b0"));
        assert!(roles.has_other("web-b1"));
        let leaving = Role {
            is_leaving: true,
            ..role(Some("a"), "a")
        };
        roles.set("web-b0", Some(leaving));
        assert!(!roles.has_other("web-b1"));
        // Users are being told of a third one, of which the next leader knows nothing.
        roles.set("web-b2", Some(role(None, "c")));
        roles.list(id("web-b2"));
        assert!(!roles.has_other("web-b1"));
        roles.set("web-b2", Some(role(Some("c"), "c")));
        assert!(roles.has_other("web-b1"));
    }
}
