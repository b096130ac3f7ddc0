//! Who may do what: the rights of operator, administrators and tenants, tried with their own tokens.

use std::time::Duration;

use anyhow::Result;
use serde_json::{Value, json};
use thuban_cluster::Cluster;

use crate::actor::Actor;
use crate::support::{condition, delete, get, netexec_manifest};
use crate::tenants::tenants;

const SYSTEM: &str = "thuban-system";
const HEARTBEATS: &str = "thuban-heartbeats";
const NODE: &str = "node-a";
const OTHER: &str = "node-b";

#[test]
fn the_operator_is_granted_what_it_uses_and_no_more() {
    let operator = Actor::service_account(&tenants().cluster, SYSTEM, "thuban-operator").unwrap();
    let everywhere = [
        "bouncers.thuban.dev []: create delete list patch update watch",
        "bouncers.thuban.dev/status []: patch update",
        "clusternetworkpolicies.policy.networking.k8s.io []: list watch",
        "clusternetworkpolicies.policy.networking.k8s.io/status []: patch update",
        "dividers.thuban.dev []: create delete list patch update watch",
        "dividers.thuban.dev/status []: patch update",
        "droplets.thuban.dev []: list patch update watch",
        "droplets.thuban.dev/status []: patch update",
        "endpoints.thuban.dev []: create delete get list patch update watch",
        "endpoints.thuban.dev/status []: patch update",
        "endpointslices.discovery.k8s.io []: list watch",
        "events.events.k8s.io []: create patch",
        "ipclaims.thuban.dev []: create delete get list watch",
        "ipclaims.thuban.dev/status []: patch update",
        "ipleases.thuban.dev []: get",
        "namespaces []: list watch",
        "networkpolicies.networking.k8s.io []: list watch",
        "networks.thuban.dev []: create get list patch update watch",
        "networks.thuban.dev/finalizers []: update",
        "networks.thuban.dev/status []: patch update",
        "nodes []: list watch",
        "nodes/finalizers []: update",
        "pathtraces.thuban.dev []: delete list watch",
        "pathtraces.thuban.dev/status []: patch update",
        "pods []: get list watch",
        "pods/eviction []: create",
        "policystates.thuban.dev []: create delete list watch",
        "policystates.thuban.dev/status []: patch update",
        "servicecidrs.networking.k8s.io []: list watch",
        "services []: list watch",
        "subjectaccessreviews.authorization.k8s.io []: create",
        "tokenreviews.authentication.k8s.io []: create",
        "vips.thuban.dev []: get",
        "vips.thuban.dev/status []: patch",
        "vniclaims.thuban.dev []: create delete get list watch",
        "vpcs.thuban.dev []: create get list patch update watch",
        "vpcs.thuban.dev/finalizers []: update",
        "vpcs.thuban.dev/status []: patch update",
    ];
    assert_eq!(operator.grants("red").unwrap(), everywhere);
    let with = |more: &[&str]| {
        let mut all: Vec<String> = everywhere
            .iter()
            .chain(more)
            .map(|grant| (*grant).to_owned())
            .collect();
        all.sort();
        all
    };
    // Of rights to pods there is one line, with those of everywhere.
    let mut at_home = with(&[
        "configmaps []: create",
        "configmaps [thuban-operator-ca]: patch",
        "leases.coordination.k8s.io []: create",
        "leases.coordination.k8s.io [thuban-operator]: get list update watch",
        "secrets []: create",
        "secrets [thuban-operator-ca]: get update",
    ]);
    for grant in at_home.iter_mut().filter(|grant| grant.starts_with("pods []")) {
        *grant = "pods []: get list patch watch".to_owned();
    }
    assert_eq!(operator.grants(SYSTEM).unwrap(), at_home);
    // Those of the version before.
    let heartbeats = with(&["leases.coordination.k8s.io []: delete get list patch"]);
    assert_eq!(operator.grants(HEARTBEATS).unwrap(), heartbeats);
    for arguments in [
        &["get", "secrets", "-A"][..],
        &["get", "configmap", "-n", SYSTEM, "thuban-config"],
        &["delete", "--dry-run=server", "vpc", "red"],
        &["delete", "--dry-run=server", "pod", "-n", "red", "red-web-node-a"],
        &["label", "--dry-run=server", "droplet", NODE, "a=b"],
        &["label", "--dry-run=server", "node", NODE, "a=b"],
    ] {
        operator.is_refused(
            &arguments.join(" "),
            operator.kubectl(arguments),
            &["thuban-operator", "cannot"],
        );
    }
}

