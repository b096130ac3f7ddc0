//! What dividers and bouncers share: placed on a droplet, made ready there before users are told of it, Provisioned
//! once they know; taken from its users before its tables go.
//!
//! Invariants: `status.droplet` is where users have it, and its tables are there until that is written anew.
//! `status.leaving` is written before any user is told to forget it, and gone before any is told of it again: of
//! several that are deleted, the next leader knows which serve.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use kube::runtime::controller::Action;
use kube::runtime::reflector::Store;
use kube::{Api, ResourceExt};
use thuban_api::condition::set;
use thuban_api::{Phase, RoleStatus};

use super::context::{Context, ReconcileError, related};
use super::deletion::few;
use super::objects::{
    Object, WriteError, condition, has_finalizer, remove_finalizer, replace, replace_status,
};
pub use super::pick::Placements;
use super::pick::{Move, place, should_move};
use crate::hub::{Missing, Waiter};
use crate::model::rows::Key;
use crate::model::world::{self, RoleId, World};

/// What waits longer than this says so in a condition.
const PATIENCE: Duration = Duration::from_secs(3);
/// A droplet that has not taken the tables for so long will not.
const REFUSED: Duration = Duration::from_secs(30);
/// Between two looks at what acks should have woken.
const LOOK_AGAIN: Duration = Duration::from_secs(2);
/// One that found no better droplet than a shared or cordoned one looks again so often.
const SPREAD: Duration = Duration::from_secs(20);

/// A divider or a bouncer.
pub trait Role: Object + 'static {
    const KIND: &'static str;
    /// The divider's VPC, the bouncer's network.
    fn parent(&self) -> &str;
    fn droplet(&self) -> Option<&str>;
    fn place_on(&mut self, droplet: String);
    fn status(&self) -> Option<&RoleStatus>;
    fn set_status(&mut self, status: RoleStatus);
    fn all(context: &Context) -> &Store<Self>;
    fn waiter(name: String) -> Waiter;
    /// The rows that the droplet needs to serve.
    fn tables(&self, world: &World, droplet: &str) -> Vec<(String, Key)>;
    /// The rows that tell users where it is.
    fn lists(&self, world: &World) -> Vec<(String, Key)>;
    fn set(world: &mut World, name: &str, role: Option<world::Role>);
    fn list(world: &mut World, id: RoleId);
    fn part(world: &mut World, id: RoleId);
    fn has_left(world: &World, name: &str) -> bool;
    fn leave(world: &mut World, id: RoleId);
    fn take_back(world: &mut World, id: RoleId);
    fn is_listed(world: &World, name: &str) -> bool;
    fn forget(world: &mut World, id: RoleId);
    fn has_other(world: &World, name: &str) -> bool;
    /// Whether somebody may be using its parent's roles.
    fn is_in_use(&self, context: &Context) -> bool;

    fn id(&self) -> RoleId<'_> {
        let meta = self.meta();
        RoleId {
            name: meta.name.as_deref().unwrap_or_default(),
            uid: meta.uid.as_deref().unwrap_or_default(),
        }
    }

    /// Where users have it. Roles of operators that wrote no `status.droplet` serve where they are.
    fn serves_on(&self) -> Option<&str> {
        let status = self.status()?;
        let provisioned = self.droplet().filter(|_| status.phase == Phase::Provisioned);
        status.droplet.as_deref().or(provisioned)
    }

    fn is_leaving(&self) -> bool {
        self.status().is_some_and(|status| status.leaving)
    }

    /// As the world has it.
    fn in_world(&self) -> world::Role {
        world::Role {
            uid: self.uid().unwrap_or_default(),
            parent: self.parent().to_owned(),
            serves_on: self.serves_on().map(str::to_owned),
            placed_on: self.droplet().map(str::to_owned),
            is_leaving: self.is_leaving(),
        }
    }
}

