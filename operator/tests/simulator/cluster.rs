//! The cluster's own actions: nodes, kubelets with their CNI calls, scheduler, garbage collector, namespaces.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use thuban_proto::transit::Attachment;

use crate::droplet::{self, Droplet, Report};
use crate::invariants::pod_uid;
use crate::kind::Kind;
use crate::placement::{PREFERENCE, ZONE};
use crate::simulation::{Simulation, State};
use crate::store::{Preconditions, is_deleting, text};

/// How often kubelets say that they live. Kubernetes' default.
const REPORT_EVERY: Duration = Duration::from_secs(10);
/// How long the node lifecycle controller waits for a kubelet. Kubernetes' former default.
const REPORT_GRACE: Duration = Duration::from_secs(40);

pub fn droplet_object(name: &str, address: Ipv4Addr) -> Value {
    json!({
        "metadata": {},
        "spec": {"node": name, "ip": address.to_string(), "interface": "eth0", "mtu": 1500},
    })
}

/// Adds a node with its transitd and kubelet.
pub fn add_node(simulation: &Arc<Simulation>, number: u8) {
    let name = format!("n{number}");
    let address = Ipv4Addr::new(192, 168, 0, number + 1);
    let is_new = simulation.with(|state| {
        if state.droplets.contains_key(&name) || state.store.get(Kind::Droplet, "", &name).is_some() {
            return false;
        }
        register_node(state, &name, address);
        let droplet = droplet_object(&name, address);
        let _ = state.store.create(Kind::Droplet, "", &name, droplet);
        let incarnation = state.random.next();
        state
            .droplets
            .insert(name.clone(), Droplet::new(&name, incarnation, address));
        true
    });
    if is_new {
        let incarnation = simulation.lock().droplets[&name].incarnation;
        tokio::spawn(droplet::live(simulation.clone(), name.clone(), incarnation));
        tokio::spawn(droplet::keep_registered(
            simulation.clone(),
            name.clone(),
            incarnation,
        ));
        tokio::spawn(report_ready(simulation.clone(), name.clone(), incarnation));
        tokio::spawn(kubelet(simulation.clone(), name, incarnation));
    }
}

/// Makes the Node of a machine, as its kubelet does.
pub fn register_node(state: &mut State, name: &str, address: Ipv4Addr) {
    let number = address.octets()[3] - 1;
    let mut labels = json!({ZONE: format!("z{}", number % 2)});
    if state.random.permille(300) {
        labels[PREFERENCE] = "".into();
    }
    state.note(|| format!("node {name} joins: {labels}"));
    let node = json!({
        "metadata": {"labels": labels},
        "spec": {},
        "status": {
            "addresses": [{"type": "InternalIP", "address": address.to_string()}],
            "conditions": ready("True"),
        },
    });
    let _ = state.store.create(Kind::Node, "", name, node);
}

fn ready(status: &str) -> Value {
    json!([{"type": "Ready", "status": status}])
}

/// Writes whether a Node is Ready: its kubelet says so while the machine is on, and the node lifecycle controller says
/// that it does not know once kubelet has been silent for long.
async fn report_ready(simulation: Arc<Simulation>, name: String, incarnation: u64) {
    let mut heard = simulation.lock().elapsed();
    loop {
        tokio::time::sleep(REPORT_EVERY).await;
        let lives = simulation.with(|state| {
            let now = state.elapsed();
            let droplet = state.droplets.get(&name);
            let Some(droplet) = droplet.filter(|droplet| droplet.incarnation == incarnation) else {
                return false;
            };
            if droplet.is_on && !droplet.is_kubelet_away {
                heard = now;
            }
            let silent = now.saturating_sub(heard);
            let status = if silent.is_zero() {
                "True"
            } else if silent >= REPORT_GRACE {
                "Unknown"
            } else {
                return true;
            };
            state.store.edit(Kind::Node, "", &name, |node| {
                node["status"]["conditions"] = ready(status);
            });
            true
        });
        if !lives {
            return;
        }
    }
}

/// Switches a machine off, or starts it again: then only its tables and its pods' sandboxes are gone.
pub fn power(state: &mut State, name: &str, is_on: bool) {
    let now = state.elapsed();
    let Some(droplet) = state.droplets.get_mut(name) else {
        return;
    };
    droplet.report(Report::Break);
    droplet.stream = None;
    droplet.tables.rows.clear();
    droplet.attachments.clear();
    droplet.subscriptions.clear();
    droplet.since = now;
    droplet.is_on = is_on;
    state.note(|| format!("node {name} is {}", if is_on { "started again" } else { "off" }));
}

/// Deletes the Node of a machine that is off; the objects that it owned and its pods follow.
pub fn remove_node(state: &mut State, name: &str) {
    power(state, name, false);
    state.droplets.remove(name);
    state.note(|| format!("node {name} is deleted"));
    let is_owned = state
        .store
        .value(Kind::Droplet, "", name)
        .is_some_and(|droplet| droplet.pointer("/metadata/ownerReferences/0").is_some());
    state.store.purge(Kind::Node, "", name);
    if !is_owned {
        let _ = state
            .store
            .delete(Kind::Droplet, "", name, &Preconditions::default(), false);
    }
    for (namespace, pod) in pods_on(state, name) {
        state.store.purge(Kind::Pod, &namespace, &pod);
    }
}

