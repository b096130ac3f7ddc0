//! What a user sees with kubectl while pods wait for their network is true, and comes in time: in a burst, when the
//! API server refuses an Endpoint, and when a droplet does not answer.

use std::collections::HashMap;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use thuban_cluster::Cluster;

use crate::audit::wait_sound;
use crate::support::{Hanging, apply, condition, delete, get, is_ready, netexec_manifest, running};
use crate::tenant::Tenant;
use crate::tenants::tenants;

/// The pods of the burst on each node.
const BURST: usize = 4;
/// How soon a user is told.
const TOLD: Duration = Duration::from_secs(20);

fn items(cluster: &Cluster, kind: &str, namespace: &str) -> Result<Vec<Value>> {
    let list = get(cluster, &[kind, "-n", namespace])?;
    Ok(list["items"].as_array().context("a list")?.clone())
}

/// Returns the Endpoints by the names of their pods.
fn endpoints(cluster: &Cluster, namespace: &str) -> Result<HashMap<String, Value>> {
    let named = |endpoint: Value| {
        let pod = endpoint["spec"]["podRef"]["name"].as_str()?.to_owned();
        Some((pod, endpoint))
    };
    let all = items(cluster, "endpoints.thuban.dev", namespace)?;
    Ok(all.into_iter().filter_map(named).collect())
}

/// Checks what is said of each pod, and returns whether all run and are said to be Provisioned.
fn look(cluster: &Cluster, namespace: &str, count: usize) -> Result<bool> {
    // Pods are read first: what follows from them has been written before.
    let pods = items(cluster, "pods", namespace)?;
    let endpoints = endpoints(cluster, namespace)?;
    for pod in &pods {
        let Some(address) = pod["status"]["podIP"].as_str() else {
            continue;
        };
        let name = pod["metadata"]["name"].as_str().context("a name")?;
        let endpoint = endpoints.get(name);
        let endpoint = endpoint.with_context(|| format!("pod {name} has {address} and no Endpoint"))?;
        let own = [
            &endpoint["spec"]["claimed"][0],
            &endpoint["status"]["addresses"][0],
        ];
        let said: Vec<&str> = own.iter().filter_map(|address| address.as_str()).collect();
        ensure!(
            !said.is_empty() && said.iter().all(|said| *said == address),
            "pod {name} has {address}: {endpoint:#}"
        );
    }
    for endpoint in endpoints.values() {
        let is_provisioned = endpoint["status"]["phase"] == "Provisioned";
        ensure!(is_provisioned == is_ready(endpoint), "{endpoint:#}");
    }
    let are_provisioned = endpoints.values().all(is_ready);
    Ok(pods.len() == count && pods.iter().all(is_ready) && endpoints.len() == count && are_provisioned)
}

#[test]
fn in_a_burst_users_see_the_addresses_that_pods_have() {
    let cluster = &tenants().cluster;
    let tenant = Tenant::new(cluster, "told-burst", &["10.81.0.0/16"], &["10.81.1.0/24"]).unwrap();
    let nodes = cluster.nodes().unwrap();
    let count = BURST * nodes.len();
    let pods: Vec<Value> = (0..count)
        .zip(nodes.iter().cycle())
        .map(|(number, node)| netexec_manifest("told-burst", &format!("p{number}"), node, None))
        .collect();
    apply(cluster, &pods).unwrap();
    cluster
        .wait_for("all pods of the burst", Duration::from_mins(2), || {
            look(cluster, "told-burst", count)
        })
        .unwrap();
    tenant.remove().unwrap();
}

#[test]
fn a_pod_says_which_quota_refuses_its_endpoint_until_it_may() {
    const NAME: &str = "told-quota";
    let cluster = &tenants().cluster;
    let tenant = Tenant::new(cluster, NAME, &["10.82.0.0/16"], &["10.82.1.0/24"]).unwrap();
    let quota = json!({
        "apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "no-endpoints", "namespace": NAME},
        "spec": {"hard": {"count/endpoints.thuban.dev": "0"}},
    });
    apply(cluster, &[quota]).unwrap();
    cluster
        .wait_for("the quota in force", Duration::from_secs(30), || {
            let quota = get(cluster, &["resourcequota", "-n", NAME, "no-endpoints"])?;
            Ok(quota["status"]["hard"]["count/endpoints.thuban.dev"] == "0")
        })
        .unwrap();
    apply(cluster, &[netexec_manifest(NAME, "pod", "node-a", None)]).unwrap();
    let selector = "--field-selector=involvedObject.kind=Pod,involvedObject.name=pod,reason=EndpointDenied";
    let mut told = String::new();
    cluster
        .wait_for("an event of the pod", TOLD, || {
            let events = get(cluster, &["events", "-n", NAME, selector])?;
            told = events["items"][0]["message"]
                .as_str()
                .unwrap_or_default()
                .to_owned();
            Ok(!told.is_empty())
        })
        .unwrap();
    assert!(
        told.contains("no-endpoints") && told.contains("raise the quota"),
        "{told}"
    );
    assert!(endpoints(cluster, NAME).unwrap().is_empty());
    let pod = get(cluster, &["pod", "-n", NAME, "pod"]).unwrap();
    assert!(pod["status"]["podIP"].is_null() && !is_ready(&pod), "{pod:#}");
    delete(cluster, &["resourcequota", "-n", NAME, "no-endpoints"]).unwrap();
    running(cluster, NAME, "pod").unwrap();
    tenant.remove().unwrap();
}

#[test]
fn an_endpoint_names_the_droplet_that_it_waits_for() {
    const NAME: &str = "told-droplet";
    let cluster = &tenants().cluster;
    let tenant = Tenant::new(cluster, NAME, &["10.83.0.0/16"], &["10.83.1.0/24"]).unwrap();
    let hanging = Hanging::new(cluster, "node-b", "transitd").unwrap();
    apply(cluster, &[netexec_manifest(NAME, "pod", "node-b", None)]).unwrap();
    let mut said = Value::Null;
    cluster
        .wait_for("a word of the Endpoint", TOLD, || {
            said = endpoints(cluster, NAME)?.remove("pod").unwrap_or_default();
            let ready = condition(&said, "Ready").cloned().unwrap_or_default();
            Ok(
                ready["status"] == "False"
                    && ready["message"].as_str().unwrap_or_default().contains("node-b"),
            )
        })
        .unwrap_or_else(|error| panic!("{error:#}: {said:#}"));
    assert_eq!(said["status"]["phase"], "Init", "{said:#}");
    let pod = get(cluster, &["pod", "-n", NAME, "pod"]).unwrap();
    assert!(!is_ready(&pod), "{pod:#}");
    drop(hanging);
    running(cluster, NAME, "pod").unwrap();
    cluster
        .wait_for("its Endpoint Provisioned", TOLD, || look(cluster, NAME, 1))
        .unwrap();
    tenant.remove().unwrap();
    wait_sound(cluster);
}
