//! The backends of a Vip: those of its Service.

use std::collections::BTreeMap;
use std::fmt::Debug;

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::discovery::v1::{Endpoint, EndpointSlice};
use kube::api::ListParams;
use kube::{Api, Client, Resource, ResourceExt};
use serde::Serialize;
use serde::de::DeserializeOwned;
use thuban_api::condition::find;
use thuban_api::{ConditionStatus, Droplet, MemberState, Vip};

use super::CtlError;
use super::table::table;
use crate::SERVICE_LABEL;

#[derive(Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Member {
    /// The pod's name.
    name: String,
    address: String,
    node: String,
    ready: bool,
    /// It fails the Vip's check.
    failing: bool,
    /// Why the backend is not ready, or not reached.
    why: String,
}

/// What keeps a node's backends from being reached, by the nodes' names.
type Faults = BTreeMap<String, String>;

/// Why backends fail the Vip's check, by their addresses.
type Failures = BTreeMap<String, String>;

pub async fn of(client: &Client, vip: &Vip) -> Result<Vec<Member>, CtlError> {
    let namespace = vip.namespace().unwrap_or_default();
    let slices: Api<EndpointSlice> = Api::namespaced(client.clone(), &namespace);
    let selector = format!("{SERVICE_LABEL}={}", vip.name_any());
    let slices = slices.list(&ListParams::default().labels(&selector)).await?;
    // Tenants may not see nodes.
    let nodes = readable::<Node>(client).await;
    let droplets = readable::<Droplet>(client).await;
    let mut faults: Faults = droplets.iter().filter_map(droplet_fault).collect();
    faults.extend(nodes.iter().filter_map(node_fault));
    Ok(members(&slices.items, &faults, &failures(vip)))
}

fn failures(vip: &Vip) -> Failures {
    let members = vip.status.iter().flat_map(|status| &status.members);
    let failing = members.filter(|member| member.state == MemberState::Failing);
    failing
        .map(|member| (member.address.clone(), member.why.clone()))
        .collect()
}

async fn readable<K>(client: &Client) -> Vec<K>
where
    K: Resource<DynamicType = (), Scope = kube::core::ClusterResourceScope>
        + Clone
        + Debug
        + DeserializeOwned,
{
    let listed = Api::<K>::all(client.clone()).list(&ListParams::default()).await;
    listed.map(|list| list.items).unwrap_or_default()
}

fn node_fault(node: &Node) -> Option<(String, String)> {
    let mut conditions = node
        .status
        .iter()
        .flat_map(|status| status.conditions.iter().flatten());
    let is_ready = conditions.any(|condition| condition.type_ == "Ready" && condition.status == "True");
    (!is_ready).then(|| (node.name_any(), "the node is not ready".to_owned()))
}

fn droplet_fault(droplet: &Droplet) -> Option<(String, String)> {
    let ready = find(&droplet.status.as_ref()?.conditions, "Ready")?;
    (ready.status != ConditionStatus::True).then(|| {
        (
            droplet.name_any(),
            format!("the node's droplet: {}", ready.message),
        )
    })
}

fn members(slices: &[EndpointSlice], faults: &Faults, failures: &Failures) -> Vec<Member> {
    let mut members: Vec<Member> = slices
        .iter()
        .flat_map(|slice| slice.endpoints.iter().flatten())
        .flat_map(|endpoint| {
            let address = |address: &String| member(endpoint, address, faults, failures);
            endpoint.addresses.iter().map(address)
        })
        .collect();
    members.sort_unstable();
    members.dedup();
    members
}

fn member(endpoint: &Endpoint, address: &str, faults: &Faults, failures: &Failures) -> Member {
    let node = endpoint.node_name.clone().unwrap_or_default();
    let conditions = endpoint.conditions.clone().unwrap_or_default();
    let is_ready = conditions.ready.unwrap_or(true);
    let failure = failures.get(address).filter(|_| is_ready);
    let why = if conditions.terminating == Some(true) {
        "it is terminating".to_owned()
    } else if let Some(fault) = faults.get(&node) {
        fault.clone()
    } else if let Some(failure) = failure {
        format!("its check: {failure}")
    } else if is_ready {
        String::new()
    } else {
        "the pod is not ready".to_owned()
    };
    let pod = endpoint
        .target_ref
        .as_ref()
        .and_then(|target| target.name.clone());
    Member {
        name: pod.unwrap_or_default(),
        address: address.to_owned(),
        node,
        ready: is_ready,
        failing: failure.is_some(),
        why,
    }
}

