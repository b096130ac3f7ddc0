//! The workflow that dividers and bouncers share. A role is placed on a droplet, is made ready there before users are
//! told of it, and is Provisioned once they know. It is taken from its users before its tables are removed.
//!
//! Invariants: `status.droplet` is the droplet where users have the role, and its tables stay there until that field
//! changes, which is [`IN_FLIGHT`] after its users know. `status.leaving` is written before any user is told to forget
//! the role, and removed before any user is told of it again: of several roles that are deleted, the next leader knows
//! which serve.

mod bouncer;
mod decide;
mod divider;
pub mod kind;
pub mod placement;
pub mod role_set;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use kube::runtime::controller::Action;
use kube::{Api, ResourceExt};
use thuban_api::condition::{find, set};
use thuban_api::{Condition, Phase, RoleStatus};

use crate::controller::context::{Context, related};
use crate::controller::deletion::join_first;
use crate::controller::role::decide::{
    Leaving, LeavingView, Move, Step, Tables, View, decide, decide_leaving,
};
use crate::controller::role::kind::Role;
use crate::controller::role::placement::{place, should_move, without_room};
use crate::controller::runtime::clocks::Timed;
use crate::controller::runtime::error::ReconcileError;
use crate::controller::runtime::objects::{
    WriteError, condition, has_finalizer, remove_finalizer, update, update_status,
};
use crate::hub::{Barrier, Missing, TABLE_FULL};

/// How long a role waits before a condition says so.
const CONDITION_DELAY: Duration = Duration::from_secs(3);
/// How long a droplet may take to ack the tables; after that the operator expects no ack.
const TABLES_TIMEOUT: Duration = Duration::from_secs(30);
/// How long the workflow waits for a change of which acks should have woken it.
const ACK_RETRY: Duration = Duration::from_secs(2);
/// How long a role's tables stay where no droplet sends to any more: packets may still wait in the queues of links and
/// CPUs.
const IN_FLIGHT: Duration = Duration::from_secs(1);
/// How often a role on a shared or cordoned droplet looks for a better one.
const SPREAD_RETRY: Duration = Duration::from_secs(20);

pub async fn reconcile<R: Role>(role: Arc<R>, context: Arc<Context>) -> Result<Action, ReconcileError> {
    let roles: Api<R> = Api::all(context.client.clone());
    let is_deleted = role.meta().deletion_timestamp.is_some();
    if is_deleted && !has_finalizer(&*role) {
        return Ok(Action::await_change());
    }
    if is_deleted {
        match leave(&*role, &roles, &context).await? {
            Leave::Left => return remove(&*role, &roles, &context).await,
            Leave::Later => return Ok(Action::requeue(ACK_RETRY)),
            Leave::Unkept => {
                let message =
                    "the CRDs are too old to keep status.leaving: kubectl apply -f install/10-crds.yaml";
                return wait(&*role, &roles, &context, ("OldCrd", message.to_owned())).await;
            }
            Leave::Held => {}
        }
    }
    let view = View {
        droplet: role.droplet(),
        why: should_move(&*role, &context),
        is_published: context
            .hub
            .read(|world| world.roles(R::KIND).is_published(&role.name_any())),
        serves_here: role.status().is_some_and(|status| {
            status.phase == Phase::Provisioned && status.droplet.as_deref() == role.droplet()
        }),
        is_leaving: role.is_leaving(),
        is_deleted,
    };
    if let Some(why) = view.wants_to_move()
        && let Some(droplet) = place(&*role, why, &context)
    {
        return place_on(&*role, droplet, why, &roles, &context).await;
    }
    let step = decide(
        view,
        || tables_of(&*role, &context),
        || uninformed(&*role, &context),
    );
    take(step, &*role, &roles, &context).await
}

fn tables_of<R: Role>(role: &R, context: &Context) -> Tables {
    let droplet = role.droplet().unwrap_or_default();
    let tables = context.hub.read(|world| role.tables(world, droplet));
    let is_unknown = tables.is_empty();
    let barrier = Barrier::new(role.waiter())
        .has(tables)
        .never_excuses(Some(droplet));
    let what = context.hub.missing(&barrier);
    if is_unknown {
        Tables::Unknown
    } else if what.is_empty() {
        Tables::There
    } else {
        let waited = context.clocks.known_for(Timed::RoleWait, role.id().uid);
        Tables::Missing {
            what,
            is_overdue: waited > TABLES_TIMEOUT,
        }
    }
}

