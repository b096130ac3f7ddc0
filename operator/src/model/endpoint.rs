//! Makes an Endpoint's object, and reads its kind of holder, its droplet and its addresses from its object.

use kube::ResourceExt;
use thuban_api::{Endpoint, EndpointSpec, EndpointType, FINALIZER, PodRef};

use super::allocation::addresses_of;
use super::world::EndpointName;

/// The kind of holder that an Endpoint has. The CRD's rules allow exactly one.
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

/// Returns an Endpoint as the operator makes it. A pod's has no finalizer: only the operator deletes it, once no
/// droplet has its rows (policy `thuban-endpoints-of-pods`). That saves a write.
pub fn new(namespace: &str, name: &str, spec: EndpointSpec) -> Endpoint {
    let mut endpoint = Endpoint::new(name, spec);
    endpoint.metadata.namespace = Some(namespace.to_owned());
    if EndpointKind::of(&endpoint) != EndpointKind::Pod {
        endpoint.metadata.finalizers = Some(vec![FINALIZER.to_owned()]);
    }
    endpoint
}

pub fn name_of(endpoint: &Endpoint) -> EndpointName {
    (endpoint.namespace().unwrap_or_default(), endpoint.name_any())
}

/// Returns the identifier by which the droplet knows the holder: the UID that kubelet tells the CNI plugin, or a node's
/// name in a form that is no UID.
pub fn holder_uid(endpoint: &Endpoint) -> String {
    match EndpointKind::of(endpoint) {
        EndpointKind::Host => format!("node/{}", endpoint.spec.droplet),
        EndpointKind::Pod | EndpointKind::User | EndpointKind::Service => {
            pod_of(endpoint).map_or_else(String::new, |pod| pod.cni_uid.clone())
        }
    }
}

/// Returns the pod that has the Endpoint.
pub fn pod_of(endpoint: &Endpoint) -> Option<&PodRef> {
    let current = endpoint
        .status
        .as_ref()
        .and_then(|status| status.pod_ref.as_ref());
    endpoint.spec.pod_ref.as_ref().or(current)
}

/// Returns the droplet that the Endpoint lives on; empty while no pod has the Endpoint.
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

/// Whether the Endpoint has addresses of its own, by its status or by claims made before it.
pub fn has_addresses(endpoint: &Endpoint) -> bool {
    !addresses_of(endpoint).is_empty()
}
