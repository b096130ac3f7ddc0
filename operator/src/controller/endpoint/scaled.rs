//! A scaled Endpoint, which stands for a Service. It is admitted as pods are, and sent to all bouncers of its VPC with
//! its backends; it is Provisioned when they have acked. It is removed from all droplets before it is deleted. Its
//! addresses are the Service's, which the API server gives out and takes back.
//!
//! The Endpoint lives as long as its Service wants it, whoever deletes it. A Service that names another network gets
//! another Endpoint.

mod conditions;

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Namespace;
use kube::runtime::controller::Action;
use kube::runtime::reflector::ObjectRef;
use kube::{Api, ResourceExt};
use thiserror::Error;
use thuban_api::condition::set;
use thuban_api::{ConditionStatus, Endpoint, EndpointStatus, Phase};
use thuban_rows::Port;
use tracing::info;

use crate::controller::address::all_addresses;
use crate::controller::admission::{Unusable, usable_network};
use crate::controller::context::Context;
use crate::controller::deletion::{self, until_taken};
use crate::controller::endpoint::status::write;
use crate::controller::runtime::clocks::Timed;
use crate::controller::runtime::error::ReconcileError;
use crate::controller::runtime::objects::{condition, delete, has_finalizer, remove_finalizer};
use crate::controller::service::outside_address::{self, outside_of};
use crate::controller::service::own_address::{self, Claimed, asked_by, asked_of};
use crate::hub::{Barrier, Missing, TABLE_FULL, WAITS_FOR_ACKS, WAITS_FOR_UPGRADE, Waiter};
use crate::model::admission::network_of;
use crate::model::allocation::addresses_of;
use crate::model::backends::{Located, Place, TooLarge, WaysIn, backends};
use crate::model::endpoint::{has_addresses, name_of, pod_of};
use crate::model::rows::Key;
use crate::model::service::{Backend, EndpointSlice, Service, Target};
use crate::model::world::{self, World};
use conditions::{
    OVERLAY_PORT_REASON, PORT_RESTS_REASON, accepted, await_rest, await_room, leave_out, record_node_ports,
    recorded_node_ports, refuse_overlay_port, tell, tell_news,
};

/// How long the workflow waits for a change of which acks and watches should have woken it.
const ACK_RETRY: Duration = Duration::from_secs(2);
/// How long the workflow waits for a fix by a person.
const USER_RETRY: Duration = Duration::from_mins(1);
/// How long the workflow waits for an address of another owner to become free.
const CLAIM_RETRY: Duration = Duration::from_secs(10);
/// How often at most a status follows backends that come and go.
const COUNT_EVERY: Duration = Duration::from_secs(1);
/// How many backends a status names.
const NAMED: usize = 5;

/// What the world was told, for the status.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Counts {
    used: usize,
    /// Addresses of some of them.
    first: Vec<String>,
    left_out: usize,
    /// A part of the Service is not served, because its port is the overlay's.
    uses_overlay_port: bool,
}

/// The reason why a Service has no rows.
#[derive(Debug, Error)]
enum Unfit {
    #[error(transparent)]
    TooLarge(#[from] TooLarge),
    #[error(
        "the Service's address {0} is in no service range that its VPC can use. A range comes from a ServiceCIDR or from \
         THUBAN_SERVICE_CIDRS, and it must not touch the VPC's ranges: kubectl get servicecidrs,vpcs"
    )]
    OutsideRanges(IpAddr),
}

impl Unfit {
    fn reason(&self) -> &'static str {
        match self {
            Self::TooLarge(_) => "TooLarge",
            Self::OutsideRanges(_) => "OutsideServiceRanges",
        }
    }
}

