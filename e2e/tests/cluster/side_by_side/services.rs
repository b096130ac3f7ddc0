//! Services: each VPC has its own. Their addresses stand for pods of that VPC alone, wherever these run.

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use anyhow::Result;
use serde_json::{Value, json};
use thuban_cluster::Cluster;

use crate::audit::wait_sound_of;
use crate::service_objects::{endpoint, made, manifest, serves, wait_endpoint};
use crate::support::{
    NOT_REACHED, Pod, REACHED, apply, condition, delete, get, netexec_manifest, nobody_reaches, running,
};
use crate::tenants::{SELECTOR, tenants};

const NODE: &str = "node-a";
const TOLD_TIMEOUT: Duration = Duration::from_secs(30);

fn names(pods: &[&Pod]) -> BTreeSet<String> {
    pods.iter().map(|pod| pod.name.clone()).collect()
}

/// Returns everybody who answers at an address, until all of `expected` have.
fn answering(pod: &Pod, address: Ipv4Addr, expected: usize) -> BTreeSet<String> {
    let mut answered = BTreeSet::new();
    let end = Instant::now() + TOLD_TIMEOUT;
    while answered.len() < expected && Instant::now() < end {
        answered.insert(pod.tcp(address, REACHED).unwrap());
        answered.insert(pod.udp(address, REACHED).unwrap());
    }
    answered
}

#[test]
fn pods_reach_all_backends_of_services_of_own_vpc_only() {
    let tenants = tenants();
    let cluster = &tenants.cluster;
    let all = json!({SELECTOR.0: SELECTOR.1});
    let mut addresses = Vec::new();
    for vpc in ["red", "blue"] {
        let pods = tenants.vpc(vpc);
        let address = made(cluster, &manifest(vpc, "everybody", &all)).unwrap();
        let endpoint = wait_endpoint(
            cluster,
            vpc,
            "everybody",
            "all backends",
            serves(pods.len() as u64),
        );
        let all: BTreeSet<String> = pods.iter().map(|pod| pod.address.to_string()).collect();
        let named = endpoint["status"]["firstBackends"].as_array().unwrap();
        let first = |address: &Value| all.contains(address.as_str().unwrap());
        assert!(
            named.len() == all.len().min(5) && named.iter().all(first),
            "{named:?}"
        );
        addresses.push((vpc, address));
    }
    for (vpc, address) in &addresses {
        let pods = tenants.vpc(vpc);
        for pod in &pods {
            assert_eq!(
                answering(pod, *address, pods.len()),
                names(&pods),
                "seen by {}",
                pod.name
            );
        }
        let others = if *vpc == "red" { "blue" } else { "red" };
        let others = tenants.vpc(others).into_iter().chain(tenants.vpc("green"));
        nobody_reaches(others.map(|pod| (pod, *address)));
    }
    for (vpc, _) in addresses {
        delete(cluster, &["service", "-n", vpc, "everybody"]).unwrap();
    }
    wait_sound_of(cluster, &["red", "blue"]);
}

#[test]
fn service_refuses_connections_until_it_has_backends() {
    let tenants = tenants();
    let cluster = &tenants.cluster;
    let address = made(cluster, &manifest("red", "late", &json!({"app": "late"}))).unwrap();
    let empty = wait_endpoint(cluster, "red", "late", "no backends", serves(0));
    let ready = condition(&empty, "Ready").unwrap();
    assert_eq!(
        (&ready["status"], &ready["reason"]),
        (&json!("True"), &json!("NoBackends"))
    );
    let refused = |pod: &Pod| {
        let error = pod.tcp(address, REACHED).expect_err("nobody should answer");
        let kind = error.downcast_ref::<std::io::Error>().map(std::io::Error::kind);
        assert_eq!(kind, Some(ErrorKind::ConnectionRefused), "{error:#}");
    };
    let clients = tenants.vpc("red");
    for pod in &clients {
        refused(pod);
    }
    let mut late = netexec_manifest("red", "late", NODE, None);
    late["metadata"]["labels"]["app"] = json!("late");
    apply(cluster, &[late]).unwrap();
    running(cluster, "red", "late").unwrap();
    wait_endpoint(cluster, "red", "late", "one backend", serves(1));
    for pod in &clients {
        assert_eq!(pod.tcp(address, REACHED).unwrap(), "late", "seen by {}", pod.name);
        assert_eq!(pod.udp(address, REACHED).unwrap(), "late", "seen by {}", pod.name);
    }
    delete(cluster, &["pod", "-n", "red", "late"]).unwrap();
    wait_endpoint(cluster, "red", "late", "no backends again", serves(0));
    for pod in &clients {
        refused(pod);
    }
    delete(cluster, &["service", "-n", "red", "late"]).unwrap();
    for pod in &clients {
        pod.tcp(address, NOT_REACHED).expect_err("there is no service");
    }
}

