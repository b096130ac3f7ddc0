//! Network: checked against its VPC and siblings, and served by bouncers. It is deleted after its endpoints.

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
use crate::controller::parent::{Readiness, Stage, Step, View, decide, keep_ready, readiness};
use crate::controller::ranges;
use crate::controller::role::kind::roles_of;
use crate::controller::role::role_set::{self, RoleSet};
use crate::controller::runtime::clocks::Timed;
use crate::controller::runtime::error::ReconcileError;
use crate::controller::runtime::objects::{
    WriteError, add_finalizer, condition, has_finalizer, list_where, remove_finalizer, write_status,
};
use crate::controller::runtime::pace::{Pace, write_in_time};
use crate::hub::{Barrier, WAITS_FOR_ACKS, Waiter};
use crate::model::allocation::capacity;
use crate::model::endpoint::{EndpointKind, has_addresses};
use crate::model::range_claims::Claims;
use crate::model::ranges::{id, is_accepted, parsed};
use crate::model::rows::Key;
use crate::model::scaling::{Bounds, Demand};
use crate::model::validation::{self, RangeError};

/// How long numbers in the status may be out of date, so that a burst of pods costs one write.
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
    let verdict = match check(&network, &context.networks_of(&network.spec.vpc), &context) {
        Ok(_) if is_judged && !ranges::are_in_force(&*network) => {
            let siblings = Some(("spec.vpc", network.spec.vpc.as_str()));
            let check = |siblings: &[_]| check(&network, siblings, &context);
            ranges::contend(&*network, &networks, siblings, check).await?
        }
        verdict => verdict,
    };
    let step = decide(View {
        is_early: !is_judged,
        is_usable: verdict.is_ok(),
        is_in_force: is_accepted(&network),
        has_number: true,
    });
    if step == Step::WaitForVpc {
        // The network was made together with its VPC, which is checked first.
        return Ok(Action::requeue(Duration::from_secs(1)));
    }
    let generation = network.metadata.generation;
    let mut status = network.status.clone().unwrap_or_default();
    status.observed_generation = generation;
    let is_news = set(&mut status.conditions, ranges::accepted(&verdict, generation));
    let error = match verdict {
        Ok(ranges) => {
            status.cidrs.clone_from(&network.spec.cidrs);
            status.ranges = status.cidrs.join(", ");
            return serve(&network, &networks, (status, capacity(&ranges)), &context).await;
        }
        Err(error) => error,
    };
    // The refusal is stored first: it ends the claim of these ranges.
    if step == (Step::Refuse { serves_on: true }) && network.status.as_ref() == Some(&status) {
        let capacity = capacity(&parsed(&status.cidrs));
        serve(&network, &networks, (status, capacity), &context).await?;
        return Ok(Action::requeue(ranges::retry(&error).min(COUNT_EVERY)));
    }
    write_status(&networks, &*network, status).await?;
    if is_news {
        ranges::tell(&*network, &error, &context);
    }
    Ok(Action::requeue(ranges::retry(&error)))
}

