//! Network: checked against its VPC and siblings, served by bouncers; goes after its endpoints.

use std::sync::Arc;
use std::time::Duration;

use kube::api::ObjectMeta;
use kube::runtime::controller::Action;
use kube::runtime::reflector::ObjectRef;
use kube::{Api, ResourceExt};
use thuban_api::cidr::Cidr;
use thuban_api::condition::{find, set};
use thuban_api::identifiers::NetworkId;
use thuban_api::{Bouncer, BouncerSpec, Endpoint, FINALIZER, IpClaim, Network, NetworkStatus, Phase};
use tokio::time::Instant;

use super::context::{Context, ReconcileError};
use super::objects::{
    WriteError, add_finalizer, condition, create, delete, has_finalizer, owner, remove_finalizer,
    replace_status,
};
use crate::hub::Waiter;
use crate::model::allocation::capacity;
use crate::model::rows::Key;
use crate::model::validation::{self, RangeError};

/// Numbers in the status are written no more often.
const COUNT_EVERY: Duration = Duration::from_secs(1);

/// Whether ranges of the network are in force.
pub fn is_accepted(network: &Network) -> bool {
    !in_force(network).is_empty()
}

/// Its id in rows; none until ranges are in force.
pub fn id(network: &Network) -> Option<u32> {
    let ranges = in_force(network).iter().filter_map(|cidr| cidr.parse().ok());
    NetworkId::of(&ranges.collect::<Vec<_>>()).map(NetworkId::get)
}

/// The ranges in force.
pub fn in_force(network: &Network) -> &[String] {
    network.status.as_ref().map_or(&[], |status| &status.cidrs)
}

pub async fn reconcile(network: Arc<Network>, context: Arc<Context>) -> Result<Action, ReconcileError> {
    let networks: Api<Network> = Api::all(context.client.clone());
    if network.metadata.deletion_timestamp.is_some() {
        return remove(&network, &networks, &context).await;
    }
    if !has_finalizer(&*network) {
        add_finalizer(&networks, &*network).await?;
        return Ok(Action::await_change());
    }
    let vpc = context.vpc(&network.spec.vpc);
    let is_judged = vpc.is_none_or(|vpc| {
        vpc.status
            .as_ref()
            .is_some_and(|status| !status.conditions.is_empty())
    });
    if !is_judged {
        // Made together with its VPC, which is looked at first.
        return Ok(Action::requeue(Duration::from_secs(1)));
    }
    let generation = network.metadata.generation;
    let mut status = network.status.clone().unwrap_or_default();
    status.observed_generation = generation;
    let verdict = check(&network, &context);
    let accepted = match &verdict {
        Ok(_) => condition("Accepted", true, "Valid", "ranges are usable", generation),
        Err(error) => condition("Accepted", false, error.reason(), &error.to_string(), generation),
    };
    let is_news = set(&mut status.conditions, accepted);
    let ranges = match verdict {
        Ok(ranges) => ranges,
        Err(error) => {
            write(&network, &networks, status).await?;
            if is_news {
                context
                    .event(&*network, true, error.reason(), &error.to_string())
                    .await;
            }
            if is_accepted(&network) {
                // What is in force goes on being served.
                ensure_bouncers(&network, &context).await?;
            }
            return Ok(Action::requeue(Duration::from_mins(1)));
        }
    };
    status.cidrs.clone_from(&network.spec.cidrs);
    let waiting = ensure_bouncers(&network, &context).await?;
    let was = status.phase;
    if was == Phase::Init {
        let vpc = context
            .vpc(&network.spec.vpc)
            .and_then(|vpc| vpc.status.clone())
            .unwrap_or_default();
        let ready = if vpc.phase == Phase::Init {
            condition(
                "Ready",
                false,
                "VpcNotProvisioned",
                "waits for its VPC",
                generation,
            )
        } else if waiting.is_empty() {
            status.phase = Phase::Provisioned;
            condition("Ready", true, "Provisioned", "its bouncers work", generation)
        } else {
            let message = format!("waits for bouncers: {}", waiting.join(", "));
            condition("Ready", false, "BouncersNotProvisioned", &message, generation)
        };
        set(&mut status.conditions, ready);
    }
    let is_counted = count(&mut status, capacity(&ranges), &network.name_any(), &context);
    let is_provisioned = status.phase == Phase::Provisioned;
    write(&network, &networks, status).await?;
    if was == Phase::Init && is_provisioned {
        context
            .event(&*network, false, "Provisioned", "endpoints can be served")
            .await;
    }
    Ok(if is_counted {
        Action::await_change()
    } else {
        Action::requeue(COUNT_EVERY)
    })
}

/// Brings the numbers up to date, unless they were written a moment ago.
fn count(status: &mut NetworkStatus, capacity: u64, name: &str, context: &Context) -> bool {
    let claims = context.stores.ip_claims.state();
    // Every endpoint has one IPv4 address.
    let is_counted = |claim: &IpClaim| {
        claim.spec.network == name && claim.spec.address.parse::<std::net::Ipv4Addr>().is_ok()
    };
    let allocated = Some(claims.iter().filter(|claim| is_counted(claim)).count() as u64);
    if status.allocated == allocated && status.capacity == Some(capacity) {
        return true;
    }
    let Ok(mut seen) = context.seen.lock() else {
        return false;
    };
    let key = format!("network/{name}");
    if seen
        .get(&key)
        .is_some_and(|written| written.elapsed() < COUNT_EVERY)
    {
        return false;
    }
    seen.insert(key, Instant::now());
    status.allocated = allocated;
    status.capacity = Some(capacity);
    true
}

