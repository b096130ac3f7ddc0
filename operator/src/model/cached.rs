//! Kubernetes' objects, reduced to the fields that the operator reads. A cluster has tens of thousands of pods, whose
//! specs are most of a watch's data.

use std::net::IpAddr;

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::{Resource, ResourceExt};
use serde::{Deserialize, Serialize};
use thuban_api::PodRef;

/// The annotation of a static pod's mirror with the UID that kubelet tells the CNI plugin.
const MIRROR: &str = "kubernetes.io/config.mirror";

/// A pod, reduced to the fields that are read: the whole type takes 2.5 KiB even when nearly empty.
#[derive(Clone, Debug, Default, Deserialize, Resource, Serialize)]
#[resource(inherit = k8s_openapi::api::core::v1::Pod)]
pub struct Pod {
    pub metadata: ObjectMeta,
    pub spec: Option<PodSpec>,
    pub status: Option<PodStatus>,
}

#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PodSpec {
    pub node_name: Option<String>,
    pub host_network: Option<bool>,
}

#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct PodStatus {
    pub phase: Option<String>,
}

impl Pod {
    /// Returns the pod as an Endpoint names it.
    pub fn reference(&self) -> Option<PodRef> {
        let uid = self.uid()?;
        Some(PodRef {
            name: self.name_any(),
            cni_uid: self.mirrored().unwrap_or_else(|| uid.clone()),
            uid,
        })
    }

    /// Returns the node of a pod that needs a network of ours.
    pub fn node(&self) -> Option<String> {
        let spec = self.spec.as_ref()?;
        if spec.host_network == Some(true) {
            return None;
        }
        spec.node_name.clone().filter(|node| !node.is_empty())
    }

    /// Returns the UID of the static pod that this pod mirrors. Its form (32 hex digits) can't be the UID of any Pod
    /// object, so a pod whose owner sets the annotation takes no other pod's place.
    fn mirrored(&self) -> Option<String> {
        let uid = self.annotations().get(MIRROR)?;
        let is_hash = uid.len() == 32 && uid.bytes().all(|byte| byte.is_ascii_hexdigit());
        is_hash.then(|| uid.clone())
    }

    /// Whether the pod is not finished: a pod that is being deleted still runs.
    pub fn is_alive(&self) -> bool {
        let phase = self.status.as_ref().and_then(|status| status.phase.as_deref());
        !matches!(phase, Some("Succeeded" | "Failed"))
    }

    /// Returns the name of the pod's Endpoint: `<pod>-<first 8 of its UID>`.
    pub fn endpoint_name(&self) -> String {
        let uid: String = self.uid().unwrap_or_default().chars().take(8).collect();
        let name: String = self.name_any().chars().take(244).collect();
        format!("{name}-{uid}")
    }
}

/// A NetworkPolicy, reduced to the fields that are read: only its existence matters.
#[derive(Clone, Debug, Default, Deserialize, Resource, Serialize)]
#[resource(inherit = k8s_openapi::api::networking::v1::NetworkPolicy)]
pub struct NetworkPolicy {
    pub metadata: ObjectMeta,
}

/// Returns the InternalIPs of a node, of both families.
pub fn internal_ips(node: &Node) -> Vec<IpAddr> {
    let addresses = node
        .status
        .as_ref()
        .and_then(|status| status.addresses.as_ref())
        .into_iter()
        .flatten();
    let internal = addresses.filter(|address| address.type_ == "InternalIP");
    internal
        .filter_map(|address| address.address.parse().ok())
        .collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::Pod;

    #[test]
    fn a_mirror_annotation_can_not_name_the_uid_of_a_pod() {
        let pod = |value: &str| -> Pod {
            serde_json::from_value(
                json!({"metadata": {"annotations": {"kubernetes.io/config.mirror": value}}}),
            )
            .unwrap()
        };
        let hash = "0123456789abcdef0123456789abcdef";
        assert_eq!(pod(hash).mirrored().as_deref(), Some(hash));
        for other in [
            "319ca394-4b1f-4a5e-9a6e-0d8f6f2c1a11",
            "",
            "0123456789abcdef0123456789abcdeg",
        ] {
            assert_eq!(pod(other).mirrored(), None, "{other}");
        }
    }
}
