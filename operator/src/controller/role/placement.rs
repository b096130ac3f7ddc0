//! Decides which droplet a role should be on, and whether it should move.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;
use kube::runtime::reflector::ObjectRef;
use thuban_rows::Kind;

use crate::controller::cache::placements::Site;
use crate::controller::context::Context;
use crate::controller::role::decide::Move;
use crate::controller::role::kind::{Role, roles_of};
use crate::controller::runtime::clocks::Timed;
use crate::hub::{Health, Missing};
use crate::model::droplet::is_accepted;
use crate::model::placement::{Candidate, Hope, pick_ordered};

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

/// Whether roles may be on the droplet: it is accepted and follows this operator. Returns whether it has room for them.
fn follows(droplet: &str, context: &Context) -> Option<bool> {
    let is_full = context.hub.is_follower_full(droplet, &NEEDED)?;
    let object = context.stores.droplets.get(&ObjectRef::new(droplet))?;
    is_accepted(&object).then_some(is_full)
}

/// Returns how many droplets there are for the roles of one parent, but at most `most`: those where these roles serve,
/// and those that may get a role now.
pub fn count_places<R: Role>(roles: &[Arc<R>], most: usize, context: &Context) -> usize {
    let taken = roles.iter().filter_map(|role| role.droplet());
    let taken: BTreeSet<&str> = taken.filter(|droplet| lost(droplet, context).is_none()).collect();
    let placed = context.placements.lock();
    let others = placed.by_load().filter(|(_, droplet)| !taken.contains(droplet));
    let open = others.filter(|(_, droplet)| {
        let node = context.node(droplet);
        node.is_some_and(|node| !is_cordoned(&node)) && follows(droplet, context) == Some(false)
    });
    (taken.len() + open.take(most.saturating_sub(taken.len())).count()).min(most)
}

/// Picks a droplet for a role that is better than the role's current one, and remembers it until the store shows it.
pub fn place<R: Role>(role: &R, why: Move, context: &Context) -> Option<String> {
    let (name, uid) = (role.name_any(), role.id().uid);
    if why == Move::Full && context.clocks.is_recent(Timed::RoleMoved, uid, FULL_RETRY) {
        return None;
    }
    let mut placed = context.placements.lock();
    let siblings: Vec<&str> = placed.siblings(R::KIND, role.parent(), &name).collect();
    let in_zone = |zone: Option<&str>| {
        let zones = siblings.iter().map(|droplet| placed.zone(droplet));
        zones.filter(|other| zone.is_some() && *other == zone).count()
    };
    let hope = Hope {
        zone_siblings: placed.zones().map(in_zone).min().unwrap_or_default(),
        is_preferred: placed.has_preferred(),
    };
    let own = placed.droplet_of(R::KIND, &name);
    let candidate = |(roles, droplet): (usize, &str)| {
        let is_full = follows(droplet, context)?;
        Some(Candidate {
            name: droplet.to_owned(),
            // The role itself doesn't count.
            roles: roles - usize::from(own == Some(droplet)),
            has_sibling: siblings.contains(&droplet),
            zone_siblings: in_zone(placed.zone(droplet)),
            is_preferred: placed.is_preferred(droplet),
            is_cordoned: context.node(droplet).is_none_or(|node| is_cordoned(&node)),
            is_full,
        })
    };
    let others = placed.by_load();
    let others = others.filter(|(_, droplet)| Some(*droplet) != role.droplet());
    let picked = pick_ordered(others.filter_map(candidate), hope)
        .filter(|picked| why.is_forced() || picked.is_good())?
        .name;
    placed.place(R::KIND, (role.parent(), &name), &picked);
    Some(picked)
}

/// Returns what decides of a Node where roles are.
pub fn site(node: &Node) -> Site {
    Site {
        zone: node.labels().get(ZONE).cloned(),
        is_preferred: node.labels().contains_key(PREFERENCE),
    }
}
