//! An Endpoint that a user made. The pods of its namespace that name it have it, one after the other, and it keeps its
//! addresses between them.

use kube::runtime::controller::Action;
use kube::{Api, ResourceExt};
use thuban_api::condition::set;
use thuban_api::{Endpoint, EndpointStatus, Phase, PodRef};

use crate::controller::admission::admitted;
use crate::controller::attach;
use crate::controller::context::Context;
use crate::controller::endpoint::status::{pod_reference, unattached, waits_for_acks, write};
use crate::controller::runtime::clocks::Timed;
use crate::controller::runtime::error::ReconcileError;
use crate::controller::runtime::objects::{add_finalizer, condition, has_finalizer};
use crate::model::endpoint::name_of;
use crate::traces;

/// Gives the Endpoint to the next pod, if a pod waits and none needs it; none: its workflow goes on.
pub async fn attend(
    endpoint: &Endpoint,
    endpoints: &Api<Endpoint>,
    context: &Context,
) -> Result<Option<Action>, ReconcileError> {
    if !has_finalizer(endpoint) {
        add_finalizer(endpoints, endpoint).await?;
        return Ok(Some(Action::await_change()));
    }
    if let Some(status) = next_pod(endpoint, context) {
        if let Some(pod) = &status.pod_ref {
            traces::binds(&pod.cni_uid);
        }
        write(endpoint, endpoints, status, context).await?;
        return Ok(Some(Action::await_change()));
    }
    Ok(None)
}

/// Tells a pod once that another pod has the Endpoint.
fn tell_in_use(endpoint: &Endpoint, waiting: &PodRef, context: &Context) {
    if !context
        .clocks
        .known_for(Timed::EndpointInUse, &waiting.uid)
        .is_zero()
    {
        return;
    }
    let note = format!(
        "another pod has Endpoint {:?}; this pod gets it when that pod has ended",
        endpoint.name_any()
    );
    let about = pod_reference(endpoint, &waiting.name, &waiting.uid);
    context.events.event_about(about, true, "EndpointInUse", &note);
}

/// Returns the status with the pod that has a user's Endpoint from now on, if that changes.
fn next_pod(endpoint: &Endpoint, context: &Context) -> Option<EndpointStatus> {
    let mut status = endpoint.status.clone().unwrap_or_default();
    let naming = attach::pods_naming(endpoint, context);
    if attach::is_needed(endpoint, context) {
        let pods = naming.iter().map(|(pod, _)| pod);
        let waiting = pods.filter(|pod| Some(*pod) != status.pod_ref.as_ref());
        waiting.for_each(|pod| tell_in_use(endpoint, pod, context));
        return None;
    }
    let (pod, droplet) = naming.into_iter().next().unzip();
    if pod.is_none() && status.pod_ref.is_none() {
        return None;
    }
    let (namespace, network) = (name_of(endpoint).0, &endpoint.spec.network);
    let allowed = admitted(&namespace, network, context.network(network).as_deref(), context);
    if pod.is_some()
        && let Err(refusal) = allowed
    {
        // Only running pods keep what they have.
        let message = refusal.to_string();
        let is_news = set(
            &mut status.conditions,
            condition("Accepted", false, refusal.reason(), &message, None),
        );
        let is_given_back = status.pod_ref.take().is_some();
        if is_given_back {
            (status.droplet, status.previous_droplet) = (None, None);
            status.phase = Phase::Init;
        }
        return (is_news || is_given_back).then_some(status);
    }
    status.previous_droplet = status
        .droplet
        .take()
        .filter(|old| droplet.as_ref().is_some_and(|new| new != old));
    status.droplet = droplet;
    status.pod_ref = pod;
    status.phase = Phase::Init;
    let ready = if status.pod_ref.is_some() {
        waits_for_acks()
    } else {
        unattached()
    };
    set(&mut status.conditions, ready);
    Some(status)
}
