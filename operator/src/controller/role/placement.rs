//! Decides which droplet a role should be on, and whether it should move.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;
use kube::runtime::reflector::ObjectRef;
use thuban_rows::Kind;

use crate::controller::cache::placements::Placed;
use crate::controller::context::Context;
use crate::controller::role::decide::Move;
use crate::controller::role::kind::{Role, roles_of};
use crate::controller::runtime::clocks::Timed;
use crate::hub::{Health, Missing};
use crate::model::droplet::is_accepted;
use crate::model::placement::{Candidate, pick};
use crate::model::world::RoleKind;

/// The label of Nodes that should carry roles; kubelets can't set it.
pub const PREFERENCE: &str = "transit.node-restriction.kubernetes.io/thuban";
/// The label of zones: the roles of one parent spread over its values.
pub const ZONE: &str = "topology.kubernetes.io/zone";

/// The least time between two moves of a role for want of room: there may be no droplet with enough of it.
const FULL_RETRY: Duration = Duration::from_mins(5);
/// The kinds of rows that a role needs room for.
const NEEDED: [Kind; 4] = [Kind::Vpc, Kind::Network, Kind::Bouncer, Kind::Service];

/// Returns what the role's droplet has no room for. Services don't count: a droplet bounds each VPC's share of these
/// tables, so another droplet may refuse them as well.
pub fn without_room<R: Role>(role: &R, droplet: &str, context: &Context) -> Missing {
    context.hub.without_room(|world| {
        let mut tables = role.tables(world, droplet);
        tables.retain(|(_, key)| key.kind() != Kind::Service);
        tables
    })
}

/// Returns the reason why no role serves on the droplet, if there is one.
fn lost(droplet: &str, context: &Context) -> Option<Move> {
    let object = context.stores.droplets.get(&ObjectRef::new(droplet));
    let is_usable = object.is_some_and(|object| is_accepted(&object));
    if !is_usable || !context.hub.read(|world| world.is_droplet(droplet)) {
        return Some(Move::Gone);
    }
    (context.hub.health(droplet) == Health::Suspect).then_some(Move::Suspect)
}

/// Returns the reason why the role should be elsewhere, if there is one.
pub fn should_move<R: Role>(role: &R, context: &Context) -> Option<Move> {
    let Some(droplet) = role.droplet() else {
        return Some(Move::Unplaced);
    };
    if let Some(why) = lost(droplet, context) {
        return Some(why);
    }
    if !without_room(role, droplet, context).is_empty() {
        return Some(Move::Full);
    }
    if context.node(droplet).is_some_and(|node| is_cordoned(&node)) {
        return Some(Move::Cordoned);
    }
    roles_of::<R>(role.parent(), context)
        .iter()
        .any(|other| is_crowding(&**other, role))
        .then_some(Move::Crowded)
}

/// Whether the role must make way for the other one: of two on one droplet, the later by name goes.
fn is_crowding<R: Role>(role: &R, other: &R) -> bool {
    let stays = role.meta().deletion_timestamp.is_none() && role.name_any() < other.name_any();
    stays && role.droplet().is_some() && role.droplet() == other.droplet()
}

/// Returns the siblings of the role that should move because it is where they are.
pub fn crowded_by<R: Role>(role: &R, context: &Context) -> Vec<String> {
    let siblings = roles_of::<R>(role.parent(), context);
    let crowded = siblings.iter().filter(|other| is_crowding(role, &**other));
    crowded.map(|other| other.name_any()).collect()
}

pub fn is_cordoned(node: &Node) -> bool {
    let spec = node.spec.as_ref();
    spec.is_some_and(|spec| spec.unschedulable == Some(true))
}

fn zone(context: &Context, droplet: &str) -> Option<String> {
    let node = context.node(droplet)?;
    node.labels().get(ZONE).cloned()
}

/// Returns the droplets that are accepted and follow this operator.
fn following(context: &Context) -> Vec<String> {
    let mut droplets: Vec<String> = context
        .hub
        .read(|world| world.droplets().map(|(name, _)| name.clone()).collect());
    droplets.retain(|droplet| {
        // An open stream is not enough: the droplet may owe acks for too long.
        context.hub.is_connected(droplet) && context.hub.health(droplet) == Health::Connected
    });
    droplets.retain(|droplet| {
        let object = context.stores.droplets.get(&ObjectRef::new(droplet));
        object.is_some_and(|object| is_accepted(&object))
    });
    droplets
}