pub async fn reconcile(
    endpoint: &Endpoint,
    endpoints: &Api<Endpoint>,
    context: &Context,
) -> Result<Action, ReconcileError> {
    let is_deleted = endpoint.metadata.deletion_timestamp.is_some();
    let is_leaving = context.index.is_leaving(&endpoint.uid().unwrap_or_default());
    let service = service_of(endpoint, context).filter(|_| !is_leaving);
    let Some(service) = service.filter(|_| !is_deleted || has_addresses(endpoint)) else {
        if is_deleted {
            return remove(endpoint, endpoints, context).await;
        }
        delete(endpoints, endpoint).await?;
        return Ok(Action::await_change());
    };
    let mut status = endpoint.status.clone().unwrap_or_default();
    if is_deleted {
        let message = format!("waits until Service {} is deleted", service.name_any());
        set(
            &mut status.conditions,
            condition("Deleting", true, "WaitsForService", &message, None),
        );
    }
    let mut addresses = service.cluster_ips();
    if !has_addresses(endpoint)
        && let Err(unusable) = usable_network(&name_of(endpoint).0, &endpoint.spec.network, context)
    {
        let is_refused = matches!(unusable, Unusable::Refused(_));
        let told = unusable.condition(&endpoint.spec.network);
        let is_news = set(&mut status.conditions, told.clone());
        if !is_refused {
            set(
                &mut status.conditions,
                condition("Accepted", true, "Admitted", "", None),
            );
        }
        write_if_new(endpoint, endpoints, status, context).await?;
        if is_news && is_refused {
            tell(endpoint, &told.reason, &told.message, context);
        }
        return Ok(Action::requeue(if is_refused { USER_RETRY } else { ACK_RETRY }));
    }
    addresses.extend(own_address::held(endpoint));
    if addresses_of(endpoint) != addresses {
        status.addresses = addresses.iter().map(ToString::to_string).collect();
        set(
            &mut status.conditions,
            condition("Accepted", true, "Admitted", "", None),
        );
        write_if_new(endpoint, endpoints, status, context).await?;
        return Ok(Action::await_change());
    }
    let claimed = own_address::claim(endpoint, &mut status, context).await?;
    if matches!(claimed, Claimed::All) {
        write(endpoint, endpoints, status, context).await?;
        return Ok(Action::await_change());
    }
    if let Claimed::Not(Some(told)) = &claimed {
        write(endpoint, endpoints, status, context).await?;
        tell(endpoint, &told.reason, &told.message, context);
        return Ok(Action::await_change());
    }
    let next = serve(endpoint, endpoints, status, context).await?;
    // Nothing wakes the Endpoint when an address becomes free.
    Ok(if matches!(claimed, Claimed::Not(_)) {
        Action::requeue(CLAIM_RETRY)
    } else {
        next
    })
}

/// Returns the Service that wants the Endpoint as it is.
fn service_of(endpoint: &Endpoint, context: &Context) -> Option<Arc<Service>> {
    let reference = endpoint.spec.service_ref.as_ref()?;
    let namespace = name_of(endpoint).0;
    let known = ObjectRef::<Service>::new(&reference.name).within(&namespace);
    let service = context.stores.services.get(&known)?;
    if service.uid().as_ref() != Some(&reference.uid) || service.cluster_ips().is_empty() {
        return None;
    }
    let space = ObjectRef::<Namespace>::new(&namespace);
    if let Some(space) = context.stores.namespaces.get(&space)
        && network_of(service.annotations(), space.annotations()) != endpoint.spec.network
    {
        return None;
    }
    if asked_by(&service).unwrap_or_default() != asked_of(endpoint) {
        return None;
    }
    // A network that is made again under its name is another network: its admission of the Service is checked again.
    let is_same = match context.network(&endpoint.spec.network) {
        Some(network) => endpoint.spec.vpc.is_empty() || network.spec.vpc == endpoint.spec.vpc,
        None => !has_addresses(endpoint),
    };
    is_same.then_some(service)
}

/// Brings the world up to date with the Endpoint, its Service and slices as their stores have them now; none while the
/// Service wants no Endpoint, or another one.
fn bring(endpoint: &Endpoint, context: &Context) -> Option<Result<Counts, Unfit>> {
    let name = name_of(endpoint);
    context.hub.update(|world| {
        let latest = context.stores.endpoints.get(&ObjectRef::from_obj(endpoint))?;
        if context.index.is_leaving(&latest.uid().unwrap_or_default()) {
            return None;
        }
        let service = service_of(&latest, context)?;
        let made = in_world(&latest, &service, world, context);
        let (shown, counts) = match made {
            Ok((shown, counts)) => (Some(shown), Ok(counts)),
            Err(unfit) => (None, Err(unfit)),
        };
        world.set_service(&name, shown);
        Some(counts)
    })
}

