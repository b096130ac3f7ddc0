//! Strips objects: only what reconcilers read is kept in memory.
//!
//! Invariant: objects that the operator writes lose nothing but `managedFields`, which the API server then takes from
//! its own copy of the object. The operator never writes nodes, namespaces, Services, slices and policies, and of pods
//! only some labels (see `crowding`): of these only the fields that are named here are left. Neither does it write the
//! metadata of PathTraces.

use k8s_openapi::api::core::v1::{Namespace, Node, NodeCondition, NodeSpec, NodeStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use thuban_api::{
    EGRESS_BANDWIDTH_ANNOTATION, INGRESS_BANDWIDTH_ANNOTATION, PathTrace, REPORT_DENIED_ANNOTATION,
};

use crate::controller::runtime::objects::Object;
use crate::model::cached::{NetworkPolicy, Pod, READY};
use crate::model::service::{EndpointSlice, LEFT_ALONE, SERVICE_LABEL, Service};

/// Prefixes of the annotations that the operator reads: its own, those of static pods, and those of bandwidth.
const ANNOTATIONS: [&str; 4] = [
    "thuban.dev/",
    "kubernetes.io/config.",
    EGRESS_BANDWIDTH_ANNOTATION,
    INGRESS_BANDWIDTH_ANNOTATION,
];

pub fn any<K: Object>(object: &mut K) {
    object.meta_mut().managed_fields = None;
}

/// Leaves identity, the annotations above, and what policies see.
pub fn pod(pod: &mut Pod) {
    metadata(&mut pod.metadata);
    pod.take_profile();
    pod.metadata.owner_references = None;
}

/// Leaves taints, cordon, addresses, whether it is Ready, labels and identity.
pub fn node(node: &mut Node) {
    metadata(&mut node.metadata);
    node.spec = node.spec.take().map(|spec| NodeSpec {
        taints: spec.taints,
        unschedulable: spec.unschedulable,
        ..NodeSpec::default()
    });
    node.status = node.status.take().map(|status| NodeStatus {
        addresses: status.addresses,
        conditions: status.conditions.map(|conditions| {
            let ready = conditions
                .into_iter()
                .filter(|condition| condition.type_ == READY);
            ready.map(without_times).collect()
        }),
        ..NodeStatus::default()
    });
}

fn without_times(condition: NodeCondition) -> NodeCondition {
    NodeCondition {
        type_: condition.type_,
        status: condition.status,
        ..NodeCondition::default()
    }
}

pub fn namespace(namespace: &mut Namespace) {
    metadata(&mut namespace.metadata);
    namespace.spec = None;
    namespace.status = None;
}

/// Leaves identity, the annotations above, and the labels that say who serves it.
pub fn service(service: &mut Service) {
    metadata(&mut service.metadata);
    if let Some(labels) = &mut service.metadata.labels {
        labels.retain(|name, _| LEFT_ALONE.contains(&name.as_str()));
    }
    service.metadata.owner_references = None;
}

/// Leaves identity, the name of its Service, and the labels that say who serves it.
pub fn slice(slice: &mut EndpointSlice) {
    metadata(&mut slice.metadata);
    slice.metadata.owner_references = None;
    slice.metadata.annotations = None;
    if let Some(labels) = &mut slice.metadata.labels {
        labels.retain(|name, _| name == SERVICE_LABEL || LEFT_ALONE.contains(&name.as_str()));
    }
}

/// Leaves identity, generation, spec, and whether denied packets are reported.
pub fn network_policy(policy: &mut NetworkPolicy) {
    metadata(&mut policy.metadata);
    policy.metadata.labels = None;
    let annotations = policy.metadata.annotations.take();
    let read = annotations.and_then(|mut annotations| annotations.remove_entry(REPORT_DENIED_ANNOTATION));
    policy.metadata.annotations = read.map(|read| [read].into());
    policy.metadata.owner_references = None;
}

/// Leaves identity, generation, times, the question, and what says when it was answered. Anybody who may edit a
/// namespace may make many, and large ones.
pub fn path_trace(trace: &mut PathTrace) {
    let whole = std::mem::take(&mut trace.metadata);
    trace.metadata = ObjectMeta {
        name: whole.name,
        namespace: whole.namespace,
        uid: whole.uid,
        resource_version: whole.resource_version,
        generation: whole.generation,
        creation_timestamp: whole.creation_timestamp,
        deletion_timestamp: whole.deletion_timestamp,
        ..ObjectMeta::default()
    };
    if let Some(status) = &mut trace.status {
        status.steps = Vec::new();
        status.hops = Vec::new();
        status.answer = None;
    }
}

fn metadata(metadata: &mut ObjectMeta) {
    metadata.managed_fields = None;
    if let Some(annotations) = &mut metadata.annotations {
        annotations.retain(|name, _| ANNOTATIONS.iter().any(|start| name.starts_with(start)));
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::{Namespace, Node};
    use kube::{Resource, ResourceExt};
    use serde_json::json;

    use super::{
        EndpointSlice, LEFT_ALONE, NetworkPolicy, PathTrace, Pod, Service, namespace, network_policy, node,
        path_trace, pod, service, slice,
    };
    use crate::model::cached::{internal_ips, is_node_lost};

    #[test]
    fn a_trimmed_pod_is_read_as_the_whole_one() {
        let whole: Pod = serde_json::from_value(json!({
            "metadata": {
                "name": "web", "namespace": "red", "uid": "0b1c2d3e-4f50-6172-8394-a5b6c7d8e9f0", "resourceVersion": "7",
                "deletionTimestamp": "2026-01-01T00:00:00Z", "labels": {"app": "web"},
                "annotations": {
                    "thuban.dev/ip": "10.0.1.5", "kubernetes.io/config.mirror": "0123456789abcdef0123456789abcdef",
                    "kubernetes.io/egress-bandwidth": "10M", "kubernetes.io/ingress-bandwidth": "20M",
                    "example.org/long": "x",
                },
                "managedFields": [{"manager": "kubelet"}],
            },
            "spec": {"nodeName": "a", "hostNetwork": false, "containers": [{"name": "web", "image": "web:1"}]},
            "status": {"phase": "Succeeded", "message": "done"},
        }))
        .unwrap();
        let mut trimmed = whole.clone();
        pod(&mut trimmed);
        assert_eq!(trimmed.reference(), whole.reference());
        assert_eq!(trimmed.node(), whole.node());
        assert_eq!(trimmed.endpoint_name(), whole.endpoint_name());
        assert_eq!(trimmed.is_alive(), whole.is_alive());
        assert_eq!(
            trimmed.metadata.deletion_timestamp,
            whole.metadata.deletion_timestamp
        );
        assert_eq!(trimmed.metadata.resource_version, whole.metadata.resource_version);
        let annotations = trimmed.metadata.annotations.unwrap();
        assert_eq!(
            annotations.into_keys().collect::<Vec<_>>(),
            [
                "kubernetes.io/config.mirror",
                "kubernetes.io/egress-bandwidth",
                "kubernetes.io/ingress-bandwidth",
                "thuban.dev/ip"
            ]
        );
        assert!(trimmed.metadata.labels.is_none() && trimmed.metadata.managed_fields.is_none());
        assert_eq!(trimmed.profile.unwrap().labels["app"], "web");
    }

    #[test]
    fn a_trimmed_node_keeps_what_places_roles() {
        let whole: Node = serde_json::from_value(json!({
            "metadata": {"name": "a", "uid": "u", "labels": {"topology.kubernetes.io/zone": "z"}},
            "spec": {
                "unschedulable": true, "podCIDR": "10.1.0.0/24",
                "taints": [{"key": "node.kubernetes.io/out-of-service", "effect": "NoExecute"}],
            },
            "status": {
                "addresses": [{"type": "InternalIP", "address": "192.0.2.1"}],
                "images": [{"names": ["web:1"], "sizeBytes": 1}],
                "conditions": [
                    {"type": "MemoryPressure", "status": "Unknown"},
                    {"type": "Ready", "status": "Unknown", "lastHeartbeatTime": "2026-01-01T00:00:00Z"},
                ],
            },
        }))
        .unwrap();
        let mut trimmed = whole.clone();
        node(&mut trimmed);
        assert_eq!(internal_ips(&trimmed), internal_ips(&whole));
        assert_eq!(trimmed.metadata.labels, whole.metadata.labels);
        assert!(is_node_lost(&trimmed) && is_node_lost(&whole));
        let (left, all) = (trimmed.spec.unwrap(), whole.spec.unwrap());
        assert_eq!((left.taints, left.unschedulable), (all.taints, all.unschedulable));
        let status = trimmed.status.unwrap();
        assert!(status.images.is_none());
        let conditions = status.conditions.unwrap();
        assert!(conditions.len() == 1 && conditions[0].last_heartbeat_time.is_none());
    }

    #[test]
    fn a_trimmed_namespace_keeps_what_admission_reads() {
        let mut space: Namespace = serde_json::from_value(json!({
            "metadata": {
                "name": "red", "labels": {"team": "red"},
                "annotations": {"thuban.dev/network": "red-web", "example.org/long": "x"},
            },
            "status": {"phase": "Active"},
        }))
        .unwrap();
        namespace(&mut space);
        assert_eq!(
            space
                .metadata
                .annotations
                .unwrap()
                .into_keys()
                .collect::<Vec<_>>(),
            ["thuban.dev/network"]
        );
        assert_eq!(space.metadata.labels.unwrap()["team"], "red");
    }

    #[test]
    fn of_a_network_policy_only_what_is_read_is_left() {
        let mut policy: NetworkPolicy = serde_json::from_value(json!({
            "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
            "metadata": {
                "name": "deny", "namespace": "red", "uid": "u", "generation": 3, "labels": {"app": "web"},
                "annotations": {"thuban.dev/network": "red-web", "thuban.dev/report-denied": "true"},
                "managedFields": [{"manager": "kubectl"}],
            },
            "spec": {"podSelector": {}, "policyTypes": ["Ingress"]},
        }))
        .unwrap();
        network_policy(&mut policy);
        let left = serde_json::to_value(&policy).unwrap();
        let read = json!({
            "name": "deny", "namespace": "red", "uid": "u", "generation": 3,
            "annotations": {"thuban.dev/report-denied": "true"},
        });
        assert_eq!(left["metadata"], read);
        assert_eq!(left["spec"]["policyTypes"], json!(["Ingress"]));
        let reference = policy.object_ref(&());
        assert_eq!(reference.kind.as_deref(), Some("NetworkPolicy"));
        assert_eq!(reference.api_version.as_deref(), Some("networking.k8s.io/v1"));
    }

    #[test]
    fn of_a_path_trace_only_what_is_read_is_left() {
        let mut trace: PathTrace = serde_json::from_value(json!({
            "apiVersion": "thuban.dev/v1alpha1", "kind": "PathTrace",
            "metadata": {
                "name": "why-1", "namespace": "red", "uid": "u", "resourceVersion": "7", "generation": 1,
                "creationTimestamp": "2026-11-28T12:00:00Z", "deletionTimestamp": "2026-11-28T12:00:01Z",
                "generateName": "why-", "labels": {"app": "web"}, "annotations": {"thuban.dev/long": "x"},
                "finalizers": ["example.org/stay"], "managedFields": [{"manager": "kubectl"}],
                "ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": "web", "uid": "p"}],
            },
            "spec": {"source": {"pod": "a"}, "target": {"pod": {"name": "b"}}},
            "status": {"verdict": "OK", "evaluatedAt": "2026-11-28T12:00:00Z", "steps": [
                {"name": "source", "state": "ok"}]},
        }))
        .unwrap();
        path_trace(&mut trace);
        let left = serde_json::to_value(&trace).unwrap();
        let read = json!({
            "name": "why-1", "namespace": "red", "uid": "u", "resourceVersion": "7", "generation": 1,
            "creationTimestamp": "2026-11-28T12:00:00Z", "deletionTimestamp": "2026-11-28T12:00:01Z",
        });
        assert_eq!(left["metadata"], read);
        assert_eq!(
            left["status"],
            json!({"verdict": "OK", "evaluatedAt": "2026-11-28T12:00:00Z"})
        );
        assert_eq!(left["spec"]["source"]["pod"], "a");
    }

    #[test]
    fn a_trimmed_slice_and_its_service_are_read_as_the_whole_ones() {
        let mut read: EndpointSlice = serde_json::from_value(json!({
            "metadata": {
                "name": "web-x", "namespace": "red",
                "labels": {"kubernetes.io/service-name": "web", "endpointslice.kubernetes.io/managed-by": "x"},
                "annotations": {"endpoints.kubernetes.io/last-change-trigger-time": "2026-01-01T00:00:00Z"},
                "managedFields": [{"manager": "kube-controller-manager"}],
            },
            "addressType": "IPv4",
            "endpoints": [{"addresses": ["10.0.1.2"], "nodeName": "a", "zone": "z", "hints": {},
                           "conditions": {"ready": true}, "targetRef": {"kind": "Pod", "name": "web-1"}}],
            "ports": [{"name": "http", "port": 8080, "appProtocol": "http"}],
        }))
        .unwrap();
        slice(&mut read);
        assert_eq!(read.service(), Some("web"));
        assert_eq!(
            read.addresses().collect::<Vec<_>>(),
            [std::net::IpAddr::from([10, 0, 1, 2])]
        );
        assert!(read.metadata.annotations.is_none() && read.metadata.managed_fields.is_none());
        let mut web: Service = serde_json::from_value(json!({
            "metadata": {
                "name": "web", "uid": "0b1c2d3e-4f50-6172-8394-a5b6c7d8e9f0", "labels": {"app": "web"},
                "annotations": {"thuban.dev/network": "red-web", "example.org/long": "x"},
            },
            "spec": {"clusterIPs": ["10.96.0.10"], "ports": [{"port": 80, "targetPort": 8080}], "selector": {"app": "web"}},
        }))
        .unwrap();
        service(&mut web);
        assert_eq!(web.endpoint_name(), "web-0b1c2d3e");
        assert_eq!(web.cluster_ips().len(), 1);
        assert!(web.labels().is_empty());
        let annotations = web.annotations();
        assert_eq!(annotations.keys().collect::<Vec<_>>(), ["thuban.dev/network"]);
        for label in LEFT_ALONE {
            let labels = web.metadata.labels.get_or_insert_default();
            labels.insert(label.to_owned(), String::new());
            service(&mut web);
            assert!(web.cluster_ips().is_empty(), "{label}");
            web.metadata.labels = None;
            let mut of_proxy = read.clone();
            let labels = of_proxy.metadata.labels.get_or_insert_default();
            labels.insert(label.to_owned(), String::new());
            slice(&mut of_proxy);
            assert_eq!(of_proxy.service(), None, "{label}");
        }
    }
}