pub async fn reconcile<R: Role>(role: Arc<R>, context: Arc<Context>) -> Result<Action, ReconcileError> {
    let roles: Api<R> = Api::all(context.client.clone());
    let is_deleted = role.meta().deletion_timestamp.is_some();
    if is_deleted && !has_finalizer(&*role) {
        return Ok(Action::await_change());
    }
    if is_deleted {
        match leave(&*role, &roles, &context).await? {
            Leave::Left => return remove(&*role, &roles, &context).await,
            Leave::Later => return Ok(Action::requeue(LOOK_AGAIN)),
            Leave::Unkept => {
                let message = "status.leaving is not kept: kubectl apply -f install/10-crds.yaml";
                return wait(&*role, &roles, &context, ("OldCrd", message.to_owned())).await;
            }
            Leave::Held => {}
        }
    }
    let why = should_move(&*role, &context);
    let is_listed = context.hub.read(|world| R::is_listed(world, &role.name_any()));
    let serves_here = role.status().is_some_and(|status| {
        status.phase == Phase::Provisioned && status.droplet.as_deref() == role.droplet()
    });
    // Others may have left because users are being told of this one: it moves once they know where it is.
    let is_announced = is_listed && !serves_here;
    if let Some(why) = why
        && (why.is_forced() || !is_announced)
        && let Some(droplet) = place(&*role, why, &context)
    {
        return settle_on(&*role, droplet, why, &roles, &context).await;
    }
    let Some(droplet) = role.droplet() else {
        let message = "waits for a droplet that is connected and Accepted: kubectl get droplets";
        return wait(&*role, &roles, &context, ("NoDroplet", message.to_owned())).await;
    };
    let mut status = role.status().cloned().unwrap_or_default();
    if is_listed && serves_here {
        if status.leaving {
            return stay(&*role, &roles).await;
        }
        if is_deleted {
            let message = format!("{} is in use and this is the last that serves it", role.parent());
            return wait(&*role, &roles, &context, ("WaitsForAnother", message)).await;
        }
        context.forget(&waiting_key(&*role));
        return Ok(match why {
            Some(Move::Crowded | Move::Cordoned) => Action::requeue(SPREAD),
            Some(_) => Action::requeue(LOOK_AGAIN),
            None => Action::await_change(),
        });
    }
    let name = role.name_any();
    let tables = context.hub.read(|world| role.tables(world, droplet));
    let missing = context
        .hub
        .missing(&tables, Some(droplet), &R::waiter(name.clone()));
    if tables.is_empty() || !missing.is_empty() {
        // Without a parent there are no tables to refuse.
        let has_time = context.known_for(&waiting_key(&*role)) <= REFUSED;
        if !tables.is_empty()
            && !has_time
            && !is_announced
            && let Some(other) = place(&*role, Move::Refused, &context)
        {
            context.forget(&waiting_key(&*role));
            return settle_on(&*role, other, Move::Refused, &roles, &context).await;
        }
        let message = format!("waits until droplet {droplet} has its tables");
        let told = outdated(&missing).unwrap_or(("Filling", message));
        return wait(&*role, &roles, &context, told).await;
    }
    // First all take what it passes on, then they use it: a packet may be faster than the news.
    let unaware = || {
        let lists = context.hub.read(|world| role.lists(world));
        let waiter = R::waiter(name.clone());
        context.hub.missing(&lists, Some(droplet), &waiter)
    };
    let mut missing = unaware();
    if missing.is_empty() {
        if status.leaving {
            return stay(&*role, &roles).await;
        }
        context.hub.update(|world| R::list(world, role.id()));
        missing = unaware();
    }
    if !missing.is_empty() {
        let message = format!("waits until these droplets know of it: {}", few(&missing.unacked));
        let told = outdated(&missing).unwrap_or(("Announcing", message));
        return wait(&*role, &roles, &context, told).await;
    }
    status.phase = Phase::Provisioned;
    let moved_from = status.droplet.replace(droplet.to_owned());
    let message = "its tables are there and all droplets concerned know of it";
    let ready = condition("Ready", true, "Acknowledged", message, role.meta().generation);
    set(&mut status.conditions, ready);
    context.forget(&waiting_key(&*role));
    if role.status() == Some(&status) {
        // It was taken back where it was.
        return Ok(Action::requeue(LOOK_AGAIN));
    }
    write(&*role, &roles, status).await?;
    let note = match moved_from {
        Some(old) => format!("works on droplet {droplet}, no more on {old}"),
        None => format!("works on droplet {droplet}"),
    };
    let place = related("Droplet", droplet);
    context.events.event_with(&*role, place, "Provisioned", &note);
    Ok(Action::await_change())
}

/// What is told of droplets whose transitd is to be upgraded, if that is what it waits for.
fn outdated(missing: &Missing) -> Option<(&'static str, String)> {
    let is_so = !missing.outdated.is_empty();
    is_so.then(|| (missing.reason(), missing.message()))
}

async fn settle_on<R: Role>(
    role: &R,
    droplet: String,
    why: Move,
    roles: &Api<R>,
    context: &Context,
) -> Result<Action, ReconcileError> {
    let mut placed = role.clone();
    placed.place_on(droplet.clone());
    if let Err(error) = replace(roles, &placed).await {
        context.placements.forget(R::KIND, &role.name_any());
        return Err(error.into());
    }
    let note = match role.droplet() {
        Some(old) => format!("placed on droplet {droplet} instead of {old}"),
        None => format!("placed on droplet {droplet}"),
    };
    let place = related("Droplet", &droplet);
    context.events.event_with(role, place, why.reason(), &note);
    Ok(Action::await_change())
}

fn waiting_key<R: Role>(role: &R) -> String {
    format!("{}/{}", R::KIND, role.uid().unwrap_or_default())
}

