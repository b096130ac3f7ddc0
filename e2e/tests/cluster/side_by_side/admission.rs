//! Invalid input: every error names the field and what was expected, and no half-made object stays.

use std::time::Duration;

use serde_json::{Value, json};
use thuban_cluster::Cluster;

use crate::actor::Actor;
use crate::support::{
    apply, condition, delete, delete_namespace, get, namespace_manifest, netexec_manifest, network_manifest,
    nobody_reaches, running, vpc_manifest,
};
use crate::tenants::tenants;

/// Waits for a warning event about the object, and returns its text.
fn warning(cluster: &Cluster, namespace: &str, name: &str) -> String {
    let mut text = String::new();
    cluster
        .wait_for(
            &format!("a warning about {name}"),
            Duration::from_secs(30),
            || {
                let selector = format!("involvedObject.name={name},type=Warning");
                let events = get(
                    cluster,
                    &["events", "-n", namespace, "--field-selector", &selector],
                )?;
                text = events["items"]
                    .as_array()
                    .into_iter()
                    .flatten()
                    .filter(|event| {
                        event["reason"] != "FailedCreatePodSandBox" && event["reason"] != "FailedScheduling"
                    })
                    .flat_map(|event| [&event["reason"], &event["message"]])
                    .filter_map(Value::as_str)
                    .collect::<Vec<_>>()
                    .join(" ");
                Ok(!text.is_empty())
            },
        )
        .unwrap();
    text
}

/// Asserts that the controller refuses a VPC or network: its condition and event say why.
fn refused(object: &Value, expected: &[&str]) {
    let cluster = &tenants().cluster;
    let kind = if object["kind"] == "Vpc" {
        "vpcs.thuban.dev"
    } else {
        "networks.thuban.dev"
    };
    let name = object["metadata"]["name"].as_str().unwrap();
    apply(cluster, std::slice::from_ref(object)).unwrap();
    let mut message = String::new();
    cluster
        .wait_for(&format!("{kind}/{name} refused"), Duration::from_secs(20), || {
            let object = get(cluster, &[kind, name])?;
            let refused = condition(&object, "Accepted").filter(|condition| condition["status"] == "False");
            message = refused
                .map(|condition| condition["message"].as_str().unwrap_or("").to_owned())
                .unwrap_or_default();
            Ok(!message.is_empty())
        })
        .unwrap();
    for word in expected {
        assert!(
            message.contains(word),
            "{name}: {message:?} does not say {word:?}"
        );
    }
    let object = get(cluster, &[kind, name]).unwrap();
    assert_eq!(object["status"]["phase"], "Init", "{name}");
    let event = warning(cluster, "default", name);
    assert!(event.contains(expected[0]), "{name}: event {event:?}");
    for role in ["dividers.thuban.dev", "bouncers.thuban.dev"] {
        let children = get(cluster, &[role]).unwrap();
        let prefix = format!("{name}-");
        let made = children["items"]
            .as_array()
            .unwrap()
            .iter()
            .any(|child| child["metadata"]["name"].as_str().unwrap().starts_with(&prefix));
        assert!(!made, "{name} has a {role} though it was refused");
    }
    delete(cluster, &[kind, name]).unwrap();
}

/// Asserts that the API server itself refuses an object, by a rule of the CRD.
fn rejected(object: &Value, expected: &[&str]) {
    let error = apply(&tenants().cluster, std::slice::from_ref(object))
        .expect_err("the API server took it")
        .to_string();
    for word in expected {
        assert!(error.contains(word), "{error:?} does not say {word:?}");
    }
}

#[test]
fn a_malformed_cidr_is_refused_by_the_api_server() {
    rejected(&vpc_manifest("bad", "10.0.0.0/33", &[]), &["spec.cidrs"]);
    rejected(&vpc_manifest("bad", "10.0.0.1/16", &[]), &["spec.cidrs"]);
    rejected(&vpc_manifest("bad", "ten.zero", &[]), &["spec.cidrs"]);
    rejected(&network_manifest("bad", "red", "10.0.9.9/24"), &["spec.cidrs"]);
}

