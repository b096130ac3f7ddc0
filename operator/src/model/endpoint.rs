//! Whose an Endpoint is, where it lives and what it has, by what its object says.

use kube::ResourceExt;
use thuban_api::{Endpoint, EndpointType, PodRef};

use super::allocation::addresses_of;
use super::world::EndpointName;

pub fn name_of(endpoint: &Endpoint) -> EndpointName {
    (endpoint.namespace().unwrap_or_default(), endpoint.name_any())
}

/// Whether a user made it, for pods.
pub fn is_users(endpoint: &Endpoint) -> bool {
    endpoint.spec.pod_ref.is_none() && endpoint.spec.service_ref.is_none() && !is_host(endpoint)
}

/// Whether it is a node's own.
pub fn is_host(endpoint: &Endpoint) -> bool {
    endpoint.spec.kind == EndpointType::Host
}

pub fn is_scaled(endpoint: &Endpoint) -> bool {
    endpoint.spec.kind == EndpointType::Scaled
}

/// By what its droplet knows who has it: the UID that kubelet tells the CNI plugin, or a node's name in a form that is no
/// UID.
pub fn holder_uid(endpoint: &Endpoint) -> String {
    if is_host(endpoint) {
        return format!("node/{}", endpoint.spec.droplet);
    }
    pod_of(endpoint).map_or_else(String::new, |pod| pod.cni_uid.clone())
}

/// The pod that has it.
pub fn pod_of(endpoint: &Endpoint) -> Option<&PodRef> {
    let current = endpoint
        .status
        .as_ref()
        .and_then(|status| status.pod_ref.as_ref());
    endpoint.spec.pod_ref.as_ref().or(current)
}

/// Where it lives; empty while no pod has it.
pub fn droplet_of(endpoint: &Endpoint) -> &str {
    if is_users(endpoint) {
        let status = endpoint.status.as_ref();
        status
            .and_then(|status| status.droplet.as_deref())
            .unwrap_or_default()
    } else {
        &endpoint.spec.droplet
    }
}

/// Whether addresses are its own, by its status or by claims made before it.
pub fn has_addresses(endpoint: &Endpoint) -> bool {
    !addresses_of(endpoint).is_empty()
}
