//! What somebody with a token of one node gets from the operator's stream and from the API server.

use serde_json::{Value, json};
use thuban_cluster::Cluster;
use thuban_proto::OPERATOR_TOKEN_AUDIENCE;
use tonic::{Code, Status};

use crate::actor::{Actor, token_of_node};
use crate::operator_stream::{NODE, operator_lease, program, runtime};
use crate::support::get;
use crate::tenants::tenants;

const SYSTEM: &str = "thuban-system";
const HEARTBEATS: &str = "thuban-heartbeats";
const OTHER: &str = "node-b";

fn refusal(lease: &Value, token: Option<&str>, droplet: &str) -> Status {
    runtime()
        .block_on(program(lease, token, droplet))
        .expect_err("the operator sent a program")
}

fn thief(audience: &str) -> Actor {
    let cluster = &tenants().cluster;
    let token = token_of_node(cluster, NODE, audience).unwrap();
    Actor::new(cluster, "the thief of node-a's token", &token).unwrap()
}

/// Without its version: transitd and the operator may write it before the test does.
fn droplet(cluster: &Cluster, name: &str) -> Value {
    let mut droplet = get(cluster, &["droplets.thuban.dev", name]).unwrap();
    if let Some(metadata) = droplet["metadata"].as_object_mut() {
        metadata.remove("resourceVersion");
    }
    droplet
}

#[test]
fn a_stolen_token_is_good_for_no_other_nodes_stream() {
    let cluster = &tenants().cluster;
    let lease = operator_lease(cluster);
    let token = token_of_node(cluster, NODE, OPERATOR_TOKEN_AUDIENCE).unwrap();
    for other in ["node-b", "node-z", ""] {
        let status = refusal(&lease, Some(&token), other);
        assert_eq!(status.code(), Code::PermissionDenied, "{status}");
        assert!(
            status.message().contains("the token is of node node-a"),
            "{status}"
        );
    }
}

#[test]
fn stream_requires_transitd_token_for_operator_audience() {
    let cluster = &tenants().cluster;
    let lease = operator_lease(cluster);
    let status = refusal(&lease, None, NODE);
    assert_eq!(status.code(), Code::Unauthenticated, "{status}");
    let status = refusal(&lease, Some("not.a.token"), NODE);
    assert_eq!(status.code(), Code::Unauthenticated, "{status}");
    // The token is the one for the API server, of the same pod.
    let token = token_of_node(cluster, NODE, "api").unwrap();
    let status = refusal(&lease, Some(&token), NODE);
    assert_eq!(status.code(), Code::Unauthenticated, "{status}");
    let made = |arguments: &[&str]| {
        let audience = format!("--audience={OPERATOR_TOKEN_AUDIENCE}");
        let arguments: Vec<&str> = ["create", "token", &audience]
            .iter()
            .chain(arguments)
            .copied()
            .collect();
        cluster.kubectl(&arguments).unwrap()
    };
    // The tokens: of the right ServiceAccount but of no pod, of a node alone, and of another account.
    for (arguments, word) in [
        (&["-n", "thuban-system", "transitd"][..], "not bound to a pod"),
        (
            &[
                "-n",
                "thuban-system",
                "transitd",
                "--bound-object-kind=Node",
                "--bound-object-name=node-a",
            ],
            "not bound to a pod",
        ),
        (&["-n", "red", "default"], "system:serviceaccount:red:default"),
    ] {
        let status = refusal(&lease, Some(&made(arguments)), NODE);
        assert_eq!(status.code(), Code::PermissionDenied, "{status}");
        assert!(status.message().contains(word), "{status}");
    }
}

#[test]
fn stolen_node_token_is_granted_what_transitd_uses_and_no_more() {
    let thief = thief("api");
    assert_eq!(
        thief.grants("red").unwrap(),
        ["droplets.thuban.dev []: create get update"]
    );
    assert_eq!(
        thief.grants(SYSTEM).unwrap(),
        [
            "droplets.thuban.dev []: create get update",
            "leases.coordination.k8s.io [thuban-operator]: get"
        ]
    );
    assert_eq!(
        thief.grants(HEARTBEATS).unwrap(),
        ["droplets.thuban.dev []: create get update"]
    );
}

