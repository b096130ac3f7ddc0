//! The destinations of pods beside their VPC: the API server by its ClusterIP, and outside addresses in their node's
//! name.

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::json;
use thuban_cluster::Cluster;

use crate::support::{
    NOT_REACHED, Pod, REACHED, apply, condition, delete, get, lock, netexec_manifest, patch_vpc, running,
};
use crate::tenants::tenants;

const SOON: Duration = Duration::from_secs(20);
/// An address in no range of any VPC; the test gives it to a node.
const OUTSIDE: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 9);
const PORT: u16 = 7070;

/// Returns the API server's answer to the pod's own account, by its usual address.
fn asks_server(cluster: &Cluster, pod: &Pod, patience: Duration) -> Result<String> {
    let token = cluster.kubectl(&["create", "token", "-n", &pod.namespace, "default"])?;
    let server = cluster.kubectl(&["get", "service", "kubernetes", "-o", "jsonpath={.spec.clusterIP}"])?;
    let instance = cluster.instance();
    let authority = instance.state().join("pki/ca.crt");
    let kubectl = instance.bin().join("kubectl");
    pod.command(&[
        &kubectl.display().to_string(),
        "--kubeconfig=/dev/null",
        &format!("--server=https://{server}"),
        &format!("--certificate-authority={}", authority.display()),
        &format!("--token={}", token.trim()),
        &format!("--request-timeout={}ms", patience.as_millis()),
        "auth",
        "whoami",
        "-o",
        "jsonpath={.status.userInfo.username}",
    ])
}

#[test]
fn pods_of_every_vpc_use_their_account_at_the_api_server() {
    let tenants = tenants();
    let cluster = &tenants.cluster;
    let _red = lock(cluster, "vpc-red").unwrap();
    let node = "node-b";
    apply(cluster, &[netexec_manifest("default", "account", node, None)]).unwrap();
    let own = running(cluster, "default", "account").unwrap();
    let red = tenants.vpc("red");
    let red = red.iter().find(|pod| pod.node == node).unwrap();
    for pod in [&own, red] {
        let name = asks_server(cluster, pod, REACHED).unwrap();
        assert_eq!(name, format!("system:serviceaccount:{}:default", pod.namespace));
    }
    let kubernetes = get(cluster, &["endpoints.thuban.dev", "-n", "default"]).unwrap();
    let kubernetes = kubernetes["items"].as_array().unwrap();
    let kubernetes = kubernetes
        .iter()
        .find(|one| one["spec"]["serviceRef"]["name"] == "kubernetes");
    let kubernetes = kubernetes.unwrap();
    assert_eq!(kubernetes["status"]["backends"], 1);
    assert_eq!(condition(kubernetes, "Ready").unwrap()["status"], "True");
    // The first is another port of the same address, the second is the server's own address.
    let gateway = cluster.gateway();
    let service = "10.96.0.1".parse().unwrap();
    let port = cluster.instance().api_port();
    assert!(connects(red, service, 6443).is_err());
    assert!(connects(red, gateway, port).is_err(), "nodes and underlay");
    assert!(connects(&own, gateway, port).is_ok(), "of the VPC of nodes");

    // The VPC shares nothing.
    patch_vpc(cluster, "red", &json!({"sharedServices": []})).unwrap();
    let result = cluster.wait_for("no API server for red", SOON, || {
        Ok(asks_server(cluster, red, NOT_REACHED).is_err())
    });
    patch_vpc(cluster, "red", &json!({"sharedServices": null})).unwrap();
    result.unwrap();
    cluster
        .wait_for("the API server for red", SOON, || {
            Ok(asks_server(cluster, red, REACHED).is_ok())
        })
        .unwrap();
    delete(cluster, &["pod", "-n", "default", "account", "--now"]).unwrap();
}

fn connects(pod: &Pod, address: Ipv4Addr, port: u16) -> Result<TcpStream> {
    let address = SocketAddr::from((address, port));
    pod.inside(move || Ok(TcpStream::connect_timeout(&address, NOT_REACHED * 2)?))
}

/// An address outside on one node, and the route to it on another, until this is dropped.
struct Outside<'a> {
    cluster: &'a Cluster,
    server: &'static str,
    client: &'static str,
}

impl<'a> Outside<'a> {
    fn new(cluster: &'a Cluster, server: &'static str, client: &'static str) -> Result<Self> {
        let made = Self {
            cluster,
            server,
            client,
        };
        let (address, way) = (format!("{OUTSIDE}/32"), cluster.node_address(server)?.to_string());
        cluster.exec_on_node(server, &["ip", "address", "add", &address, "dev", "lo"])?;
        cluster.exec_on_node(client, &["ip", "route", "add", &address, "via", &way])?;
        Ok(made)
    }
}

impl Drop for Outside<'_> {
    fn drop(&mut self) {
        let address = format!("{OUTSIDE}/32");
        let _ = self
            .cluster
            .exec_on_node(self.client, &["ip", "route", "del", &address]);
        let _ = self
            .cluster
            .exec_on_node(self.server, &["ip", "address", "del", &address, "dev", "lo"]);
    }
}

/// Returns the client address that the server outside sees when the pod asks it.
fn seen_as(pod: &Pod) -> Result<IpAddr> {
    let mut stream = connects(pod, OUTSIDE, PORT)?;
    stream.set_read_timeout(Some(REACHED))?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    text.parse().context(text)
}

#[test]
fn a_vpc_that_may_reaches_outside_in_its_nodes_name() {
    let tenants = tenants();
    let cluster = &tenants.cluster;
    let _outside = Outside::new(cluster, "node-c", "node-a").unwrap();
    let listener = cluster
        .in_node("node-c", || Ok(TcpListener::bind((OUTSIDE, PORT))?))
        .unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            if let Ok(peer) = stream.peer_addr() {
                let _ = stream.write_all(peer.ip().to_string().as_bytes());
            }
        }
    });
    let on = |vpc: &str| {
        let pods = tenants.vpc(vpc);
        (*pods.iter().find(|pod| pod.node == "node-a").unwrap()).clone()
    };
    let (blue, red) = (on("blue"), on("red"));
    assert!(seen_as(&blue).is_err(), "nobody said that it may");
    patch_vpc(cluster, "blue", &json!({"egress": true})).unwrap();
    let result = (|| {
        cluster.wait_for("a way out for blue", SOON, || Ok(seen_as(&blue).is_ok()))?;
        let node = IpAddr::from(cluster.node_address("node-a")?);
        ensure!(seen_as(&blue)? == node, "not in its node's name");
        ensure!(seen_as(&red).is_err(), "red may not");
        let kubelet = cluster.node_address("node-c")?;
        ensure!(connects(&blue, kubelet, 10250).is_err(), "a node");
        // The pod's own VPC is unchanged.
        for other in tenants.vpc("blue") {
            ensure!(blue.tcp(other.address, REACHED)? == other.name);
        }
        Ok(())
    })();
    patch_vpc(cluster, "blue", &json!({"egress": null})).unwrap();
    result.unwrap();
    cluster
        .wait_for("no way out for blue", SOON, || Ok(seen_as(&blue).is_err()))
        .unwrap();
}