pub fn table_of(members: &[Member]) -> String {
    let row = |member: &Member| {
        let state = match (member.ready, member.failing) {
            (_, true) => "failing",
            (true, false) => "ready",
            (false, false) => "not ready",
        };
        let [name, address, node, why] =
            [&member.name, &member.address, &member.node, &member.why].map(Clone::clone);
        [name, address, node, state.to_owned(), why]
    };
    table(
        &["NAME", "ADDRESS", "NODE", "STATE", "WHY"],
        members.iter().map(row),
    )
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::{Faults, droplet_fault, failures, members, node_fault, table_of};

    fn endpoint(name: &str, address: &str, node: &str, conditions: &Value) -> Value {
        json!({"addresses": [address], "nodeName": node, "conditions": conditions,
            "targetRef": {"kind": "Pod", "name": name}})
    }

    #[test]
    fn members_say_why_they_are_not_ready() {
        let node = json!({"metadata": {"name": "node-b"},
            "status": {"conditions": [{"type": "Ready", "status": "Unknown"}]}});
        let droplet = json!({"apiVersion": "thuban.dev/v1alpha1", "kind": "Droplet", "metadata": {"name": "node-c"},
            "spec": {"node": "node-c", "ip": "192.0.2.1", "interface": "eth0", "mtu": 1500},
            "status": {"conditions": [{"type": "Ready", "status": "False", "reason": "Disconnected",
                "message": "not connected", "lastTransitionTime": ""}]}});
        let faults: Faults = [
            node_fault(&serde_json::from_value(node).unwrap()).unwrap(),
            droplet_fault(&serde_json::from_value(droplet).unwrap()).unwrap(),
        ]
        .into();
        let (ready, unready) = (json!({"ready": true}), json!({"ready": false}));
        let terminating = json!({"ready": false, "terminating": true});
        let slice = json!({"addressType": "IPv4", "endpoints": [
            endpoint("web-1", "10.0.0.1", "node-a", &ready),
            endpoint("web-2", "10.0.0.2", "node-a", &unready),
            endpoint("web-3", "10.0.0.3", "node-a", &terminating),
            endpoint("web-4", "10.0.0.4", "node-b", &unready),
            endpoint("web-5", "10.0.0.5", "node-c", &ready),
            endpoint("web-6", "10.0.0.6", "node-a", &ready),
        ]});
        let vip = json!({"apiVersion": "thuban.dev/v1alpha1", "kind": "Vip", "metadata": {"name": "shop"},
        "spec": {"service": "web"}, "status": {"members": [
            {"endpoint": "web-6", "address": "10.0.0.6", "droplet": "node-a", "state": "Failing",
                "why": "the pod refuses the connection"},
            {"endpoint": "web-1", "address": "10.0.0.1", "droplet": "node-a", "state": "Ready"},
        ]}});
        let failures = failures(&serde_json::from_value(vip).unwrap());
        // A change of the slices may show an endpoint twice.
        let slices = [slice.clone(), slice].map(|slice| serde_json::from_value(slice).unwrap());
        let members = members(&slices, &faults, &failures);
        let said: Vec<(bool, &str)> = members
            .iter()
            .map(|member| (member.ready, member.why.as_str()))
            .collect();
        assert_eq!(
            said,
            [
                (true, ""),
                (false, "the pod is not ready"),
                (false, "it is terminating"),
                (false, "the node is not ready"),
                (true, "the node's droplet: not connected"),
                (true, "its check: the pod refuses the connection"),
            ]
        );
        let table = table_of(&members);
        assert!(table.lines().nth(1).unwrap().ends_with("ready"), "{table}");
        assert!(table.lines().nth(6).unwrap().contains("failing"), "{table}");
    }
}
