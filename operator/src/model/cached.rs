//! Kubernetes' objects, reduced to the fields that the operator reads. A cluster has tens of thousands of pods, whose
//! specs are most of a watch's data.

use std::net::IpAddr;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::networking::v1::NetworkPolicySpec;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::{Resource, ResourceExt};
use serde::{Deserialize, Serialize};
use thuban_api::PodRef;
use thuban_rows::NamedPort;

use super::policy::Profile;

/// The annotation of a static pod's mirror with the UID that kubelet tells the CNI plugin.
const MIRROR: &str = "kubernetes.io/config.mirror";
/// The condition of a Node that says whether its kubelet reports.
pub const READY: &str = "Ready";

/// A pod, reduced to the fields that are read: the whole type takes 2.5 KiB even when nearly empty.
#[derive(Clone, Debug, Default, Deserialize, Resource, Serialize)]
#[resource(inherit = k8s_openapi::api::core::v1::Pod)]
pub struct Pod {
    pub metadata: ObjectMeta,
    pub spec: Option<PodSpec>,
    pub status: Option<PodStatus>,
    /// Its labels and ports, which are kept here alone.
    #[serde(skip)]
    pub profile: Option<Arc<Profile>>,
}

#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PodSpec {
    pub node_name: Option<String>,
    pub host_network: Option<bool>,
    #[serde(default)]
    pub containers: Vec<Container>,
    #[serde(default)]
    pub init_containers: Vec<Container>,
}

#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Container {
    /// Of init containers only: one that runs on has `Always`.
    pub restart_policy: Option<String>,
    #[serde(default)]
    pub ports: Vec<ContainerPort>,
}

#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ContainerPort {
    pub name: Option<String>,
    pub protocol: Option<String>,
    pub container_port: i32,
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

    /// Moves labels and ports to the profile.
    pub fn take_profile(&mut self) {
        let labels = self.metadata.labels.take().unwrap_or_default();
        let spec = self.spec.as_mut();
        let (containers, init_containers) = spec
            .map(|spec| {
                (
                    std::mem::take(&mut spec.containers),
                    std::mem::take(&mut spec.init_containers),
                )
            })
            .unwrap_or_default();
        let is_sidecar = |container: &Container| container.restart_policy.as_deref() == Some("Always");
        let sidecars = init_containers.into_iter().filter(is_sidecar);
        let ports = containers
            .into_iter()
            .chain(sidecars)
            .flat_map(|container| container.ports);
        let profile = Profile {
            labels,
            ports: ports.filter_map(ContainerPort::named).collect(),
        };
        self.profile = Some(profile.shared());
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

impl ContainerPort {
    fn named(self) -> Option<NamedPort> {
        let protocol = match self.protocol.as_deref() {
            None | Some("TCP") => 6,
            Some("UDP") => 17,
            Some("SCTP") => 132,
            Some(_) => return None,
        };
        Some(NamedPort {
            name: self.name.filter(|name| !name.is_empty())?,
            protocol,
            port: u16::try_from(self.container_port).ok()?,
        })
    }
}

/// A NetworkPolicy, reduced to the fields that are read.
#[derive(Clone, Debug, Default, Deserialize, Resource, Serialize)]
#[resource(inherit = k8s_openapi::api::networking::v1::NetworkPolicy)]
pub struct NetworkPolicy {
    pub metadata: ObjectMeta,
    pub spec: Option<NetworkPolicySpec>,
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

/// Whether Kubernetes has lost the node: kubelet has not renewed its Lease for so long that the node lifecycle
/// controller says `Unknown`. A node that is `False` says so itself, so it lives.
pub fn is_node_lost(node: &Node) -> bool {
    let conditions = node
        .status
        .as_ref()
        .and_then(|status| status.conditions.as_deref());
    let mut ready = conditions.unwrap_or_default().iter();
    ready.any(|condition| condition.type_ == READY && condition.status == "Unknown")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{NamedPort, Pod};

    #[test]
    fn ports_of_containers_and_sidecars_have_names() {
        let port = |name: &str, port: u16| json!({"name": name, "containerPort": port});
        let mut pod: Pod = serde_json::from_value(json!({
            "metadata": {"labels": {"app": "web"}},
            "spec": {
                "containers": [
                    {"name": "web", "ports": [port("http", 8080), {"containerPort": 1}]},
                    {"name": "dns", "ports": [{"name": "dns", "containerPort": 53, "protocol": "UDP"}]},
                    {"name": "none"},
                ],
                "initContainers": [
                    {"name": "sidecar", "restartPolicy": "Always", "ports": [port("probe", 9000)]},
                    {"name": "first", "ports": [port("early", 9001)]},
                ],
            },
        }))
        .unwrap();
        pod.take_profile();
        let profile = pod.profile.unwrap();
        let named = |name: &str, protocol, port| NamedPort {
            name: name.to_owned(),
            protocol,
            port,
        };
        let ports = [
            named("dns", 17, 53),
            named("http", 6, 8080),
            named("probe", 6, 9000),
        ];
        assert_eq!(profile.ports, ports.into());
        assert_eq!(profile.labels, [("app".to_owned(), "web".to_owned())].into());
        let spec = pod.spec.unwrap();
        assert!(
            pod.metadata.labels.is_none() && spec.containers.is_empty() && spec.init_containers.is_empty()
        );
    }

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
