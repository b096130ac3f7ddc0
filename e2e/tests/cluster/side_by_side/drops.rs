//! Dropped packets: the pod that sent them is told.

use std::net::Ipv4Addr;
use std::time::Duration;

use thuban_cluster::Cluster;

use crate::support::{NOT_REACHED, apply, delete, get, netexec_manifest, running};
use crate::tenants::tenants;

/// An address in no range of any VPC.
const OUTSIDE: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 77);
/// Nodes report once a minute, and each pod is told once a minute.
const TOLD: Duration = Duration::from_mins(4);
const NAME: &str = "drops";

/// Returns what the pod was told.
fn notes(cluster: &Cluster) -> anyhow::Result<Vec<String>> {
    let selector =
        format!("--field-selector=involvedObject.kind=Pod,involvedObject.name={NAME},reason=PacketsDropped");
    let events = get(cluster, &["events", "-n", "red", &selector])?;
    let events = events["items"].as_array().into_iter().flatten();
    Ok(events.map(|event| event["message"].to_string()).collect())
}

#[test]
fn a_pod_is_told_that_its_vpc_has_no_way_out() {
    let cluster = &tenants().cluster;
    apply(cluster, &[netexec_manifest("red", NAME, "node-b", None)]).unwrap();
    let pod = running(cluster, "red", NAME).unwrap();
    cluster
        .wait_for("an event", TOLD, || {
            assert!(pod.tcp(OUTSIDE, NOT_REACHED).is_err());
            Ok(!notes(cluster)?.is_empty())
        })
        .unwrap();
    for note in notes(cluster).unwrap() {
        for part in ["outside_vpc", "no way out", "spec.egress"] {
            assert!(note.contains(part), "{note}");
        }
    }
    delete(cluster, &["pod", "-n", "red", NAME, "--now"]).unwrap();
}
