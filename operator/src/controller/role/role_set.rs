//! Keeps the number of a parent's roles: missing roles are created, those beyond the number are removed once the others
//! work.

use std::collections::BTreeSet;
use std::time::Duration;

use kube::api::ObjectMeta;
use kube::runtime::reflector::ObjectRef;
use kube::{Api, ResourceExt};
use thuban_api::condition::set;
use thuban_api::{Condition, FINALIZER, Phase};

use crate::controller::context::{Context, related};
use crate::controller::role::decide::Move;
use crate::controller::role::kind::{Role, roles_of};
use crate::controller::role::placement::{count_places, place};
use crate::controller::runtime::clocks::Timed;
use crate::controller::runtime::objects::{Object, WriteError, condition, create, delete, owner};
use crate::model::scaling::{Bounds, Demand, Scaling, limit, scale};

/// How long a smaller number must be enough before a role is removed.
const SCALE_DOWN_DELAY: Duration = Duration::from_mins(5);

/// The condition of a parent whose roles share droplets, or are fewer than wanted for want of droplets.
const CROWDED: &str = "Crowded";

/// How often the operator looks at loads.
pub const LOOK_AT_LOAD: Duration = Duration::from_secs(10);

/// Returns the number that is wanted now. `fewer` is the clock for a smaller number, `known` the number so far.
pub fn wanted(
    fewer: (Timed, &str),
    known: Option<u32>,
    bounds: Bounds,
    demands: &[Demand],
    context: &Context,
) -> u32 {
    let current = known.unwrap_or(bounds.least);
    let (what, whose) = fewer;
    match scale(current, bounds, demands) {
        Scaling::Now(number) => {
            context.clocks.forget(what, whose);
            number
        }
        Scaling::Fewer(number) if context.clocks.known_for(what, whose) >= SCALE_DOWN_DELAY => {
            context.clocks.forget(what, whose);
            number
        }
        Scaling::Fewer(_) => current.clamp(bounds.least, bounds.most.max(bounds.least)),
    }
}

/// Returns how many of the wanted roles of a parent there should be: none is added that would share a droplet. `known`
/// is the number so far; none: the roles that are there, because the number is not stored yet.
pub fn limited<R: Role>(wanted: u32, known: Option<u32>, parent: &str, context: &Context) -> u32 {
    let mut roles = roles_of::<R>(parent, context);
    roles.retain(|role| role.meta().deletion_timestamp.is_none());
    let places = count_places(&roles, wanted as usize, context) as u32;
    let there = roles.len() as u32;
    limit(wanted, places, there, known.unwrap_or(there))
}

/// Has a condition say so while roles of a parent share a droplet: if it dies, several are lost at once. It also says
/// so while there are fewer roles than wanted.
pub fn judge_crowded<R: Role>(
    parent: &str,
    (wanted, number): (u32, u32),
    conditions: &mut Vec<Condition>,
    generation: Option<i64>,
    context: &Context,
) {
    let roles = roles_of::<R>(parent, context);
    let placed: Vec<&str> = roles.iter().filter_map(|role| role.droplet()).collect();
    let droplets: BTreeSet<&str> = placed.iter().copied().collect();
    let (kind, there, places) = (R::KIND, placed.len(), droplets.len());
    let (reason, message) = if places < there {
        let message = format!(
            "{there} {kind}s are on {places} droplets: some share one, and are lost together if it dies. Add nodes, or \
             lower the number of {kind}s in the spec"
        );
        ("DropletsShared", message)
    } else if number < wanted {
        let message = format!(
            "there are {number} of {wanted} {kind}s, because no other droplet may carry one. Add nodes, or lower the \
             number of {kind}s in the spec"
        );
        ("TooFewDroplets", message)
    } else {
        conditions.retain(|condition| condition.kind != CROWDED);
        return;
    };
    set(conditions, condition(CROWDED, true, reason, &message, generation));
}

/// Roles of one parent, numbered from 0.
pub struct RoleSet<'a, P, R> {
    pub parent: &'a P,
    /// The letter in the names of roles: `d` of `<vpc>-d0`.
    pub letter: char,
    pub make: &'a (dyn Fn(&str) -> R + Sync),
}