#[test]
fn operator_writes_nothing_of_pods_but_its_own_labels() {
    let cluster = &tenants().cluster;
    let operator = Actor::service_account(cluster, SYSTEM, "thuban-operator").unwrap();
    let transitd = cluster.transitd_pod(NODE).unwrap();
    let label =
        |label: &str| operator.kubectl(&["label", "--dry-run=server", "pod", "-n", SYSTEM, &transitd, label]);
    label("full.thuban.dev/red-web=").unwrap();
    for other in ["a=b", "app.kubernetes.io/part-of-"] {
        operator.is_refused(other, label(other), &["full.thuban.dev/"]);
    }
}

#[test]
fn administrator_cannot_write_roles_claims_or_statuses() {
    let cluster = &tenants().cluster;
    let admin = Actor::administrator(cluster).unwrap();
    let thuban = |kind: &str, name: &str, spec: &Value| {
        json!({"apiVersion": "thuban.dev/v1alpha1", "kind": kind,
               "metadata": {"name": name, "namespace": "red"}, "spec": spec})
    };
    let claim = json!({"vpc": "red", "network": "red-web", "address": "10.0.1.200",
                       "endpointNamespace": "red", "endpointName": "a", "ownerUid": "b"});
    for (object, expected) in [
        (
            thuban("Divider", "red-d7", &json!({"vpc": "red"})),
            "spec.dividers",
        ),
        (
            thuban(
                "Bouncer",
                "red-web-b7",
                &json!({"vpc": "red", "network": "red-web"}),
            ),
            "spec.bouncers",
        ),
        (thuban("IpClaim", "red.10.0.1.200", &claim), "thuban.dev/ip"),
        (
            thuban("VniClaim", "77777", &json!({"vpc": "red", "vpcUid": "a"})),
            "by itself",
        ),
    ] {
        let answer = admin.write("create", &object, &[]);
        admin.is_refused("make it", answer, &["by the operator alone", expected]);
    }
    let bouncer = get(cluster, &["bouncers.thuban.dev", "red-web-b0"]).unwrap();
    let mut moved = bouncer.clone();
    let elsewhere = if bouncer["spec"]["droplet"] == NODE {
        OTHER
    } else {
        NODE
    };
    moved["spec"]["droplet"] = json!(elsewhere);
    let answer = admin.write("replace", &moved, &[]);
    admin.is_refused(
        "move a bouncer",
        answer,
        &["spec of Bouncers is written by the operator alone"],
    );
    // A repair may change metadata, and delete.
    admin
        .kubectl(&["label", "--dry-run=server", "bouncer", "red-web-b0", "a=b"])
        .unwrap();
    admin
        .kubectl(&["delete", "--dry-run=server", "bouncer", "red-web-b0"])
        .unwrap();
    // Claims can't be repaired: an address in use would be given to another pod.
    for kind in ["ipclaims.thuban.dev", "vniclaims.thuban.dev"] {
        let claims = get(cluster, &[kind]).unwrap();
        let name = claims["items"][0]["metadata"]["name"].as_str().unwrap();
        let answer = admin.kubectl(&["delete", "--dry-run=server", kind, name]);
        admin.is_refused(
            "delete a claim",
            answer,
            &["are deleted by the operator alone", "once nobody uses"],
        );
    }
    for object in [
        "vpcs.thuban.dev/red",
        "networks.thuban.dev/red-web",
        "bouncers.thuban.dev/red-web-b0",
        "dividers.thuban.dev/red-d0",
        "droplets.thuban.dev/node-a",
    ] {
        let replace = || {
            let object = get(cluster, &[object]).unwrap();
            admin.write("replace", &object, &["--subresource=status"])
        };
        // A conflict proves nothing: the operator has written the status in between.
        let is_conflict = |answer: &Result<String>| {
            let error = answer.as_ref().err();
            error.is_some_and(|error| error.to_string().contains("Conflict"))
        };
        let mut answers = (0..10).map(|_| replace());
        let answer = answers.find(|answer| !is_conflict(answer)).unwrap();
        admin.is_refused(
            "write a status",
            answer,
            &["status of", "is written by the operator alone"],
        );
    }
    // The request is in the operator's name, as docs/guide/access.md says.
    let operator = "--as=system:serviceaccount:thuban-system:thuban-operator";
    admin.write("replace", &moved, &[operator]).unwrap();
}