pub fn pods_on(state: &State, node: &str) -> Vec<(String, String)> {
    let pods = state.store.all(Kind::Pod);
    pods.filter(|(_, pod)| text(&pod.value, "/spec/nodeName") == node)
        .map(|((_, namespace, name), _)| (namespace.clone(), name.clone()))
        .collect()
}

/// Whether the pod is not finished.
pub fn is_alive(pod: &Value) -> bool {
    !matches!(text(pod, "/status/phase"), "Succeeded" | "Failed")
}

/// Whether the pod that has the Endpoint lives.
pub fn has_living_pod(state: &State, endpoint: &Value) -> bool {
    let uid = pod_uid(endpoint);
    let mut pods = state.store.values(Kind::Pod);
    pods.any(|pod| text(pod, "/metadata/uid") == uid && is_alive(pod))
}

/// Whether the Endpoint is of a pod that has ended. Its rows go before it.
pub fn is_left_over(state: &State, endpoint: &Value) -> bool {
    !text(endpoint, "/spec/podRef/uid").is_empty() && !has_living_pod(state, endpoint)
}

pub fn add_pod(state: &mut State, namespace: &str, name: &str, node: &str, annotations: &Value) {
    let pod = json!({
        "metadata": {"annotations": annotations},
        "spec": {"containers": [], "nodeName": node},
        "status": {"phase": "Pending"},
    });
    if state.store.create(Kind::Pod, namespace, name, pod).is_ok() {
        state.note(|| format!("pod {namespace}/{name} is bound to {node}: {annotations}"));
    }
}

/// The next action of a kubelet.
#[derive(Debug)]
enum Chore {
    /// CNI ADD.
    Attach(String),
    /// CNI DEL.
    Detach(String),
    /// The pod has ended.
    Purge(String, String),
}

fn chores(state: &State, node: &str) -> Vec<Chore> {
    let works = |droplet: &&Droplet| droplet.is_on && !droplet.is_kubelet_away;
    let Some(droplet) = state.droplets.get(node).filter(works) else {
        return Vec::new();
    };
    let mut chores = Vec::new();
    let mut wanted = Vec::new();
    for ((_, namespace, name), pod) in state.store.all(Kind::Pod) {
        let pod = &*pod.value;
        if text(pod, "/spec/nodeName") != node {
            continue;
        }
        let uid = text(pod, "/metadata/uid");
        let is_attached = droplet.attachments.contains_key(uid);
        if is_alive(pod) && !is_deleting(pod) {
            wanted.push(uid);
            if !is_attached && droplet.tables.ready(uid).is_some() {
                chores.push(Chore::Attach(uid.to_owned()));
            }
        } else if is_deleting(pod) && !is_attached {
            chores.push(Chore::Purge(namespace.clone(), name.clone()));
        }
    }
    let ended = droplet
        .attachments
        .keys()
        .filter(|uid| !wanted.contains(&uid.as_str()));
    chores.extend(ended.map(|uid| Chore::Detach(uid.clone())));
    chores
}

async fn kubelet(simulation: Arc<Simulation>, node: String, incarnation: u64) {
    let lives = |state: &State| {
        let droplet = state.droplets.get(&node);
        droplet.is_some_and(|droplet| droplet.incarnation == incarnation)
    };
    let mut stirred = simulation.stirred.get();
    let mut has_more = false;
    loop {
        if !has_more {
            stirred = simulation.stirred.other_than(stirred).await;
        }
        simulation.pause(5, 400).await;
        has_more = simulation.with(|state| {
            if !lives(state) {
                return None;
            }
            let chores = chores(state, &node);
            if let Some(chore) = state.random.pick(&chores) {
                state.note(|| format!("kubelet {node}: {chore:?}"));
                perform(state, &node, chore);
            }
            Some(!chores.is_empty())
        }) == Some(true);
        if !lives(&simulation.lock()) {
            return;
        }
    }
}

fn perform(state: &mut State, node: &str, chore: &Chore) {
    let Some(droplet) = state.droplets.get_mut(node) else {
        return;
    };
    match chore {
        Chore::Attach(uid) => {
            let Some(row) = droplet.tables.ready(uid).cloned() else {
                return;
            };
            droplet.containers += 1;
            let attachment = Attachment {
                container_id: format!("{node}-{}", droplet.containers),
                ifname: "eth0".into(),
                pod_uid: uid.clone(),
                pod_namespace: row.pod_namespace,
                pod_name: row.pod_name,
                vni: row.vni,
                address: row.address,
                address6: row.address6,
            };
            droplet.report(Report::Attached(attachment.clone()));
            droplet.attachments.insert(uid.clone(), attachment);
            crate::invariants::after_attach(state, node, uid);
        }
        Chore::Detach(uid) => detach(state, node, uid),
        Chore::Purge(namespace, name) => state.store.purge(Kind::Pod, namespace, name),
    }
}