#[test]
fn network_vpc_is_immutable_and_cidrs_are_append_only() {
    let cluster = &tenants().cluster;
    let error = apply(cluster, &[network_manifest("green-web", "red", "10.1.1.0/24")])
        .expect_err("vpc changed")
        .to_string();
    assert!(
        error.contains("spec.vpc") || error.contains("immutable"),
        "{error}"
    );
    let error = apply(cluster, &[network_manifest("green-web", "green", "10.1.2.0/24")])
        .expect_err("cidr replaced")
        .to_string();
    assert!(error.contains("cidrs"), "{error}");
    let network = get(cluster, &["networks.thuban.dev", "green-web"]).unwrap();
    assert_eq!(network["spec"]["cidrs"][0], "10.1.1.0/24");
    assert_eq!(network["spec"]["vpc"], "green");
}

#[test]
fn a_vpc_inside_a_refused_range_says_which_and_makes_nothing() {
    refused(
        &vpc_manifest("in-services", "10.96.0.0/24", &[]),
        &["spec.cidrs", "10.96.0.0/16"],
    );
    let node = tenants()
        .cluster
        .node_address(&tenants().cluster.nodes().unwrap()[0])
        .unwrap();
    let range = format!("{}.{}.0.0/16", node.octets()[0], node.octets()[1]);
    refused(&vpc_manifest("in-nodes", &range, &[]), &["spec.cidrs"]);
    refused(
        &vpc_manifest("in-loopback", "127.0.0.0/16", &[]),
        &["spec.cidrs", "127.0.0.0/8"],
    );
    refused(
        &vpc_manifest("in-link-local", "169.254.0.0/16", &[]),
        &["spec.cidrs", "169.254.0.0/16"],
    );
}

#[test]
fn a_network_outside_its_vpc_or_over_a_sibling_says_so() {
    refused(
        &network_manifest("outside", "red", "10.9.0.0/24"),
        &["spec.cidrs", "10.0.0.0/16"],
    );
    refused(
        &network_manifest("overlapping", "red", "10.0.1.128/25"),
        &["spec.cidrs", "red-web"],
    );
    refused(
        &network_manifest("orphan", "no-such-vpc", "10.0.1.0/24"),
        &["spec.vpc", "no-such-vpc"],
    );
}

#[test]
fn event_names_missing_network_and_creating_it_starts_pod() {
    let cluster = &tenants().cluster;
    let node = &cluster.nodes().unwrap()[0];
    apply(
        cluster,
        &[netexec_manifest("red", "lost", node, Some("red-cache"))],
    )
    .unwrap();
    let event = warning(cluster, "red", "lost");
    assert!(
        event.contains("red-cache") && event.contains("thuban.dev/network"),
        "{event}"
    );
    apply(cluster, &[network_manifest("red-cache", "red", "10.0.3.0/24")]).unwrap();
    let pod = running(cluster, "red", "lost").unwrap();
    assert_eq!(pod.address.octets()[..3], [10, 0, 3]);
    delete(cluster, &["pod", "-n", "red", "lost"]).unwrap();
    delete(cluster, &["networks.thuban.dev", "red-cache"]).unwrap();
}

#[test]
fn a_pod_whose_annotations_break_a_rule_of_endpoints_is_told_so() {
    let cluster = &tenants().cluster;
    let node = &cluster.nodes().unwrap()[0];
    let long = "a".repeat(64);
    apply(cluster, &[netexec_manifest("red", "long", node, Some(&long))]).unwrap();
    let event = warning(cluster, "red", "long");
    assert!(
        event.contains("InvalidAnnotation") && event.contains("spec.network"),
        "{event}"
    );
    delete(cluster, &["pod", "-n", "red", "long"]).unwrap();
}

/// Returns a pod that is never scheduled.
fn gated(annotations: &[(&str, &str)], on_host: bool) -> Value {
    let annotations: serde_json::Map<String, Value> = annotations
        .iter()
        .map(|(direction, rate)| (format!("kubernetes.io/{direction}-bandwidth"), json!(rate)))
        .collect();
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": "gated", "namespace": "red", "annotations": annotations},
        "spec": {
            "schedulingGates": [{"name": "thuban.dev/never"}],
            "hostNetwork": on_host,
            "containers": [{"name": "main", "image": "none"}],
        },
    })
}

