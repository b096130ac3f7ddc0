//! Provisions an Endpoint that has addresses: it is Provisioned when its bouncers and its droplet have its rows, and is
//! kept from then on.

use std::time::Duration;

use kube::runtime::controller::Action;
use kube::{Api, ResourceExt};
use thuban_api::condition::set;
use thuban_api::{Endpoint, EndpointStatus, Phase};

use crate::controller::admission::admitted;
use crate::controller::attach;
use crate::controller::context::Context;
use crate::controller::deletion;
use crate::controller::endpoint::status::{ACK_RETRY, USER_RETRY, fill, say, unattached, write};
use crate::controller::endpoint::sync::{ranges_of, sync_endpoint};
use crate::controller::runtime::clocks::Timed;
use crate::controller::runtime::error::ReconcileError;
use crate::controller::runtime::objects::condition;
use crate::hub::{Barrier, WAITS_FOR_ACKS, Waiter};
use crate::model::endpoint::{droplet_of, holder_uid, name_of};
use crate::model::rows::Key;
use crate::model::world::RoleKind;
use crate::traces;

/// How long an Endpoint waits without a word. If a burst makes many wait for seconds, a write for each would make them
/// wait longer.
const UNTOLD: Duration = Duration::from_secs(5);

/// Waits for the acks of steps 4 and 5, then sets Provisioned and tells the droplet (steps 6 and 8).
pub async fn provision(
    endpoint: &Endpoint,
    endpoints: &Api<Endpoint>,
    mut status: EndpointStatus,
    context: &Context,
) -> Result<Action, ReconcileError> {
    let name = name_of(endpoint);
    let home = droplet_of(endpoint);
    if home.is_empty() {
        say(endpoint, endpoints, status, unattached(), false, context).await?;
        // A pod that was refused may be admitted later, and nothing wakes the Endpoint then.
        let is_asked_for = !attach::pods_naming(endpoint, context).is_empty();
        return Ok(if is_asked_for {
            Action::requeue(USER_RETRY)
        } else {
            Action::await_change()
        });
    }
    if context.drafts.is_written(&name) {
        return Ok(Action::requeue(ACK_RETRY));
    }
    // Claims or ranges may have arrived after the Endpoint.
    sync_endpoint(endpoint, context);
    let waiter = Waiter::Endpoint(name.clone());
    let (rows, followers) = context
        .hub
        .read(|world| (world.endpoint_rows(&name), world.followers(&name)));
    let is_known = rows
        .iter()
        .any(|(droplet, key)| droplet == home && matches!(key, Key::Local(..)));
    let missing = context.hub.missing(&acks_of(endpoint, rows, context));
    let waits_for = if !is_known {
        let message = format!(
            "waits for droplet {home}: transitd has not registered it, or it is not Accepted: kubectl get droplet \
             {home}"
        );
        Some((WAITS_FOR_ACKS, message))
    } else if !missing.is_empty() {
        Some((missing.reason(), missing.message()))
    } else if context.hub.read(|world| world.is_policy_pending(&name)) {
        let message = "waits until the droplets of its VPC know how network policies select it";
        Some((WAITS_FOR_ACKS, message.to_owned()))
    } else {
        None
    };
    if let Some((reason, message)) = waits_for {
        return wait(endpoint, endpoints, status, (reason, &message), context).await;
    }
    if status.addresses.is_empty() {
        let Some(claimed) = ranges_of(endpoint, context) else {
            return Ok(Action::requeue(ACK_RETRY));
        };
        fill(&mut status, &claimed, endpoint);
    }
    let followed = Barrier::new(waiter).has(followers);
    let is_followed = |_: &String| !context.hub.missing(&followed).unacked.is_empty();
    status.previous_droplet = status.previous_droplet.filter(is_followed);
    status.phase = Phase::Provisioned;
    set(
        &mut status.conditions,
        condition("Accepted", true, "Admitted", "", None),
    );
    let message = "its droplet and its bouncers have its rows";
    set(
        &mut status.conditions,
        condition("Ready", true, "Acknowledged", message, None),
    );
    context
        .clocks
        .forget(Timed::EndpointWait, &endpoint.uid().unwrap_or_default());
    if endpoint.status.as_ref() == Some(&status) {
        return Ok(Action::requeue(ACK_RETRY));
    }
    if context.drafts.make_ready(&name, endpoint) {
        // ADD goes on meanwhile.
        sync_endpoint(endpoint, context);
    }
    traces::acked(endpoint);
    let span = traces::begin(|| holder_uid(endpoint), "write Provisioned");
    let written = write(endpoint, endpoints, status, context).await;
    span.end_with(&written);
    written?;
    context.drafts.note_written(&name);
    traces::provisions(endpoint);
    Ok(Action::await_change())
}

/// Returns what an Endpoint waits for until it is Provisioned: that droplets have acked its rows; that others take
/// packets of its droplet; and, because lost droplets are excused, that one live bouncer and one live divider can pass
/// packets on to it.
fn acks_of(endpoint: &Endpoint, rows: Vec<(String, Key)>, context: &Context) -> Barrier {
    let (name, home, network) = (name_of(endpoint), droplet_of(endpoint), &endpoint.spec.network);
    let bouncer = format!("a bouncer of network {network}: kubectl get bouncers");
    let divider = format!("a divider of the VPC of network {network}: kubectl get dividers");
    context.hub.read(|world| {
        Barrier::new(Waiter::Endpoint(name.clone()))
            .has(rows)
            .never_excuses(Some(home))
            .knows(home, world.dividers_of(&name))
            .served_by(bouncer, world.serving_rows(RoleKind::Bouncer, &name))
            .served_by(divider, world.serving_rows(RoleKind::Divider, &name))
    })
}

/// Reports what the Endpoint waits for, if it has waited for a while.
async fn wait(
    endpoint: &Endpoint,
    endpoints: &Api<Endpoint>,
    status: EndpointStatus,
    (reason, message): (&str, &str),
    context: &Context,
) -> Result<Action, ReconcileError> {
    let uid = endpoint.uid().unwrap_or_default();
    if let Some(left) = context.clocks.remaining(Timed::EndpointWait, &uid, UNTOLD) {
        return Ok(Action::requeue(left.min(ACK_RETRY)));
    }
    let told = condition("Ready", false, reason, message, None);
    say(endpoint, endpoints, status, told, false, context).await?;
    Ok(Action::requeue(ACK_RETRY))
}

/// Reports whether its network still admits a Provisioned Endpoint. The Endpoint keeps what it has.
pub async fn keep(
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
            let message = format!("{refusal}. The Endpoint keeps its addresses until its pod ends");
            condition("Accepted", false, refusal.reason(), &message, None)
        }
    };
    let lives = deletion::remove_condition(&mut status.conditions);
    if set(&mut status.conditions, accepted) || lives {
        write(endpoint, endpoints, status, context).await?;
    }
    // An object that is seen for the first time wakes nothing.
    Ok(if refusal.is_some_and(|refusal| refusal.is_unseen()) {
        Action::requeue(USER_RETRY)
    } else {
        Action::await_change()
    })
}
