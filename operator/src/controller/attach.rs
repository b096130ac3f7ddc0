//! Decides which pod has an Endpoint. An Endpoint that was made for a pod belongs to that pod for life. An Endpoint
//! that a user made belongs to the pods of its namespace that name it, one after the other.

use kube::ResourceExt;
use kube::runtime::reflector::ObjectRef;
use thuban_api::{Endpoint, Phase, PodRef};

use crate::controller::context::Context;
use crate::hub::Report;
use crate::model::cached::Pod;
use crate::model::endpoint::{droplet_of, holder_uid, name_of, pod_of};
use crate::model::world::World;

/// Whether the pod lives.
fn lives(pod: &PodRef, namespace: &str, context: &Context) -> bool {
    let known = find(&pod.name, namespace, context);
    known.is_some_and(|known| known.uid().as_ref() == Some(&pod.uid) && known.is_alive())
}

/// Whether the pod of a droplet's report is bound to that droplet.
pub fn is_bound(report: &Report, context: &Context) -> bool {
    find(report.name, report.namespace, context).is_some_and(|pod| {
        let is_it = pod.reference().is_some_and(|pod| pod.cni_uid == report.uid);
        is_it && pod.node().as_deref() == Some(report.droplet)
    })
}

/// Whether the API server bears out a droplet's report that a pod has an address: the pod is bound to the droplet, and
/// the droplet has a part in the VPC.
pub fn is_borne_out(report: &Report, world: &World, context: &Context) -> bool {
    world.takes_part(report.droplet, report.vni) && is_bound(report, context)
}

fn find(pod: &str, namespace: &str, context: &Context) -> Option<std::sync::Arc<Pod>> {
    context
        .stores
        .pods
        .get(&ObjectRef::<Pod>::new(pod).within(namespace))
}

/// Whether the pod of the Endpoint may still need it: the pod lives, or its droplet has not said that the attachment is
/// gone.
pub fn is_needed(endpoint: &Endpoint, context: &Context) -> bool {
    has_living_pod(endpoint, context) || may_be_attached(endpoint, context)
}

/// Whether the pod of the Endpoint lives.
pub fn has_living_pod(endpoint: &Endpoint, context: &Context) -> bool {
    let namespace = endpoint.namespace().unwrap_or_default();
    pod_of(endpoint).is_some_and(|pod| lives(pod, &namespace, context))
}

/// Whether the pod of the Endpoint may have the Endpoint's addresses. No ADD succeeds before the Endpoint is made, and
/// ready: Provisioned, or about to be.
pub fn is_in_use(endpoint: &Endpoint, context: &Context) -> bool {
    let status = endpoint.status.as_ref();
    let mut was_ready = status.is_some_and(|status| status.phase == Phase::Provisioned);
    was_ready |= context.drafts.is_ready(&name_of(endpoint), endpoint);
    was_ready && is_needed(endpoint, context) || may_be_attached(endpoint, context)
}

fn may_be_attached(endpoint: &Endpoint, context: &Context) -> bool {
    let holder = holder_uid(endpoint);
    !holder.is_empty() && context.hub.may_be_attached(&holder, droplet_of(endpoint))
}

/// Returns the living pods that name an Endpoint that a user made, with their nodes: the oldest first.
pub fn pods_naming(endpoint: &Endpoint, context: &Context) -> Vec<(PodRef, String)> {
    let name = name_of(endpoint);
    let pods = context.index.pods_of(&name);
    let pods = pods.iter().filter_map(|pod| find(pod, &name.0, context));
    let ready = pods.filter(|pod| pod.is_alive() && pod.metadata.deletion_timestamp.is_none());
    let bound = ready.filter_map(|pod| Some((pod.node()?, pod)));
    let mut bound: Vec<_> = bound.collect();
    bound.sort_by_key(|(_, pod)| (pod.creation_timestamp(), pod.name_any()));
    let pods = bound.into_iter();
    pods.filter_map(|(node, pod)| Some((pod.reference()?, node)))
        .collect()
}