#[test]
fn pods_with_unreadable_rates_are_refused_and_no_others() {
    let cluster = &tenants().cluster;
    let admin = Actor::administrator(cluster).unwrap();
    let remedy = "between 1k and 1P, such as 100M: correct it";
    for rate in ["x", "-1", "10 M", "", "999", "1.1P", "1e99"] {
        for direction in ["egress", "ingress"] {
            let answer = admin.write("create", &gated(&[(direction, rate)], false), &[]);
            let annotation = format!("kubernetes.io/{direction}-bandwidth must be");
            admin.is_refused(&format!("ask for {rate:?}"), answer, &[&annotation, remedy]);
        }
    }
    let both = [("egress", "1k"), ("ingress", "1P")];
    for (annotations, on_host) in [
        (&both[..], false),
        (&[("egress", "999.5"), ("ingress", "1.5Mi")], false),
        (&[], false),
        (&[("egress", "x")], true),
    ] {
        admin.write("create", &gated(annotations, on_host), &[]).unwrap();
    }
    // Nothing but a change to another such text is in the way of a pod that has one.
    apply(cluster, &[gated(&[], false)]).unwrap();
    let kubectl = |arguments: &[&str]| admin.kubectl(&[&["-n", "red"], arguments].concat());
    let made_before =
        json!({"metadata": {"annotations": {"kubernetes.io/egress-bandwidth": "x"}}}).to_string();
    let patch = [
        "patch",
        "pod",
        "gated",
        "--subresource=status",
        "--type=merge",
        "-p",
        &made_before,
    ];
    kubectl(&patch).unwrap();
    kubectl(&["label", "pod", "gated", "a=b"]).unwrap();
    let set = |rate: &str| kubectl(&["annotate", "--overwrite", "pod", "gated", rate]);
    for rate in [
        "kubernetes.io/egress-bandwidth=y",
        "kubernetes.io/ingress-bandwidth=y",
    ] {
        admin.is_refused(rate, set(rate), &["-bandwidth must be", remedy]);
    }
    set("kubernetes.io/egress-bandwidth=1M").unwrap();
    set("kubernetes.io/egress-bandwidth-").unwrap();
    kubectl(&patch).unwrap();
    delete(cluster, &["pod", "-n", "red", "gated"]).unwrap();
}

#[test]
fn pod_of_disallowed_namespace_gets_event_but_no_address() {
    let cluster = &tenants().cluster;
    let node = &cluster.nodes().unwrap()[0];
    apply(
        cluster,
        &[
            namespace_manifest("mallory", None),
            netexec_manifest("mallory", "spy", node, Some("red-web")),
        ],
    )
    .unwrap();
    let event = warning(cluster, "mallory", "spy");
    assert!(event.contains("mallory") && event.contains("red"), "{event}");
    let pod = get(cluster, &["pod", "-n", "mallory", "spy"]).unwrap();
    assert!(pod["status"]["podIP"].is_null(), "{}", pod["status"]);
    let claims = get(cluster, &["ipclaims.thuban.dev"]).unwrap().to_string();
    assert!(
        !claims.contains("mallory"),
        "an address was claimed for a refused pod"
    );
    delete_namespace(cluster, "mallory").unwrap();
}

#[test]
fn pod_without_namespace_annotation_gets_default_network() {
    let cluster = &tenants().cluster;
    let nodes = cluster.nodes().unwrap();
    apply(
        cluster,
        &[
            namespace_manifest("plain", None),
            netexec_manifest("plain", "a", &nodes[0], None),
            netexec_manifest("plain", "b", &nodes[2], None),
        ],
    )
    .unwrap();
    let (first, second) = (
        running(cluster, "plain", "a").unwrap(),
        running(cluster, "plain", "b").unwrap(),
    );
    assert_eq!(first.address.octets()[..2], [10, 244]);
    assert_eq!(first.tcp(second.address, crate::support::REACHED).unwrap(), "b");
    let others = tenants().vpc("red").into_iter().chain(tenants().vpc("green"));
    nobody_reaches(others.flat_map(|pod| [(&first, pod.address), (pod, first.address)]));
    delete_namespace(cluster, "plain").unwrap();
}

