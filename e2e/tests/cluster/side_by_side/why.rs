//! `kubectl thuban why`, as an administrator and as a tenant run it: planted faults are named.

use serde_json::{Value, json};

use super::command_line::{Namespace, Said, administrator, plugin};
use crate::actor::Actor;
use crate::path_questions::{
    Expected, SEEN, WORKS, has_hop, last_message, named, named_by_probe, wait_answer,
};
use crate::support::{apply, get, lock, netexec_manifest, running};
use crate::tenants::tenants;

/// An address in no range of any VPC.
const OUTSIDE: &str = "198.51.100.77";

/// Asks until the answer has the reason; an empty one is that of a path that works.
fn is_named(ask: &dyn Fn() -> Said, reason: &str) -> Value {
    if reason.is_empty() {
        return wait_answer(&WORKS, SEEN, ask).unwrap().json();
    }
    named(&Expected::no(reason, ""), ask).unwrap()
}

fn asked(line: &str, reason: &str) -> Value {
    is_named(&|| administrator(&format!("why {line} -o json")), reason)
}

#[test]
fn why_names_what_keeps_pods_of_two_vpcs_apart() {
    let tenants = tenants();
    let _red = lock(&tenants.cluster, "vpc-red").unwrap();
    let source = &tenants.network("red-web")[0].name;
    let target = tenants.network("red-db")[1];
    let other = &tenants.network("blue-db")[1].name;
    let answer = asked(&format!("red/{source} red/{}", target.name), "");
    assert_eq!(answer["verdict"], "OK", "{answer}");
    asked(&format!("red/{source} {}", target.address), "");
    let answer = asked(&format!("red/{source} blue/{other}"), "NotInVpc");
    // The administrator may see it.
    assert!(
        last_message(&answer).contains("in VPC blue, network blue-db"),
        "{answer}"
    );
    asked(&format!("red/{source} red/no-such-pod"), "PodNotFound");
    asked(&format!("red/{source} 10.0.2.250"), "AddressFree");
    let answer = asked(&format!("red/{source} {OUTSIDE}:80"), "NoEgress");
    assert!(last_message(&answer).contains("VPC red"), "{answer}");
    let text = administrator(&format!("why red/{source} {OUTSIDE}:80")).output;
    assert!(
        text.starts_with(&format!("NO  red/{source} > {OUTSIDE}:80/tcp\n")),
        "{text}"
    );
    let line = format!("why red/{source} {OUTSIDE}:80 --probe -o json");
    let expected = Expected::no("NoEgress", "VPC red").probed("fail");
    let dropped = named_by_probe(&expected, &|| administrator(&line)).unwrap();
    let node = &tenants.network("red-web")[0].node;
    assert!(has_hop(&dropped, node, "dropped, outside_vpc"), "{dropped}");
}

#[test]
fn a_tenant_asks_why_in_its_own_namespace_alone() {
    const SPACE: &str = "cli-why";
    let cluster = &tenants().cluster;
    let _namespace = Namespace::new(cluster, SPACE).unwrap();
    let service = json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "empty", "namespace": SPACE},
        "spec": {"selector": {"app": "nobody"}, "ports": [{"port": 80}]}});
    let pods = [("client", "node-a"), ("server", "node-b")];
    let pods = pods.map(|(name, node)| netexec_manifest(SPACE, name, node, None));
    apply(cluster, &[&pods[..], &[service]].concat()).unwrap();
    for pod in ["client", "server"] {
        running(cluster, SPACE, pod).unwrap();
    }
    for arguments in [
        &["create", "serviceaccount", "-n", SPACE, "editor"][..],
        &[
            "create",
            "rolebinding",
            "-n",
            SPACE,
            "editor",
            "--clusterrole=edit",
            "--serviceaccount=cli-why:editor",
        ],
    ] {
        cluster.kubectl(arguments).unwrap();
    }
    let tenant = Actor::service_account(cluster, SPACE, "editor").unwrap();
    // The API server may learn of the rights a moment later.
    cluster
        .wait_for("the tenant's rights", SEEN, || {
            Ok(plugin(&tenant.kubeconfig, "endpoints -n cli-why")?.code == Some(0))
        })
        .unwrap();
    let ask = |target: &str, reason: &str| {
        let line = format!("why -n {SPACE} client {target} -o json");
        is_named(&|| plugin(&tenant.kubeconfig, &line).unwrap(), reason)
    };
    ask("server:8080", "");
    ask("svc/empty", "NoBackends");
    let other = &tenants().network("blue-db")[1];
    let answer = ask(&format!("blue/{}", other.name), "NotInVpc");
    let same = ask("blue/no-such-pod", "NotInVpc");
    let said = last_message(&answer).replace(&other.name, "no-such-pod");
    assert_eq!(said, last_message(&same));
    let closed = json!({"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
        "metadata": {"name": "closed", "namespace": SPACE}, "spec": {"podSelector": {}}});
    apply(cluster, &[closed]).unwrap();
    let answer = ask("server:8080", "PolicyDenies");
    assert!(last_message(&answer).contains("cli-why/closed"), "{answer}");
    let refused = plugin(&tenant.kubeconfig, "why blue/client blue/server").unwrap();
    assert_eq!(refused.code, Some(2), "{refused:?}");
    assert!(
        refused
            .error
            .contains("you may not create pathtraces.thuban.dev in namespace blue"),
        "{refused:?}"
    );
    // Each question was deleted.
    let left = get(cluster, &["pathtraces.thuban.dev", "-n", SPACE]).unwrap();
    assert_eq!(left["items"].as_array().map(Vec::len), Some(0), "{left}");
}

#[test]
fn a_malformed_question_is_refused() {
    let cluster = &tenants().cluster;
    let admin = Actor::administrator(cluster).unwrap();
    let trace = |target: &Value| {
        json!({"apiVersion": "thuban.dev/v1alpha1", "kind": "PathTrace",
            "metadata": {"name": "two", "namespace": "red"},
            "spec": {"source": {"pod": "a"}, "target": target}})
    };
    for (target, expected) in [
        (json!({}), "exactly one of pod, service and address"),
        (
            json!({"pod": {"name": "a"}, "address": "10.0.0.1"}),
            "exactly one of pod, service and address",
        ),
        (json!({"address": "10.0.0.0/24"}), "without prefix length"),
        (json!({"address": "127.0.0.1"}), "none of loopback"),
        (json!({"address": "169.254.64.1"}), "none of loopback"),
        (json!({"address": "224.0.0.1"}), "none of loopback"),
        (json!({"address": "0.0.0.0"}), "none of loopback"),
        (json!({"address": "ff02::1"}), "none of loopback"),
        (json!({"pod": {"name": "b\u{1b}[31m"}}), "spec.target.pod.name"),
        (
            json!({"service": {"name": "b", "namespace": "b\nc"}}),
            "spec.target.service.namespace",
        ),
    ] {
        let answer = admin.write("create", &trace(&target), &[]);
        admin.is_refused("ask", answer, &[expected]);
    }
    let mut endless = trace(&json!({"pod": {"name": "b"}}));
    endless["metadata"]["finalizers"] = json!(["example.com/stay"]);
    let answer = admin.write("create", &endless, &[]);
    admin.is_refused("keep it by a finalizer", answer, &["metadata.finalizers"]);
    admin
        .write("create", &trace(&json!({"pod": {"name": "b"}})), &[])
        .unwrap();
}