#[test]
fn stolen_node_token_writes_only_its_own_droplet() {
    let cluster = &tenants().cluster;
    let thief = thief("api");
    // Its own: as transitd does.
    let mut own = droplet(cluster, NODE);
    own["spec"]["mtu"] = json!(1400);
    thief.write("replace", &own, &[]).unwrap();
    for (field, value) in [
        ("ownerReferences", json!([])),
        ("finalizers", json!(["example.com/stay"])),
        ("labels", json!({"a": "b"})),
        ("annotations", json!({"a": "b"})),
    ] {
        let mut own = droplet(cluster, NODE);
        own["metadata"][field] = value;
        let answer = thief.write("replace", &own, &[]);
        thief.is_refused(
            &format!("write {field} of its Droplet"),
            answer,
            &["metadata", field],
        );
    }
    let mut own = droplet(cluster, NODE);
    own["status"]["address"] = json!("10.9.9.9");
    let answer = thief.write("replace", &own, &["--subresource=status"]);
    thief.is_refused("write the status of its Droplet", answer, &["droplets", "status"]);

    // Another's, there or not.
    let mut other = droplet(cluster, OTHER);
    other["spec"]["ip"] = droplet(cluster, NODE)["spec"]["ip"].clone();
    let words = &["transitd of node node-a may write the Droplet node-a only", OTHER];
    thief.is_refused(
        "replace another's Droplet",
        thief.write("replace", &other, &[]),
        words,
    );
    let made = |name: &str, node: &str| {
        json!({
            "apiVersion": "thuban.dev/v1alpha1", "kind": "Droplet", "metadata": {"name": name},
            "spec": {"node": node, "ip": "172.31.1.9", "interface": "eth0", "mtu": 1500},
        })
    };
    let answer = thief.write("create", &made("node-z", "node-z"), &[]);
    thief.is_refused(
        "make another's Droplet",
        answer,
        &["may write the Droplet node-a only"],
    );
    for arguments in [
        &["get", "droplets"][..],
        &["delete", "--dry-run=server", "droplet", OTHER],
        &["delete", "--dry-run=server", "droplet", NODE],
    ] {
        thief.is_refused(&arguments.join(" "), thief.kubectl(arguments), &["cannot"]);
    }
}

#[test]
fn stolen_node_token_writes_no_lease() {
    let thief = thief("api");
    let lease = |name: &str, namespace: &str| {
        json!({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
               "metadata": {"name": name, "namespace": namespace}, "spec": {"holderIdentity": NODE}})
    };
    let own = format!("droplet-{NODE}");
    // Nodes had heartbeats in the first of them.
    for namespace in [HEARTBEATS, SYSTEM] {
        let answer = thief.write("create", &lease(&own, namespace), &[]);
        thief.is_refused("make a Lease", answer, &["cannot create"]);
    }
}

#[test]
fn stolen_node_token_reads_and_writes_nothing_else() {
    let thief = thief("api");
    let operators = thief.get(&["lease", "-n", SYSTEM, "thuban-operator"]).unwrap();
    let answer = thief.write("replace", &operators, &[]);
    thief.is_refused("take the operator's Lease", answer, &["cannot update"]);
    for kind in [
        "endpoints.thuban.dev",
        "ipclaims",
        "vpcs",
        "networks.thuban.dev",
        "bouncers",
        "dividers",
        "pods",
        "secrets",
        "configmaps",
        "nodes",
    ] {
        thief.is_refused(
            &format!("get {kind}"),
            thief.kubectl(&["get", kind, "-A"]),
            &["cannot list"],
        );
    }
    let endpoint = json!({
        "apiVersion": "thuban.dev/v1alpha1", "kind": "Endpoint",
        "metadata": {"name": "a", "namespace": "red"}, "spec": {"network": "red-web"},
    });
    let answer = thief.write("create", &endpoint, &[]);
    thief.is_refused("make an Endpoint", answer, &["cannot create"]);
}

#[test]
fn token_without_node_or_right_audience_writes_nothing() {
    let cluster = &tenants().cluster;
    let nowhere = Actor::service_account(cluster, SYSTEM, "transitd").unwrap();
    let answer = nowhere.write("replace", &droplet(cluster, NODE), &[]);
    nowhere.is_refused("write a Droplet", answer, &["the token names no node"]);
    let stream_only = thief("thuban-operator");
    let answer = stream_only.kubectl(&["get", "droplet", NODE]);
    stream_only.is_refused("ask the API server", answer, &["Unauthorized"]);
}
