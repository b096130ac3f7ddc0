//! Waits until objects say in their condition Ready what is expected.

use std::sync::Arc;

use super::{says, until};
use crate::kind::Kind;
use crate::simulation::{Simulation, State};
use crate::store::{condition, text};

/// Returns a field of the condition; empty without the object or the condition.
fn ready<'a>(state: &'a State, kind: Kind, name: &str, field: &str) -> &'a str {
    let object = state.store.value(kind, "", name);
    let ready = object.and_then(|object| condition(object, "Ready"));
    ready.map(|ready| text(ready, field)).unwrap_or_default()
}

/// Returns why the droplet is Ready, or is not.
pub fn reason<'a>(state: &'a State, droplet: &str) -> &'a str {
    ready(state, Kind::Droplet, droplet, "/reason")
}

/// Waits until a droplet is Ready, or is not, for this reason.
pub async fn until_droplet_is(simulation: &Arc<Simulation>, name: &str, wanted: &str) {
    until(simulation, &format!("{name} is {wanted}"), |state| {
        reason(state, name) == wanted
    })
    .await;
}

/// Waits until a Node has this status of its readiness.
pub async fn until_node_is(simulation: &Arc<Simulation>, name: &str, wanted: &str) {
    until(simulation, &format!("the Node {name} is {wanted}"), |state| {
        ready(state, Kind::Node, name, "/status") == wanted
    })
    .await;
}

/// Waits until the endpoint of a pod has this reason for its readiness.
pub async fn until_pod_says(simulation: &Arc<Simulation>, pod: &str, reason: &str) {
    until(simulation, &format!("{pod} says {reason}"), |state| {
        says(state, pod, reason)
    })
    .await;
}
