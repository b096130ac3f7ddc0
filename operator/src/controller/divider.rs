//! Divider: placed on a droplet, Provisioned once those who use it have acked.

use std::sync::Arc;
use std::time::Duration;

use kube::runtime::controller::Action;
use kube::{Api, ResourceExt};
use thuban_api::condition::set;
use thuban_api::{Divider, Phase};

use super::context::{Context, ReconcileError};
use super::network::is_accepted;
use super::objects::{condition, has_finalizer, remove_finalizer, replace, replace_status};
use super::role::{needs_place, place};
use crate::hub::Waiter;

pub async fn reconcile(divider: Arc<Divider>, context: Arc<Context>) -> Result<Action, ReconcileError> {
    let name = divider.name_any();
    let dividers: Api<Divider> = Api::all(context.client.clone());
    if divider.metadata.deletion_timestamp.is_some() {
        if is_held(&divider, &context) {
            return Ok(Action::requeue(Duration::from_secs(2)));
        }
        context.hub.update(|world| world.set_divider(&name, None));
        if has_finalizer(&*divider) {
            remove_finalizer(&dividers, &*divider).await?;
        }
        return Ok(Action::await_change());
    }
    if needs_place(&context, divider.spec.droplet.as_deref()) {
        let all = context.stores.dividers.state();
        let siblings: Vec<String> = all
            .iter()
            .filter(|other| other.spec.vpc == divider.spec.vpc && other.name_any() != name)
            .filter_map(|other| other.spec.droplet.clone())
            .collect();
        let Some(droplet) = place(&context, &siblings) else {
            return Ok(Action::requeue(Duration::from_secs(2)));
        };
        let mut placed = (*divider).clone();
        placed.spec.droplet = Some(droplet.clone());
        replace(&dividers, &placed).await?;
        context
            .event(
                &*divider,
                false,
                "Placed",
                &format!("placed on droplet {droplet}"),
            )
            .await;
        return Ok(Action::await_change());
    }
    let mut status = divider.status.clone().unwrap_or_default();
    if status.phase == Phase::Provisioned {
        return Ok(Action::await_change());
    }
    let droplet = divider.spec.droplet.as_deref().unwrap_or_default();
    let rows = context
        .hub
        .read(|world| world.divider_rows(&divider.spec.vpc, droplet));
    let is_known = rows.iter().any(|(at, _)| at == droplet);
    let missing = context
        .hub
        .missing(&rows, Some(droplet), &Waiter::Divider(name.clone()));
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
            divider.metadata.generation,
        ),
    );
    let mut provisioned = (*divider).clone();
    provisioned.status = Some(status);
    replace_status(&dividers, &provisioned).await?;
    context
        .event(
            &*divider,
            false,
            "Provisioned",
            &format!("works on droplet {droplet}"),
        )
        .await;
    Ok(Action::await_change())
}

/// A divider stays as long as networks of its VPC do, unless it is replaced.
fn is_held(divider: &Divider, context: &Context) -> bool {
    let vpc = context.vpc(&divider.spec.vpc);
    let is_leaving = vpc.is_some_and(|vpc| vpc.metadata.deletion_timestamp.is_some());
    let networks = context.stores.networks.state();
    is_leaving
        && networks
            .iter()
            .any(|network| network.spec.vpc == divider.spec.vpc && is_accepted(network))
}