/// Makes a tenant with the role `edit` in its namespace.
fn editor(cluster: &Cluster, namespace: &str) -> Actor {
    bound(cluster, namespace, "editor", "edit")
}

/// Makes a ServiceAccount with a role in its namespace alone.
fn bound(cluster: &Cluster, namespace: &str, name: &str, role: &str) -> Actor {
    let ignore = |arguments: &[&str]| {
        if let Err(error) = cluster.kubectl(arguments) {
            assert!(error.to_string().contains("already exists"), "{error}");
        }
    };
    ignore(&["create", "serviceaccount", "-n", namespace, name]);
    ignore(&[
        "create",
        "rolebinding",
        "-n",
        namespace,
        name,
        &format!("--clusterrole={role}"),
        &format!("--serviceaccount={namespace}:{name}"),
    ]);
    Actor::service_account(cluster, namespace, name).unwrap()
}

/// Returns the Endpoint of a pod that runs in the namespace `red`.
fn endpoint_of_pod(actor: &Actor) -> Value {
    let pod = &tenants().network("red-web")[0].name;
    let all = actor.get(&["endpoints.thuban.dev", "-n", "red"]).unwrap();
    let mut all = all["items"].as_array().unwrap().iter();
    let of_pod = all.find(|endpoint| endpoint["spec"]["podRef"]["name"] == pod.as_str());
    of_pod.unwrap().clone()
}

#[test]
fn nobody_deletes_the_endpoint_of_a_running_pod() {
    let cluster = &tenants().cluster;
    let ruler = bound(cluster, "red", "deleter", "cluster-admin");
    let endpoint = endpoint_of_pod(&ruler);
    let name = endpoint["metadata"]["name"].as_str().unwrap();
    let pod = endpoint["spec"]["podRef"]["name"].as_str().unwrap();
    for actor in [ruler, Actor::administrator(cluster).unwrap()] {
        for what in [&[name][..], &["--all"]] {
            let arguments = ["delete", "--dry-run=server", "endpoints.thuban.dev", "-n", "red"];
            let answer = actor.kubectl(&[&arguments[..], what].concat());
            actor.is_refused("delete it", answer, &[pod, "delete the pod"]);
        }
    }
}

