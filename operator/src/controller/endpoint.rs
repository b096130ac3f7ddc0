//! Endpoint of a pod, or of a node: admitted, given its addresses, told to its bouncers and its droplet, Provisioned when
//! they acked; taken out of them all before its addresses are released.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Namespace, ObjectReference};
use kube::runtime::controller::Action;
use kube::runtime::reflector::ObjectRef;
use kube::{Api, Resource, ResourceExt};
use thuban_api::cidr::Cidr;
use thuban_api::condition::set;
use thuban_api::identifiers::MacAddr;
use thuban_api::{Condition, Endpoint, EndpointStatus, Network, Phase};
use tracing::info;

use super::address::{Claimant, all_addresses, release_all};
use super::attach::{self, droplet_of, is_host, is_users, name_of, pod_of};
use super::context::{Context, ReconcileError};
use super::deletion::{self, until_detached, until_taken};
use super::network::in_force;
use super::objects::{WriteError, condition, delete, has_finalizer, remove_finalizer, replace_status};
use super::pod::unicast;
use super::scaled::{self, is_scaled};
use super::show::hide;
pub use super::show::show;
use crate::hub::{WAITS_FOR_ACKS, Waiter};
use crate::model::admission::{Refusal, admit};
use crate::model::allocation::{Owner, addresses_of};
use crate::model::rows::Key;
use crate::model::validation::parse;

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
            super::objects::add_finalizer(&endpoints, &*endpoint).await?;
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

/// Whether addresses are its own, by its status or by claims made before it.
pub fn has_addresses(endpoint: &Endpoint) -> bool {
    !addresses_of(endpoint).is_empty()
}

/// Why a network can't be used.
pub enum Unusable {
    Refused(Refusal),
    NotProvisioned,
}

impl Unusable {
    pub fn condition(&self, network: &str) -> Condition {
        match self {
            Self::Refused(refusal) => {
                condition("Accepted", false, refusal.reason(), &refusal.to_string(), None)
            }
            Self::NotProvisioned => {
                let message = format!("network {network:?} is not Provisioned yet");
                condition("Ready", false, "NetworkNotProvisioned", &message, None)
            }
        }
    }
}

/// The network, if it may be entered from the namespace and works.
pub fn usable_network(namespace: &str, network: &str, context: &Context) -> Result<Arc<Network>, Unusable> {
    let name = network;
    let network = context.network(name);
    admitted(namespace, name, network.as_deref(), context).map_err(Unusable::Refused)?;
    network
        .filter(|network| is_provisioned(network))
        .ok_or(Unusable::NotProvisioned)
}

/// Whether a network and its VPC let a namespace in.
pub fn admitted(
    namespace: &str,
    name: &str,
    network: Option<&Network>,
    context: &Context,
) -> Result<(), Refusal> {
    let vpc = network.and_then(|network| context.vpc(&network.spec.vpc));
    let space = context
        .stores
        .namespaces
        .get(&ObjectRef::<Namespace>::new(namespace));
    // The cache may not have it yet: what no selector knows is let in by none.
    let Some(space) = space else {
        return Err(Refusal::NamespaceNotFound {
            namespace: namespace.to_owned(),
        });
    };
    admit(namespace, space.labels(), name, network, vpc.as_deref())
}

