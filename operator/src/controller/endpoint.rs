//! Endpoint: admitted, given its addresses, told to its bouncers and its droplet, Provisioned when they acked; taken
//! out of them all before its addresses are released.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Namespace, ObjectReference, Pod};
use kube::runtime::controller::Action;
use kube::runtime::reflector::ObjectRef;
use kube::{Api, ResourceExt};
use thuban_api::condition::set;
use thuban_api::identifiers::MacAddr;
use thuban_api::{Endpoint, EndpointStatus, Network, Phase, PodRef};
use tracing::info;

use super::address::{ClaimError, claim_all, release_all};
use super::context::{Context, ReconcileError};
use super::network::in_force;
use super::objects::{WriteError, condition, delete, has_finalizer, remove_finalizer, replace_status};
use super::pod::is_alive;
use crate::hub::Waiter;
use crate::model::admission::admit;
use crate::model::allocation::addresses_of;
use crate::model::validation::parse;

/// Steady ones are looked at again, should a watch have missed the end of their pod.
const LOOK_AGAIN: Duration = Duration::from_mins(5);

pub async fn reconcile(endpoint: Arc<Endpoint>, context: Arc<Context>) -> Result<Action, ReconcileError> {
    let namespace = endpoint.namespace().unwrap_or_default();
    let endpoints: Api<Endpoint> = Api::namespaced(context.client.clone(), &namespace);
    if endpoint.metadata.deletion_timestamp.is_some() {
        return remove(&endpoint, &endpoints, &context).await;
    }
    let is_needed = is_needed(&endpoint, &context);
    if !is_needed {
        // CNI DEL ends the attachment; only then is the address out of use.
        if context
            .hub
            .may_be_attached(&pod_of(&endpoint).cni_uid, &endpoint.spec.droplet)
        {
            return Ok(Action::requeue(Duration::from_secs(5)));
        }
        delete(&endpoints, &*endpoint).await?;
        return Ok(Action::await_change());
    }
    let status = endpoint.status.clone().unwrap_or_default();
    let name = (namespace.clone(), endpoint.name_any());
    if context.hub.is_in_use(&name) && status.phase == Phase::Init && !status.addresses.is_empty() {
        let action = give_back(&endpoint, &endpoints, status, &context).await?;
        context.hub.forget_in_use(&name);
        return Ok(action);
    }
    if status.addresses.is_empty() {
        return allocate(&endpoint, &endpoints, status, &context).await;
    }
    if status.phase == Phase::Init {
        return provision(&endpoint, &endpoints, status, &context).await;
    }
    Ok(Action::requeue(LOOK_AGAIN))
}

/// Whether its pod lives.
fn is_needed(endpoint: &Endpoint, context: &Context) -> bool {
    let reference = pod_of(endpoint);
    let pod = ObjectRef::<Pod>::new(&reference.name).within(&endpoint.namespace().unwrap_or_default());
    let pod = context.stores.pods.get(&pod);
    pod.is_some_and(|pod| pod.uid().as_ref() == Some(&reference.uid) && is_alive(&pod))
}

/// Admission and address: steps 1 and 2 of the workflow.
async fn allocate(
    endpoint: &Endpoint,
    endpoints: &Api<Endpoint>,
    mut status: EndpointStatus,
    context: &Context,
) -> Result<Action, ReconcileError> {
    let namespace = endpoint.namespace().unwrap_or_default();
    let network = context.network(&endpoint.spec.network);
    let vpc = network
        .as_ref()
        .and_then(|network| context.vpc(&network.spec.vpc));
    let space = context
        .stores
        .namespaces
        .get(&ObjectRef::<Namespace>::new(&namespace));
    let nothing = std::collections::BTreeMap::new();
    let labels = space.as_ref().map_or(&nothing, |space| space.labels());
    if let Err(refusal) = admit(
        &namespace,
        labels,
        &endpoint.spec.network,
        network.as_deref(),
        vpc.as_deref(),
    ) {
        let message = refusal.to_string();
        if set(
            &mut status.conditions,
            condition("Accepted", false, refusal.reason(), &message, None),
        ) {
            write(endpoint, endpoints, status).await?;
            context
                .event_about(&pod_reference(endpoint), true, refusal.reason(), &message)
                .await;
        }
        return Ok(Action::requeue(Duration::from_mins(1)));
    }
    let Some(network) = network.filter(|network| is_provisioned(network)) else {
        let message = format!("network {:?} is not Provisioned yet", endpoint.spec.network);
        if set(
            &mut status.conditions,
            condition("Accepted", true, "Admitted", "", None),
        ) | set(
            &mut status.conditions,
            condition("Ready", false, "NetworkNotProvisioned", &message, None),
        ) {
            write(endpoint, endpoints, status).await?;
        }
        return Ok(Action::requeue(Duration::from_secs(5)));
    };
    let ranges = parse(in_force(&network)).unwrap_or_default();
    let claimed = claim_all(endpoint, &network, &ranges, context).await;
    if let Err(full @ ClaimError::Full { .. }) = &claimed {
        let message = full.to_string();
        if set(
            &mut status.conditions,
            condition("Ready", false, "NetworkFull", &message, None),
        ) {
            write(endpoint, endpoints, status).await?;
            context
                .event_about(&pod_reference(endpoint), true, "NetworkFull", &message)
                .await;
        }
        return Ok(Action::requeue(Duration::from_secs(5)));
    }
    for (address, range) in claimed? {
        status.addresses.push(address.to_string());
        match address {
            IpAddr::V4(address) => {
                status.mac = Some(MacAddr::of(address).to_string());
                status.gateway = Some(range.gateway().to_string());
                status.prefix_length = Some(range.prefix_length());
            }
            IpAddr::V6(_) => status.prefix_length6 = Some(range.prefix_length()),
        }
    }
    let addresses = status.addresses.join(", ");
    status.droplet = Some(endpoint.spec.droplet.clone());
    set(
        &mut status.conditions,
        condition("Accepted", true, "Admitted", "", None),
    );
    set(
        &mut status.conditions,
        condition(
            "Ready",
            false,
            "WaitsForAcks",
            "waits for its bouncers and its droplet",
            None,
        ),
    );
    write(endpoint, endpoints, status).await?;
    info!(
        endpoint = endpoint.name_any(),
        addresses,
        network = endpoint.spec.network,
        "addresses allocated"
    );
    Ok(Action::await_change())
}