/// Adds a Service to the world, if its network admits it.
pub fn sync_service(endpoint: &Endpoint, context: &Context) {
    let _ = bring(endpoint, context);
}

/// Returns the Service of the world that follows from a Service, its slices, and the endpoints of its VPC.
fn in_world(
    endpoint: &Endpoint,
    service: &Service,
    world: &World,
    context: &Context,
) -> Result<(world::Service, Counts), Unfit> {
    let namespace = name_of(endpoint).0;
    let addresses = addresses_of(endpoint);
    let own_addresses = own_address::held(endpoint);
    let is_known = |address: &IpAddr| {
        own_addresses.contains(address) || world.is_in_service_ranges(&endpoint.spec.network, *address)
    };
    if let Some(outside) = addresses.iter().find(|address| !is_known(address)) {
        return Err(Unfit::OutsideRanges(*outside));
    }
    let slices = context.slices.of(&namespace, &service.name_any());
    let slices: Vec<_> = slices
        .iter()
        .filter_map(|slice| {
            let slice = ObjectRef::<EndpointSlice>::new(slice).within(&namespace);
            context.stores.slices.get(&slice)
        })
        .collect();
    let vni = world.network_vni(&endpoint.spec.network);
    let locate = |address: IpAddr, backend: &Backend| {
        let target = backend.target_ref.as_ref();
        let is_pods = target.is_some_and(|target| target.kind.as_deref() == Some("Pod"));
        if world.is_outside(&endpoint.spec.network, address, is_pods) {
            return Some(Located {
                place: Place::Outside,
                droplet: backend.node_name.clone(),
            });
        }
        let holder = vni.and_then(|vni| world.holder(vni, address));
        let holder = holder.filter(|holder| holder.0 == namespace)?;
        let is_member = target.is_none_or(|target| is_pod_of(&holder.1, &namespace, target, context));
        // The real place of the address: the writer of a slice may name anything.
        is_member.then(|| Located {
            place: Place::Member,
            droplet: world.endpoint(holder).map(|holder| holder.droplet.clone()),
        })
    };
    let outside = outside_of(endpoint, service, context).allowed;
    let slices = slices.iter().map(AsRef::as_ref);
    let fronts = service.fronts();
    let ways_in = WaysIn {
        outside: &outside,
        fronts: &fronts,
        at_droplets: outside.iter().any(|address| world.is_droplets(*address)),
        is_tenants: !world.is_nodes_own(&endpoint.spec.network),
    };
    let made = backends(service, &addresses, ways_in, slices, locate)?;
    let counts = Counts {
        used: made.used,
        first: first_backends(&made.tables),
        left_out: made.left_out,
        uses_overlay_port: made.uses_overlay_port,
    };
    let uid = service.uid().unwrap_or_default();
    let clients = service.clients();
    let check = service.health_check().filter(|_| !fronts.is_empty());
    let service = world::Service {
        network: endpoint.spec.network.clone(),
        name: service.name_any(),
        by_node: made.by_node,
        by_peers: made.by_peers,
        born: (service.metadata.creation_timestamp.clone(), uid),
        tables: made.tables,
        own_addresses,
        exposed: made.exposed,
        fronts: made.fronts,
        tunnel: service.is_front_tunnel(),
        outside,
        clients,
        check,
        homes: made.homes,
        hints: made.hints,
        health_port: service.health_port(),
        recorded: recorded_node_ports(endpoint).filter(|_| world.distrusts_node_ports()),
    };
    Ok((service, counts))
}

/// The lowest addresses that new connections go to.
fn first_backends(tables: &[(IpAddr, Vec<Port>)]) -> Vec<String> {
    let ports = tables.iter().flat_map(|(_, ports)| ports);
    let addresses: BTreeSet<IpAddr> = ports
        .flat_map(|port| port.backends.iter().map(|backend| backend.address))
        .collect();
    addresses.iter().take(NAMED).map(ToString::to_string).collect()
}