#[test]
fn a_range_that_is_appended_serves_and_a_bad_one_harms_nobody() {
    let cluster = &tenants().cluster;
    let pods = tenants().network("green-web");
    let ranges = |cidrs: &[&str]| {
        let mut network = network_manifest("green-web", "green", cidrs[0]);
        network["spec"]["cidrs"] = json!(cidrs);
        apply(cluster, &[network])
    };
    let in_force = || get(cluster, &["networks.thuban.dev", "green-web"]).unwrap()["status"]["cidrs"].clone();
    ranges(&["10.1.1.0/24", "10.9.0.0/24"]).unwrap();
    let mut message = String::new();
    cluster
        .wait_for(
            "the range outside of the VPC refused",
            Duration::from_secs(20),
            || {
                let network = get(cluster, &["networks.thuban.dev", "green-web"])?;
                message = condition(&network, "Accepted").unwrap()["message"].to_string();
                Ok(message.contains("10.9.0.0/24"))
            },
        )
        .unwrap();
    assert!(message.contains("spec.cidrs"), "{message}");
    assert_eq!(in_force(), json!(["10.1.1.0/24"]));
    assert_eq!(
        pods[0].tcp(pods[1].address, crate::support::REACHED).unwrap(),
        pods[1].name
    );
    // The range can be taken back, as it never was in force; a valid range is then in force beside the first.
    ranges(&["10.1.1.0/24", "10.1.7.0/24"]).unwrap();
    cluster
        .wait_for("the second range in force", Duration::from_secs(20), || {
            Ok(in_force() == json!(["10.1.1.0/24", "10.1.7.0/24"]))
        })
        .unwrap();
    let error = ranges(&["10.1.1.0/24"])
        .expect_err("a range in force was taken away")
        .to_string();
    assert!(error.contains("spec.cidrs"), "{error}");
    assert_eq!(
        pods[0].tcp(pods[2].address, crate::support::REACHED).unwrap(),
        pods[2].name
    );
}

#[test]
fn a_policy_that_ships_keeps_pods_out_of_the_default_network() {
    const SPACE: &str = "consent";
    let cluster = &tenants().cluster;
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../install/optional/require-network.yaml"
    );
    // Namespaces of other tests stay as they are.
    let policy = std::fs::read_to_string(path).unwrap();
    let policy = policy.replace("operator: NotIn", "operator: In");
    let own = policy.replace("[kube-system, thuban-system]", "[consent]");
    assert_ne!(own, policy, "the binding's namespaces are written in another way");
    apply(cluster, &[namespace_manifest(SPACE, None)]).unwrap();
    cluster.kubectl_apply(&own).unwrap();
    let create = |network: Option<&str>| {
        let pod = netexec_manifest(SPACE, "pod", "node-a", network);
        let created = apply(cluster, &[pod]);
        delete(cluster, &["pod", "-n", SPACE, "pod"]).unwrap();
        // A new namespace has no ServiceAccount for a moment.
        let said = created.err().map(|error| format!("{error:#}"));
        said.filter(|said| said.contains("no pod of this namespace"))
    };
    let wait = |what: &str, is_refused: bool| {
        let answered = || Ok(create(None).is_some() == is_refused);
        cluster.wait_for(what, Duration::from_secs(30), answered).unwrap();
    };
    wait("a pod without a network is refused", true);
    let said = create(Some("default")).expect("a pod of the network `default` was made");
    assert!(said.contains("thuban.dev/network"), "{said}");
    assert_eq!(create(Some("red-web")), None);
    apply(cluster, &[namespace_manifest(SPACE, Some("red-web"))]).unwrap();
    wait("a pod of a namespace with a network is made", false);
    for kind in ["validatingadmissionpolicybinding", "validatingadmissionpolicy"] {
        delete(cluster, &[kind, "thuban-require-network"]).unwrap();
    }
    delete(cluster, &["namespace", SPACE]).unwrap();
}
