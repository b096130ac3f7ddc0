//! UDP port 6081 of nodes is the overlay's: a user who may write Services and EndpointSlices in one namespace of the
//! VPC `default` can't use it to send a packet into another VPC.

use std::net::{Ipv4Addr, UdpSocket};
use std::time::Duration;

use anyhow::Result;
use serde_json::{Value, json};
use thuban_cluster::Cluster;
use thuban_cluster::wait::uninterrupted;

use crate::intruder::Intruder;
use crate::packets::arrives;
use crate::packets::{geneve_packet, send_raw, udp_packet};
use crate::service_objects::endpoint;
use crate::support::{apply, condition, delete, get, netexec_manifest, running};
use crate::tenants::tenants;

const TOLD_TIMEOUT: Duration = Duration::from_secs(30);
/// An address of nobody.
const ELSEWHERE: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 66);
/// A port of a node, where the test itself listens.
const CONTROL: u16 = 7777;
/// The size of an IPv4 and a UDP header.
const OUTER: usize = 28;

/// The objects that the test made in `default`, until this is dropped.
struct Made<'a> {
    cluster: &'a Cluster,
    node: &'a str,
}

impl Drop for Made<'_> {
    fn drop(&mut self) {
        for object in ["service/relay", "service/by-host", "endpointslice/relay-1"] {
            let _ = delete(self.cluster, &["-n", "default", object]);
        }
        for pod in ["pod/relays", "pod/on-host"] {
            let _ = delete(self.cluster, &["-n", "default", pod, "--now"]);
        }
        let _ = self
            .cluster
            .exec_on_node(self.node, &["nft", "delete", "table", "ip", "relay"]);
    }
}

fn service(name: &str, selector: Option<Value>) -> Value {
    let mut service = json!({
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": name, "namespace": "default"},
        "spec": {"ports": [
            {"name": "u", "protocol": "UDP", "port": 7000, "targetPort": 6081},
            {"name": "c", "protocol": "UDP", "port": 7001, "targetPort": CONTROL},
        ]},
    });
    if let Some(selector) = selector {
        service["spec"]["selector"] = selector;
    }
    service
}

/// A pod in the node's network namespace. The Service `by-host` selects it.
fn pod_on_host(node: &str) -> Value {
    let mut pod = netexec_manifest("default", "on-host", node, None);
    pod["metadata"]["labels"]["app"] = "on-host".into();
    pod["spec"]["hostNetwork"] = true.into();
    pod["spec"]["containers"][0]["args"] = json!(["pause"]);
    pod
}

/// Gives the Service `relay` a node as its backend.
fn relay_slice(node: Ipv4Addr) -> Value {
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": {"name": "relay-1", "namespace": "default", "labels": {"kubernetes.io/service-name": "relay"}},
        "endpoints": [{"addresses": [node.to_string()]}],
        "ports": [
            {"name": "u", "protocol": "UDP", "port": 6081},
            {"name": "c", "protocol": "UDP", "port": CONTROL},
        ],
    })
}

/// Waits until a condition and an event say that the port is the overlay's.
fn wait_until_told(cluster: &Cluster, name: &str) -> Result<()> {
    let has_condition = || -> Result<bool> {
        let own = endpoint(cluster, "default", name)?;
        let told = own.as_ref().and_then(|own| condition(own, "Ports"));
        Ok(told.is_some_and(|told| told["reason"] == "OverlayPort" && told["status"] == "False"))
    };
    let has_event = || -> Result<bool> {
        let events = get(cluster, &["events", "-n", "default"])?;
        let mut events = events["items"].as_array().into_iter().flatten();
        Ok(events.any(|event| {
            event["reason"] == "OverlayPort"
                && event["involvedObject"]["kind"] == "Service"
                && event["involvedObject"]["name"] == name
        }))
    };
    let what = format!("Service {name} is told that the port is the overlay's");
    cluster.wait_for(&what, TOLD_TIMEOUT, || Ok(has_condition()? && has_event()?))
}