/// Whether the pod that has an Endpoint is the one that a slice means.
fn is_pod_of(endpoint: &str, namespace: &str, target: &Target, context: &Context) -> bool {
    let endpoint = ObjectRef::<Endpoint>::new(endpoint).within(namespace);
    let endpoint = context.stores.endpoints.get(&endpoint);
    let pod = endpoint.as_deref().and_then(pod_of);
    pod.is_some_and(|pod| target.may_be(namespace, &pod.name, &pod.uid))
}

/// Adds the rows first, then writes the status that says that they are there. From then on updates the status.
async fn serve(
    endpoint: &Endpoint,
    endpoints: &Api<Endpoint>,
    mut status: EndpointStatus,
    context: &Context,
) -> Result<Action, ReconcileError> {
    let Some(made) = bring(endpoint, context) else {
        return Ok(Action::requeue(ACK_RETRY));
    };
    let (name, network) = (name_of(endpoint), &endpoint.spec.network);
    let rows = context.hub.read(|world| world.service_rows(&name));
    let was = status.phase;
    let missing = if was == Phase::Init {
        let bouncer = format!("a bouncer of the VPC of network {network}: kubectl get bouncers");
        let barrier = Barrier::new(Waiter::Endpoint(name.clone()))
            .has(rows.clone())
            .served_by(bouncer, rows.clone());
        context.hub.missing(&barrier)
    } else {
        Missing::default()
    };
    let waits = |reason, message: &str| condition("Ready", false, reason, message, None);
    let accepted = accepted(endpoint, context);
    let ready = match &made {
        Err(unfit) => waits(unfit.reason(), &unfit.to_string()),
        Ok(_) if rows.is_empty() && accepted.status == ConditionStatus::False => {
            waits(&accepted.reason, &accepted.message)
        }
        Ok(_) if rows.is_empty() => {
            let message =
                format!("waits for a bouncer of the VPC of network {network}: kubectl get bouncers");
            waits(WAITS_FOR_ACKS, &message)
        }
        Ok(_) if !missing.is_empty() => waits(missing.reason(), &missing.message()),
        Ok(counts) if counts.used == 0 => {
            let message = "new connections are refused: no pod of the Service is ready in its VPC";
            condition("Ready", true, "NoBackends", message, None)
        }
        Ok(_) => condition("Ready", true, "Acknowledged", "its bouncers have its rows", None),
    };
    let is_waiting = [WAITS_FOR_ACKS, WAITS_FOR_UPGRADE, TABLE_FULL].contains(&&*ready.reason);
    let uid = endpoint.uid().unwrap_or_default();
    if is_waiting
        && was == Phase::Init
        && context.clocks.known_for(Timed::ScaledWait, &uid) < Duration::from_secs(5)
    {
        return Ok(Action::requeue(ACK_RETRY));
    }
    let is_serving = ready.status == ConditionStatus::True;
    if is_serving {
        status.phase = Phase::Provisioned;
    }
    let counts = made.as_ref().cloned().unwrap_or_default();
    let addresses = addresses_of(endpoint);
    status.addresses = addresses.iter().map(ToString::to_string).collect();
    status.backends = Some(u32::try_from(counts.used).unwrap_or(u32::MAX));
    status.first_backends = counts.first;
    let left_out = leave_out(&mut status, counts.left_out, endpoint);
    let overlay_port = refuse_overlay_port(&mut status, counts.uses_overlay_port);
    let refused = outside_address::say(&mut status, endpoint, context);
    let resting = context.hub.resting_node_ports(&name);
    let rests = await_rest(&mut status, &resting);
    let full = context.hub.without_room(|_| rows);
    let without_room = await_room(&mut status, &full);
    record_node_ports(&mut status, &context.hub.read(|world| world.node_ports_of(&name)));
    set(&mut status.conditions, accepted);
    let told = (ready.reason.clone(), ready.message.clone());
    let is_news = set(&mut status.conditions, ready) && made.is_err();
    // Backends come and go in crowds, and people who look need no write for each.
    let is_steady = was == Phase::Provisioned && endpoint.status.as_ref() != Some(&status);
    if is_steady
        && (context.clocks.known_for(Timed::ScaledWait, &uid) < COUNT_EVERY || !context.counts.take())
    {
        return Ok(Action::requeue(COUNT_EVERY));
    }
    context.clocks.forget(Timed::ScaledWait, &uid);
    let is_first = was == Phase::Init && is_serving;
    write_if_new(endpoint, endpoints, status, context).await?;
    if is_first {
        info!(
            namespace = name.0,
            endpoint = name.1,
            backends = counts.used,
            "scaled endpoint serves"
        );
    }
    if is_news {
        tell(endpoint, &told.0, &told.1, context);
    }
    let news = [
        ("BackendsLeftOut", left_out),
        (OVERLAY_PORT_REASON, overlay_port),
        (outside_address::REASON, refused),
        (PORT_RESTS_REASON, rests),
        (TABLE_FULL, without_room),
    ];
    tell_news(endpoint, news, context);
    Ok(if is_waiting || !resting.is_empty() {
        Action::requeue(ACK_RETRY)
    } else if full.is_empty() {
        Action::await_change()
    } else {
        Action::requeue(CLAIM_RETRY)
    })
}

