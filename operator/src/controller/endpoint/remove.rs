//! Removes an Endpoint that is deleted: from all droplets, before its addresses are released.

use std::net::IpAddr;
use std::time::Duration;

use kube::runtime::controller::Action;
use kube::{Api, ResourceExt};
use thuban_api::Endpoint;

use crate::controller::address::{claims_to_rest, release_each};
use crate::controller::attach;
use crate::controller::claim::rest_each;
use crate::controller::context::Context;
use crate::controller::deletion::{self, until_detached, until_taken};
use crate::controller::endpoint::sync::remove_endpoint;
use crate::controller::runtime::clocks::Timed;
use crate::controller::runtime::error::ReconcileError;
use crate::controller::runtime::objects::{has_finalizer, remove_finalizer};
use crate::hub::{Barrier, Waiter};
use crate::model::allocation::{Owner, addresses_of};
use crate::model::endpoint::{EndpointKind, droplet_of, has_addresses, name_of, pod_of};
use crate::model::world::RoleKind;

/// Removes the rows first: the world forgets the endpoint. Then removes the object. Its claims rest from then on.
pub async fn remove(
    endpoint: &Endpoint,
    endpoints: &Api<Endpoint>,
    context: &Context,
) -> Result<Action, ReconcileError> {
    if !has_finalizer(endpoint) {
        return Ok(Action::await_change());
    }
    let is_pods = EndpointKind::of(endpoint) != EndpointKind::Host;
    if has_addresses(endpoint) && is_pods && attach::is_in_use(endpoint, context) {
        // The Endpoint of a running pod was deleted: the pod keeps its network until it ends.
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
    // One that was given back may be another's by now: its claim goes by itself, and its rows are not waited for here.
    let addresses = addresses_of(endpoint);
    let network = &endpoint.spec.network;
    // The network doesn't wait for an endpoint that has been removed from it, and may be gone.
    let vpc = context.vpc_name_of(endpoint);
    let vni = context.hub.read(|world| world.vni(&vpc));
    if let (false, Some(vni)) = (addresses.is_empty(), vni) {
        let bouncers = context.hub.read(|world| {
            let droplets = world.roles(RoleKind::Bouncer).holders(network);
            droplets.into_iter().map(str::to_owned).collect::<Vec<_>>()
        });
        let home = Some(droplet_of(endpoint)).filter(|home| !home.is_empty());
        let barrier = Barrier::new(Waiter::Endpoint(name))
            .lacks_addresses(vni, &addresses)
            .asks(bouncers.into_iter().chain(home.map(str::to_owned)));
        let missing = context.hub.missing(&barrier);
        if !missing.is_empty() {
            let message = until_taken(&missing.unacked);
            deletion::wait_long(endpoint, endpoints, ("WaitsForAcks", &message), context).await?;
            return Ok(Action::requeue(Duration::from_secs(3)));
        }
    }
    let resting = claims_to_rest(endpoint, &addresses, context);
    let rests = |address: &IpAddr| {
        let mut texts = resting.iter().map(|claim| &claim.spec.address);
        texts.any(|text| text.parse() == Ok(*address))
    };
    let marked: Vec<IpAddr> = addresses
        .iter()
        .copied()
        .filter(|address| !rests(address))
        .collect();
    release_each(endpoint, &marked, context).await?;
    remove_finalizer(endpoints, endpoint).await?;
    rest_each(&resting, context);
    context.reservations.forget(&Owner::of(endpoint).uid);
    context.clocks.forget(Timed::EndpointWait, &uid);
    context.clocks.forget(Timed::TooManyRules, &uid);
    Ok(Action::await_change())
}
