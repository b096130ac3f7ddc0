//! ClusterNetworkPolicy of the group `policy.networking.k8s.io` (network-policy-api v0.2.0): rules of the cluster's
//! administrators, before and behind those of NetworkPolicies.
//!
//! The kind isn't Thuban's: its CRD is not among [`crate::crds`], and the types make none.
//!
//! Invariant: what a later version of the CRD adds is read as if it were absent, so that one such object doesn't end
//! the watch of all. Who judges by an object sees that something is missing, because each peer and protocol has one
//! field.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::CustomResource;
use serde::{Deserialize, Serialize};

use crate::Condition;

#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "policy.networking.k8s.io",
    version = "v1alpha2",
    kind = "ClusterNetworkPolicy",
    plural = "clusternetworkpolicies",
    shortname = "cnp",
    status = "ClusterNetworkPolicyStatus",
    schema = "disabled"
)]
#[serde(rename_all = "camelCase", default)]
pub struct ClusterNetworkPolicySpec {
    pub tier: Tier,
    /// 0 to 1000. In a tier, lower ones are asked first.
    pub priority: i32,
    pub subject: ClusterNetworkPolicySubject,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub ingress: Vec<ClusterNetworkPolicyIngressRule>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub egress: Vec<ClusterNetworkPolicyEgressRule>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Tier {
    Admin,
    Baseline,
    #[default]
    #[serde(other)]
    Unknown,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum RuleAction {
    Accept,
    Deny,
    /// On to the next tier.
    Pass,
    #[default]
    #[serde(other)]
    Unknown,
}

/// Has one field. Pods on their host's network are never selected.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ClusterNetworkPolicySubject {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespaces: Option<LabelSelector>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pods: Option<NamespacedPod>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ClusterNetworkPolicyIngressRule {
    #[serde(skip_serializing_if = "String::is_empty")]
    pub name: String,
    pub action: RuleAction,
    pub from: Vec<ClusterNetworkPolicyIngressPeer>,
    /// Empty: all packets.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub protocols: Vec<ClusterNetworkPolicyProtocol>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ClusterNetworkPolicyEgressRule {
    #[serde(skip_serializing_if = "String::is_empty")]
    pub name: String,
    pub action: RuleAction,
    pub to: Vec<ClusterNetworkPolicyEgressPeer>,
    /// Empty: all packets.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub protocols: Vec<ClusterNetworkPolicyProtocol>,
}

/// Has one field. With none, the rule fails closed: an Accept matches nothing, a Deny or Pass denies all.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ClusterNetworkPolicyIngressPeer {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespaces: Option<LabelSelector>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pods: Option<NamespacedPod>,
}

/// As [`ClusterNetworkPolicyIngressPeer`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ClusterNetworkPolicyEgressPeer {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespaces: Option<LabelSelector>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pods: Option<NamespacedPod>,
    /// The addresses in the status of these nodes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nodes: Option<LabelSelector>,
    /// In CIDR notation. Pods' addresses are in them too.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub networks: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub domain_names: Vec<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct NamespacedPod {
    pub namespace_selector: LabelSelector,
    pub pod_selector: LabelSelector,
}

/// Has one field.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ClusterNetworkPolicyProtocol {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tcp: Option<PortsOfProtocol>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub udp: Option<PortsOfProtocol>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sctp: Option<PortsOfProtocol>,
    /// A name of a port of the destination, whatever its protocol.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub destination_named_port: String,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PortsOfProtocol {
    /// With none, the rule fails closed, as with an unknown peer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub destination_port: Option<Port>,
}

/// Has one field.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Port {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub number: Option<i32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub range: Option<PortRange>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PortRange {
    pub start: i32,
    /// In the range too.
    pub end: i32,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ClusterNetworkPolicyStatus {
    pub conditions: Vec<Condition>,
}

#[cfg(test)]
mod tests {
    use super::{ClusterNetworkPolicy, ClusterNetworkPolicyEgressPeer, RuleAction, Tier};
    use serde_json::json;

    #[test]
    fn a_policy_is_written_as_it_was_read() {
        let selector = json!({"matchLabels": {"app": "web"}});
        let pods = json!({"namespaceSelector": {}, "podSelector": selector});
        let given = json!({
            "apiVersion": "policy.networking.k8s.io/v1alpha2",
            "kind": "ClusterNetworkPolicy",
            "metadata": {"name": "guard"},
            "spec": {
                "tier": "Admin",
                "priority": 7,
                "subject": {"pods": pods},
                "ingress": [{"name": "in", "action": "Pass", "from": [{"namespaces": {}}, {"pods": pods}]}],
                "egress": [{
                    "action": "Deny",
                    "to": [
                        {"nodes": selector},
                        {"networks": ["10.0.0.0/8"]},
                        {"domainNames": ["*.example.com"]},
                    ],
                    "protocols": [
                        {"tcp": {"destinationPort": {"number": 80}}},
                        {"udp": {"destinationPort": {"range": {"start": 1, "end": 2}}}},
                        {"sctp": {}},
                        {"destinationNamedPort": "http"},
                    ],
                }],
            },
        });
        let read: ClusterNetworkPolicy = serde_json::from_value(given.clone()).unwrap();
        assert_eq!(serde_json::to_value(&read).unwrap(), given);
    }

    #[test]
    fn what_a_later_version_adds_is_read_as_absent() {
        let read: ClusterNetworkPolicy = serde_json::from_value(json!({
            "apiVersion": "policy.networking.k8s.io/v1alpha2",
            "kind": "ClusterNetworkPolicy",
            "metadata": {"name": "later"},
            "spec": {
                "tier": "Middle",
                "priority": 7,
                "subject": {"namespaces": {}},
                "egress": [{"action": "Log", "to": [{"services": {}}]}],
            },
        }))
        .unwrap();
        assert_eq!(read.spec.tier, Tier::Unknown);
        let rule = &read.spec.egress[0];
        assert_eq!(rule.action, RuleAction::Unknown);
        assert_eq!(rule.to, [ClusterNetworkPolicyEgressPeer::default()]);
    }
}
