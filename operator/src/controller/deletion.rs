//! Reports what a deletion waits for: in the condition `Deleting` and, for VPCs and networks, by an event.

use std::time::Duration;

use kube::{Api, ResourceExt};
use thuban_api::condition::{find, set};
use thuban_api::{Condition, Endpoint, Network, Vpc};

use crate::controller::context::Context;
use crate::controller::runtime::objects::{Object, WriteError, condition, update_status};
use crate::controller::runtime::waits::CONDITION_DELAY;

const DELETING: &str = "Deleting";

pub trait Deleted: Object {
    /// Whether events report the wait. Many Endpoints may wait for the same thing.
    const HAS_EVENTS: bool;
    fn conditions(&mut self) -> &mut Vec<Condition>;
}

macro_rules! deleted {
    ($($kind:ty: $has_events:literal),*) => {
        $(impl Deleted for $kind {
            const HAS_EVENTS: bool = $has_events;
            fn conditions(&mut self) -> &mut Vec<Condition> {
                &mut self.status.get_or_insert_default().conditions
            }
        })*
    };
}

deleted!(Vpc: true, Network: true, Endpoint: false);

/// Reports what the object waits for.
pub async fn wait<K: Deleted>(
    object: &K,
    api: &Api<K>,
    why: (&'static str, &str),
    context: &Context,
) -> Result<(), WriteError> {
    say(object, api, why, Duration::ZERO, context).await
}

/// Reports the same for a wait that is mostly short: only when it takes longer.
pub async fn wait_long<K: Deleted>(
    object: &K,
    api: &Api<K>,
    why: (&'static str, &str),
    context: &Context,
) -> Result<(), WriteError> {
    say(object, api, why, CONDITION_DELAY, context).await
}

async fn say<K: Deleted>(
    object: &K,
    api: &Api<K>,
    (reason, message): (&'static str, &str),
    patience: Duration,
    context: &Context,
) -> Result<(), WriteError> {
    let uid = object.uid().unwrap_or_default();
    if !context.waits.is_due(&uid, reason, patience) {
        return Ok(());
    }
    let mut told = object.clone();
    let known = find(told.conditions(), DELETING).map(|known| known.reason.clone());
    let news = condition(DELETING, true, reason, message, object.meta().generation);
    if !set(told.conditions(), news) {
        return Ok(());
    }
    update_status(api, object, &told).await?;
    context.waits.said(&uid);
    if K::HAS_EVENTS && known.as_deref() != Some(reason) {
        context.events.event(object, false, reason, message);
    }
    Ok(())
}

/// Removes the condition of an object that is not deleted after all. Returns false if there was no such condition.
pub fn remove_condition(conditions: &mut Vec<Condition>) -> bool {
    let told = conditions.len();
    conditions.retain(|condition| condition.kind != DELETING);
    conditions.len() < told
}

/// Returns the message for a droplet that hasn't reported the end of a pod's network.
pub fn until_detached(droplet: &str) -> String {
    format!("its pod is gone; waits until droplet {droplet} has removed the pod's network")
}

/// Returns the message for droplets that still have rows of the object.
pub fn until_taken(holding: &[String]) -> String {
    format!(
        "waits until its rows are gone from droplets {}; if a droplet never comes back, delete its Node",
        join_first(holding)
    )
}

/// Joins the first names of a list that may be long.
pub fn join_first(names: &[String]) -> String {
    const SHOWN: usize = 5;
    let more = names.len().saturating_sub(SHOWN);
    let first = names[..names.len().min(SHOWN)].join(", ");
    if more > 0 {
        format!("{first} and {more} more")
    } else {
        first
    }
}