pub fn detach(state: &mut State, node: &str, uid: &str) {
    let Some(droplet) = state.droplets.get_mut(node) else {
        return;
    };
    if let Some(attachment) = droplet.attachments.remove(uid) {
        droplet.report(Report::Detached(attachment));
    }
}

/// Runs Kubernetes' garbage collector: objects whose owners are all gone are deleted; owners deleted in the foreground
/// wait for that.
pub async fn collect(simulation: Arc<Simulation>) {
    loop {
        simulation.collect.notified().await;
        simulation.pause(5, 800).await;
        simulation.with(|state| {
            if !state.is_collector_away {
                sweep(state);
            }
        });
    }
}

fn sweep(state: &mut State) {
    let kinds = [
        Kind::Node,
        Kind::Vpc,
        Kind::Network,
        Kind::NetworkPolicy,
        Kind::ClusterNetworkPolicy,
    ];
    let owners: Vec<(String, bool)> = kinds
        .into_iter()
        .flat_map(|kind| state.store.values(kind))
        .map(|owner| (text(owner, "/metadata/uid").to_owned(), is_foreground(owner)))
        .collect();
    let mut blocking = Vec::new();
    let mut ended = Vec::new();
    for kind in [Kind::Droplet, Kind::Divider, Kind::Bouncer, Kind::PolicyState] {
        for ((_, namespace, name), object) in state.store.all(kind) {
            let uid = text(&object.value, "/metadata/ownerReferences/0/uid");
            if uid.is_empty() {
                continue;
            }
            let owner = owners.iter().find(|(owner, _)| owner == uid);
            let is_foreground = owner.is_some_and(|(_, is_foreground)| *is_foreground);
            if is_foreground {
                blocking.push(uid.to_owned());
            }
            if (owner.is_none() || is_foreground) && !is_deleting(&object.value) {
                ended.push((
                    kind,
                    namespace.clone(),
                    name.clone(),
                    text(&object.value, "/metadata/uid").to_owned(),
                ));
            }
        }
    }
    for (kind, namespace, name, uid) in ended {
        let preconditions = Preconditions {
            uid: Some(uid),
            version: None,
        };
        state.note(|| format!("garbage collector deletes {kind:?} {name}"));
        let _ = state.store.delete(kind, &namespace, &name, &preconditions, false);
    }
    let waiting: Vec<_> = [Kind::Vpc, Kind::Network]
        .into_iter()
        .flat_map(|kind| state.store.all(kind))
        .filter(|(_, owner)| {
            is_foreground(&owner.value)
                && !blocking
                    .iter()
                    .any(|uid| uid == text(&owner.value, "/metadata/uid"))
        })
        .map(|((kind, _, name), _)| (*kind, name.clone()))
        .collect();
    for (kind, name) in waiting {
        state.store.edit(kind, "", &name, |owner| {
            if let Some(finalizers) = owner["metadata"]["finalizers"].as_array_mut() {
                finalizers.retain(|finalizer| finalizer != "foregroundDeletion");
            }
        });
    }
    end_namespaces(state);
}

fn is_foreground(owner: &Value) -> bool {
    let finalizers = owner.pointer("/metadata/finalizers").and_then(Value::as_array);
    finalizers.is_some_and(|all| all.iter().any(|finalizer| finalizer == "foregroundDeletion"))
}

/// Ends the namespaces that are deleted: each takes all its objects along, its Endpoints after its pods.
fn end_namespaces(state: &mut State) {
    let ending: Vec<String> = state
        .store
        .all(Kind::Namespace)
        .filter(|(_, space)| is_deleting(&space.value))
        .map(|((_, _, name), _)| name.clone())
        .collect();
    for space in ending {
        let mut is_empty = true;
        for kind in [
            Kind::Pod,
            Kind::Service,
            Kind::EndpointSlice,
            Kind::Endpoint,
            Kind::NetworkPolicy,
            Kind::PolicyState,
            Kind::PathTrace,
            Kind::Event,
        ] {
            let within: Vec<_> = state
                .store
                .all(kind)
                .filter(|((_, namespace, _), _)| *namespace == space)
                .map(|((_, _, name), _)| name.clone())
                .collect();
            if kind == Kind::Endpoint && !is_empty {
                // Pods, or Services, which end their Endpoints themselves.
                continue;
            }
            for name in within {
                is_empty = false;
                let object = state.store.value(kind, &space, &name);
                if kind == Kind::Endpoint && object.is_some_and(|of| !text(of, "/spec/podRef/uid").is_empty())
                {
                    // A pod's goes at once, whatever the operator has done.
                    state.stripped.insert(name.clone());
                }
                let preconditions = Preconditions::default();
                let _ = state.store.delete(kind, &space, &name, &preconditions, false);
            }
        }
        if is_empty {
            state.store.purge(Kind::Namespace, "", &space);
        }
    }
}
