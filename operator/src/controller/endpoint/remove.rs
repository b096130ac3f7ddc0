//! Removes an Endpoint that is deleted, or whose pod is gone: from all droplets, before its addresses are released.

use std::time::Duration;

use kube::runtime::controller::Action;
use kube::runtime::reflector::ObjectRef;
use kube::{Api, ResourceExt};
use thuban_api::Endpoint;

use crate::controller::address::claims_counted;
use crate::controller::attach;
use crate::controller::context::Context;
use crate::controller::deletion::{self, until_detached, until_taken};
use crate::controller::endpoint::sync::remove_endpoint;
use crate::controller::runtime::clocks::Timed;
use crate::controller::runtime::error::ReconcileError;
use crate::controller::runtime::objects::{delete, has_finalizer, remove_finalizer};
use crate::hub::{Barrier, Waiter};
use crate::model::allocation::{Owner, addresses_of};
use crate::model::endpoint::{EndpointKind, droplet_of, has_addresses, name_of, pod_of};
use crate::model::world::RoleKind;

/// Removes the rows first: the world forgets the endpoint. Then removes the object, and its claims rest.
pub async fn remove(
    endpoint: &Endpoint,
    endpoints: &Api<Endpoint>,
    context: &Context,
) -> Result<Action, ReconcileError> {
    let (name, kind) = (name_of(endpoint), EndpointKind::of(endpoint));
    let uid = endpoint.uid().unwrap_or_default();
    let is_deleted = endpoint.metadata.deletion_timestamp.is_some();
    if context.index.is_deleted(&uid) {
        return Ok(Action::await_change());
    }
    if is_deleted && !has_finalizer(endpoint) {
        // Somebody else's finalizer keeps it. Its claims go with it.
        if kind == EndpointKind::Pod && !attach::is_in_use(endpoint, context) {
            context.index.leave(&uid);
            remove_endpoint(&name, context);
        }
        return Ok(Action::await_change());
    }
    if has_addresses(endpoint) && kind != EndpointKind::Host && attach::is_in_use(endpoint, context) {
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
    let claims: Vec<_> = claims_counted(endpoint, &addresses, context)
        .into_iter()
        .map(|claim| (context.resting_claims.settles(&claim), claim))
        .collect();
    if is_deleted {
        remove_finalizer(endpoints, endpoint).await?;
    } else {
        delete(endpoints, endpoint).await?;
        context.index.note_deleted(&uid);
    }
    for (settles, claim) in claims {
        if is_deleted {
            context.resting_claims.begin(&claim, settles);
        } else {
            // Until now another leader may have sent its rows again: only a deleted Endpoint has none for good.
            context.resting_claims.expect(&claim, settles);
        }
        context.hub.triggers.claims.wake(ObjectRef::from_obj(&*claim));
    }
    context.reservations.forget(&Owner::of(endpoint).uid);
    context.clocks.forget(Timed::EndpointWait, &uid);
    context.clocks.forget(Timed::TooManyRules, &uid);
    Ok(Action::await_change())
}
