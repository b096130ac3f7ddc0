//! Bouncer: placed on a droplet, Provisioned once those who use it have acked.

use std::sync::Arc;
use std::time::Duration;

use kube::runtime::controller::Action;
use kube::{Api, ResourceExt};
use thuban_api::condition::set;
use thuban_api::{Bouncer, Phase};

use super::context::{Context, ReconcileError};
use super::network::has_endpoints;
use super::objects::{condition, has_finalizer, remove_finalizer, replace, replace_status};
use super::role::{needs_place, place};
use crate::hub::Waiter;

pub async fn reconcile(bouncer: Arc<Bouncer>, context: Arc<Context>) -> Result<Action, ReconcileError> {
    let name = bouncer.name_any();
    let bouncers: Api<Bouncer> = Api::all(context.client.clone());
    if bouncer.metadata.deletion_timestamp.is_some() {
        if is_held(&bouncer, &context) {
            return Ok(Action::requeue(Duration::from_secs(2)));
        }
        context.hub.update(|world| world.set_bouncer(&name, None));
        if has_finalizer(&*bouncer) {
            remove_finalizer(&bouncers, &*bouncer).await?;
        }
        return Ok(Action::await_change());
    }
    if needs_place(&context, bouncer.spec.droplet.as_deref()) {
        let all = context.stores.bouncers.state();
        let siblings: Vec<String> = all
            .iter()
            .filter(|other| other.spec.network == bouncer.spec.network && other.name_any() != name)
            .filter_map(|other| other.spec.droplet.clone())
            .collect();
        let Some(droplet) = place(&context, &siblings) else {
            return Ok(Action::requeue(Duration::from_secs(2)));
        };
        let mut placed = (*bouncer).clone();
        placed.spec.droplet = Some(droplet.clone());
        replace(&bouncers, &placed).await?;
        context
            .event(
                &*bouncer,
                false,
                "Placed",
                &format!("placed on droplet {droplet}"),
            )
            .await;
        return Ok(Action::await_change());
    }
    let mut status = bouncer.status.clone().unwrap_or_default();
    if status.phase == Phase::Provisioned {
        return Ok(Action::await_change());
    }
    let droplet = bouncer.spec.droplet.as_deref().unwrap_or_default();
    let rows = context
        .hub
        .read(|world| world.network_rows(&bouncer.spec.network, droplet));
    let is_known = rows.iter().any(|(at, _)| at == droplet);
    let missing = context
        .hub
        .missing(&rows, Some(droplet), &Waiter::Bouncer(name.clone()));
    if !is_known || !missing.is_empty() {
        return Ok(Action::requeue(Duration::from_secs(3)));
    }
    status.phase = Phase::Provisioned;
    set(
        &mut status.conditions,
        condition(
            "Ready",
            true,
            "Acknowledged",
            "all droplets concerned have its rows",
            bouncer.metadata.generation,
        ),
    );
    let mut provisioned = (*bouncer).clone();
    provisioned.status = Some(status);
    replace_status(&bouncers, &provisioned).await?;
    context
        .event(
            &*bouncer,
            false,
            "Provisioned",
            &format!("works on droplet {droplet}"),
        )
        .await;
    Ok(Action::await_change())
}

/// A bouncer stays as long as endpoints of its network do, unless it is replaced.
fn is_held(bouncer: &Bouncer, context: &Context) -> bool {
    let network = context.network(&bouncer.spec.network);
    let is_leaving = network.is_some_and(|network| network.metadata.deletion_timestamp.is_some());
    is_leaving && has_endpoints(&bouncer.spec.network, context)
}
