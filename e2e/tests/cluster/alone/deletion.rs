//! A deleted object says what it waits for, and goes in order: a VPC after its networks, a network after its endpoints,
//! an endpoint after its pod and after its rows are gone from all droplets.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::Result;
use serde_json::{Value, json};
use thuban_cluster::Cluster;

use crate::audit::wait_sound;
use crate::leadership::{JUDGING, wait_led};
use crate::support::{
    Hanging, apply, condition, delete, get, namespace_manifest, netexec_manifest, network_manifest, running,
    vpc_manifest, wait_provisioned,
};
use crate::tenants::tenants;

const NAME: &str = "leaver";
const WAIT_TIMEOUT: Duration = Duration::from_mins(1);

/// Returns the reason why it waits, and its message, if it says that it is being deleted.
fn deleting(object: &Value) -> Option<(String, String)> {
    let deleting = condition(object, "Deleting").filter(|told| told["status"] == "True")?;
    let text = |field: &str| deleting[field].as_str().unwrap_or_default().to_owned();
    Some((text("reason"), text("message")))
}

/// Waits until the object gives this reason and message.
fn wait_says(cluster: &Cluster, object: &[&str], reason: &str, what: &str) {
    let mut said = None;
    let waited = cluster.wait_for(&format!("{object:?}: {reason}"), WAIT_TIMEOUT, || {
        said = deleting(&get(cluster, object)?);
        Ok(said
            .as_ref()
            .is_some_and(|(why, message)| why == reason && message.contains(what)))
    });
    waited.unwrap_or_else(|error| panic!("{error:#}: it says {said:?}"));
}

/// Returns the reasons of the object's events.
fn told(cluster: &Cluster, kind: &str) -> Result<BTreeSet<String>> {
    let selector = format!("--field-selector=involvedObject.kind={kind},involvedObject.name={NAME}");
    let events = get(cluster, &["events", "-n", "default", &selector])?;
    let events = events["items"].as_array().into_iter().flatten();
    Ok(events
        .filter_map(|event| Some(event["reason"].as_str()?.to_owned()))
        .collect())
}

fn begin(cluster: &Cluster, object: &[&str]) {
    let arguments: Vec<&str> = ["delete", "--wait=false"]
        .into_iter()
        .chain(object.iter().copied())
        .collect();
    cluster.kubectl(&arguments).unwrap();
}

fn is_gone(cluster: &Cluster, object: &[&str]) -> Result<bool> {
    let arguments: Vec<&str> = ["get", "--ignore-not-found"]
        .into_iter()
        .chain(object.iter().copied())
        .collect();
    Ok(cluster.kubectl(&arguments)?.trim().is_empty())
}

#[test]
fn what_is_deleted_says_what_it_waits_for_and_goes_in_order() {
    let cluster = &tenants().cluster;
    wait_led(cluster, JUDGING).unwrap();
    let mut network = network_manifest(NAME, NAME, "10.78.0.0/24");
    // There is one on every node.
    network["spec"]["bouncers"] = json!(3);
    let objects = [
        vpc_manifest(NAME, "10.78.0.0/16", &[NAME]),
        network,
        namespace_manifest(NAME, Some(NAME)),
    ];
    apply(cluster, &objects).unwrap();
    let (vpc, network) = (["vpcs.thuban.dev", NAME], ["networks.thuban.dev", NAME]);
    wait_provisioned(cluster, &vpc.join("/")).unwrap();
    wait_provisioned(cluster, &network.join("/")).unwrap();
    apply(cluster, &[netexec_manifest(NAME, "pod", "node-a", None)]).unwrap();
    let pod = running(cluster, NAME, "pod").unwrap();
    let endpoints = get(cluster, &["endpoints.thuban.dev", "-n", NAME]).unwrap();
    let name = endpoints["items"][0]["metadata"]["name"].as_str().unwrap();
    let endpoint = ["endpoints.thuban.dev", "-n", NAME, name];

    begin(cluster, &vpc);
    begin(cluster, &network);
    wait_says(cluster, &vpc, "WaitsForNetworks", NAME);
    wait_says(cluster, &network, "WaitsForEndpoints", "1 endpoints");
    pod.command(&["true"]).unwrap();
    let kept = get(cluster, &endpoint).unwrap();
    assert_eq!(kept["status"]["phase"], "Provisioned", "{kept:#}");

    let hanging = Hanging::new(cluster, "node-b", "transitd").unwrap();
    delete(cluster, &["pod", "-n", NAME, "pod"]).unwrap();
    wait_says(cluster, &endpoint, "WaitsForAcks", "node-b");
    drop(hanging);
    let claim = format!("{NAME}.{}", pod.address);
    for object in [&endpoint[..], &network, &vpc] {
        cluster
            .wait_for(&format!("{object:?} gone"), WAIT_TIMEOUT, || {
                is_gone(cluster, object)
            })
            .unwrap();
        if object == endpoint {
            let claim = get(cluster, &["ipclaims.thuban.dev", &claim]).unwrap();
            assert!(
                claim["metadata"]["deletionTimestamp"].is_null(),
                "its address rests before another has it: {claim:#}"
            );
        }
    }
    let claims = get(cluster, &["vniclaims.thuban.dev"]).unwrap();
    let rests = |claim: &Value| claim["spec"]["vpc"] == NAME;
    let mut claims = claims["items"].as_array().unwrap().iter();
    assert!(claims.any(rests), "its number rests before another VPC has it");

    let steps = |kind: &str, wanted: &[&str]| {
        let mut told_now = BTreeSet::new();
        let waited = cluster.wait_for(&format!("events of the {kind}"), WAIT_TIMEOUT, || {
            told_now = told(cluster, kind)?;
            Ok(wanted.iter().all(|step| told_now.contains(*step)))
        });
        waited.unwrap_or_else(|error| panic!("{error:#}: told were {told_now:?}"));
    };
    steps(
        "Vpc",
        &[
            "DividerCreated",
            "Provisioned",
            "WaitsForNetworks",
            "DividerRemoved",
        ],
    );
    steps(
        "Network",
        &[
            "BouncerCreated",
            "Provisioned",
            "WaitsForEndpoints",
            "BouncerRemoved",
        ],
    );
    delete(cluster, &["namespace", NAME]).unwrap();
    wait_sound(cluster);
}
