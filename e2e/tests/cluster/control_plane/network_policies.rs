//! NetworkPolicies are not enforced, and each gets an event that says so: once, whichever operator leads.

use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Value, json};
use thuban_cluster::Cluster;

use crate::scrape::of_leader;
use crate::support::{REACHED, apply, delete, get};
use crate::tenants::tenants;

const SOON: Duration = Duration::from_secs(30);
const REASON: &str = "NetworkPolicyNotEnforced";

/// Returns a policy that allows nothing to the pods that it selects.
fn deny(name: &str, selector: &Value) -> Value {
    json!({
        "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
        "metadata": {"name": name, "namespace": "red"},
        "spec": {"podSelector": selector, "policyTypes": ["Ingress", "Egress"]},
    })
}

/// Returns the events of the policy that has the name now, each with how often it was reported.
fn told(cluster: &Cluster, name: &str) -> Result<Vec<(String, u64)>> {
    let policy = get(cluster, &["networkpolicy", "-n", "red", name])?;
    let uid = policy["metadata"]["uid"].as_str().context("no UID")?;
    let selector = format!("--field-selector=involvedObject.uid={uid}");
    let events = get(cluster, &["events", "-n", "red", &selector])?;
    let events = events["items"].as_array().context("no list")?;
    let one = |event: &Value| {
        let reason = event["reason"].as_str().unwrap_or_default().to_owned();
        (reason, event["series"]["count"].as_u64().unwrap_or(1))
    };
    Ok(events.iter().map(one).collect())
}

fn once() -> (String, u64) {
    (REASON.to_owned(), 1)
}

fn wait_told(cluster: &Cluster, name: &str, times: usize) {
    let mut last = Vec::new();
    let result = cluster.wait_for(&format!("{times} events of {name}"), SOON, || {
        last = told(cluster, name)?;
        Ok(last.len() >= times)
    });
    result.unwrap_or_else(|error| panic!("{error:#}: {last:?}"));
    assert_eq!(last, vec![once(); times], "{name}");
}

fn counted(cluster: &Cluster, series: &str) -> f64 {
    let all = of_leader(cluster).unwrap();
    all.get(&format!("thuban_operator_{series}"))
        .copied()
        .unwrap_or_default()
}

#[test]
fn unenforced_network_policy_warns_once_across_leaders() {
    let tenants = tenants();
    let cluster = &tenants.cluster;
    let before = counted(cluster, "network_policies_not_enforced");
    apply(cluster, &[deny("closed", &json!({}))]).unwrap();
    wait_told(cluster, "closed", 1);
    // The message is true, and a person finds it; kubectl describes policies without their events.
    let described = cluster
        .kubectl(&["events", "-n", "red", "--for", "networkpolicy/closed"])
        .unwrap();
    for words in ["Warning", REASON, "does not enforce NetworkPolicies"] {
        assert!(described.contains(words), "{words:?} is not in {described}");
    }
    for (pod, address) in tenants.ring("red-web") {
        pod.tcp(address, REACHED).unwrap();
    }
    let more = counted(cluster, "network_policies_not_enforced") - before;
    assert!((more - 1.0).abs() < 0.1, "{more} more are counted");
    // Other rules make another generation, other labels do not.
    apply(
        cluster,
        &[deny("closed", &json!({"matchLabels": {"app": "netexec"}}))],
    )
    .unwrap();
    wait_told(cluster, "closed", 2);
    cluster
        .kubectl(&["label", "networkpolicy", "-n", "red", "closed", "a=b"])
        .unwrap();
    // The next leader looks at all policies, and a later policy comes after them.
    let restart = [
        "rollout",
        "restart",
        "-n",
        "thuban-system",
        "deployment/thuban-operator",
    ];
    cluster.kubectl(&restart).unwrap();
    let status = [
        "rollout",
        "status",
        "-n",
        "thuban-system",
        "deployment/thuban-operator",
        "--timeout=180s",
    ];
    cluster.kubectl(&status).unwrap();
    let looked = r#"reconciles_total{kind="NetworkPolicy",result="ok",reason=""}"#;
    cluster
        .wait_for("the next leader's look at the policies", SOON, || {
            let all = of_leader(cluster)?;
            let looks = all.get(&format!("thuban_operator_{looked}"));
            Ok(looks.is_some_and(|looks| *looks > 0.0))
        })
        .unwrap();
    apply(cluster, &[deny("late", &json!({}))]).unwrap();
    wait_told(cluster, "late", 1);
    assert_eq!(told(cluster, "closed").unwrap(), vec![once(); 2], "told again");
    // A policy that is made again under its name is another policy.
    delete(cluster, &["networkpolicy", "-n", "red", "closed", "late"]).unwrap();
    apply(cluster, &[deny("closed", &json!({}))]).unwrap();
    wait_told(cluster, "closed", 1);
    delete(cluster, &["networkpolicy", "-n", "red", "closed"]).unwrap();
    cluster
        .wait_for("none counted", SOON, || {
            let now = counted(cluster, "network_policies_not_enforced");
            Ok((now - before).abs() < 0.1)
        })
        .unwrap();
}