/// Says what it waits for, if it has waited for a while.
async fn wait<R: Role>(
    role: &R,
    roles: &Api<R>,
    context: &Context,
    (reason, message): (&str, String),
) -> Result<Action, ReconcileError> {
    if context.known_for(&waiting_key(role)) < PATIENCE {
        return Ok(Action::requeue(PATIENCE));
    }
    let kind = if role.meta().deletion_timestamp.is_some() {
        "Deleting"
    } else {
        "Ready"
    };
    let mut status = role.status().cloned().unwrap_or_default();
    if set(
        &mut status.conditions,
        condition(kind, false, reason, &message, role.meta().generation),
    ) {
        write(role, roles, status).await?;
    }
    Ok(Action::requeue(LOOK_AGAIN))
}

async fn write<R: Role>(role: &R, roles: &Api<R>, status: RoleStatus) -> Result<R, WriteError> {
    let mut changed = role.clone();
    changed.set_status(status);
    replace_status(roles, &changed).await
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Leave {
    /// Its users are told to forget it.
    Left,
    /// It is the last that they have.
    Held,
    /// What its object says is not seen yet.
    Later,
    /// The API server does not keep that it leaves.
    Unkept,
}

/// Takes a role that is deleted from its users, unless it is the last that they have.
async fn leave<R: Role>(role: &R, roles: &Api<R>, context: &Context) -> Result<Leave, WriteError> {
    let name = role.name_any();
    let is_in_use = role.is_in_use(context);
    // Decided in one step, so that of two that leave at the same time one stays.
    let known = context.hub.update(|world| {
        let has_left = R::has_left(world, &name);
        if !is_in_use || R::has_other(world, &name) {
            R::part(world, role.id());
            return (has_left && role.is_leaving()).then_some(Leave::Left);
        }
        if has_left && !role.is_leaving() {
            return Some(Leave::Later);
        }
        R::take_back(world, role.id());
        Some(Leave::Held)
    });
    let mut status = role.status().cloned().unwrap_or_default();
    match known {
        // Not seen yet, or taken away by another leader: a write that changes nothing tells.
        Some(Leave::Later) => match write(role, roles, status).await {
            Ok(_) => {
                context.hub.update(|world| R::take_back(world, role.id()));
                return Ok(Leave::Held);
            }
            Err(error) if error.is_conflict() => return Ok(Leave::Later),
            Err(error) => return Err(error),
        },
        Some(known) => return Ok(known),
        None => {}
    }
    status.leaving = true;
    let written = match write(role, roles, status).await {
        Err(error) if error.is_conflict() => return Ok(Leave::Later),
        written => written?,
    };
    if !written.is_leaving() {
        return Ok(Leave::Unkept);
    }
    context.hub.update(|world| R::leave(world, role.id()));
    Ok(Leave::Left)
}

/// One that left, or was going to, is needed after all, and ready: as the next leader is to know it.
async fn stay<R: Role>(role: &R, roles: &Api<R>) -> Result<Action, ReconcileError> {
    let mut status = role.status().cloned().unwrap_or_default();
    status.leaving = false;
    write(role, roles, status).await?;
    Ok(Action::requeue(LOOK_AGAIN))
}

/// Before a new leader serves anybody: the one before may have taken their tables away already.
pub fn leave_those_leaving<R: Role>(context: &Context) {
    for role in R::all(context).state() {
        if role.meta().deletion_timestamp.is_some() && role.is_leaving() && has_finalizer(&*role) {
            context.hub.update(|world| R::leave(world, role.id()));
        }
    }
}

/// From its users first, then its tables, then the object.
async fn remove<R: Role>(role: &R, roles: &Api<R>, context: &Context) -> Result<Action, ReconcileError> {
    let name = role.name_any();
    let lists = context.hub.read(|world| role.lists(world));
    // Those that don't understand its rows never used it.
    let users = context
        .hub
        .missing(&lists, None, &R::waiter(name.clone()))
        .unacked;
    if !users.is_empty() {
        let message = format!("waits until these droplets use it no more: {}", few(&users));
        return wait(role, roles, context, ("WaitsForUsers", message)).await;
    }
    context.hub.update(|world| R::forget(world, role.id()));
    let droplets = role.serves_on().into_iter().chain(role.droplet());
    let holders: BTreeSet<String> = droplets.map(str::to_owned).collect();
    let unsettled = context.hub.unsettled(&holders, &R::waiter(name));
    if !unsettled.is_empty() {
        let message = format!("waits until its tables are gone from {}", few(&unsettled));
        return wait(role, roles, context, ("WaitsForTables", message)).await;
    }
    remove_finalizer(roles, role).await?;
    context.forget(&waiting_key(role));
    Ok(Action::await_change())
}
