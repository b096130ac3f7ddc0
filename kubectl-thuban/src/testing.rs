//! A small healthy cluster for unit tests: two nodes, the VPCs `default` and `red`.

use std::collections::BTreeMap;
use std::future;
use std::io::Read;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use k8s_openapi::jiff::Timestamp;
use kube::Client;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use thuban_api::Endpoint;
use thuban_client::played::{self, Answer as Answered, Request};

use crate::objects::{CheckObjects, ControlPlane, Endpoints, StatusObjects, Surroundings, Tenancy};
use crate::report::PLUGIN;
use crate::why::{Answer, Question};

/// The time at which tests look.
pub fn now() -> Timestamp {
    "2026-11-28T12:00:00Z".parse().unwrap()
}

/// Reads an object.
pub fn object<K: DeserializeOwned>(value: Value) -> K {
    serde_json::from_value(value).unwrap()
}

/// Returns a condition that changed 14 s ago.
pub fn condition(kind: &str, status: &str, reason: &str, message: &str) -> Value {
    json!({"type": kind, "status": status, "reason": reason, "message": message,
        "lastTransitionTime": "2026-11-28T11:59:46Z"})
}

fn thuban<K: DeserializeOwned>(kind: &str, name: &str, spec: &Value, status: &Value) -> K {
    let mut value = json!({"apiVersion": "thuban.dev/v1alpha1", "kind": kind, "metadata": {"name": name},
        "spec": spec, "status": status});
    if kind == "Endpoint" {
        value["metadata"]["namespace"] = json!("red");
    }
    object(value)
}

fn ready() -> Value {
    json!([
        condition("Accepted", "True", "Valid", ""),
        condition("Ready", "True", "Provisioned", "")
    ])
}

fn role<K: DeserializeOwned>(kind: &str, name: &str, spec: &Value, droplet: &str) -> K {
    let mut spec = spec.clone();
    spec["droplet"] = json!(droplet);
    let status = json!({"phase": "Provisioned", "droplet": droplet, "conditions": ready()});
    thuban(kind, name, &spec, &status)
}

fn control_plane() -> ControlPlane {
    let lease = json!({"metadata": {"name": "thuban-operator", "annotations": {"thuban.dev/version": PLUGIN}},
        "spec": {"holderIdentity": "operator-1_6a2b", "leaseTransitions": 7,
            "renewTime": "2026-11-28T11:59:59.000000Z"}});
    let deployment = json!({"metadata": {"name": "thuban-operator"},
        "spec": {"replicas": 2, "selector": {}, "template": {}}, "status": {"readyReplicas": 2}});
    let pod = json!({"metadata": {"name": "operator-1"}, "spec": {"nodeName": "node-a", "containers": []}});
    ControlPlane {
        deployment: Ok(Some(object(deployment))),
        pods: Ok(vec![object(pod)]),
        lease: Ok(Some(object(lease))),
    }
}

fn droplet<K: DeserializeOwned>(name: &str) -> K {
    let spec =
        json!({"node": name, "ip": "192.0.2.11", "interface": "eth0", "mtu": 1500, "programVersion": PLUGIN});
    let conditions = json!([
        condition("Accepted", "True", "Registered", ""),
        condition("Ready", "True", "Connected", "")
    ]);
    thuban(
        "Droplet",
        name,
        &spec,
        &json!({"phase": "Provisioned", "conditions": conditions}),
    )
}

fn vpc<K: DeserializeOwned>(name: &str, vni: u32, cidr: &str, shared: Option<&[&str]>) -> K {
    let mut spec = json!({"cidrs": [cidr]});
    if let Some(shared) = shared {
        spec["sharedServices"] = json!(shared);
    }
    let status = json!({"phase": "Provisioned", "cidrs": [cidr], "vni": vni, "dividers": 1, "workingDividers": 1,
        "conditions": ready()});
    thuban("Vpc", name, &spec, &status)
}

fn network<K: DeserializeOwned>(name: &str, vpc: &str, cidr: &str) -> K {
    let status = json!({"phase": "Provisioned", "cidrs": [cidr], "capacity": 252, "allocated": 3, "bouncers": 1,
        "workingBouncers": 1, "conditions": ready()});
    thuban("Network", name, &json!({"vpc": vpc, "cidrs": [cidr]}), &status)
}

fn endpoints() -> Vec<Endpoint> {
    let pod = json!({"name": "web-1", "uid": "u", "cniUid": "u"});
    let on_node = json!({"vpc": "red", "network": "red-web", "podRef": pod, "droplet": "node-a"});
    let provisioned =
        |address: &str| json!({"phase": "Provisioned", "addresses": [address], "conditions": ready()});
    let service = json!({"type": "Scaled", "vpc": "red", "network": "red-web",
        "serviceRef": {"name": "shop", "uid": "u"}});
    let unattached = json!({"phase": "Init", "addresses": ["10.0.1.50"], "conditions": [
        condition("Accepted", "True", "Admitted", ""), condition("Ready", "False", "Unattached", "no pod")]});
    vec![
        thuban("Endpoint", "web-1-00000000", &on_node, &provisioned("10.0.1.2")),
        thuban("Endpoint", "shop-00000000", &service, &provisioned("10.96.0.7")),
        thuban("Endpoint", "kept", &json!({"network": "red-web"}), &unattached),
    ]
}

/// Returns an endpoint of `red-web` with a condition that is False.
pub fn endpoint_that_waits(namespace: &str, name: &str, reason: &str, message: &str) -> Endpoint {
    let conditions = json!([condition("Ready", "False", reason, message)]);
    let mut endpoint: Endpoint = thuban(
        "Endpoint",
        name,
        &json!({"vpc": "red", "network": "red-web"}),
        &json!({"phase": "Init", "conditions": conditions}),
    );
    endpoint.metadata.namespace = Some(namespace.to_owned());
    endpoint
}

