//! What a deletion waits for, told in the condition `Deleting` and by an event.

use std::time::Duration;

use kube::{Api, ResourceExt};
use thuban_api::condition::{find, set};
use thuban_api::{Condition, Endpoint, Network, Vpc};

use super::context::Context;
use super::objects::{Object, WriteError, condition, replace_status};

const DELETING: &str = "Deleting";
/// What is over sooner is not worth a write: acks take milliseconds.
const MOMENT: Duration = Duration::from_secs(5);

pub trait Deleted: Object {
    fn conditions(&mut self) -> &mut Vec<Condition>;
}

macro_rules! deleted {
    ($($kind:ty),*) => {
        $(impl Deleted for $kind {
            fn conditions(&mut self) -> &mut Vec<Condition> {
                &mut self.status.get_or_insert_default().conditions
            }
        })*
    };
}

deleted!(Vpc, Network, Endpoint);

/// Says what it waits for.
pub async fn wait<K: Deleted>(
    object: &K,
    api: &Api<K>,
    (reason, message): (&str, &str),
    context: &Context,
) -> Result<(), WriteError> {
    let mut told = object.clone();
    let known = find(told.conditions(), DELETING).map(|known| known.reason.clone());
    let news = condition(DELETING, false, reason, message, object.meta().generation);
    if !set(told.conditions(), news) {
        return Ok(());
    }
    replace_status(api, &told).await?;
    // Numbers and names change more often than anybody reads of it.
    if known.as_deref() != Some(reason) {
        context.events.event(object, false, reason, message);
    }
    Ok(())
}

/// The same for what mostly takes a moment: said when it takes longer, or in place of what was said before.
pub async fn wait_long<K: Deleted>(
    object: &K,
    api: &Api<K>,
    why: (&str, &str),
    context: &Context,
) -> Result<(), WriteError> {
    let is_told = find(object.clone().conditions(), DELETING).is_some();
    if !is_told && context.known_for(&key(object)) < MOMENT {
        return Ok(());
    }
    wait(object, api, why, context).await
}

/// It waits no more.
pub fn end<K: Object>(object: &K, context: &Context) {
    context.forget(&key(object));
}

fn key<K: Object>(object: &K) -> String {
    format!("deleting/{}", object.uid().unwrap_or_default())
}

/// Of droplets whose rows are in the way.
pub fn until_taken(holding: &[String]) -> String {
    format!(
        "waits until its rows are gone from droplets {}; one that never comes back is forgotten with its Node",
        few(holding)
    )
}

/// The first names of a list that may be long.
pub fn few(names: &[String]) -> String {
    const FEW: usize = 5;
    let more = names.len().saturating_sub(FEW);
    let first = names[..names.len().min(FEW)].join(", ");
    if more > 0 {
        format!("{first} and {more} more")
    } else {
        first
    }
}
