//! What dividers and bouncers share: their placement on a droplet.

use std::collections::HashMap;

use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;
use kube::runtime::reflector::ObjectRef;

use super::context::Context;
use super::droplet::is_accepted;
use crate::model::placement::{Candidate, pick};

/// Set on Nodes that should carry roles; kubelets can't set it.
const PREFERENCE: &str = "transit.node-restriction.kubernetes.io/thuban";

/// Picks a droplet for a role; `siblings` are the droplets of the other roles of its parent.
pub fn place(context: &Context, siblings: &[String]) -> Option<String> {
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

/// Whether the role must be placed: nowhere yet, or on a droplet that is gone.
pub fn needs_place(context: &Context, droplet: Option<&str>) -> bool {
    droplet.is_none_or(|droplet| context.stores.droplets.get(&ObjectRef::new(droplet)).is_none())
}
