//! Nodes' own endpoints: every node reaches pods and Services of the default VPC on every node, and nothing of a
//! tenant's. Services are reached by way of nodes, and from other VPCs if those share them.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Value, json};
use thuban_cluster::Cluster;

use crate::support::patch_vpc;
use crate::support::{
    NOT_REACHED, PORT, Pod, REACHED, apply, condition, delete, get, http_hostname_at, lock, netexec_manifest,
    running,
};
use crate::tenants::tenants;

const SOON: Duration = Duration::from_secs(30);
const SYSTEM: &str = "thuban-system";

/// Pods of the default VPC, one on each node, and the Service `echo` before them, until this is dropped.
struct Echo<'a> {
    cluster: &'a Cluster,
    pods: Vec<Pod>,
    service: Value,
}

impl<'a> Echo<'a> {
    fn new(cluster: &'a Cluster) -> Result<Self> {
        let nodes = cluster.nodes()?;
        let service = json!({
            "apiVersion": "v1", "kind": "Service",
            "metadata": {"name": "echo", "namespace": "default"},
            "spec": {"type": "NodePort", "selector": {"echo": "yes"}, "ports": [{"port": 80, "targetPort": PORT}]},
        });
        let mut objects = vec![service];
        for node in &nodes {
            let mut pod = netexec_manifest("default", &format!("echo-{node}"), node, None);
            pod["metadata"]["labels"]["echo"] = "yes".into();
            objects.push(pod);
        }
        apply(cluster, &objects)?;
        let pods = nodes
            .iter()
            .map(|node| running(cluster, "default", &format!("echo-{node}")));
        let pods = pods.collect::<Result<Vec<_>>>()?;
        let service = get(cluster, &["service", "-n", "default", "echo"])?;
        let made = Self {
            cluster,
            pods,
            service,
        };
        cluster.wait_for("scaled endpoint of echo", SOON, || {
            let all = get(cluster, &["endpoints.thuban.dev", "-n", "default"])?;
            let mut all = all["items"].as_array().into_iter().flatten();
            Ok(all.any(|one| {
                one["spec"]["serviceRef"]["name"] == "echo" && one["status"]["backends"] == made.pods.len()
            }))
        })?;
        Ok(made)
    }

    fn address(&self) -> Result<Ipv4Addr> {
        let text = self.service["spec"]["clusterIP"].as_str();
        Ok(text.context("clusterIP")?.parse()?)
    }

    fn node_port(&self) -> Result<u16> {
        let port = self.service["spec"]["ports"][0]["nodePort"].as_u64();
        Ok(port.context("nodePort")?.try_into()?)
    }
}

impl Drop for Echo<'_> {
    fn drop(&mut self) {
        let _ = delete(self.cluster, &["service", "-n", "default", "echo"]);
        for pod in &self.pods {
            let _ = delete(self.cluster, &["pod", "-n", "default", &pod.name, "--now"]);
        }
    }
}

/// Returns the server's name for itself when the node asks it.
fn asked(
    cluster: &Cluster,
    node: &str,
    address: impl Into<IpAddr>,
    port: u16,
    patience: Duration,
) -> Result<String> {
    let address = address.into();
    cluster.in_node(node, || http_hostname_at((address, port), patience))
}

#[test]
fn nodes_reach_default_vpc_pods_and_services_but_no_tenants() {
    let tenants = tenants();
    let cluster = &tenants.cluster;
    let echo = Echo::new(cluster).unwrap();
    let nodes = cluster.nodes().unwrap();
    for node in &nodes {
        let endpoint = get(cluster, &["endpoints.thuban.dev", "-n", SYSTEM, node]).unwrap();
        assert_eq!(endpoint["spec"]["type"], "Host", "{endpoint:#}");
        assert_eq!(condition(&endpoint, "Ready").unwrap()["status"], "True");
        for pod in &echo.pods {
            let name = asked(cluster, node, pod.address, PORT, REACHED).unwrap();
            assert_eq!(name, pod.name, "from {node}");
        }
        let name = asked(cluster, node, echo.address().unwrap(), 80, REACHED).unwrap();
        assert!(name.starts_with("echo-"), "{name}");
        for pod in tenants.vpc("red").into_iter().filter(|pod| pod.node != *node) {
            let got = asked(cluster, node, pod.address, PORT, NOT_REACHED);
            let is_own = |name: &String| {
                let own = tenants.vpc("blue");
                let green = tenants.vpc("green");
                // A tenant of this very node has the same address.
                own.iter()
                    .chain(&green)
                    .any(|own| own.node == *node && own.name == *name)
            };
            assert!(
                got.as_ref().ok().is_none_or(is_own),
                "{node} reaches {}: {got:?}",
                pod.name
            );
        }
    }
    // Pods reach nodes' endpoints as they reach any member; pods of other VPCs don't.
    let endpoint = get(cluster, &["endpoints.thuban.dev", "-n", SYSTEM, &nodes[1]]).unwrap();
    let address: Ipv4Addr = endpoint["status"]["addresses"][0]
        .as_str()
        .unwrap()
        .parse()
        .unwrap();
    echo.pods[0].ping(address, REACHED).unwrap();
    let red = tenants.vpc("red");
    assert!(red[0].ping(address, NOT_REACHED).is_err());
}