fn check(network: &Network, context: &Context) -> Result<Vec<Cidr>, RangeError> {
    let vpc_name = &network.spec.vpc;
    let vpc = context
        .vpc(vpc_name)
        .ok_or_else(|| RangeError::NoVpc(vpc_name.clone()))?;
    let age = |network: &Network| (network.metadata.creation_timestamp.clone(), network.name_any());
    let siblings: Vec<_> = context
        .stores
        .networks
        .state()
        .iter()
        .filter(|other| other.spec.vpc == *vpc_name && other.name_any() != network.name_any())
        // Of two new ones that overlap the older one stays.
        .filter(|other| is_accepted(other) || !is_accepted(network) && age(other) < age(network))
        .map(|other| {
            (
                other.name_any(),
                if is_accepted(other) {
                    in_force(other).to_vec()
                } else {
                    other.spec.cidrs.clone()
                },
            )
        })
        .collect();
    let status = vpc.status.as_ref().filter(|status| status.vni.is_some());
    let status = status.ok_or_else(|| RangeError::VpcNotAccepted(vpc_name.clone()))?;
    validation::network(&network.spec.cidrs, (vpc_name, &status.cidrs), &siblings)
}

async fn write(network: &Network, networks: &Api<Network>, status: NetworkStatus) -> Result<(), WriteError> {
    if network.status.as_ref() == Some(&status) {
        return Ok(());
    }
    let mut network = network.clone();
    network.status = Some(status);
    replace_status(networks, &network).await.map(|_| ())
}

/// Creates missing bouncers; the names of those that don't work yet.
async fn ensure_bouncers(network: &Network, context: &Context) -> Result<Vec<String>, WriteError> {
    let bouncers: Api<Bouncer> = Api::all(context.client.clone());
    let mut waiting = Vec::new();
    for number in 0..network.spec.bouncers {
        let name = format!("{}-b{number}", network.name_any());
        let known = context.stores.bouncers.get(&ObjectRef::new(&name));
        if known
            .as_ref()
            .and_then(|bouncer| bouncer.status.as_ref())
            .is_none_or(|status| status.phase == Phase::Init)
        {
            waiting.push(name.clone());
        }
        if known.is_some() {
            continue;
        }
        let spec = BouncerSpec {
            vpc: network.spec.vpc.clone(),
            network: network.name_any(),
            droplet: None,
        };
        let mut bouncer = Bouncer::new(&name, spec);
        bouncer.metadata = ObjectMeta {
            name: Some(name.clone()),
            finalizers: Some(vec![FINALIZER.to_owned()]),
            owner_references: owner(network).map(|reference| vec![reference]),
            ..ObjectMeta::default()
        };
        match create(&bouncers, &bouncer).await {
            Ok(_) => context.event(network, false, "BouncerCreated", &name).await,
            Err(error) if error.is_conflict() => {}
            Err(error) => return Err(error),
        }
    }
    Ok(waiting)
}

/// How many endpoints of the network have an address.
fn addressed(name: &str, context: &Context) -> usize {
    let endpoints = context.stores.endpoints.state();
    let has_address = |endpoint: &Endpoint| {
        endpoint
            .status
            .as_ref()
            .is_some_and(|status| !status.addresses.is_empty())
    };
    endpoints
        .iter()
        .filter(|endpoint| endpoint.spec.network == name && has_address(endpoint))
        .count()
}

/// Whether a network still serves somebody.
pub fn has_endpoints(name: &str, context: &Context) -> bool {
    addressed(name, context) > 0
}

/// Endpoints first, then bouncers, then the rows everywhere, then the object.
async fn remove(
    network: &Network,
    networks: &Api<Network>,
    context: &Context,
) -> Result<Action, ReconcileError> {
    if !has_finalizer(network) {
        return Ok(Action::await_change());
    }
    let name = network.name_any();
    let waiting = addressed(&name, context);
    if waiting > 0 {
        let mut status = network.status.clone().unwrap_or_default();
        let message =
            format!("waits until {waiting} endpoints are gone: kubectl get endpoints.thuban.dev -A");
        let deleting = condition(
            "Deleting",
            false,
            "WaitsForEndpoints",
            &message,
            network.metadata.generation,
        );
        let is_first = find(&status.conditions, "Deleting").is_none();
        set(&mut status.conditions, deleting);
        write(network, networks, status).await?;
        if is_first {
            context.event(network, false, "WaitsForEndpoints", &message).await;
        }
        return Ok(Action::requeue(Duration::from_secs(10)));
    }
    let bouncers: Api<Bouncer> = Api::all(context.client.clone());
    let own: Vec<_> = context
        .stores
        .bouncers
        .state()
        .into_iter()
        .filter(|bouncer| bouncer.spec.network == name)
        .collect();
    for bouncer in &own {
        if bouncer.metadata.deletion_timestamp.is_none() {
            delete(&bouncers, &**bouncer).await?;
        }
    }
    if !own.is_empty() {
        return Ok(Action::requeue(Duration::from_secs(1)));
    }
    // With its bouncers gone, the rows that are left go with the network itself.
    context.hub.update(|world| world.set_network(&name, None));
    let vpc = context.vpc(&network.spec.vpc);
    let vni = vpc.and_then(|vpc| vpc.status.as_ref()?.vni);
    if let (Some(vni), Some(id)) = (vni, id(network)) {
        let key = Key::Network(vni, id);
        if !context.hub.holding_key(&key, &Waiter::Network(name)).is_empty() {
            return Ok(Action::requeue(Duration::from_secs(3)));
        }
    }
    remove_finalizer(networks, network).await?;
    Ok(Action::await_change())
}