/// Returns how many droplets there are for the roles of one parent: those where these roles serve, and those that may
/// get a role now.
pub fn count_places<R: Role>(roles: &[Arc<R>], context: &Context) -> usize {
    let mut open = following(context);
    open.retain(|droplet| {
        let node = context.node(droplet);
        node.is_some_and(|node| !is_cordoned(&node)) && !context.hub.is_full(droplet, &NEEDED)
    });
    let mut places: BTreeSet<&str> = open.iter().map(String::as_str).collect();
    let taken = roles.iter().filter_map(|role| role.droplet());
    places.extend(taken.filter(|droplet| lost(droplet, context).is_none()));
    places.len()
}

/// Picks a droplet for a role that is better than the role's current one, and remembers it until the store shows it.
pub fn place<R: Role>(role: &R, why: Move, context: &Context) -> Option<String> {
    let (name, uid) = (role.name_any(), role.id().uid);
    if why == Move::Full && context.clocks.is_recent(Timed::RoleMoved, uid, FULL_RETRY) {
        return None;
    }
    let mut placements = context.placements.lock();
    let mut crowd = Crowd {
        kind: R::KIND,
        name: &name,
        parent: role.parent(),
        roles: HashMap::new(),
        siblings: Vec::new(),
    };
    let (dividers, bouncers) = (context.stores.dividers.state(), context.stores.bouncers.state());
    crowd.add_stored(&dividers, &placements);
    crowd.add_stored(&bouncers, &placements);
    for (kind, names) in placements.iter() {
        for (name, (parent, droplet)) in names {
            crowd.add(*kind, name, parent, droplet);
        }
    }
    let Crowd { roles, siblings, .. } = crowd;
    let zones: Vec<Option<String>> = siblings.iter().map(|droplet| zone(context, droplet)).collect();
    let candidate = |droplet: &String| {
        let node = context.node(droplet);
        let own_zone = zone(context, droplet);
        let in_zone = |other: &&Option<String>| own_zone.is_some() && **other == own_zone;
        Candidate {
            name: droplet.clone(),
            roles: roles.get(droplet.as_str()).copied().unwrap_or_default(),
            has_sibling: siblings.contains(&droplet.as_str()),
            zone_siblings: zones.iter().filter(in_zone).count(),
            is_preferred: node
                .as_ref()
                .is_some_and(|node| node.labels().contains_key(PREFERENCE)),
            is_cordoned: node.is_none_or(|node| is_cordoned(&node)),
            is_full: context.hub.is_full(droplet, &NEEDED),
        }
    };
    let following = following(context);
    let others = following
        .iter()
        .filter(|droplet| Some(droplet.as_str()) != role.droplet());
    let candidates: Vec<Candidate> = others.map(candidate).collect();
    let picked = pick(&candidates)
        .filter(|picked| why.is_forced() || picked.is_good())?
        .name
        .clone();
    let at = (role.parent().to_owned(), picked.clone());
    placements.entry(R::KIND).or_default().insert(name, at);
    Some(picked)
}

/// The roles that droplets carry already, for one role that looks for a droplet.
struct Crowd<'a> {
    kind: RoleKind,
    name: &'a str,
    parent: &'a str,
    /// Number of roles of any kind, by droplet.
    roles: HashMap<&'a str, usize>,
    /// Droplets of the roles of the same kind and parent.
    siblings: Vec<&'a str>,
}

impl<'a> Crowd<'a> {
    fn add(&mut self, kind: RoleKind, name: &str, parent: &str, droplet: &'a str) {
        if kind == self.kind && name == self.name {
            return;
        }
        *self.roles.entry(droplet).or_default() += 1;
        if kind == self.kind && parent == self.parent {
            self.siblings.push(droplet);
        }
    }

    /// Adds stored roles. Roles that were placed a moment ago count where they were placed.
    fn add_stored<R: Role>(&mut self, stored: &'a [Arc<R>], placements: &Placed) {
        let newer = placements.get(&R::KIND);
        for role in stored {
            let name = role.name_any();
            if let Some(droplet) = role.droplet()
                && newer.is_none_or(|newer| !newer.contains_key(&name))
            {
                self.add(R::KIND, &name, role.parent(), droplet);
            }
        }
    }
}