#[test]
fn node_ports_lead_to_a_service_from_every_node_and_from_pods() {
    let tenants = tenants();
    let cluster = &tenants.cluster;
    let echo = Echo::new(cluster).unwrap();
    let port = echo.node_port().unwrap();
    let nodes = cluster.nodes().unwrap();
    for node in &nodes {
        let at = cluster.node_address(node).unwrap();
        // The clients are outside the cluster's nodes (this process), on nodes, and in pods.
        cluster
            .wait_for("the node port from outside", SOON, || {
                Ok(http_hostname_at((at, port), REACHED).is_ok_and(|name| name.starts_with("echo-")))
            })
            .unwrap();
        for from in &nodes {
            let name = asked(cluster, from, at, port, REACHED).unwrap();
            assert!(name.starts_with("echo-"), "from {from}: {name}");
        }
        for pod in &echo.pods {
            let name = pod.inside(|| http_hostname_at((at, port), REACHED)).unwrap();
            assert!(name.starts_with("echo-"), "from {}: {name}", pod.name);
        }
        let red = tenants.vpc("red");
        assert!(
            red[0]
                .inside(|| http_hostname_at((at, port), NOT_REACHED))
                .is_err()
        );
    }
}

/// Asserts that policies of egress in red's VPC decide by the labels and ports of the backends of a shared Service.
fn is_reached_by_policy(cluster: &Cluster, service: Ipv4Addr) -> Result<()> {
    let mut pod = netexec_manifest("red", "caller", "node-a", None);
    pod["metadata"]["labels"]["caller"] = "yes".into();
    apply(cluster, &[pod])?;
    let caller = running(cluster, "red", "caller")?;
    let policy = |echo: &str, port: u16| {
        let peer = json!({
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "default"}},
            "podSelector": {"matchLabels": {"echo": echo}},
        });
        json!({
            "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
            "metadata": {"name": "caller", "namespace": "red"},
            "spec": {
                "podSelector": {"matchLabels": {"caller": "yes"}}, "policyTypes": ["Egress"],
                "egress": [{"to": [peer], "ports": [{"port": port}]}],
            },
        })
    };
    for (echo, port, is_allowed) in [("no", PORT, false), ("yes", PORT, true), ("yes", 80, false)] {
        apply(cluster, &[policy(echo, port)])?;
        cluster.wait_for(&format!("backends echo={echo}, port {port}"), SOON, || {
            let answer = caller.inside(|| http_hostname_at((service, 80), NOT_REACHED));
            Ok(answer.is_ok() == is_allowed)
        })?;
    }
    delete(cluster, &["networkpolicy", "-n", "red", "caller"])?;
    delete(cluster, &["pod", "-n", "red", "caller", "--now"])
}

/// Asserts that ingress policies of the backends tell clients of the shared Service from the VPC's own pods.
fn is_a_peer_of_backends(cluster: &Cluster, service: Ipv4Addr, tenant: &Pod, echo: &Echo) -> Result<()> {
    let policy = |peer: &Value| {
        json!({
            "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
            "metadata": {"name": "echo", "namespace": "default"},
            "spec": {
                "podSelector": {"matchLabels": {"echo": "yes"}}, "policyTypes": ["Ingress"],
                "ingress": [{"from": [peer]}],
            },
        })
    };
    let by_shared_service = json!({"podSelector": {"matchLabels": {"thuban.dev/by": "shared-service"}}});
    let own_pods = json!({"namespaceSelector": {}});
    let result = [(by_shared_service, [true, false]), (own_pods, [false, true])]
        .into_iter()
        .try_for_each(|(peer, expected)| {
            apply(cluster, &[policy(&peer)])?;
            cluster.wait_for(&format!("backends that let in {peer}"), SOON, || {
                let by_service = tenant.inside(|| http_hostname_at((service, 80), NOT_REACHED));
                let backend = (echo.pods[0].address, PORT);
                let directly = echo.pods[1].inside(|| http_hostname_at(backend, NOT_REACHED));
                Ok([by_service.is_ok(), directly.is_ok()] == expected)
            })
        });
    delete(cluster, &["networkpolicy", "-n", "default", "echo"])?;
    result
}

#[test]
fn vpc_reaches_default_vpc_service_only_while_sharing_it() {
    let tenants = tenants();
    let cluster = &tenants.cluster;
    let _red = lock(cluster, "vpc-red").unwrap();
    let echo = Echo::new(cluster).unwrap();
    let service = echo.address().unwrap();
    let red = tenants.vpc("red");
    let ask = |pod: &Pod, patience| pod.inside(|| http_hostname_at((service, 80), patience));
    assert!(ask(red[0], NOT_REACHED).is_err());
    let shared = json!({"sharedServices": ["default/echo"]});
    patch_vpc(cluster, "red", &shared).unwrap();
    let result = red.iter().try_for_each(|pod| {
        cluster.wait_for(&format!("echo for {}", pod.name), SOON, || {
            Ok(ask(pod, REACHED).is_ok())
        })?;
        let name = ask(pod, REACHED)?;
        anyhow::ensure!(name.starts_with("echo-"), "{name}");
        // Only the Service is reached, not its backends.
        anyhow::ensure!(
            pod.inside(|| http_hostname_at((echo.pods[0].address, PORT), NOT_REACHED))
                .is_err(),
            "a pod of the default VPC"
        );
        Ok(())
    });
    let result = result.and_then(|()| is_reached_by_policy(cluster, service));
    let result = result.and_then(|()| is_a_peer_of_backends(cluster, service, red[0], &echo));
    let blue = tenants.vpc("blue");
    let leaks = ask(blue[0], NOT_REACHED).is_ok();
    patch_vpc(cluster, "red", &json!({"sharedServices": null})).unwrap();
    result.unwrap();
    assert!(!leaks, "blue shares nothing but the API server");
    cluster
        .wait_for("no echo for red", SOON, || Ok(ask(red[0], NOT_REACHED).is_err()))
        .unwrap();
}
