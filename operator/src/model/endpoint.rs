//! Whose an Endpoint is, where it lives and what it has, by what its object says.

use kube::ResourceExt;
use thuban_api::{Endpoint, EndpointType, PodRef};

use super::allocation::addresses_of;
use super::world::EndpointName;

/// Whose an Endpoint is. The CRD's rules let none be two of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndpointKind {
    /// Made for a pod, which has it for life.
    Pod,
    /// Made by a user: the pods that name it have it, one after the other.
    User,
    /// A node's own.
    Host,
    /// Stands for a Service.
    Service,
}

impl EndpointKind {
    pub fn of(endpoint: &Endpoint) -> Self {
        let spec = &endpoint.spec;
        match spec.kind {
            EndpointType::Scaled => Self::Service,
            EndpointType::Host => Self::Host,
            EndpointType::Simple if spec.pod_ref.is_none() && spec.service_ref.is_none() => Self::User,
            EndpointType::Simple => Self::Pod,
        }
    }
}

pub fn name_of(endpoint: &Endpoint) -> EndpointName {
    (endpoint.namespace().unwrap_or_default(), endpoint.name_any())
}

/// By what its droplet knows who has it: the UID that kubelet tells the CNI plugin, or a node's name in a form that is no
/// UID.
pub fn holder_uid(endpoint: &Endpoint) -> String {
    match EndpointKind::of(endpoint) {
        EndpointKind::Host => format!("node/{}", endpoint.spec.droplet),
        EndpointKind::Pod | EndpointKind::User | EndpointKind::Service => {
            pod_of(endpoint).map_or_else(String::new, |pod| pod.cni_uid.clone())
        }
    }
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
    match EndpointKind::of(endpoint) {
        EndpointKind::User => {
            let status = endpoint.status.as_ref();
            status
                .and_then(|status| status.droplet.as_deref())
                .unwrap_or_default()
        }
        EndpointKind::Pod | EndpointKind::Host | EndpointKind::Service => &endpoint.spec.droplet,
    }
}

/// Whether addresses are its own, by its status or by claims made before it.
pub fn has_addresses(endpoint: &Endpoint) -> bool {
    !addresses_of(endpoint).is_empty()
}