/// Returns the warnings on the Service with this reason.
fn warnings(cluster: &Cluster, service: &str, reason: &str) -> Result<Vec<String>> {
    let selector =
        format!("--field-selector=involvedObject.kind=Service,involvedObject.name={service},reason={reason}");
    let events = get(cluster, &["events", "-n", "red", &selector])?;
    let events = events["items"].as_array().into_iter().flatten();
    Ok(events.map(|event| event["message"].to_string()).collect())
}

#[test]
fn a_scaled_endpoint_follows_its_service_and_tells_why_it_waits() {
    let tenants = tenants();
    let cluster = &tenants.cluster;
    let mut service = manifest("red", "nomad", &json!({SELECTOR.0: SELECTOR.1}));
    service["metadata"]["annotations"]["thuban.dev/network"] = json!("blue-web");
    let address = made(cluster, &service).unwrap();
    // The Endpoint is refused, like a pod that names a network of another VPC.
    let refused = wait_endpoint(cluster, "red", "nomad", "refused", |endpoint| {
        condition(endpoint, "Accepted").is_some_and(|accepted| accepted["status"] == "False")
    });
    assert_eq!(
        condition(&refused, "Accepted").unwrap()["reason"],
        "NamespaceNotAllowed"
    );
    assert!(
        refused["status"]["addresses"]
            .as_array()
            .is_none_or(Vec::is_empty)
    );
    cluster
        .wait_for("the event on the Service", TOLD_TIMEOUT, || {
            let said = warnings(cluster, "nomad", "NamespaceNotAllowed")?;
            Ok(said.iter().any(|said| said.contains("allowedNamespaces")))
        })
        .unwrap();
    let client = tenants.network("red-web")[0];
    client.reaches_nothing_at(address);
    tenants.network("blue-web")[0].reaches_nothing_at(address);
    // The Service names a network that admits it.
    service["metadata"]["annotations"]["thuban.dev/network"] = json!("red-db");
    apply(cluster, &[service]).unwrap();
    let count = tenants.vpc("red").len() as u64;
    let served = wait_endpoint(cluster, "red", "nomad", "admitted", serves(count));
    assert_eq!(served["spec"]["network"], "red-db");
    let uid = served["spec"]["serviceRef"]["uid"].as_str().unwrap();
    let name = format!("nomad-{}", &uid[..8]);
    assert_eq!(served["metadata"]["name"], name);
    client.tcp(address, REACHED).unwrap();
    // Another proxy serves the Service for a while.
    let label = |text: &str| cluster.kubectl(&["label", "service", "-n", "red", "nomad", text]);
    label("service.kubernetes.io/service-proxy-name=another").unwrap();
    cluster
        .wait_for(
            "the scaled endpoint of another proxy's gone",
            TOLD_TIMEOUT,
            || Ok(endpoint(cluster, "red", "nomad")?.is_none()),
        )
        .unwrap();
    client.tcp(address, NOT_REACHED).expect_err("another proxy's");
    label("service.kubernetes.io/service-proxy-name-").unwrap();
    wait_endpoint(cluster, "red", "nomad", "served again", serves(count));
    client.tcp(address, REACHED).unwrap();
    // Somebody deletes the Endpoint while the Service exists.
    cluster
        .kubectl(&[
            "delete",
            "endpoints.thuban.dev",
            "-n",
            "red",
            &name,
            "--wait=false",
        ])
        .unwrap();
    let kept = wait_endpoint(cluster, "red", "nomad", "kept", |endpoint| {
        condition(endpoint, "Deleting").is_some()
    });
    assert_eq!(condition(&kept, "Deleting").unwrap()["reason"], "WaitsForService");
    client.tcp(address, REACHED).unwrap();
    delete(cluster, &["service", "-n", "red", "nomad"]).unwrap();
    cluster
        .wait_for("the scaled endpoint gone", TOLD_TIMEOUT, || {
            Ok(endpoint(cluster, "red", "nomad")?.is_none())
        })
        .unwrap();
    client.tcp(address, NOT_REACHED).expect_err("there is no service");
    wait_sound_of(cluster, &["red", "blue"]);
}

#[test]
fn the_api_servers_service_has_its_backend_and_makes_no_noise() {
    let cluster = &tenants().cluster;
    let endpoint = wait_endpoint(cluster, "default", "kubernetes", "there", serves(1));
    assert_eq!(condition(&endpoint, "Complete"), None);
    let name = endpoint["metadata"]["name"].as_str().unwrap();
    for object in ["kubernetes", name] {
        let selector = format!("--field-selector=involvedObject.name={object}");
        let events = get(cluster, &["events", "-n", "default", &selector]).unwrap();
        // The API server reports its own repairs there.
        let is_own = |event: &&Value| event["reportingComponent"] == "thuban-operator";
        let own: Vec<&Value> = events["items"]
            .as_array()
            .unwrap()
            .iter()
            .filter(is_own)
            .collect();
        assert!(own.is_empty(), "{own:?}");
    }
}
