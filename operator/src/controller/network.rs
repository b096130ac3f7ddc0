//! Network: checked against its VPC and siblings, served by bouncers; goes after its endpoints.

use std::sync::Arc;
use std::time::Duration;

use kube::runtime::controller::Action;
use kube::{Api, ResourceExt};
use thuban_api::cidr::Cidr;
use thuban_api::condition::set;
use thuban_api::identifiers::Vni;
use thuban_api::{Bouncer, BouncerSpec, Endpoint, Network, NetworkStatus, Phase};

use crate::controller::context::Context;
use crate::controller::deletion::{self, join_first, until_taken};
use crate::controller::role::kind::roles_of;
use crate::controller::role::role_set::{self, RoleSet};
use crate::controller::runtime::clocks::Timed;
use crate::controller::runtime::error::ReconcileError;
use crate::controller::runtime::objects::{
    WriteError, add_finalizer, condition, has_finalizer, list_where, remove_finalizer, replace_status,
};
use crate::hub::Waiter;
use crate::model::allocation::capacity;
use crate::model::endpoint::{EndpointKind, has_addresses};
use crate::model::ranges::{id, in_force, is_accepted};
use crate::model::rows::Key;
use crate::model::scaling::{Bounds, Demand};
use crate::model::validation::{self, RangeError};

/// How long numbers in the status may be old, so that a burst of pods costs one write.
const COUNT_EVERY: Duration = Duration::from_secs(10);

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
                    .events
                    .event(&*network, true, error.reason(), &error.to_string());
            }
            if is_accepted(&network) {
                // What is in force goes on being served.
                let number = network.status.as_ref().and_then(|status| status.bouncers);
                ensure_bouncers(&network, number.unwrap_or(network.spec.bouncers), &context).await?;
            }
            return Ok(Action::requeue(Duration::from_mins(1)));
        }
    };
    status.cidrs.clone_from(&network.spec.cidrs);
    let number = wanted(&network, &status, &context);
    status.bouncers = Some(number);
    let waiting = ensure_bouncers(&network, number, &context).await?;
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
            .events
            .event(&*network, false, "Provisioned", "endpoints can be served");
    }
    Ok(if is_counted && network.spec.autoscale.is_none() {
        Action::await_change()
    } else {
        Action::requeue(COUNT_EVERY)
    })
}

/// Brings the numbers up to date, unless they were written a moment ago.
fn count(status: &mut NetworkStatus, capacity: u64, name: &str, context: &Context) -> bool {
    let allocated = Some(context.index.claimed(name));
    if status.allocated == allocated && status.capacity == Some(capacity) {
        return true;
    }
    let is_first = status.allocated.is_none();
    if !is_first
        && (context.clocks.known_for(Timed::NetworkCount, name) < COUNT_EVERY || !context.counts.take())
    {
        return false;
    }
    context.clocks.forget(Timed::NetworkCount, name);
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
        .networks_of(vpc_name)
        .iter()
        .filter(|other| other.name_any() != network.name_any())
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
    if vpc.metadata.deletion_timestamp.is_some() && !is_accepted(network) {
        return Err(RangeError::VpcLeaves(vpc_name.clone()));
    }
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

/// How many bouncers there should be now.
fn wanted(network: &Network, status: &NetworkStatus, context: &Context) -> u32 {
    let name = network.name_any();
    let least = network.spec.bouncers;
    let Some(scaling) = &network.spec.autoscale else {
        let bounds = Bounds { least, most: least };
        return role_set::wanted((Timed::FewerBouncers, &name), None, bounds, &[], context);
    };
    let vni = context.hub.read(|world| world.network_vni(&name));
    let load = vni
        .zip(id(network))
        .map_or(0, |(vni, id)| context.hub.load(vni, Some(id)));
    let demands = [
        Demand {
            amount: context.hub.read(|world| world.population(&name)) as u64,
            each: scaling.endpoints_per_bouncer.into(),
        },
        Demand {
            amount: load,
            each: scaling.packets_per_second.into(),
        },
    ];
    let bounds = Bounds {
        least,
        most: scaling.max_bouncers,
    };
    role_set::wanted(
        (Timed::FewerBouncers, &name),
        status.bouncers,
        bounds,
        &demands,
        context,
    )
}

/// Creates missing bouncers and removes those too many; the names of those that don't work yet.
async fn ensure_bouncers(
    network: &Network,
    wanted: u32,
    context: &Context,
) -> Result<Vec<String>, WriteError> {
    let make = |name: &str| {
        let spec = BouncerSpec {
            vpc: network.spec.vpc.clone(),
            network: network.name_any(),
            droplet: None,
        };
        Bouncer::new(name, spec)
    };
    let roles = RoleSet {
        parent: network,
        letter: 'b',
        make: &make,
    };
    roles.ensure(wanted, context).await
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
    let waiting = context.hub.read(|world| world.population(&name));
    if waiting > 0 {
        let message =
            format!("waits until {waiting} endpoints are gone: kubectl get endpoints.thuban.dev -A");
        deletion::wait(network, networks, ("WaitsForEndpoints", &message), context).await?;
        // Endpoints that came while it began to leave are served to their end.
        if roles_of::<Bouncer>(&name, context).is_empty() {
            ensure_bouncers(network, 1, context).await?;
        }
        return Ok(Action::requeue(Duration::from_secs(10)));
    }
    let own = role_set::remove_all::<_, Bouncer>(network, context).await?;
    if !own.is_empty() {
        let message = format!("waits until these bouncers are gone: {}", join_first(&own));
        deletion::wait_long(network, networks, ("WaitsForBouncers", &message), context).await?;
        return Ok(Action::requeue(Duration::from_secs(1)));
    }
    // With its bouncers gone, the rows that are left go with the network itself.
    context.hub.update(|world| world.set_network(&name, None));
    let vpc = context.vpc(&network.spec.vpc);
    let vni = vpc.and_then(|vpc| Vni::new(vpc.status.as_ref()?.vni?));
    if let (Some(vni), Some(id)) = (vni, id(network)) {
        let key = Key::Network(vni, id);
        let holding = context.hub.holding_key(&key, &Waiter::Network(name));
        if !holding.is_empty() {
            let message = until_taken(&holding);
            deletion::wait_long(network, networks, ("WaitsForAcks", &message), context).await?;
            return Ok(Action::requeue(Duration::from_secs(3)));
        }
    }
    // This process makes no more endpoints in it, but its view of those that were made may be old.
    let endpoints = Api::<Endpoint>::all(context.client.clone());
    let own = list_where(&endpoints, "spec.network", &network.name_any()).await?;
    // One that never came in stays, and says so; so does a Service's.
    let own = own
        .iter()
        .filter(|endpoint| has_addresses(endpoint) && EndpointKind::of(endpoint) != EndpointKind::Service);
    let own: Vec<String> = own
        .map(|endpoint| {
            format!(
                "{}/{}",
                endpoint.namespace().unwrap_or_default(),
                endpoint.name_any()
            )
        })
        .collect();
    if !own.is_empty() {
        let message = format!("waits until these endpoints are gone: {}", join_first(&own));
        deletion::wait_long(network, networks, ("WaitsForEndpoints", &message), context).await?;
        return Ok(Action::requeue(Duration::from_secs(1)));
    }
    remove_finalizer(networks, network).await?;
    Ok(Action::await_change())
}