impl<P, R> RoleSet<'_, P, R>
where
    P: Object,
    R: Role,
{
    fn number(&self, name: &str) -> Option<u32> {
        let prefix = format!("{}-{}", self.parent.name_any(), self.letter);
        name.strip_prefix(&prefix)?.parse().ok()
    }

    /// Creates and deletes roles. Returns the names of the wanted roles that don't work yet.
    pub async fn ensure(&self, wanted: u32, context: &Context) -> Result<Vec<String>, WriteError> {
        let api: Api<R> = Api::all(context.client.clone());
        let mut waiting = Vec::new();
        let name_of = |number: u32| format!("{}-{}{number}", self.parent.name_any(), self.letter);
        let known_as = |name: &str| R::all(context).get(&ObjectRef::new(name));
        // The only role is deleted by hand: it serves until there is another one.
        let only = known_as(&name_of(0)).filter(|_| wanted == 1);
        let is_replaced = only.is_some_and(|role| role.meta().deletion_timestamp.is_some());
        for number in 0..wanted + u32::from(is_replaced) {
            let name = name_of(number);
            let known = known_as(&name);
            let works = |role: &R| {
                let status = role.status();
                role.meta().deletion_timestamp.is_none()
                    && status.is_some_and(|status| status.phase == Phase::Provisioned)
            };
            if !known.as_ref().is_some_and(|role| works(role)) {
                waiting.push(name.clone());
            }
            if known.is_some() {
                continue;
            }
            let mut role = (self.make)(&name);
            *role.meta_mut() = ObjectMeta {
                name: Some(name.clone()),
                finalizers: Some(vec![FINALIZER.to_owned()]),
                owner_references: owner(self.parent).map(|reference| vec![reference]),
                ..ObjectMeta::default()
            };
            // The role has a droplet from the start, if there is one: that saves a write.
            if let Some(droplet) = place(&role, Move::Unplaced, context) {
                role.place_on(droplet);
            }
            let created = create(&api, &role).await;
            if created.is_err() {
                context.placements.forget(R::KIND, (role.parent(), &name));
            }
            match created {
                Ok(_) => tell(self.parent, &role, "Created", context),
                Err(error) if error.is_conflict() => {}
                Err(error) => return Err(error),
            }
        }
        if waiting.is_empty() {
            self.shrink(&api, wanted, context).await?;
        }
        Ok(waiting)
    }

    async fn shrink(&self, api: &Api<R>, wanted: u32, context: &Context) -> Result<(), WriteError> {
        for role in roles_of::<R>(&self.parent.name_any(), context) {
            let name = role.name_any();
            let is_beyond = self.number(&name).is_some_and(|number| number >= wanted);
            if !is_beyond || role.meta().deletion_timestamp.is_some() {
                continue;
            }
            match delete(api, &*role).await {
                Ok(()) => tell(self.parent, &*role, "Removed", context),
                Err(error) if error.is_conflict() => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// Deletes all roles of a parent that is deleted. Returns the names of the roles that are still there.
pub async fn remove_all<P: Object, R: Role>(
    parent: &P,
    context: &Context,
) -> Result<Vec<String>, WriteError> {
    let api: Api<R> = Api::all(context.client.clone());
    let own = roles_of::<R>(&parent.name_any(), context);
    for role in &own {
        if role.meta().deletion_timestamp.is_none() {
            delete(&api, &**role).await?;
            tell(parent, &**role, "Removed", context);
        }
    }
    Ok(own.iter().map(|role| role.name_any()).collect())
}

/// Writes an event of the parent: `<kind><what>`.
fn tell<P: Object, R: Role>(parent: &P, role: &R, what: &str, context: &Context) {
    let name = role.name_any();
    let note = match role.droplet() {
        Some(droplet) => format!("{name} on droplet {droplet}"),
        None => name.clone(),
    };
    let related = related(R::KIND.name(), &name);
    context
        .events
        .event_with(parent, related, &format!("{}{what}", R::KIND), &note);
}