#[test]
fn who_rules_a_namespace_takes_no_finalizer_of_its_endpoints() {
    let cluster = &tenants().cluster;
    let ruler = bound(cluster, "red", "ruler", "cluster-admin");
    let admin = Actor::administrator(cluster).unwrap();
    let name = "ruled";
    let manifest = json!({
        "apiVersion": "thuban.dev/v1alpha1", "kind": "Endpoint",
        "metadata": {"name": name, "namespace": "red"}, "spec": {"network": "red-web"},
    });
    ruler
        .with_input(&["create", "-f", "-"], &manifest.to_string())
        .unwrap();
    let object = ["endpoints.thuban.dev", "-n", "red", name];
    let mut endpoint = Value::Null;
    let guarded = cluster.wait_for("its finalizer", Duration::from_secs(20), || {
        endpoint = ruler.get(&object)?;
        Ok(endpoint["metadata"]["finalizers"] == json!(["thuban.dev/rows"]))
    });
    guarded.unwrap();
    let patch = |actor: &Actor, patch: &Value| {
        actor.kubectl(&[
            "patch",
            "--dry-run=server",
            "endpoints.thuban.dev",
            "-n",
            "red",
            name,
            "--type=merge",
            "-p",
            &patch.to_string(),
        ])
    };
    for finalizers in [Value::Null, json!([]), json!(["example.com/stay"])] {
        let answer = patch(&ruler, &json!({"metadata": {"finalizers": finalizers}}));
        ruler.is_refused(
            "take the operator's finalizer",
            answer,
            &["thuban.dev/rows", "taken by the operator alone"],
        );
    }
    let mut unguarded = endpoint.clone();
    unguarded["metadata"]["finalizers"] = Value::Null;
    if let Some(metadata) = unguarded["metadata"].as_object_mut() {
        metadata.remove("resourceVersion");
    }
    let answer = ruler.write("replace", &unguarded, &[]);
    ruler.is_refused("replace it without", answer, &["thuban.dev/rows"]);
    let answer = patch(&ruler, &json!({"spec": {"droplet": "node-z"}}));
    ruler.is_refused("move it", answer, &["immutable"]);
    // Everything else of its metadata is the namespace owner's, also a finalizer beside the operator's.
    for allowed in [
        json!({"metadata": {"labels": {"a": "b"}}}),
        json!({"metadata": {"finalizers": ["thuban.dev/rows", "example.com/stay"]}}),
    ] {
        patch(&ruler, &allowed).unwrap();
    }
    // The cluster's administrator repairs it.
    patch(&admin, &json!({"metadata": {"finalizers": null}})).unwrap();
    delete(cluster, &object).unwrap();
}

#[test]
fn tenant_editor_sees_reason_and_enters_no_disallowed_vpc() {
    let cluster = &tenants().cluster;
    let tenant = editor(cluster, "red");
    tenant
        .with_input(
            &["create", "-f", "-"],
            &netexec_manifest("red", "burglar", NODE, Some("blue-web")).to_string(),
        )
        .unwrap();
    let mut endpoint = Value::Null;
    cluster
        .wait_for("the tenant's own words", Duration::from_secs(20), || {
            let all = tenant.get(&["endpoints.thuban.dev", "-n", "red"])?;
            let of_pod = |endpoint: &&Value| endpoint["spec"]["podRef"]["name"] == "burglar";
            endpoint = all["items"]
                .as_array()
                .and_then(|items| items.iter().find(of_pod))
                .cloned()
                .unwrap_or_default();
            Ok(condition(&endpoint, "Accepted").is_some())
        })
        .unwrap();
    let accepted = condition(&endpoint, "Accepted").unwrap();
    assert_eq!(accepted["status"], "False");
    assert_eq!(accepted["reason"], "NamespaceNotAllowed");
    assert!(
        endpoint["status"]["addresses"]
            .as_array()
            .is_none_or(Vec::is_empty)
    );
    let mut said = String::new();
    cluster
        .wait_for("the event on its pod", Duration::from_secs(20), || {
            let selector = "--field-selector=involvedObject.name=burglar,reason=NamespaceNotAllowed";
            said = tenant.get(&["events", "-n", "red", selector])?["items"][0]["message"].to_string();
            Ok(said.contains("allowedNamespaces"))
        })
        .unwrap();
    assert!(
        said.contains("red") && said.contains("thuban.dev/network"),
        "{said}"
    );
    let name = endpoint["metadata"]["name"].as_str().unwrap().to_owned();
    tenant
        .kubectl(&["describe", "endpoints.thuban.dev", "-n", "red", &name])
        .unwrap();
    // The tenant may not write the objects that guard an endpoint's address.
    for arguments in [
        &["label", "endpoints.thuban.dev", "-n", "red", &name, "a=b"][..],
        &[
            "patch",
            "endpoints.thuban.dev",
            "-n",
            "red",
            &name,
            "--type=merge",
            "-p",
            r#"{"metadata":{"finalizers":[]}}"#,
        ],
    ] {
        tenant.is_refused(&arguments.join(" "), tenant.kubectl(arguments), &["cannot patch"]);
    }
    let answer = tenant.write("replace", &endpoint, &["--subresource=status"]);
    tenant.is_refused("write the status of its Endpoint", answer, &["cannot"]);
    delete(cluster, &["pod", "-n", "red", "burglar"]).unwrap();
}

