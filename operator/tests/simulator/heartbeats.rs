//! Heartbeats of droplets: Leases that nodes make and renew every ten seconds while they live.

use std::collections::BTreeMap;

use bytes::Bytes;
use http::Method;
use serde_json::{Value, json};

use crate::kind::Kind;
use crate::simulation::State;
use crate::store::{CONFLICT, Failure, INVALID, NOT_FOUND, text};

/// The owners of each Lease, by its droplet.
pub type Heartbeats = BTreeMap<String, Value>;

/// Makes the Lease of a droplet that has none.
pub fn begin(state: &mut State, droplet: &str) {
    state.heartbeats.entry(droplet.to_owned()).or_default();
}

/// Deletes the Leases whose owner is gone, as the garbage collector does.
pub fn collect(state: &mut State) {
    let nodes = state.store.values(Kind::Node);
    let uids: Vec<String> = nodes.map(|node| text(node, "/metadata/uid").to_owned()).collect();
    state.heartbeats.retain(|_, owners| {
        let owner = text(owners, "/0/uid");
        owner.is_empty() || uids.iter().any(|uid| uid == owner)
    });
}

/// Answers a request for one Lease, or for all if there is no name.
pub fn answer(state: &mut State, method: &Method, name: &str, body: &Bytes) -> Result<(u16, Bytes), Failure> {
    if name.is_empty() {
        let leases: Vec<Value> = state
            .heartbeats
            .keys()
            .map(|droplet| lease(state, droplet))
            .collect();
        let list = json!({
            "apiVersion": "coordination.k8s.io/v1", "kind": "LeaseList", "metadata": {"resourceVersion": "1"},
            "items": leases,
        });
        return Ok((200, bytes(&list)));
    }
    let droplet = name.strip_prefix("droplet-").ok_or(NOT_FOUND)?;
    if !state.heartbeats.contains_key(droplet) {
        return Err(NOT_FOUND);
    }
    let request: Value = if body.is_empty() {
        Value::Null
    } else {
        serde_json::from_slice(body).map_err(|_| INVALID)?
    };
    let known = lease(state, droplet);
    let is_known = |path: &str| {
        let wanted = text(&request, path);
        wanted.is_empty() || wanted == text(&known, "/metadata/resourceVersion")
    };
    if !is_known("/metadata/resourceVersion") || !is_known("/preconditions/resourceVersion") {
        return Err(CONFLICT);
    }
    match method.as_str() {
        "PATCH" => {
            let owners = request.pointer("/metadata/ownerReferences").ok_or(INVALID)?;
            state.heartbeats.insert(droplet.to_owned(), owners.clone());
        }
        "DELETE" => drop(state.heartbeats.remove(droplet)),
        _ => return Ok((200, bytes(&known))),
    }
    Ok((200, bytes(&lease(state, droplet))))
}

fn bytes(value: &Value) -> Bytes {
    serde_json::to_vec(value).unwrap().into()
}

fn lease(state: &State, droplet: &str) -> Value {
    let now = state.elapsed();
    let beats = state
        .droplets
        .get(droplet)
        .map_or(0, |droplet| droplet.beats(now));
    let owners = state.heartbeats.get(droplet).cloned().unwrap_or_default();
    let time = format!(
        "2026-01-01T{:02}:{:02}:{:02}.000000Z",
        beats / 360 % 24,
        beats / 6 % 60,
        beats % 6 * 10
    );
    json!({
        "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
        "metadata": {
            "name": format!("droplet-{droplet}"), "namespace": "thuban-heartbeats", "uid": format!("lease-{droplet}"),
            "resourceVersion": (1000 + 2 * beats + u64::from(!owners.is_null())).to_string(), "ownerReferences": owners,
        },
        "spec": {"holderIdentity": droplet, "leaseDurationSeconds": 40, "renewTime": time},
    })
}