/// Creates the bouncers first, then writes the status that says that they work.
async fn serve(
    network: &Network,
    networks: &Api<Network>,
    (mut status, capacity): (NetworkStatus, u64),
    context: &Context,
) -> Result<Action, ReconcileError> {
    let generation = network.metadata.generation;
    let name = network.name_any();
    let wanted = wanted(network, &status, context);
    let number = role_set::limited::<Bouncer>(wanted, status.bouncers, &name, context);
    status.bouncers = Some(number);
    let waiting = ensure_bouncers(network, number, context).await?;
    let numbers = (wanted, number);
    role_set::judge_crowded::<Bouncer>(&name, numbers, &mut status.conditions, generation, context);
    status.working_bouncers = Some(number.saturating_sub(waiting.len() as u32));
    let vpc = context.vpc(&network.spec.vpc);
    let vpc = vpc.and_then(|vpc| Some(vpc.status.as_ref()?.phase));
    let readiness = readiness(status.phase, Some(vpc.unwrap_or_default()), waiting.len());
    let not_ready = |reason, message: &str| condition("Ready", false, reason, message, generation);
    let ready = match readiness {
        Readiness::Kept => {
            keep_ready(&mut status.conditions, generation);
            None
        }
        Readiness::WaitsForVpc => Some(not_ready(
            "VpcNotProvisioned",
            "waits until its VPC is Provisioned: kubectl get vpcs",
        )),
        Readiness::WaitsForRoles => {
            let message = format!("waits for bouncers: {}", waiting.join(", "));
            Some(not_ready("BouncersNotProvisioned", &message))
        }
        Readiness::Provisioned => {
            status.phase = Phase::Provisioned;
            Some(condition(
                "Ready",
                true,
                "Provisioned",
                "its bouncers work",
                generation,
            ))
        }
    };
    if let Some(ready) = ready {
        set(&mut status.conditions, ready);
    }
    let is_counted = count(&mut status, capacity, &name, context);
    let pace = Pace {
        clocks: &context.clocks,
        timed: Timed::NetworkStatus,
        steady,
        limit: None,
    };
    let held_back = write_in_time(networks, network, status, &pace).await?;
    tell_nearly_used_up(network, capacity, context);
    if readiness == Readiness::Provisioned {
        context
            .events
            .event(network, false, "Provisioned", "endpoints can be served");
    }
    if let Some(left) = held_back {
        return Ok(Action::requeue(left));
    }
    // A droplet may join.
    let is_final = network.spec.autoscale.is_none() && number == wanted;
    Ok(if is_counted && is_final {
        Action::await_change()
    } else {
        Action::requeue(COUNT_EVERY)
    })
}

/// Writes an event when 9 of 10 addresses are used, and again after it was fewer than 8.
fn tell_nearly_used_up(network: &Network, capacity: u64, context: &Context) {
    let name = network.name_any();
    let used = context.index.claimed(&name);
    if used * 10 < capacity * 8 {
        context.clocks.forget(Timed::AddressesNearlyUsedUp, &name);
    } else if used * 10 >= capacity * 9
        && context
            .clocks
            .known_for(Timed::AddressesNearlyUsedUp, &name)
            .is_zero()
    {
        let message = format!(
            "{used} of {capacity} IPv4 addresses are used: append a range to spec.cidrs, or delete Endpoints that \
             no pod has"
        );
        context
            .events
            .event(network, true, "AddressesNearlyUsedUp", &message);
    }
}

/// Updates the numbers, unless they were written a moment ago.
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

/// Checks a network against its VPC and these networks of the VPC.
fn check(network: &Network, siblings: &[Arc<Network>], context: &Context) -> Result<Vec<Cidr>, RangeError> {
    let vpc_name = &network.spec.vpc;
    let vpc = context
        .vpc(vpc_name)
        .ok_or_else(|| RangeError::NoVpc(vpc_name.clone()))?;
    let siblings = Claims::of(network, siblings.iter().map(AsRef::as_ref)).ahead;
    if vpc.metadata.deletion_timestamp.is_some() && !is_accepted(network) {
        return Err(RangeError::VpcLeaves(vpc_name.clone()));
    }
    let status = vpc.status.as_ref().filter(|status| status.vni.is_some());
    let status = status.ok_or_else(|| RangeError::VpcNotAccepted(vpc_name.clone()))?;
    validation::network(&network.spec.cidrs, (vpc_name, &status.cidrs), &siblings)
}

/// Leaves what does not pass by itself in a moment: the number of bouncers that work does, and all that a network says
/// of bouncers and of its VPC's phase before it is Provisioned. Numbers of addresses have a pace of their own.
fn steady(status: &mut NetworkStatus) {
    status.working_bouncers = None;
    if status.phase == Phase::Init {
        status.bouncers = None;
        status.conditions.retain(|condition| condition.kind != "Ready");
    }
}

/// Returns how many bouncers there should be now.
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