#[test]
fn tenant_editor_has_no_rights_beyond_its_own_objects() {
    let tenant = editor(&tenants().cluster, "red");
    for arguments in [
        &["get", "endpoints.thuban.dev", "-n", "blue"][..],
        &["get", "pods", "-n", "blue"],
        &[
            "patch",
            "vpc",
            "blue",
            "--type=merge",
            "-p",
            r#"{"spec":{"allowedNamespaces":{}}}"#,
        ],
        &["delete", "--dry-run=server", "vpc", "red"],
        &["delete", "--dry-run=server", "networks.thuban.dev", "red-web"],
        &["delete", "--dry-run=server", "bouncer", "red-web-b0"],
        &["delete", "--dry-run=server", "ipclaims.thuban.dev", "--all"],
        &[
            "annotate",
            "namespace",
            "red",
            "thuban.dev/network=blue-web",
            "--overwrite",
        ],
        &[
            "label",
            "namespace",
            "red",
            "kubernetes.io/metadata.name=blue",
            "--overwrite",
        ],
    ] {
        tenant.is_refused(&arguments.join(" "), tenant.kubectl(arguments), &["cannot"]);
    }
    for kind in ["vpcs", "networks.thuban.dev", "droplets", "bouncers", "dividers"] {
        tenant.is_refused(
            &format!("get {kind}"),
            tenant.kubectl(&["get", kind]),
            &["cannot list"],
        );
    }
}

#[test]
fn an_endpoint_that_a_tenant_makes_names_no_pod_and_no_place() {
    let cluster = &tenants().cluster;
    let tenant = editor(cluster, "red");
    let endpoint = |more: &Value| {
        let mut spec = json!({"network": "red-web"});
        for (field, value) in more.as_object().unwrap() {
            spec[field] = value.clone();
        }
        json!({"apiVersion": "thuban.dev/v1alpha1", "kind": "Endpoint",
               "metadata": {"name": "kept", "namespace": "red"}, "spec": spec})
    };
    tenant.write("create", &endpoint(&json!({})), &[]).unwrap();
    let chosen = json!({"addresses": ["10.0.1.77"], "mac": "02:00:00:00:00:77"});
    tenant.write("create", &endpoint(&chosen), &[]).unwrap();
    let victim = &tenants().network("red-web")[0];
    let uid = get(cluster, &["pod", "-n", "red", &victim.name]).unwrap()["metadata"]["uid"].clone();
    let spoof = json!({"podRef": {"name": victim.name, "uid": uid, "cniUid": uid}, "droplet": NODE});
    let service =
        json!({"type": "Scaled", "serviceRef": {"name": "kubernetes", "uid": "a"}, "network": "blue-web"});
    for (more, expected) in [
        (spoof, "spec.podRef"),
        (service, "spec.serviceRef is written by the operator alone"),
        (json!({"vpc": "blue"}), "spec.vpc"),
        (json!({"droplet": NODE}), "spec.droplet"),
        (json!({"claimed": ["10.0.1.77"]}), "spec.claimed"),
        (json!({"addresses": ["10.0.1.300"]}), "spec.addresses"),
    ] {
        let answer = tenant.write("create", &endpoint(&more), &[]);
        tenant.is_refused(&format!("set {more}"), answer, &[expected]);
    }
    let mut endless = endpoint(&json!({}));
    endless["metadata"]["finalizers"] = json!(["example.com/stay"]);
    tenant.is_refused(
        "keep its Endpoint by a finalizer",
        tenant.write("create", &endless, &[]),
        &["metadata.finalizers"],
    );
    let mut elsewhere = endpoint(&json!({}));
    elsewhere["metadata"]["namespace"] = json!("blue");
    let answer = tenant.write("create", &elsewhere, &[]);
    tenant.is_refused("make one in another namespace", answer, &["cannot create"]);
}
