//! One peer's cluster, with the pods between which packets are sent.

use std::{net::Ipv4Addr, time::Duration};

use anyhow::{Context, Result};
use serde_json::{Value, json};
use thuban_cluster::{Cluster, command::run};

use super::{Parts, peer::Peer};
use crate::bench::{
    pods::{self, NODES, Pod},
    traffic::{Ends, PORTS},
};

const SPACE: &str = "peers";
const SERVICE: &str = "server";
const READY_TIMEOUT: Duration = Duration::from_mins(2);

pub struct Site {
    pub peer: Box<dyn Peer>,
    pub cluster: Cluster,
    /// Versions and settings.
    pub setting: Vec<String>,
    /// Two clients on one node: one for the server's own address and one for its Service's. A node may not be able to
    /// tell apart two connections from one port to one backend.
    clients: [Pod; 2],
    /// A pod on the other node.
    server: Pod,
    service: Ipv4Addr,
}

impl Site {
    /// Installs the peer, and makes the pods and the Service.
    pub fn up(peer: Box<dyn Peer>, name: &str, parts: &Parts) -> Result<Self> {
        let cluster = Cluster::named(name)?;
        // An earlier run may have left it paused.
        cluster.resume()?;
        let mut setting = peer.install(&cluster, parts)?;
        cluster.wait_nodes_ready(READY_TIMEOUT)?;
        let [here, there] = NODES;
        let wanted = [("direct", here), ("by-service", here), ("server", there)];
        let wanted = wanted.map(|(name, node)| (name.to_owned(), node));
        let pods = pods::up(&cluster, SPACE, &wanted)?;
        let [direct, by_service, server]: [Pod; 3] = pods.try_into().ok().context("three pods")?;
        let service = make_service(&cluster, &server)?;
        setting.push(link(&server)?);
        Ok(Self {
            peer,
            cluster,
            setting,
            clients: [direct, by_service],
            server,
            service,
        })
    }

    /// Returns the ends of traffic from pod to pod, and of traffic by the Service.
    pub fn ends(&self) -> [Ends<'_>; 2] {
        let addresses = [self.server.address, self.service];
        [0, 1].map(|index| Ends {
            client: self.clients[index].namespace(),
            server: self.server.namespace(),
            own: self.server.address,
            address: addresses[index],
        })
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        if let Err(error) = self.cluster.resume() {
            eprintln!("cluster {}: {error:#}", self.cluster.name());
        }
    }
}

/// Makes a Service with one backend; returns its address.
fn make_service(cluster: &Cluster, server: &Pod) -> Result<Ipv4Addr> {
    let ports: Vec<Value> = PORTS
        .iter()
        .map(|(port, protocol)| json!({"name": format!("p{port}"), "port": port, "protocol": protocol}))
        .collect();
    let list = json!({"apiVersion": "v1", "kind": "List", "items": [
        {
            "apiVersion": "v1", "kind": "Service", "metadata": {"name": SERVICE, "namespace": SPACE},
            "spec": {"ports": ports},
        },
        {
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
            "metadata": {"name": SERVICE, "namespace": SPACE,
                         "labels": {"kubernetes.io/service-name": SERVICE}},
            "addressType": "IPv4", "ports": ports,
            "endpoints": [{"addresses": [server.address], "conditions": {"ready": true},
                           "nodeName": NODES[1]}],
        },
    ]});
    cluster.kubectl_apply(&list.to_string())?;
    let address = cluster.kubectl(&[
        "get",
        "service",
        "-n",
        SPACE,
        SERVICE,
        "-o",
        "jsonpath={.spec.clusterIP}",
    ])?;
    address.parse().with_context(|| format!("ClusterIP {address:?}"))
}

/// Describes a pod's link.
fn link(pod: &Pod) -> Result<String> {
    let network = format!("--net={}", pod.namespace().display());
    let text = run("nsenter", &[&network, "ip", "-o", "link", "show", "dev", "eth0"])?;
    let mtu = text.split_whitespace().skip_while(|word| *word != "mtu").nth(1);
    Ok(format!("MTU of pods: {}", mtu.context("no MTU")?))
}
