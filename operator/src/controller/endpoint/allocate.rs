//! Gives addresses to an Endpoint that has none, or has one that its droplet refused: steps 1 and 2 of the workflow.

use std::net::IpAddr;
use std::time::Duration;

use kube::runtime::controller::Action;
use kube::{Api, ResourceExt};
use thuban_api::cidr::Cidr;
use thuban_api::condition::set;
use thuban_api::{Condition, Endpoint, Network};
use tracing::info;

use crate::controller::address::{Claimant, confirm_each};
use crate::controller::admission::{Unusable, usable_network};
use crate::controller::context::Context;
use crate::controller::endpoint::status::{
    ACK_RETRY, USER_RETRY, fill, say, unattached, waits_for_acks, write,
};
use crate::controller::endpoint::sync::{end_draft, remove_endpoint, sync_endpoint};
use crate::controller::runtime::clocks::Timed;
use crate::controller::runtime::error::{ClaimError, ReconcileError};
use crate::controller::runtime::objects::condition;
use crate::model::allocation::{Owner, addresses_of};
use crate::model::endpoint::{EndpointKind, droplet_of, holder_uid, name_of};
use crate::model::ranges::in_force;
use crate::model::validation::parse;

/// Admits an Endpoint that was made without addresses and claims them: steps 1 and 2 of the workflow.
pub async fn allocate(
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
                ACK_RETRY
            }));
        }
    };
    if !context.hub.is_whole() {
        return Ok(Action::requeue(ACK_RETRY));
    }
    let Some(_guard) = context.claim_locks.try_lock(&Owner::of(endpoint).uid) else {
        return Ok(Action::requeue(ACK_RETRY));
    };
    // The addresses that it was made with are not its own.
    end_draft(&name_of(endpoint), context);
    let claimed = match claim(endpoint, &network, &[], context).await {
        Ok(claimed) => claimed,
        Err(Told::Condition(told)) => {
            say(endpoint, endpoints, status, told, true, context).await?;
            return Ok(Action::requeue(USER_RETRY));
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
    write(endpoint, endpoints, status, context).await?;
    info!(
        endpoint = endpoint.name_any(),
        addresses,
        network = endpoint.spec.network,
        "addresses allocated"
    );
    Ok(Action::await_change())
}

/// The reason why there are no addresses.
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
        home: &endpoint.spec.droplet,
        network,
        ranges: &parse(in_force(network)).unwrap_or_default(),
        asked: &asked,
        refused,
    };
    let claimed = async {
        let claimed = claimant.claim_all(context).await?;
        let claimed: Vec<_> = claimed.into_iter().map(|claimed| claimed.address).collect();
        // No Endpoint but a pod's finds claims that were made for another Endpoint.
        if !addresses_of(endpoint).is_empty() || EndpointKind::of(endpoint) == EndpointKind::Pod {
            let addresses: Vec<_> = claimed.iter().map(|(address, _)| *address).collect();
            confirm_each(endpoint, &addresses, context).await?;
        }
        Ok(claimed)
    };
    claimed.await.map_err(|error: ClaimError| match error.reason() {
        Some(reason) => Told::Condition(condition("Ready", false, reason, &error.to_string(), None)),
        None => Told::Error(error.into()),
    })
}

/// Gives back addresses of which the droplet has one in another VPC already. New addresses are claimed before these are
/// given back; addresses that were asked for are tried again.
pub async fn give_back(
    endpoint: &Endpoint,
    endpoints: &Api<Endpoint>,
    context: &Context,
) -> Result<Action, ReconcileError> {
    let name = name_of(endpoint);
    end_draft(&name, context);
    let mut status = endpoint.status.clone().unwrap_or_default();
    let network = context.network(&endpoint.spec.network);
    let refused = addresses_of(endpoint);
    let is_picked = endpoint.spec.addresses.is_empty() && EndpointKind::of(endpoint) != EndpointKind::User;
    let Some(_guard) = context.claim_locks.try_lock(&Owner::of(endpoint).uid) else {
        return Ok(Action::requeue(ACK_RETRY));
    };
    if let (true, Some(network)) = (is_picked, network) {
        match claim(endpoint, &network, &refused, context).await {
            Ok(claimed) => {
                fill(&mut status, &claimed, endpoint);
                let message =
                    "its address is in use on its node in another VPC; the operator gives it another address";
                let told = condition("Ready", false, "AddressInUseOnNode", message, None);
                // The claims of the given-back addresses then count for nothing, and are deleted once no droplet has
                // their rows.
                say(endpoint, endpoints, status, told, true, context).await?;
                context.hub.forget_in_use(&name);
                return Ok(Action::await_change());
            }
            Err(Told::Condition(told)) => {
                say(endpoint, endpoints, status, told, true, context).await?;
                return Ok(Action::requeue(USER_RETRY));
            }
            Err(Told::Error(error)) => return Err(error),
        }
    }
    let message = "the address asked for is in use on its node in another VPC; ask for another one, or run the pod on another node";
    let told = condition("Ready", false, "AddressInUseOnNode", message, None);
    say(endpoint, endpoints, status, told, true, context).await?;
    let uid = endpoint.uid().unwrap_or_default();
    if context.clocks.known_for(Timed::AddressRefused, &uid) >= USER_RETRY {
        context.clocks.forget(Timed::AddressRefused, &uid);
        context.hub.forget_in_use(&name);
        remove_endpoint(&name, context);
        sync_endpoint(endpoint, context);
    }
    Ok(Action::requeue(USER_RETRY))
}