/// Creates missing bouncers and removes those that are too many. Returns the names of the bouncers that don't work yet.
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

/// Waits for the endpoints first, then removes the bouncers, then the rows everywhere, then the object.
async fn remove(
    network: &Network,
    networks: &Api<Network>,
    context: &Context,
) -> Result<Action, ReconcileError> {
    if !has_finalizer(network) {
        return Ok(Action::await_change());
    }
    for stage in Stage::ORDER {
        let names = look(stage, network, context).await?;
        if !names.is_empty() {
            return wait(stage, &names, network, networks, context).await;
        }
    }
    remove_finalizer(networks, network).await?;
    context.clocks.forget(Timed::NetworkStatus, &network.name_any());
    Ok(Action::await_change())
}

/// Returns the names of the objects that are left at a stage of the deletion, or their number.
async fn look(stage: Stage, network: &Network, context: &Context) -> Result<Vec<String>, ReconcileError> {
    let name = network.name_any();
    match stage {
        Stage::Members => {
            let number = context.hub.read(|world| world.population(&name));
            let told = (number > 0).then(|| format!("{number} endpoints"));
            Ok(told.into_iter().collect())
        }
        Stage::Roles => Ok(role_set::remove_all::<_, Bouncer>(network, context).await?),
        Stage::Rows => {
            // The bouncers are gone: the remaining rows are removed together with the network itself.
            context.hub.update(|world| world.set_network(&name, None));
            let vpc = context.vpc(&network.spec.vpc);
            let vni = vpc.and_then(|vpc| Vni::new(vpc.status.as_ref()?.vni?));
            let Some((vni, id)) = vni.zip(id(network)) else {
                return Ok(Vec::new());
            };
            let barrier = Barrier::new(Waiter::Network(name)).lacks([Key::Network(vni, id)]);
            Ok(context.hub.missing(&barrier).unacked)
        }
        // This process makes no more endpoints in the network, but its view of the existing ones may be old.
        Stage::Unseen => {
            let endpoints = Api::<Endpoint>::all(context.client.clone());
            let own = list_where(&endpoints, "spec.network", &name).await?;
            // An Endpoint that was never admitted stays, and says so; a Service's Endpoint does the same.
            let own = own.iter().filter(|endpoint| {
                has_addresses(endpoint) && EndpointKind::of(endpoint) != EndpointKind::Service
            });
            let full_name = |endpoint: &Endpoint| {
                let namespace = endpoint.namespace().unwrap_or_default();
                format!("{namespace}/{}", endpoint.name_any())
            };
            Ok(own.map(full_name).collect())
        }
    }
}

/// Reports what the network waits for.
async fn wait(
    stage: Stage,
    names: &[String],
    network: &Network,
    networks: &Api<Network>,
    context: &Context,
) -> Result<Action, ReconcileError> {
    let first = join_first(names);
    let seconds = match stage {
        Stage::Members => {
            let message = format!("waits until {first} are gone: kubectl get endpoints.thuban.dev -A");
            deletion::wait(network, networks, ("WaitsForEndpoints", &message), context).await?;
            // Endpoints that arrived while the network's deletion began are served to their end.
            if roles_of::<Bouncer>(&network.name_any(), context).is_empty() {
                ensure_bouncers(network, 1, context).await?;
            }
            10
        }
        Stage::Roles => {
            let message = format!("waits until these bouncers are gone: {first}");
            deletion::wait_long(network, networks, ("WaitsForBouncers", &message), context).await?;
            1
        }
        Stage::Rows => {
            let message = until_taken(names);
            deletion::wait_long(network, networks, (WAITS_FOR_ACKS, &message), context).await?;
            3
        }
        Stage::Unseen => {
            let message = format!("waits until these endpoints are gone: {first}");
            deletion::wait_long(network, networks, ("WaitsForEndpoints", &message), context).await?;
            1
        }
    };
    Ok(Action::requeue(Duration::from_secs(seconds)))
}
