//! What dividers and bouncers share: placed on a droplet, Provisioned once those who use them have acked, taken out
//! of all tables before they go.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use kube::runtime::controller::Action;
use kube::runtime::reflector::{ObjectRef, Store};
use kube::{Api, ResourceExt};
use thuban_api::condition::set;
use thuban_api::{Phase, RoleStatus};

use super::context::{Context, ReconcileError};
use super::droplet::is_accepted;
use super::objects::{Object, condition, has_finalizer, remove_finalizer, replace, replace_status};
use crate::hub::Waiter;
use crate::model::placement::{Candidate, pick};
use crate::model::rows::Key;
use crate::model::world::World;

/// A divider or a bouncer.
pub trait Role: Object + 'static {
    /// The divider's VPC, the bouncer's network.
    fn parent(&self) -> &str;
    fn droplet(&self) -> Option<&str>;
    fn place_on(&mut self, droplet: String);
    fn status(&self) -> Option<&RoleStatus>;
    fn set_status(&mut self, status: RoleStatus);
    fn all(context: &Context) -> &Store<Self>;
    fn waiter(name: String) -> Waiter;
    /// The rows that must be acked before it is Provisioned on `droplet`.
    fn rows(&self, world: &World, droplet: &str) -> Vec<(String, Key)>;
    fn forget(world: &mut World, name: &str);
    /// Whether it serves on although its deletion was asked for: its parent is being deleted and still has members.
    fn is_held(&self, context: &Context) -> bool;
}

pub async fn reconcile<R: Role>(role: Arc<R>, context: Arc<Context>) -> Result<Action, ReconcileError> {
    let name = role.name_any();
    let roles: Api<R> = Api::all(context.client.clone());
    if role.meta().deletion_timestamp.is_some() {
        if role.is_held(&context) {
            return Ok(Action::requeue(Duration::from_secs(2)));
        }
        context.hub.update(|world| R::forget(world, &name));
        if has_finalizer(&*role) {
            remove_finalizer(&roles, &*role).await?;
        }
        return Ok(Action::await_change());
    }
    let Some(droplet) = role.droplet().filter(|droplet| !is_gone(&context, droplet)) else {
        let all = R::all(&context).state();
        let siblings = all
            .iter()
            .filter(|other| other.parent() == role.parent() && other.name_any() != name);
        let siblings: Vec<String> = siblings
            .filter_map(|other| other.droplet().map(str::to_owned))
            .collect();
        let Some(droplet) = place(&context, &siblings) else {
            return Ok(Action::requeue(Duration::from_secs(2)));
        };
        let mut placed = (*role).clone();
        placed.place_on(droplet.clone());
        replace(&roles, &placed).await?;
        context
            .event(&*role, false, "Placed", &format!("placed on droplet {droplet}"))
            .await;
        return Ok(Action::await_change());
    };
    let mut status = role.status().cloned().unwrap_or_default();
    if status.phase == Phase::Provisioned {
        return Ok(Action::await_change());
    }
    let rows = context.hub.read(|world| role.rows(world, droplet));
    let is_known = rows.iter().any(|(at, _)| at == droplet);
    let missing = context.hub.missing(&rows, Some(droplet), &R::waiter(name));
    if !is_known || !missing.is_empty() {
        return Ok(Action::requeue(Duration::from_secs(3)));
    }
    status.phase = Phase::Provisioned;
    let message = "all droplets concerned have its rows";
    set(
        &mut status.conditions,
        condition("Ready", true, "Acknowledged", message, role.meta().generation),
    );
    let mut provisioned = (*role).clone();
    provisioned.set_status(status);
    replace_status(&roles, &provisioned).await?;
    context
        .event(
            &*role,
            false,
            "Provisioned",
            &format!("works on droplet {droplet}"),
        )
        .await;
    Ok(Action::await_change())
}

/// Set on Nodes that should carry roles; kubelets can't set it.
const PREFERENCE: &str = "transit.node-restriction.kubernetes.io/thuban";

/// Picks a droplet for a role; `siblings` are the droplets of the other roles of its parent.
fn place(context: &Context, siblings: &[String]) -> Option<String> {
    let mut roles: HashMap<String, usize> = HashMap::new();
    let dividers = context.stores.dividers.state();
    let bouncers = context.stores.bouncers.state();
    let placed = dividers.iter().filter_map(|role| role.spec.droplet.clone());
    for droplet in placed.chain(bouncers.iter().filter_map(|role| role.spec.droplet.clone())) {
        *roles.entry(droplet).or_default() += 1;
    }
    let known: Vec<String> = context
        .hub
        .read(|world| world.droplets().map(|(name, _)| name.clone()).collect());
    let candidates: Vec<Candidate> = known
        .into_iter()
        .filter(|name| {
            let droplet = context.stores.droplets.get(&ObjectRef::new(name));
            droplet.is_some_and(|droplet| is_accepted(&droplet))
        })
        .map(|name| Candidate {
            roles: roles.get(&name).copied().unwrap_or_default(),
            has_sibling: siblings.contains(&name),
            is_preferred: context
                .stores
                .nodes
                .get(&ObjectRef::<Node>::new(&name))
                .is_some_and(|node| node.labels().contains_key(PREFERENCE)),
            name,
        })
        .collect();
    pick(&candidates).map(str::to_owned)
}

/// Whether the droplet object is gone, and with it what was placed there.
fn is_gone(context: &Context, droplet: &str) -> bool {
    context.stores.droplets.get(&ObjectRef::new(droplet)).is_none()
}
