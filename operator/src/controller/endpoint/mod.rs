//! Endpoint of a pod, or of a node: admitted, given its addresses, told to its bouncers and its droplet, Provisioned when
//! they acked; taken out of them all before its addresses are released.

pub mod attach;
pub mod host;
pub mod pod;
pub mod scaled;
pub mod status;
pub mod sync;

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::ObjectReference;
use kube::runtime::controller::Action;
use kube::{Api, Resource, ResourceExt};
use thuban_api::cidr::Cidr;
use thuban_api::condition::set;
use thuban_api::{Condition, Endpoint, EndpointStatus, Network, Phase};
use tracing::info;

use crate::controller::address::{Claimant, all_addresses, release_all};
use crate::controller::admission::{Unusable, admitted, usable_network};
use crate::controller::context::Context;
use crate::controller::deletion::{self, until_detached, until_taken};
use crate::controller::endpoint::status::{fill, write};
use crate::controller::endpoint::sync::{ranges_of, remove_endpoint, sync_endpoint};
use crate::controller::endpoint::{attach, scaled};
use crate::controller::runtime::clocks::Timed;
use crate::controller::runtime::error::ReconcileError;
use crate::controller::runtime::objects::{
    WriteError, add_finalizer, condition, delete, has_finalizer, remove_finalizer,
};
use crate::hub::Waiter;
use crate::model::allocation::{Owner, addresses_of};
use crate::model::endpoint::{
    droplet_of, has_addresses, holder_uid, is_host, is_scaled, is_users, name_of, pod_of,
};
use crate::model::ranges::in_force;
use crate::model::rows::Key;
use crate::model::validation::parse;
use crate::model::world::RoleKind;

/// What acks and watches should have woken.
const SOON: Duration = Duration::from_secs(2);
/// What a person has to mend.
const LATER: Duration = Duration::from_secs(10);

pub async fn reconcile(endpoint: Arc<Endpoint>, context: Arc<Context>) -> Result<Action, ReconcileError> {
    let endpoints: Api<Endpoint> = Api::namespaced(context.client.clone(), &name_of(&endpoint).0);
    if is_scaled(&endpoint) {
        return scaled::reconcile(&endpoint, &endpoints, &context).await;
    }
    if endpoint.metadata.deletion_timestamp.is_some() {
        return remove(&endpoint, &endpoints, &context).await;
    }
    if is_users(&endpoint) {
        if !has_finalizer(&*endpoint) {
            add_finalizer(&endpoints, &*endpoint).await?;
            return Ok(Action::await_change());
        }
        if let Some(status) = next_pod(&endpoint, &context) {
            write(&endpoint, &endpoints, status).await?;
            return Ok(Action::await_change());
        }
    } else if is_host(&endpoint) {
        if !attach::is_wanted_by_node(&endpoint, &context) {
            delete(&endpoints, &*endpoint).await?;
            return Ok(Action::await_change());
        }
    } else if !attach::has_living_pod(&endpoint, &context) {
        // CNI DEL ends the attachment; only then is the address out of use.
        if attach::is_needed(&endpoint, &context) {
            let message = until_detached(droplet_of(&endpoint));
            deletion::wait_long(&*endpoint, &endpoints, ("WaitsForNode", &message), &context).await?;
            return Ok(Action::requeue(Duration::from_secs(5)));
        }
        delete(&endpoints, &*endpoint).await?;
        return Ok(Action::await_change());
    }
    if !has_addresses(&endpoint) {
        return allocate(&endpoint, &endpoints, &context).await;
    }
    let status = endpoint.status.clone().unwrap_or_default();
    let has_moved = status.previous_droplet.is_none();
    match status.phase {
        Phase::Init if context.hub.is_in_use(&name_of(&endpoint)) => {
            give_back(&endpoint, &endpoints, &context).await
        }
        Phase::Init => provision(&endpoint, &endpoints, status, &context).await,
        Phase::Provisioned if !has_moved => provision(&endpoint, &endpoints, status, &context).await,
        Phase::Provisioned => keep(&endpoint, &endpoints, status, &context).await,
    }
}

/// What its network thinks of it now. It keeps what it has.
async fn keep(
    endpoint: &Endpoint,
    endpoints: &Api<Endpoint>,
    mut status: EndpointStatus,
    context: &Context,
) -> Result<Action, ReconcileError> {
    let (network, namespace) = (&endpoint.spec.network, name_of(endpoint).0);
    let refusal = admitted(&namespace, network, context.network(network).as_deref(), context).err();
    let accepted = match &refusal {
        None => condition("Accepted", true, "Admitted", "", None),
        Some(refusal) => {
            let message = format!("{refusal}; it keeps what it has until it ends");
            condition("Accepted", false, refusal.reason(), &message, None)
        }
    };
    let lives = deletion::take_back(&mut status.conditions);
    if set(&mut status.conditions, accepted) || lives {
        write(endpoint, endpoints, status).await?;
    }
    // What is seen for the first time wakes nobody.
    Ok(if refusal.is_some_and(|refusal| refusal.is_unseen()) {
        Action::requeue(LATER)
    } else {
        Action::await_change()
    })
}

