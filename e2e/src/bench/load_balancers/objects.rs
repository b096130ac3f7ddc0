//! The objects of the benchmark: a tenant, pools and a router for the cluster with Thuban, and Services.

use std::{net::Ipv4Addr, time::Duration};

use anyhow::{Context, Result};
use serde_json::{Value, json};
use thuban_cluster::{
    Cluster,
    router::{ASN, NODES_ASN, Router},
};

pub const SPACE: &str = "balanced";
const NETWORK: &str = "balanced";
/// The class of load balancers that nobody serves: their addresses are written by hand, as MetalLB's controller does.
const BY_HAND: &str = "example.org/by-hand";
/// The pools of Services that are measured, that are made at once, and that take memory.
pub const POOL: &str = "measured";
pub const BURST_POOL: &str = "burst";
pub const MANY_POOL: &str = "many";
/// The addresses of [`BURST_POOL`].
pub const BURST: (Ipv4Addr, u32) = (Ipv4Addr::new(198, 18, 0, 0), 128);
pub const READY_TIMEOUT: Duration = Duration::from_mins(2);

/// A Service of type `LoadBalancer`.
#[derive(Clone, Debug)]
pub struct Wanted {
    pub name: String,
    /// The label of its backends; none: its `EndpointSlice` is written by hand.
    pub label: Option<(&'static str, &'static str)>,
    pub ports: Vec<(u16, &'static str)>,
    pub pool: &'static str,
    /// Whether each node's own stack serves it.
    pub by_node: bool,
}

impl Wanted {
    /// Returns the Service as lbaasd serves it.
    pub fn of_thuban(&self) -> Value {
        let mut made = self.service("thuban.dev/vip");
        let mode = if self.by_node { "Node" } else { "Dsr" };
        made["metadata"]["annotations"] = json!({
            "thuban.dev/ip-pool": self.pool, "thuban.dev/load-balancer-mode": mode,
        });
        made
    }

    /// Returns the Service for the other cluster.
    pub fn of_peer(&self) -> Value {
        self.service(BY_HAND)
    }

    fn service(&self, class: &str) -> Value {
        let ports = self.ports.iter().map(|(port, protocol)| {
            let name = format!("{}-{port}", protocol.to_lowercase());
            json!({"name": name, "port": port, "protocol": protocol})
        });
        let mut made = json!({
            "apiVersion": "v1", "kind": "Service",
            "metadata": {"name": self.name, "namespace": SPACE, "labels": {"pool": self.pool}},
            "spec": {"type": "LoadBalancer", "loadBalancerClass": class, "ports": ports.collect::<Vec<_>>()},
        });
        if let Some((label, value)) = self.label {
            made["spec"]["selector"] = json!({label: value});
        }
        made
    }
}

/// Makes the tenant's VPC with a network and a namespace.
pub fn make_tenant(cluster: &Cluster) -> Result<()> {
    let kind = |kind: &str, spec: Value| json!({"apiVersion": "thuban.dev/v1alpha1", "kind": kind, "metadata": {"name": NETWORK}, "spec": spec});
    let admits = json!({"matchLabels": {"kubernetes.io/metadata.name": SPACE}});
    apply(
        cluster,
        &[
            json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SPACE}}),
            kind(
                "Vpc",
                json!({"cidrs": ["10.0.0.0/16"], "allowedNamespaces": admits}),
            ),
            kind(
                "Network",
                json!({"vpc": NETWORK, "cidrs": ["10.0.1.0/24"], "allowedNamespaces": {}}),
            ),
        ],
    )?;
    let annotation = format!("thuban.dev/network={NETWORK}");
    cluster.kubectl(&["annotate", "namespace", SPACE, &annotation, "--overwrite"])?;
    let network = format!("networks.thuban.dev/{NETWORK}");
    let timeout = format!("--timeout={}s", READY_TIMEOUT.as_secs());
    cluster.kubectl(&[
        "wait",
        "--for=jsonpath={.status.phase}=Provisioned",
        &network,
        &timeout,
    ])?;
    Ok(())
}

/// Makes the pools, and tells the nodes of the router.
pub fn make_pools(cluster: &Cluster, router: &Router) -> Result<()> {
    let (first, count) = BURST;
    let burst = format!("{first}/{}", 32 - count.trailing_zeros());
    let pools = [
        (POOL, "203.0.113.0/24"),
        (BURST_POOL, burst.as_str()),
        (MANY_POOL, "198.18.16.0/20"),
    ];
    let mut objects: Vec<Value> = pools
        .iter()
        .map(|(name, cidr)| {
            let spec = json!({"class": "public", "cidrs": [cidr], "allowedNamespaces": {}});
            json!({"apiVersion": "thuban.dev/v1alpha1", "kind": "IpPool", "metadata": {"name": name}, "spec": spec})
        })
        .collect();
    objects.push(json!({
        "apiVersion": "thuban.dev/v1alpha1", "kind": "BgpPeer", "metadata": {"name": "router"},
        "spec": {"address": router.address(), "asn": ASN, "localAsn": NODES_ASN, "holdSeconds": 3, "bfd": {}},
    }));
    apply(cluster, &objects)
}

pub fn apply(cluster: &Cluster, objects: &[Value]) -> Result<()> {
    let list = json!({"apiVersion": "v1", "kind": "List", "items": objects});
    cluster.kubectl_apply(&list.to_string()).map(drop)
}

pub fn get(cluster: &Cluster, name: &str) -> Result<Value> {
    let text = cluster.kubectl(&["get", "service", "-n", SPACE, name, "-o", "json"])?;
    Ok(serde_json::from_str(&text)?)
}

/// Waits for a Service's address.
pub fn address(cluster: &Cluster, name: &str) -> Result<Ipv4Addr> {
    let mut address = None;
    cluster.wait_for(&format!("an address of {name}"), READY_TIMEOUT, || {
        let service = get(cluster, name)?;
        let ip = service["status"]["loadBalancer"]["ingress"][0]["ip"].as_str();
        address = ip.and_then(|ip| ip.parse().ok());
        Ok(address.is_some())
    })?;
    address.context("an address")
}

/// Gives a Service an address, as a load balancer's controller does.
pub fn give_address(cluster: &Cluster, name: &str, address: Ipv4Addr) -> Result<()> {
    let status = json!({"status": {"loadBalancer": {"ingress": [{"ip": address}]}}}).to_string();
    let patch = ["--subresource=status", "--type=merge", "-p", &status];
    let service = ["patch", "service", "-n", SPACE, name];
    cluster.kubectl(&[&service[..], &patch].concat()).map(drop)
}
