//! Membership that changes: a namespace that is no longer admitted, and a network that is made again in another VPC.

use std::time::Duration;

use serde_json::json;
use thuban_cluster::Cluster;

use crate::audit::wait_sound_of;
use crate::support::{
    REACHED, apply, condition, delete, delete_namespace, get, namespace_manifest, netexec_manifest,
    network_manifest, running, vpc_manifest, wait_provisioned,
};
use crate::tenants::tenants;

/// Returns a pod that takes the Endpoint `kept`.
fn guest(name: &str) -> serde_json::Value {
    let mut pod = netexec_manifest("guests", name, "node-b", None);
    pod["metadata"]["annotations"]["thuban.dev/endpoint"] = "kept".into();
    pod
}

/// Waits until the Endpoint `kept` is accepted, or refused for that reason.
fn wait_accepted(cluster: &Cluster, status: &str, reason: &str) {
    cluster
        .wait_for(&format!("Accepted {status}"), Duration::from_secs(30), || {
            let endpoint = get(cluster, &["endpoints.thuban.dev", "-n", "guests", "kept"])?;
            let accepted = condition(&endpoint, "Accepted");
            Ok(accepted.is_some_and(|is| is["status"] == status && is["reason"] == reason))
        })
        .unwrap();
}

/// Removes the objects that [`revoked_namespace_keeps_pods_and_adds_none_by_endpoint`] makes, if they exist.
fn remove_guests(cluster: &Cluster) {
    delete_namespace(cluster, "guests").unwrap();
    delete(cluster, &["networks.thuban.dev", "hosts"]).unwrap();
    delete(cluster, &["vpcs.thuban.dev", "hosts"]).unwrap();
}

#[test]
fn revoked_namespace_keeps_pods_and_adds_none_by_endpoint() {
    let cluster = &tenants().cluster;
    // A run that was cut short may have left some.
    remove_guests(cluster);
    let endpoint = json!({
        "apiVersion": "thuban.dev/v1alpha1", "kind": "Endpoint",
        "metadata": {"name": "kept", "namespace": "guests"}, "spec": {"network": "hosts"},
    });
    let objects = [
        vpc_manifest("hosts", "10.44.0.0/16", &["guests"]),
        network_manifest("hosts", "hosts", "10.44.1.0/24"),
        namespace_manifest("guests", None),
        endpoint,
        guest("early"),
        netexec_manifest("guests", "other", "node-c", Some("hosts")),
    ];
    apply(cluster, &objects).unwrap();
    let early = running(cluster, "guests", "early").unwrap();
    let other = running(cluster, "guests", "other").unwrap();
    apply(cluster, &[vpc_manifest("hosts", "10.44.0.0/16", &[])]).unwrap();
    wait_accepted(cluster, "False", "NamespaceNotAllowed");
    assert_eq!(
        other.tcp(early.address, REACHED).unwrap(),
        "early",
        "what runs stays"
    );
    delete(cluster, &["pod", "-n", "guests", "early"]).unwrap();
    apply(cluster, &[guest("late")]).unwrap();
    // This is long enough for an ADD that succeeds.
    std::thread::sleep(Duration::from_secs(5));
    let late = get(cluster, &["pod", "-n", "guests", "late"]).unwrap();
    assert!(late["spec"]["nodeName"].is_string(), "not even bound: {late}");
    assert!(
        late["status"]["podIP"].is_null(),
        "it entered by the Endpoint: {late}"
    );
    wait_accepted(cluster, "False", "NamespaceNotAllowed");
    apply(cluster, &[vpc_manifest("hosts", "10.44.0.0/16", &["guests"])]).unwrap();
    let late = running(cluster, "guests", "late").unwrap();
    assert_eq!(late.address, early.address, "the Endpoint's");
    assert_eq!(other.tcp(late.address, REACHED).unwrap(), "late");
    remove_guests(cluster);
    wait_sound_of(cluster, &["hosts"]);
}

#[test]
fn network_recreated_in_another_vpc_inherits_nothing() {
    let cluster = &tenants().cluster;
    let objects = [
        vpc_manifest("first", "10.45.0.0/16", &["nomadic"]),
        vpc_manifest("second", "10.45.0.0/16", &["nomadic"]),
        namespace_manifest("nomadic", Some("tents")),
        network_manifest("stays", "first", "10.45.2.0/24"),
        network_manifest("tents", "first", "10.45.1.0/24"),
        netexec_manifest("nomadic", "stays", "node-a", Some("stays")),
        netexec_manifest("nomadic", "a", "node-b", None),
    ];
    apply(cluster, &objects).unwrap();
    let stays = running(cluster, "nomadic", "stays").unwrap();
    let a = running(cluster, "nomadic", "a").unwrap();
    assert_eq!(stays.tcp(a.address, REACHED).unwrap(), "a");
    delete(cluster, &["pod", "-n", "nomadic", "a"]).unwrap();
    delete(cluster, &["networks.thuban.dev", "tents"]).unwrap();
    apply(cluster, &[network_manifest("tents", "second", "10.45.1.0/24")]).unwrap();
    wait_provisioned(cluster, "networks.thuban.dev/tents").unwrap();
    let pods = ["b", "c"].map(|name| {
        let node = if name == "b" { "node-b" } else { "node-c" };
        apply(cluster, &[netexec_manifest("nomadic", name, node, None)]).unwrap();
        running(cluster, "nomadic", name).unwrap()
    });
    assert_eq!(pods[0].tcp(pods[1].address, REACHED).unwrap(), "c");
    for pod in &pods {
        stays.reaches_nothing_at(pod.address);
        pod.reaches_nothing_at(stays.address);
    }
    delete_namespace(cluster, "nomadic").unwrap();
    delete(cluster, &["networks.thuban.dev", "tents", "stays"]).unwrap();
    delete(cluster, &["vpcs.thuban.dev", "first", "second"]).unwrap();
    wait_sound_of(cluster, &["first", "second"]);
}