fn is_provisioned(network: &Network) -> bool {
    network.metadata.deletion_timestamp.is_none()
        && network
            .status
            .as_ref()
            .is_some_and(|status| status.phase == Phase::Provisioned)
}

/// Waits for the acks of steps 4 and 5, then says Provisioned, which the droplet is told in turn (steps 6 and 8).
async fn provision(
    endpoint: &Endpoint,
    endpoints: &Api<Endpoint>,
    mut status: EndpointStatus,
    context: &Context,
) -> Result<Action, ReconcileError> {
    let name = (endpoint.namespace().unwrap_or_default(), endpoint.name_any());
    let home = &endpoint.spec.droplet;
    let rows = context.hub.read(|world| world.endpoint_rows(&name));
    let is_known = rows.iter().any(|(droplet, _)| droplet == home);
    let missing = context.hub.missing(&rows, Some(home), &Waiter::Endpoint(name));
    if !is_known || !missing.is_empty() {
        return Ok(Action::requeue(Duration::from_secs(2)));
    }
    status.phase = Phase::Provisioned;
    set(
        &mut status.conditions,
        condition(
            "Ready",
            true,
            "Acknowledged",
            "its bouncers and its droplet have its rows",
            None,
        ),
    );
    write(endpoint, endpoints, status).await?;
    Ok(Action::await_change())
}

/// The droplet has one of these addresses in another VPC already: the claims rest and other addresses are picked.
async fn give_back(
    endpoint: &Endpoint,
    endpoints: &Api<Endpoint>,
    mut status: EndpointStatus,
    context: &Context,
) -> Result<Action, ReconcileError> {
    release_all(endpoint, context).await?;
    status.addresses.clear();
    status.mac = None;
    status.gateway = None;
    status.prefix_length = None;
    status.prefix_length6 = None;
    let message = "its address is in use on its node; another one is picked";
    set(
        &mut status.conditions,
        condition("Ready", false, "AddressInUseOnNode", message, None),
    );
    write(endpoint, endpoints, status).await?;
    context
        .event_about(&pod_reference(endpoint), true, "AddressInUseOnNode", message)
        .await;
    Ok(Action::await_change())
}

async fn write(
    endpoint: &Endpoint,
    endpoints: &Api<Endpoint>,
    status: EndpointStatus,
) -> Result<(), WriteError> {
    let mut endpoint = endpoint.clone();
    endpoint.status = Some(status);
    replace_status(endpoints, &endpoint).await.map(|_| ())
}

/// Rows first: the world forgets the endpoint. Then the claims, then the object.
async fn remove(
    endpoint: &Endpoint,
    endpoints: &Api<Endpoint>,
    context: &Context,
) -> Result<Action, ReconcileError> {
    if !has_finalizer(endpoint) {
        return Ok(Action::await_change());
    }
    let name = (endpoint.namespace().unwrap_or_default(), endpoint.name_any());
    let uid = &pod_of(endpoint).cni_uid;
    let mut status = endpoint.status.clone().unwrap_or_default();
    if is_needed(endpoint, context) || context.hub.may_be_attached(uid, &endpoint.spec.droplet) {
        // Somebody deleted it under a running pod, which keeps its network until it ends.
        let message = format!("waits until pod {} is gone", pod_of(endpoint).name);
        if set(
            &mut status.conditions,
            condition("Deleting", false, "WaitsForPod", &message, None),
        ) {
            write(endpoint, endpoints, status).await?;
        }
        return Ok(Action::requeue(Duration::from_secs(5)));
    }
    context.hub.update(|world| world.set_endpoint(&name, None));
    let addresses = addresses_of(endpoint);
    let vni = context
        .hub
        .read(|world| world.network_vni(&endpoint.spec.network));
    if let (false, Some(vni)) = (addresses.is_empty(), vni) {
        let bouncers: Vec<String> = context.hub.read(|world| {
            world
                .bouncer_droplets(&endpoint.spec.network)
                .into_iter()
                .map(str::to_owned)
                .collect()
        });
        let required: Vec<&str> = bouncers
            .iter()
            .map(String::as_str)
            .chain([endpoint.spec.droplet.as_str()])
            .collect();
        let holding = context
            .hub
            .holding(vni, &addresses, &required, &Waiter::Endpoint(name));
        if !holding.is_empty() {
            return Ok(Action::requeue(Duration::from_secs(3)));
        }
    }
    release_all(endpoint, context).await?;
    remove_finalizer(endpoints, endpoint).await?;
    context.reservations.forget(&endpoint.uid().unwrap_or_default());
    Ok(Action::await_change())
}

/// The pod that has the endpoint.
fn pod_of(endpoint: &Endpoint) -> PodRef {
    endpoint.spec.pod_ref.clone().unwrap_or_default()
}

/// The pod, for events that its owner reads.
fn pod_reference(endpoint: &Endpoint) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".into()),
        kind: Some("Pod".into()),
        name: Some(pod_of(endpoint).name),
        namespace: endpoint.namespace(),
        uid: Some(pod_of(endpoint).uid),
        ..ObjectReference::default()
    }
}
