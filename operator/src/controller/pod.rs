//! Pod: one that is bound to a node gets an Endpoint in Init (the seed's first trigger of the endpoint workflow).

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Namespace, Pod};
use kube::api::ObjectMeta;
use kube::runtime::controller::Action;
use kube::runtime::reflector::ObjectRef;
use kube::{Api, ResourceExt};
use thuban_api::{Endpoint, EndpointSpec, EndpointType, FINALIZER, PodRef};
use tracing::info;

use super::context::{Context, ReconcileError};
use super::objects::create;
use crate::model::admission::network_of;

/// UID that kubelet tells the CNI plugin: a static pod's mirror carries it in this annotation.
const MIRROR: &str = "kubernetes.io/config.mirror";

pub async fn reconcile(pod: Arc<Pod>, context: Arc<Context>) -> Result<Action, ReconcileError> {
    let (Some(namespace), Some(uid)) = (pod.namespace(), pod.uid()) else {
        return Ok(Action::await_change());
    };
    let Some(node) = node_of(&pod).filter(|_| is_alive(&pod)) else {
        return Ok(Action::await_change());
    };
    let name = endpoint_name(&pod);
    if context
        .stores
        .endpoints
        .get(&ObjectRef::new(&name).within(&namespace))
        .is_some()
    {
        return Ok(Action::await_change());
    }
    let space = ObjectRef::<Namespace>::new(&namespace);
    let Some(space) = context.stores.namespaces.get(&space) else {
        // Its annotation counts; the watch of namespaces may lag behind that of pods.
        return Ok(Action::requeue(Duration::from_millis(500)));
    };
    let network = network_of(pod.annotations(), space.annotations());
    let vpc = context
        .network(&network)
        .map(|network| network.spec.vpc.clone())
        .unwrap_or_default();
    let cni_uid = mirrored(&pod).unwrap_or_else(|| uid.clone());
    let spec = EndpointSpec {
        kind: EndpointType::Simple,
        vpc,
        network,
        pod_ref: Some(PodRef {
            name: pod.name_any(),
            uid,
            cni_uid,
        }),
        droplet: node,
        addresses: Vec::new(),
        mac: None,
    };
    let mut endpoint = Endpoint::new(&name, spec);
    endpoint.metadata = ObjectMeta {
        name: Some(name.clone()),
        namespace: Some(namespace.clone()),
        finalizers: Some(vec![FINALIZER.to_owned()]),
        ..ObjectMeta::default()
    };
    let endpoints: Api<Endpoint> = Api::namespaced(context.client.clone(), &namespace);
    match create(&endpoints, &endpoint).await {
        Ok(_) => info!(
            namespace,
            endpoint = name,
            network = endpoint.spec.network,
            "endpoint created"
        ),
        Err(error) if error.is_conflict() => {}
        // The namespace is going away; so is the pod.
        Err(error) if error.is_forbidden() => {}
        Err(error) => return Err(error.into()),
    }
    Ok(Action::await_change())
}

/// The node of a pod that needs a network of ours.
fn node_of(pod: &Pod) -> Option<String> {
    let spec = pod.spec.as_ref()?;
    if spec.host_network == Some(true) {
        return None;
    }
    spec.node_name.clone().filter(|node| !node.is_empty())
}

/// UID of the static pod that this one mirrors. Its form (32 hex digits) can't be the UID of any Pod object, so a pod
/// whose owner sets the annotation takes nobody's place.
fn mirrored(pod: &Pod) -> Option<String> {
    let uid = pod.annotations().get(MIRROR)?;
    let is_hash = uid.len() == 32 && uid.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_hash.then(|| uid.clone())
}

/// Not finished: a pod that is being deleted still runs.
pub fn is_alive(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    !matches!(phase, Some("Succeeded" | "Failed"))
}

/// `<pod>-<first 8 of its UID>`.
pub fn endpoint_name(pod: &Pod) -> String {
    let uid: String = pod.uid().unwrap_or_default().chars().take(8).collect();
    let name: String = pod.name_any().chars().take(244).collect();
    format!("{name}-{uid}")
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::Pod;
    use serde_json::json;

    use super::mirrored;

    #[test]
    fn a_mirror_annotation_can_not_name_the_uid_of_a_pod() {
        let pod = |value: &str| -> Pod {
            serde_json::from_value(
                json!({"metadata": {"annotations": {"kubernetes.io/config.mirror": value}}}),
            )
            .unwrap()
        };
        let hash = "0123456789abcdef0123456789abcdef";
        assert_eq!(mirrored(&pod(hash)).as_deref(), Some(hash));
        for other in [
            "319ca394-4b1f-4a5e-9a6e-0d8f6f2c1a11",
            "",
            "0123456789abcdef0123456789abcdeg",
        ] {
            assert_eq!(mirrored(&pod(other)), None, "{other}");
        }
    }
}