/// The status with the pod that has a user's Endpoint from now on, if that changes.
fn next_pod(endpoint: &Endpoint, context: &Context) -> Option<EndpointStatus> {
    let mut status = endpoint.status.clone().unwrap_or_default();
    let next = attach::next(endpoint, context);
    if attach::is_needed(endpoint, context) {
        let (waiting, _) = next.filter(|(next, _)| Some(next) != status.pod_ref.as_ref())?;
        if context
            .clocks
            .known_for(Timed::EndpointInUse, &waiting.uid)
            .is_zero()
        {
            let note = format!(
                "Endpoint {:?} is another pod's until that one ends",
                endpoint.name_any()
            );
            let about = pod_reference(endpoint, &waiting.name, &waiting.uid);
            context.events.event_about(about, true, "EndpointInUse", &note);
        }
        return None;
    }
    let (pod, droplet) = next.unzip();
    if pod.is_none() && status.pod_ref.is_none() {
        return None;
    }
    let (namespace, network) = (name_of(endpoint).0, &endpoint.spec.network);
    let allowed = admitted(&namespace, network, context.network(network).as_deref(), context);
    if pod.is_some()
        && let Err(refusal) = allowed
    {
        // Only pods that run keep what they have.
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

fn waits_for_acks() -> Condition {
    let message = "waits for its bouncers and its droplet";
    condition("Ready", false, "WaitsForAcks", message, None)
}

fn unattached() -> Condition {
    let message = "its address is kept; no pod that runs names it by the annotation thuban.dev/endpoint";
    condition("Ready", false, "Unattached", message, None)
}

/// Admission and addresses: steps 1 and 2 of the workflow, for those that were made without.
async fn allocate(
    endpoint: &Endpoint,
    endpoints: &Api<Endpoint>,
    context: &Context,
) -> Result<Action, ReconcileError> {
    let mut status = endpoint.status.clone().unwrap_or_default();
    let network = match usable_network(&name_of(endpoint).0, &endpoint.spec.network, context) {
        Ok(network) => network,
        Err(unusable) => {
            let told = unusable.condition(&endpoint.spec.network);
            let is_refused = matches!(unusable, Unusable::Refused(_));
            say(endpoint, endpoints, status, told, is_refused, context).await?;
            return Ok(Action::requeue(if is_refused {
                Duration::from_mins(1)
            } else {
                SOON
            }));
        }
    };
    if !context.hub.is_whole() {
        return Ok(Action::requeue(SOON));
    }
    let Some(_guard) = context.claim_locks.try_lock(&Owner::of(endpoint).uid) else {
        return Ok(Action::requeue(SOON));
    };
    let claimed = match claim(endpoint, &network, &[], context).await {
        Ok(claimed) => claimed,
        Err(Told::Condition(told)) => {
            say(endpoint, endpoints, status, told, true, context).await?;
            return Ok(Action::requeue(LATER));
        }
        Err(Told::Error(error)) => return Err(error),
    };
    fill(&mut status, &claimed, endpoint);
    set(
        &mut status.conditions,
        condition("Accepted", true, "Admitted", "", None),
    );
    let ready = if droplet_of(endpoint).is_empty() {
        unattached()
    } else {
        waits_for_acks()
    };
    set(&mut status.conditions, ready);
    let addresses = status.addresses.join(", ");
    write(endpoint, endpoints, status).await?;
    info!(
        endpoint = endpoint.name_any(),
        addresses,
        network = endpoint.spec.network,
        "addresses allocated"
    );
    Ok(Action::await_change())
}

/// Why there are no addresses.
enum Told {
    Condition(Condition),
    Error(ReconcileError),
}

async fn claim(
    endpoint: &Endpoint,
    network: &Network,
    refused: &[IpAddr],
    context: &Context,
) -> Result<Vec<(IpAddr, Cidr)>, Told> {
    let asked: Vec<IpAddr> = endpoint
        .spec
        .addresses
        .iter()
        .filter_map(|text| text.parse().ok())
        .collect();
    let claimant = Claimant {
        owner: &Owner::of(endpoint),
        cni_uid: &holder_uid(endpoint),
        droplet: droplet_of(endpoint),
        network,
        ranges: &parse(in_force(network)).unwrap_or_default(),
        asked: &asked,
        refused,
    };
    claimant
        .claim_all(context)
        .await
        .map_err(|error| match error.reason() {
            Some(reason) => Told::Condition(condition("Ready", false, reason, &error.to_string(), None)),
            None => Told::Error(error.into()),
        })
}

/// Writes a condition, and an event if asked to, if it is news.
async fn say(
    endpoint: &Endpoint,
    endpoints: &Api<Endpoint>,
    mut status: EndpointStatus,
    told: Condition,
    with_event: bool,
    context: &Context,
) -> Result<(), WriteError> {
    let (reason, message) = (told.reason.clone(), told.message.clone());
    let admitted = condition("Accepted", true, "Admitted", "", None);
    let mut is_news = told.kind != "Accepted" && set(&mut status.conditions, admitted);
    is_news |= set(&mut status.conditions, told);
    if !is_news {
        return Ok(());
    }
    write(endpoint, endpoints, status).await?;
    if with_event {
        let about = match pod_of(endpoint) {
            Some(pod) => pod_reference(endpoint, &pod.name, &pod.uid),
            None => endpoint.object_ref(&()),
        };
        context.events.event_about(about, true, &reason, &message);
    }
    Ok(())
}

/// Waits for the acks of steps 4 and 5, then says Provisioned, which the droplet is told in turn (steps 6 and 8).
async fn provision(
    endpoint: &Endpoint,
    endpoints: &Api<Endpoint>,
    mut status: EndpointStatus,
    context: &Context,
) -> Result<Action, ReconcileError> {
    let name = name_of(endpoint);
    let home = droplet_of(endpoint);
    if home.is_empty() {
        say(endpoint, endpoints, status, unattached(), false, context).await?;
        // A pod that was refused may be admitted later: nothing wakes the Endpoint then.
        let is_asked_for = attach::next(endpoint, context).is_some();
        return Ok(if is_asked_for {
            Action::requeue(LATER)
        } else {
            Action::await_change()
        });
    }
    // Claims or ranges may have come after it.
    sync_endpoint(endpoint, context);
    let network = &endpoint.spec.network;
    let (rows, followers, dividers, has_bouncer) = context.hub.read(|world| {
        (
            world.endpoint_rows(&name),
            world.followers(&name),
            world.dividers_of(&name),
            !world.roles(RoleKind::Bouncer).members(network).is_empty(),
        )
    });
    let is_known = rows
        .iter()
        .any(|(droplet, key)| droplet == home && matches!(key, Key::Local(..)));
    let waiter = Waiter::Endpoint(name);
    let mut missing = context.hub.missing(&rows, Some(home), &waiter);
    missing.extend(context.hub.unaware(home, dividers, &waiter));
    let waits_for = if !is_known {
        Some(format!(
            "waits for droplet {home}: transitd has not registered it, or it is not Accepted: kubectl get droplet {home}"
        ))
    } else if !has_bouncer {
        Some(format!(
            "waits for a bouncer of network {network}: kubectl get bouncers"
        ))
    } else if !missing.is_empty() {
        Some(format!("waits for acks of droplets: {}", missing.join(", ")))
    } else {
        None
    };
    if let Some(message) = waits_for {
        return wait(endpoint, endpoints, status, &message, context).await;
    }
    if status.addresses.is_empty() {
        let Some(claimed) = ranges_of(endpoint, context) else {
            return Ok(Action::requeue(SOON));
        };
        fill(&mut status, &claimed, endpoint);
    }
    let is_followed = |_: &String| !context.hub.missing(&followers, None, &waiter).is_empty();
    status.previous_droplet = status.previous_droplet.filter(is_followed);
    status.phase = Phase::Provisioned;
    set(
        &mut status.conditions,
        condition("Accepted", true, "Admitted", "", None),
    );
    let message = "its bouncers and its droplet have its rows";
    set(
        &mut status.conditions,
        condition("Ready", true, "Acknowledged", message, None),
    );
    context
        .clocks
        .forget(Timed::EndpointWait, &endpoint.uid().unwrap_or_default());
    if endpoint.status.as_ref() == Some(&status) {
        return Ok(Action::requeue(SOON));
    }
    write(endpoint, endpoints, status).await?;
    Ok(Action::await_change())
}

/// Says what it waits for, if it has waited for a while.
async fn wait(
    endpoint: &Endpoint,
    endpoints: &Api<Endpoint>,
    status: EndpointStatus,
    message: &str,
    context: &Context,
) -> Result<Action, ReconcileError> {
    if context
        .clocks
        .known_for(Timed::EndpointWait, &endpoint.uid().unwrap_or_default())
        < Duration::from_secs(5)
    {
        return Ok(Action::requeue(SOON));
    }
    let told = condition("Ready", false, "WaitsForAcks", message, None);
    say(endpoint, endpoints, status, told, false, context).await?;
    Ok(Action::requeue(SOON))
}

/// The droplet has one of these addresses in another VPC already. Others are claimed before these are given up; those
/// that were asked for are tried again.
async fn give_back(
    endpoint: &Endpoint,
    endpoints: &Api<Endpoint>,
    context: &Context,
) -> Result<Action, ReconcileError> {
    let name = name_of(endpoint);
    let mut status = endpoint.status.clone().unwrap_or_default();
    let network = context.network(&endpoint.spec.network);
    let refused = addresses_of(endpoint);
    let Some(_guard) = context.claim_locks.try_lock(&Owner::of(endpoint).uid) else {
        return Ok(Action::requeue(SOON));
    };
    if let (true, Some(network)) = (endpoint.spec.addresses.is_empty() && !is_users(endpoint), network) {
        match claim(endpoint, &network, &refused, context).await {
            Ok(claimed) => {
                fill(&mut status, &claimed, endpoint);
                let message = "its address is in use on its node; another one was picked";
                let told = condition("Ready", false, "AddressInUseOnNode", message, None);
                // The claims of the others count for nothing then, and go once nobody has their rows.
                say(endpoint, endpoints, status, told, true, context).await?;
                context.hub.forget_in_use(&name);
                return Ok(Action::await_change());
            }
            Err(Told::Condition(told)) => {
                say(endpoint, endpoints, status, told, true, context).await?;
                return Ok(Action::requeue(LATER));
            }
            Err(Told::Error(error)) => return Err(error),
        }
    }
    let message = "the address asked for is in use on its node in another VPC; ask for another one, or run the pod on another node";
    let told = condition("Ready", false, "AddressInUseOnNode", message, None);
    say(endpoint, endpoints, status, told, true, context).await?;
    let uid = endpoint.uid().unwrap_or_default();
    if context.clocks.known_for(Timed::AddressRefused, &uid) >= LATER {
        context.clocks.forget(Timed::AddressRefused, &uid);
        context.hub.forget_in_use(&name);
        remove_endpoint(&name, context);
        sync_endpoint(endpoint, context);
    }
    Ok(Action::requeue(LATER))
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
    if has_addresses(endpoint) && !is_host(endpoint) && attach::is_in_use(endpoint, context) {
        // Somebody deleted it under a running pod, which keeps its network until it ends.
        if attach::has_living_pod(endpoint, context) {
            let pod = pod_of(endpoint).map_or("", |pod| &pod.name);
            let message = format!("waits until pod {pod} is gone");
            deletion::wait(endpoint, endpoints, ("WaitsForPod", &message), context).await?;
        } else {
            let message = until_detached(droplet_of(endpoint));
            deletion::wait_long(endpoint, endpoints, ("WaitsForNode", &message), context).await?;
        }
        return Ok(Action::requeue(Duration::from_secs(5)));
    }
    let name = name_of(endpoint);
    let uid = endpoint.uid().unwrap_or_default();
    context.index.leave(&uid);
    remove_endpoint(&name, context);
    let addresses = all_addresses(endpoint);
    let network = &endpoint.spec.network;
    // The network doesn't wait for an endpoint that has left it, and may be gone.
    let vpc = context.vpc_name_of(endpoint);
    let vni = context.hub.read(|world| world.vni(&vpc));
    if let (false, Some(vni)) = (addresses.is_empty(), vni) {
        let bouncers = context.hub.read(|world| {
            let droplets = world.roles(RoleKind::Bouncer).holders(network);
            droplets.into_iter().map(str::to_owned).collect::<Vec<_>>()
        });
        let home = Some(droplet_of(endpoint)).filter(|home| !home.is_empty());
        let required: Vec<&str> = bouncers.iter().map(String::as_str).chain(home).collect();
        let waiter = Waiter::Endpoint(name);
        let holding = context.hub.holding(vni, &addresses, &required, &waiter);
        if !holding.is_empty() {
            let message = until_taken(&holding);
            deletion::wait_long(endpoint, endpoints, ("WaitsForAcks", &message), context).await?;
            return Ok(Action::requeue(Duration::from_secs(3)));
        }
    }
    release_all(endpoint, context).await?;
    remove_finalizer(endpoints, endpoint).await?;
    context.reservations.forget(&Owner::of(endpoint).uid);
    context
        .clocks
        .forget(Timed::EndpointWait, &endpoint.uid().unwrap_or_default());
    Ok(Action::await_change())
}

/// A pod of the endpoint's namespace, for events that its owner reads.
fn pod_reference(endpoint: &Endpoint, name: &str, uid: &str) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".into()),
        kind: Some("Pod".into()),
        name: Some(name.to_owned()),
        namespace: endpoint.namespace(),
        uid: Some(uid.to_owned()),
        ..ObjectReference::default()
    }
}
