//! Handles changes of Nodes: what the world, and those that place roles, know of them.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;

use crate::controller::context::Context;
use crate::controller::role::placement::{ZONE, site};
use crate::controller::runtime::watch::Change;
use crate::controller::service::service_range;
use crate::controller::wake::wake_roles;
use crate::model::cached::internal_ips;
use crate::model::policy;

pub fn on_node(context: &Context, change: &Change<Node>) {
    let (name, zone, seen) = match change {
        Change::Applied(node) => {
            context.placements.node(&node.name_any(), Some(site(node)));
            (node.name_any(), node.labels().get(ZONE), Some(policy_node(node)))
        }
        Change::Gone(node) => {
            let name = node.name_any();
            context.placements.node(&name, None);
            forget_droplet(context, &name);
            (name, None, None)
        }
    };
    context.hub.update(|world| {
        world.set_policy_node(&name, seen);
        world.set_zone(&name, zone.map(String::as_str));
    });
    let is_moved = match change {
        Change::Applied(node) => {
            let now = internal_ips(node);
            let was = context.last_seen.node_addresses.replace(&name, now.clone());
            was != Some(now)
        }
        Change::Gone(_) => {
            context.last_seen.node_addresses.forget(&name);
            true
        }
    };
    if is_moved && !context.hub.is_filling() {
        sync_node_addresses(context);
    }
    context.hub.triggers.droplet(&name);
    // The node may have been cordoned or uncordoned.
    wake_roles(&name, context);
}

/// Tells the hub and the world the addresses of all nodes, and what depends on them.
pub fn sync_node_addresses(context: &Context) {
    // This is read under the lock, by the store as it is then: the last caller is right.
    context.hub.update(|world| {
        let addresses = context.node_addresses().into_iter().map(|(_, address)| address);
        let addresses: BTreeSet<IpAddr> = addresses.collect();
        context.hub.set_node_addresses(addresses.clone());
        world.set_nodes(addresses);
    });
    service_range::sync(context);
}

/// Returns a node as policies see it.
fn policy_node(node: &Node) -> policy::Node {
    let addresses = node
        .status
        .as_ref()
        .and_then(|status| status.addresses.as_deref());
    let addresses = addresses.unwrap_or_default().iter();
    policy::Node {
        labels: node.labels().clone(),
        addresses: addresses
            .filter_map(|address| address.address.parse().ok())
            .collect(),
        // The world knows the node's endpoints.
        members: BTreeMap::new(),
    }
}

pub fn forget_droplet(context: &Context, name: &str) {
    context.hub.forget(name);
    wake_roles(name, context);
    let residents = context.hub.update(|world| {
        world.set_droplet(name, None);
        world.residents(name)
    });
    for name in &residents {
        context.hub.triggers.endpoint(name);
    }
}