async fn write_if_new(
    endpoint: &Endpoint,
    endpoints: &Api<Endpoint>,
    status: EndpointStatus,
    context: &Context,
) -> Result<(), ReconcileError> {
    if endpoint.status.as_ref() != Some(&status) {
        write(endpoint, endpoints, status, context).await?;
    }
    Ok(())
}

/// Removes the rows of bouncers and subscribers first, then the object. It doesn't wait for a droplet that is lost: the
/// droplet's pods would reach the backends that the Service had, in their own VPC, and the address is free already.
async fn remove(
    endpoint: &Endpoint,
    endpoints: &Api<Endpoint>,
    context: &Context,
) -> Result<Action, ReconcileError> {
    if !has_finalizer(endpoint) {
        return Ok(Action::await_change());
    }
    let (name, uid) = (name_of(endpoint), endpoint.uid().unwrap_or_default());
    context.index.leave(&uid);
    context.hub.update(|world| world.set_service(&name, None));
    let vpc = context.vpc_name_of(endpoint);
    let vni = context.hub.read(|world| world.vni(&vpc));
    let sharing = endpoint
        .spec
        .service_ref
        .as_ref()
        .map(|service| context.hub.read(|world| world.sharing(&name.0, &service.name)));
    let sharing = sharing.unwrap_or_default();
    let mut addresses = all_addresses(endpoint);
    // Another Service may have an address by now: this Endpoint doesn't wait for that Service's rows.
    addresses.retain(|address| context.hub.read(|world| world.service_at(*address).is_none()));
    let mut barrier = Barrier::new(Waiter::Endpoint(name));
    for address in addresses {
        let keys = vni.map(|vni| [Key::Service(vni, address), Key::Exposed(vni, address)]);
        let keys = keys.into_iter().flatten();
        let users = sharing.iter().copied().chain(vni);
        barrier = barrier.lacks(keys.chain(users.map(|vni| Key::NodeService(vni, address))));
    }
    let missing = context.hub.missing(&barrier);
    if !missing.is_empty() {
        let message = until_taken(&missing.unacked);
        deletion::wait_long(endpoint, endpoints, ("WaitsForAcks", &message), context).await?;
        return Ok(Action::requeue(Duration::from_secs(3)));
    }
    if !own_address::give_back(endpoint, context).await? {
        let message = "waits until no droplet serves its addresses any more";
        deletion::wait_long(endpoint, endpoints, ("WaitsForAcks", message), context).await?;
        return Ok(Action::requeue(Duration::from_secs(3)));
    }
    remove_finalizer(endpoints, endpoint).await?;
    context.clocks.forget(Timed::ScaledWait, &uid);
    Ok(Action::await_change())
}