/// Returns what `status` sees.
pub fn status() -> StatusObjects {
    let divider = |name: &str, vpc: &str| role("Divider", name, &json!({"vpc": vpc}), "node-a");
    let bouncer = |name: &str, vpc: &str, network: &str| {
        role(
            "Bouncer",
            name,
            &json!({"vpc": vpc, "network": network}),
            "node-b",
        )
    };
    StatusObjects {
        control_plane: control_plane(),
        droplets: Ok(vec![droplet("node-a"), droplet("node-b")]),
        tenancy: Tenancy {
            vpcs: Ok(vec![
                vpc("default", 1, "10.244.0.0/16", None),
                vpc("red", 7, "10.0.0.0/16", Some(&["default/registry"])),
            ]),
            networks: Ok(vec![
                network("default", "default", "10.244.0.0/16"),
                network("red-web", "red", "10.0.1.0/24"),
            ]),
            dividers: Ok(vec![divider("default-d0", "default"), divider("red-d0", "red")]),
            bouncers: Ok(vec![
                bouncer("default-b0", "default", "default"),
                bouncer("red-web-b0", "red", "red-web"),
            ]),
            endpoints: Endpoints {
                list: Ok(endpoints()),
                namespace: None,
            },
        },
    }
}

/// Returns an answer of `why` whose last step has the reason; none if it is empty.
pub fn answer(verdict: &str, reason: &str) -> Answer {
    let step =
        |name: &str, state: &str, message: &str| json!({"name": name, "state": state, "message": message});
    let mut last = step("policies", "ok", "accepted");
    let mut status = json!({"verdict": verdict, "evaluatedAt": "2026-11-28T12:00:00Z"});
    if !reason.is_empty() {
        last = step("policies", "fail", "denied");
        last["reason"] = json!(reason);
        last["remedy"] = json!("accept them");
        status["reason"] = json!(reason);
    }
    status["steps"] = json!([step("source", "ok", "VPC red, red-web, 10.0.1.3"), last]);
    let question = Question::read("web-0", "db-0:5432", "red").unwrap();
    Answer::new(&question, Some(object(status)))
}

/// Returns a Node with an address and a range for pods.
pub fn node<K: DeserializeOwned>(name: &str, address: &str, pods: &str) -> K {
    object(
        json!({"metadata": {"name": name}, "spec": {"podCIDRs": [pods]}, "status": {"addresses": [
        {"type": "Hostname", "address": name}, {"type": "InternalIP", "address": address}]}}),
    )
}

/// Returns a DaemonSet that mounts a folder of its nodes.
pub fn daemon_set<K: DeserializeOwned>(namespace: &str, name: &str, path: &str) -> K {
    object(
        json!({"metadata": {"name": name, "namespace": namespace}, "spec": {"selector": {}, "template": {"spec": {
        "containers": [], "volumes": [{"name": "folder", "hostPath": {"path": path}}]}}}}),
    )
}

/// Returns what `check` sees.
pub fn check() -> CheckObjects {
    let StatusObjects {
        control_plane,
        droplets,
        tenancy,
    } = status();
    let services = json!({"metadata": {"name": "kubernetes"}, "spec": {"cidrs": ["10.96.0.0/16"]}});
    CheckObjects {
        control_plane,
        droplets,
        vpcs: tenancy.vpcs,
        networks: tenancy.networks,
        surroundings: Surroundings {
            nodes: Ok(vec![
                node("node-a", "192.0.2.11", "10.244.1.0/24"),
                node("node-b", "192.0.2.12", "10.244.2.0/24"),
            ]),
            service_cidrs: Ok(vec![object(services)]),
            daemon_sets: Ok(vec![daemon_set("thuban-system", "transitd", "/etc/cni/net.d")]),
        },
    }
}

/// Returns the client of a played API server: of a path it answers a code and a text. `asked` gets the paths.
pub fn server(answer: fn(&str) -> Answered, asked: &Arc<Mutex<Vec<String>>>) -> Client {
    let asked = Arc::clone(asked);
    played::client(move |Request { path, .. }| {
        let answered = answer(&path);
        asked.lock().unwrap().push(path);
        future::ready(answered)
    })
}

/// Returns a list of objects, as an API server sends it.
pub fn list_of(items: &Value) -> Answered {
    let list = json!({"apiVersion": "v1", "kind": "List", "metadata": {}, "items": items});
    (200, list.to_string())
}

/// Returns what an API server sends that refuses or lacks something.
pub fn refusal(code: u16, message: &str) -> Answered {
    played::status(code, "Forbidden", message)
}

/// Unpacks by the program gzip.
pub fn gunzip(packed: &[u8]) -> Vec<u8> {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let name = format!("kubectl-thuban-{}-{number}.gz", std::process::id());
    let path = std::env::temp_dir().join(name);
    std::fs::write(&path, packed).unwrap();
    let output = Command::new("gzip").arg("-dc").arg(&path).output().unwrap();
    std::fs::remove_file(&path).unwrap();
    assert!(output.status.success(), "{output:?}");
    output.stdout
}

/// Returns the files of a tar.gz.
pub fn unpack(packed: &[u8]) -> BTreeMap<String, String> {
    let bytes = gunzip(packed);
    let mut archive = tar::Archive::new(&bytes[..]);
    let mut files = BTreeMap::new();
    for entry in archive.entries().unwrap() {
        let mut entry = entry.unwrap();
        let path = entry.path().unwrap().display().to_string();
        let mut text = String::new();
        entry.read_to_string(&mut text).unwrap();
        files.insert(path, text);
    }
    files
}