/// Returns the droplets that don't know yet where the role is.
fn uninformed<R: Role>(role: &R, context: &Context) -> Missing {
    let rows = context.hub.read(|world| role.published_rows(world));
    let barrier = Barrier::new(role.waiter())
        .has(rows)
        .never_excuses(role.droplet());
    context.hub.missing(&barrier)
}

/// Does the step that was decided.
async fn take<R: Role>(
    step: Step,
    role: &R,
    roles: &Api<R>,
    context: &Context,
) -> Result<Action, ReconcileError> {
    let droplet = role.droplet().unwrap_or_default();
    let (reason, message) = match step {
        Step::WaitForDroplet => {
            let message = "waits for a droplet that is connected and Accepted: kubectl get droplets";
            ("NoDroplet", message.to_owned())
        }
        Step::Reinstate => return stay(role, roles).await,
        Step::WaitForAnother => {
            let message = format!("{} is in use and this is the last that serves it", role.parent());
            ("WaitsForAnother", message)
        }
        Step::Rest(why) => {
            context.clocks.forget(Timed::RoleWait, role.id().uid);
            say_room(role, droplet, roles, context).await?;
            return Ok(match why {
                Some(Move::Crowded | Move::Cordoned | Move::Full) => Action::requeue(SPREAD_RETRY),
                Some(_) => Action::requeue(ACK_RETRY),
                None => Action::await_change(),
            });
        }
        Step::LeaveDroplet(missing) => {
            let why = if missing.full.is_empty() {
                Move::Refused
            } else {
                Move::Full
            };
            if let Some(other) = place(role, why, context) {
                context.clocks.forget(Timed::RoleWait, role.id().uid);
                return place_on(role, other, why, roles, context).await;
            }
            filling(droplet, &missing)
        }
        Step::WaitForTables(missing) => filling(droplet, &missing),
        Step::WaitForUsers(missing) => {
            return wait_for_users(role, roles, context, announcing(&missing)).await;
        }
        Step::Publish => {
            context.hub.update(|world| world.publish_role(role.id()));
            let missing = uninformed(role, context);
            if missing.is_empty() {
                let has_moved = role.serves_on().is_some_and(|before| before != droplet);
                return match in_flight(role, context).filter(|_| has_moved) {
                    Some(left) => Ok(Action::requeue(left)),
                    None => finish(role, droplet, roles, context).await,
                };
            }
            return wait_for_users(role, roles, context, announcing(&missing)).await;
        }
    };
    wait(role, roles, context, (reason, message)).await
}

/// Returns for how much longer packets may arrive where no droplet sends any more.
fn in_flight<R: Role>(role: &R, context: &Context) -> Option<Duration> {
    context
        .clocks
        .remaining(Timed::RoleUnused, role.id().uid, IN_FLIGHT)
}

fn filling(droplet: &str, missing: &Missing) -> (&'static str, String) {
    let message = format!("waits until droplet {droplet} has its tables");
    remedy_or(missing, ("Filling", message))
}

fn announcing(missing: &Missing) -> (&'static str, String) {
    let names = join_first(&missing.unacked);
    let message = format!("waits until these droplets know of it: {names}");
    remedy_or(missing, ("Announcing", message))
}