fn is_provisioned(network: &Network) -> bool {
    let status = network.status.as_ref();
    network.metadata.deletion_timestamp.is_none()
        && status.is_some_and(|status| status.phase == Phase::Provisioned)
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
        if context.known_for(&format!("in-use/{}", waiting.uid)).is_zero() {
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
    let Some(_turn) = context.claiming.turn(&Owner::of(endpoint).uid) else {
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
        cni_uid: &attach::holder_uid(endpoint),
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

/// What follows from the addresses.
pub fn fill(status: &mut EndpointStatus, claimed: &[(IpAddr, Cidr)], endpoint: &Endpoint) {
    status.addresses = claimed.iter().map(|(address, _)| address.to_string()).collect();
    let asked = endpoint.spec.mac.as_deref().and_then(unicast);
    for (address, range) in claimed {
        match address {
            IpAddr::V4(address) => {
                status.mac = Some(asked.unwrap_or_else(|| MacAddr::of(*address)).to_string());
                status.gateway = Some(range.gateway().to_string());
                status.prefix_length = Some(range.prefix_length());
            }
            IpAddr::V6(_) => status.prefix_length6 = Some(range.prefix_length()),
        }
    }
    if !is_users(endpoint) {
        status.droplet = Some(endpoint.spec.droplet.clone());
    }
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
    show(endpoint, context);
    let network = &endpoint.spec.network;
    let (rows, followers, dividers, has_bouncer) = context.hub.read(|world| {
        (
            world.endpoint_rows(&name),
            world.followers(&name),
            world.dividers_of(&name),
            !world.bouncer_members(network).is_empty(),
        )
    });
    let is_known = rows
        .iter()
        .any(|(droplet, key)| droplet == home && matches!(key, Key::Local(..)));
    let waiter = Waiter::Endpoint(name);
    let mut missing = context.hub.missing(&rows, Some(home), &waiter);
    missing
        .unacked
        .extend(context.hub.unaware(home, dividers, &waiter));
    let waits_for = if !is_known {
        let message = format!(
            "waits for droplet {home}: transitd has not registered it, or it is not Accepted: kubectl get droplet {home}"
        );
        Some((WAITS_FOR_ACKS, message))
    } else if !has_bouncer {
        let message = format!("waits for a bouncer of network {network}: kubectl get bouncers");
        Some((WAITS_FOR_ACKS, message))
    } else if !missing.is_empty() {
        Some((missing.reason(), missing.message()))
    } else {
        None
    };
    if let Some((reason, message)) = waits_for {
        return wait(endpoint, endpoints, status, (reason, &message), context).await;
    }
    if status.addresses.is_empty() {
        let Some(claimed) = super::show::ranges_of(endpoint, context) else {
            return Ok(Action::requeue(SOON));
        };
        fill(&mut status, &claimed, endpoint);
    }
    let is_followed = |_: &String| !context.hub.missing(&followers, None, &waiter).unacked.is_empty();
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
    context.forget(&waiting_key(endpoint));
    if endpoint.status.as_ref() == Some(&status) {
        return Ok(Action::requeue(SOON));
    }
    write(endpoint, endpoints, status).await?;
    Ok(Action::await_change())
}

fn waiting_key(endpoint: &Endpoint) -> String {
    format!("Endpoint/{}", endpoint.uid().unwrap_or_default())
}

/// Says what it waits for, if it has waited for a while.
async fn wait(
    endpoint: &Endpoint,
    endpoints: &Api<Endpoint>,
    status: EndpointStatus,
    (reason, message): (&str, &str),
    context: &Context,
) -> Result<Action, ReconcileError> {
    if context.known_for(&waiting_key(endpoint)) < Duration::from_secs(5) {
        return Ok(Action::requeue(SOON));
    }
    let told = condition("Ready", false, reason, message, None);
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
    let Some(_turn) = context.claiming.turn(&Owner::of(endpoint).uid) else {
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
    let key = format!("asked-again/{}", endpoint.uid().unwrap_or_default());
    if context.known_for(&key) >= LATER {
        context.forget(&key);
        context.hub.forget_in_use(&name);
        hide(&name, context);
        show(endpoint, context);
    }
    Ok(Action::requeue(LATER))
}

pub async fn write(
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
    hide(&name, context);
    let addresses = all_addresses(endpoint);
    let network = &endpoint.spec.network;
    // The network doesn't wait for an endpoint that has left it, and may be gone.
    let vpc = context.vpc_name_of(endpoint);
    let vni = context.hub.read(|world| world.vni(&vpc));
    if let (false, Some(vni)) = (addresses.is_empty(), vni) {
        let bouncers = context.hub.read(|world| {
            let droplets = world.bouncer_droplets(network);
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
    context.forget(&waiting_key(endpoint));
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
