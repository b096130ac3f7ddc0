//! Tells pods which of their packets their droplets dropped, by events `PacketsDropped`.
//!
//! Invariant: the hub bounds how many pods are told in a minute. An event that can't be written is lost.

use std::sync::Arc;
use std::time::Duration;

use kube::runtime::reflector::ObjectRef;
use tokio::time::sleep;

use crate::controller::context::Context;
use crate::model::cached::Pod;
use crate::model::drop_reports::{Drops, PodName};

/// The reason of the events.
const REASON: &str = "PacketsDropped";
/// How often is looked which pods are to be told.
const LOOK: Duration = Duration::from_secs(10);

/// Tells pods for as long as the process leads.
pub async fn tell(context: Arc<Context>) {
    loop {
        sleep(LOOK).await;
        for (pod, drops) in context.hub.take_drops() {
            tell_one(&pod, &drops, &context);
        }
    }
}

/// Tells a pod, if it is still on the droplet that dropped its packets.
fn tell_one((namespace, name): &PodName, drops: &Drops, context: &Context) {
    let key = ObjectRef::<Pod>::new(name).within(namespace);
    let pod = context.stores.pods.get(&key);
    let pod = pod.filter(|pod| pod.node().as_deref() == Some(drops.droplet.as_str()));
    if let (Some(pod), Some((reason, note))) = (pod, drops.words()) {
        // The API server keeps the first note of a series. So each reason has a series of its own.
        let action = format!("Drop{reason:?}");
        context.events.warn_of(&*pod, &action, REASON, &note);
    }
}