/// Returns the message that a transitd must be upgraded, or that a table is full, before any other message.
fn remedy_or(missing: &Missing, told: (&'static str, String)) -> (&'static str, String) {
    if missing.outdated.is_empty() && missing.full.is_empty() {
        told
    } else {
        (missing.reason(), missing.message())
    }
}

fn acknowledged<R: Role>(role: &R) -> Condition {
    let message = "its droplet has its tables, and all droplets concerned use it";
    condition("Ready", true, "Acknowledged", message, role.meta().generation)
}

/// Reports that the droplet of a role that serves has no room for more of its rows, and the end of that.
async fn say_room<R: Role>(
    role: &R,
    droplet: &str,
    roles: &Api<R>,
    context: &Context,
) -> Result<(), WriteError> {
    let mut status = role.status().cloned().unwrap_or_default();
    let missing = without_room(role, droplet, context);
    let is_told = find(&status.conditions, "Ready").is_some_and(|ready| ready.reason == TABLE_FULL);
    let told = if missing.is_empty() {
        acknowledged(role)
    } else {
        let message = missing.message();
        condition("Ready", false, TABLE_FULL, &message, role.meta().generation)
    };
    if missing.is_empty() && !is_told {
        return Ok(());
    }
    if set(&mut status.conditions, told) {
        write(role, roles, status).await?;
    }
    Ok(())
}

/// Finishes a role of which all droplets concerned know.
async fn finish<R: Role>(
    role: &R,
    droplet: &str,
    roles: &Api<R>,
    context: &Context,
) -> Result<Action, ReconcileError> {
    let mut status = role.status().cloned().unwrap_or_default();
    status.phase = Phase::Provisioned;
    let moved_from = status.droplet.replace(droplet.to_owned());
    set(&mut status.conditions, acknowledged(role));
    let is_reinstated = role.status() == Some(&status);
    if !is_reinstated {
        write(role, roles, status).await?;
    }
    for timed in [Timed::RoleWait, Timed::RoleUnused] {
        context.clocks.forget(timed, role.id().uid);
    }
    if is_reinstated {
        return Ok(Action::requeue(ACK_RETRY));
    }
    let note = match moved_from {
        Some(old) => format!("works on droplet {droplet}, no longer on {old}"),
        None => format!("works on droplet {droplet}"),
    };
    let place = related("Droplet", droplet);
    context.events.event_with(role, place, "Provisioned", &note);
    Ok(Action::await_change())
}

async fn place_on<R: Role>(
    role: &R,
    droplet: String,
    why: Move,
    roles: &Api<R>,
    context: &Context,
) -> Result<Action, ReconcileError> {
    let mut placed = role.clone();
    placed.place_on(droplet.clone());
    if let Err(error) = update(roles, role, &placed).await {
        context
            .placements
            .forget(R::KIND, (role.parent(), &role.name_any()));
        return Err(error.into());
    }
    if why == Move::Full {
        context.clocks.begin(Timed::RoleMoved, role.id().uid);
    }
    let note = match role.droplet() {
        Some(old) => format!("placed on droplet {droplet} instead of {old}"),
        None => format!("placed on droplet {droplet}"),
    };
    let place = related("Droplet", &droplet);
    context.events.event_with(role, place, why.reason(), &note);
    Ok(Action::await_change())
}

/// Reports what the role waits for, if it has waited for a while.
async fn wait<R: Role>(
    role: &R,
    roles: &Api<R>,
    context: &Context,
    (reason, message): (&str, String),
) -> Result<Action, ReconcileError> {
    if context.clocks.known_for(Timed::RoleWait, role.id().uid) < CONDITION_DELAY {
        return Ok(Action::requeue(CONDITION_DELAY));
    }
    let is_deleted = role.meta().deletion_timestamp.is_some();
    let kind = if is_deleted { "Deleting" } else { "Ready" };
    let mut status = role.status().cloned().unwrap_or_default();
    if set(
        &mut status.conditions,
        condition(kind, is_deleted, reason, &message, role.meta().generation),
    ) {
        write(role, roles, status).await?;
    }
    Ok(Action::requeue(ACK_RETRY))
}

/// Reports which droplets the role waits for. They may still send to a place that the role leaves: packets in flight
/// there are timed anew once all of these droplets have acknowledged.
async fn wait_for_users<R: Role>(
    role: &R,
    roles: &Api<R>,
    context: &Context,
    told: (&str, String),
) -> Result<Action, ReconcileError> {
    context.clocks.forget(Timed::RoleUnused, role.id().uid);
    wait(role, roles, context, told).await
}

async fn write<R: Role>(role: &R, roles: &Api<R>, status: RoleStatus) -> Result<R, WriteError> {
    let mut changed = role.clone();
    *changed.status_mut() = Some(status);
    update_status(roles, role, &changed).await
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Leave {
    /// Its users are told to forget the role.
    Left,
    /// It is the last role that its users have.
    Held,
    /// The content of its object is not known yet.
    Later,
    /// The API server does not store that the role leaves.
    Unkept,
}

/// Takes a role that is deleted from its users, unless it is the last that they have.
async fn leave<R: Role>(role: &R, roles: &Api<R>, context: &Context) -> Result<Leave, WriteError> {
    let name = role.name_any();
    let is_in_use = role.is_in_use(context);
    // This is decided in one step, so that one of two roles that leave at the same time stays.
    let decided = context.hub.update(|world| {
        let roles = world.roles(R::KIND);
        let decided = decide_leaving(LeavingView {
            is_in_use,
            has_other: roles.has_other(&name),
            is_unpublished: roles.is_unpublished(&name),
            is_leaving: role.is_leaving(),
        });
        match decided {
            Leaving::Drain | Leaving::Unpublished => world.begin_role_drain(role.id()),
            Leaving::Held => world.reinstate_role(role.id()),
            Leaving::HeldUnseen => {}
        }
        decided
    });
    let mut status = role.status().cloned().unwrap_or_default();
    match decided {
        Leaving::Unpublished => return Ok(Leave::Left),
        Leaving::Held => return Ok(Leave::Held),
        // The change is not seen yet, or another leader removed it: a write that changes nothing tells which.
        Leaving::HeldUnseen => match write(role, roles, status).await {
            Ok(_) => {
                context.hub.update(|world| world.reinstate_role(role.id()));
                return Ok(Leave::Held);
            }
            Err(error) if error.is_conflict() => return Ok(Leave::Later),
            Err(error) => return Err(error),
        },
        Leaving::Drain => {}
    }
    status.leaving = true;
    let written = match write(role, roles, status).await {
        Err(error) if error.is_conflict() => return Ok(Leave::Later),
        written => written?,
    };
    if !written.is_leaving() {
        return Ok(Leave::Unkept);
    }
    context.hub.update(|world| world.unpublish_role(role.id()));
    Ok(Leave::Left)
}

/// Writes that a role doesn't leave. It left, or was about to, but is needed after all and ready; the next leader must
/// know that.
async fn stay<R: Role>(role: &R, roles: &Api<R>) -> Result<Action, ReconcileError> {
    let mut status = role.status().cloned().unwrap_or_default();
    status.leaving = false;
    write(role, roles, status).await?;
    Ok(Action::requeue(ACK_RETRY))
}

/// Unpublishes the roles that leave, before a new leader serves anybody: the previous leader may already have removed
/// their tables.
pub fn unpublish_leaving<R: Role>(context: &Context) {
    for role in R::all(context).state() {
        if role.meta().deletion_timestamp.is_some() && role.is_leaving() && has_finalizer(&*role) {
            context.hub.update(|world| world.unpublish_role(role.id()));
        }
    }
}

/// Removes the role from its users first, then its tables, then the object.
async fn remove<R: Role>(role: &R, roles: &Api<R>, context: &Context) -> Result<Action, ReconcileError> {
    let rows = context.hub.read(|world| role.published_rows(world));
    // Droplets that don't understand its rows never used the role.
    let barrier = Barrier::new(role.waiter()).has(rows);
    let users = context.hub.missing(&barrier).unacked;
    if !users.is_empty() {
        let message = format!(
            "waits until these droplets no longer use it: {}",
            join_first(&users)
        );
        return wait_for_users(role, roles, context, ("WaitsForUsers", message)).await;
    }
    let name = role.name_any();
    let is_purged = context.hub.read(|world| world.roles(R::KIND).is_purged(&name));
    if !is_purged
        && role.is_in_use(context)
        && let Some(left) = in_flight(role, context)
    {
        return Ok(Action::requeue(left));
    }
    context.hub.update(|world| world.purge_role(role.id()));
    let droplets = role.serves_on().into_iter().chain(role.droplet());
    let holders: BTreeSet<String> = droplets.map(str::to_owned).collect();
    let barrier = Barrier::new(role.waiter()).all_acked(holders);
    let missing = context.hub.missing(&barrier);
    if !missing.is_empty() {
        let droplets = join_first(&missing.unacked);
        let message = format!("waits until its tables are gone from {droplets}");
        return wait(role, roles, context, ("WaitsForTables", message)).await;
    }
    remove_finalizer(roles, role).await?;
    for timed in [Timed::RoleWait, Timed::RoleUnused, Timed::RoleMoved] {
        context.clocks.forget(timed, role.id().uid);
    }
    Ok(Action::await_change())
}