/// The node forwards packets to port 7000 of any address to the overlay's port of `backend`.
fn add_relay_rule(cluster: &Cluster, node: &str, backend: Ipv4Addr) -> Result<()> {
    let rule = format!("udp dport 7000 counter dnat to {backend}:6081");
    for command in [
        vec!["add", "table", "ip", "relay"],
        vec![
            "add",
            "chain",
            "ip",
            "relay",
            "in",
            "{ type nat hook prerouting priority -110; }",
        ],
        vec!["add", "rule", "ip", "relay", "in", &rule],
    ] {
        cluster.exec_on_node(node, &[&["nft"], &command[..]].concat())?;
    }
    Ok(())
}

#[test]
fn service_with_nodes_overlay_port_backend_enters_no_vpc() {
    let tenants = tenants();
    let cluster = &tenants.cluster;
    let pods = tenants.network("red-web");
    let (neighbour, victim) = (pods[0], pods.iter().find(|pod| pod.node != pods[0].node).unwrap());
    let (here, there) = (
        cluster.node_address(&neighbour.node).unwrap(),
        cluster.node_address(&victim.node).unwrap(),
    );
    let vpc = get(cluster, &["vpc", "red"]).unwrap();
    let vni = u32::try_from(vpc["status"]["vni"].as_u64().unwrap()).unwrap();
    // The source is a pod that lives where the relay would be.
    let inner = udp_packet(neighbour.address, victim.address, 9100, b"relayed");
    let geneve = geneve_packet(here, there, vni, &inner);
    let intruder = Intruder::new(cluster).unwrap();
    let control = arrives(victim, 9100, b"relayed", || intruder.inside(|| send_raw(&geneve)));
    assert!(
        control.unwrap(),
        "control: from the wire, with the droplet's address forged"
    );

    let made = Made {
        cluster,
        node: &neighbour.node,
    };
    apply(
        cluster,
        &[
            netexec_manifest("default", "relays", &neighbour.node, None),
            pod_on_host(&victim.node),
            service("relay", None),
            relay_slice(there),
            service("by-host", Some(json!({"app": "on-host"}))),
        ],
    )
    .unwrap();
    let attacker = running(cluster, "default", "relays").unwrap();
    running(cluster, "default", "on-host").unwrap();
    let asks = |address: Ipv4Addr, port: u16, payload: &[u8]| {
        attacker.inside(|| {
            UdpSocket::bind("0.0.0.0:0")?.send_to(payload, (address, port))?;
            Ok(())
        })
    };
    let heard = cluster
        .in_node(&victim.node, || Ok(UdpSocket::bind(("0.0.0.0", CONTROL))?))
        .unwrap();
    heard.set_nonblocking(true).unwrap();
    for name in ["relay", "by-host"] {
        wait_until_told(cluster, name).unwrap();
        let service = get(cluster, &["service", "-n", "default", name]).unwrap();
        let address: Ipv4Addr = service["spec"]["clusterIP"].as_str().unwrap().parse().unwrap();
        cluster
            .wait_for("its other port leads to the node", TOLD_TIMEOUT, || {
                asks(address, 7001, name.as_bytes())?;
                let mut buffer = [0; 64];
                let came = uninterrupted(|| heard.recv(&mut buffer))
                    .map(|length| buffer[..length] == *name.as_bytes());
                Ok(came.unwrap_or(false))
            })
            .unwrap();
        let relayed = arrives(victim, 9100, b"relayed", || asks(address, 7000, &geneve[OUTER..]));
        assert!(!relayed.unwrap(), "by Service {name}");
    }

    // What somebody else's rules make of it: a host port, another plugin.
    add_relay_rule(cluster, &neighbour.node, there).unwrap();
    let relayed = arrives(victim, 9100, b"relayed", || {
        asks(ELSEWHERE, 7000, &geneve[OUTER..])
    });
    assert!(!relayed.unwrap(), "by rules of others");
    let rules = cluster
        .exec_on_node(&neighbour.node, &["nft", "list", "table", "ip", "relay"])
        .unwrap();
    assert!(!rules.contains("counter packets 0 "), "the rule took it: {rules}");
    drop(made);
}
