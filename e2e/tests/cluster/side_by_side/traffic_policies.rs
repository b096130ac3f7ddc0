//! Traffic that stays on its node, addresses that a Service's user chose, and ports of nodes: the requests of Services
//! and pods besides an address.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, UdpSocket};
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Value, json};
use thuban_cluster::Cluster;
use thuban_cluster::wait::uninterrupted;

use crate::service_objects::wait_endpoint;
use crate::support::{
    NOT_REACHED, PORT, Pod, REACHED, apply, condition, delete, get, http_get, http_hostname_at,
    netexec_manifest, running,
};
use crate::tenants::tenants;

const SOON: Duration = Duration::from_secs(30);
/// An address in the range that the test's cluster allows, see `xtask`.
const EXTERNAL: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 7);

/// Objects of one namespace that are deleted when this is dropped.
struct Made<'a> {
    cluster: &'a Cluster,
    namespace: &'a str,
    /// Kind and name.
    objects: Vec<(String, String)>,
}

impl<'a> Made<'a> {
    fn new(cluster: &'a Cluster, namespace: &'a str) -> Self {
        Self {
            cluster,
            namespace,
            objects: Vec::new(),
        }
    }

    fn make(&mut self, object: &Value) -> Result<()> {
        let part = |value: &Value| value.as_str().context("manifest").map(str::to_owned);
        let named = (part(&object["kind"])?, part(&object["metadata"]["name"])?);
        apply(self.cluster, std::slice::from_ref(object))?;
        self.objects.push(named);
        Ok(())
    }

    /// Makes a server on a node, with this label.
    fn server(&mut self, name: &str, node: &str, label: &str) -> Result<Pod> {
        let mut pod = netexec_manifest(self.namespace, name, node, None);
        pod["metadata"]["labels"] = json!({"app": label});
        self.make(&pod)?;
        running(self.cluster, self.namespace, name)
    }

    /// Makes a Service; without ports of its own it has port 80 by TCP.
    fn service(&mut self, name: &str, spec: &Value) -> Result<Value> {
        let mut object = json!({
            "apiVersion": "v1", "kind": "Service", "metadata": {"name": name, "namespace": self.namespace}, "spec": spec,
        });
        object["spec"]["selector"] = json!({"app": name});
        if object["spec"]["ports"].is_null() {
            object["spec"]["ports"] = json!([{"port": 80, "targetPort": PORT}]);
        }
        self.make(&object)?;
        get(self.cluster, &["service", "-n", self.namespace, name])
    }
}

impl Drop for Made<'_> {
    fn drop(&mut self) {
        for (kind, name) in self.objects.iter().rev() {
            let _ = delete(self.cluster, &[kind, "-n", self.namespace, name, "--now"]);
        }
    }
}

fn port(service: &Value) -> u16 {
    u16::try_from(service["spec"]["ports"][0]["nodePort"].as_u64().unwrap()).unwrap()
}

fn address(service: &Value) -> Ipv4Addr {
    service["spec"]["clusterIP"].as_str().unwrap().parse().unwrap()
}

/// Returns the client address that a server sees, without its port.
fn client(at: (Ipv4Addr, u16)) -> Result<IpAddr> {
    let told = http_get(at, "/clientip", REACHED)?;
    let (address, _) = told.rsplit_once(':').context("address:port")?;
    Ok(address.parse()?)
}

#[test]
fn local_policy_reaches_own_node_pods_with_sender_address() {
    let cluster = &tenants().cluster;
    let nodes = cluster.nodes().unwrap();
    let at = |node: usize| cluster.node_address(&nodes[node]).unwrap();
    let mut made = Made::new(cluster, "default");
    let [first, second] = [0, 1].map(|node| {
        made.server(&format!("kept-{node}"), &nodes[node], "kept")
            .unwrap()
    });
    let clients: Vec<Pod> = nodes
        .iter()
        .map(|node| made.server(&format!("asker-{node}"), node, "asker").unwrap())
        .collect();
    let spec =
        json!({"type": "LoadBalancer", "externalTrafficPolicy": "Local", "internalTrafficPolicy": "Local"});
    let service = made.service("kept", &spec).unwrap();
    wait_endpoint(cluster, "default", "kept", "two backends", |endpoint| {
        endpoint["status"]["phase"] == "Provisioned" && endpoint["status"]["backends"] == 2
    });
    let port = port(&service);
    cluster
        .wait_for("the first pod from outside", SOON, || {
            Ok(http_hostname_at((at(0), port), REACHED).is_ok())
        })
        .unwrap();
    for (node, pod) in [(0, &first), (1, &second)] {
        for _ in 0..5 {
            assert_eq!(http_hostname_at((at(node), port), REACHED).unwrap(), pod.name);
        }
        // Nodes see this process at the gateway's address.
        assert_eq!(client((at(node), port)).unwrap(), IpAddr::from(cluster.gateway()));
    }
    assert!(
        http_hostname_at((at(2), port), NOT_REACHED).is_err(),
        "nobody is there"
    );
    // A node's own processes reach any of them, unless pods don't either.
    let open = made
        .service(
            "open",
            &json!({"type": "NodePort", "externalTrafficPolicy": "Local"}),
        )
        .unwrap();
    let patch = json!({"spec": {"selector": {"app": "kept"}}}).to_string();
    cluster
        .kubectl(&["patch", "service", "-n", "default", "open", "-p", &patch])
        .unwrap();
    let own = self::port(&open);
    cluster
        .wait_for("any of them from a node without", SOON, || {
            let got = cluster.in_node(&nodes[2], || http_hostname_at((at(2), own), REACHED));
            Ok(got.is_ok_and(|name| name.starts_with("kept-")))
        })
        .unwrap();
    assert!(http_hostname_at((at(2), own), NOT_REACHED).is_err());
    // By the ClusterIP, pods reach the backends of their own node.
    for (pod, here) in clients.iter().zip([Some(&first), Some(&second), None]) {
        let got = pod.inside(|| http_hostname_at((address(&service), 80), NOT_REACHED));
        assert_eq!(got.ok(), here.map(|pod| pod.name.clone()), "from {}", pod.name);
    }
    // Load balancers ask here where to send.
    let health = u16::try_from(service["spec"]["healthCheckNodePort"].as_u64().unwrap()).unwrap();
    let told: Value = serde_json::from_str(&http_get((at(0), health), "/healthz", REACHED).unwrap()).unwrap();
    assert_eq!(told["localEndpoints"], 1, "{told}");
    let none = http_get((at(2), health), "/healthz", REACHED)
        .unwrap_err()
        .to_string();
    assert!(none.contains("503"), "{none}");

    // The second server goes, and another one comes on a node without a server.
    delete(cluster, &["pod", "-n", "default", &second.name, "--now"]).unwrap();
    let third = made.server("kept-2", &nodes[2], "kept").unwrap();
    let follows = || {
        let here = http_hostname_at((at(2), port), REACHED).is_ok_and(|name| name == third.name);
        Ok(here && http_hostname_at((at(1), port), NOT_REACHED).is_err())
    };
    cluster.wait_for("ports follow the pods", SOON, follows).unwrap();
    let from_pod = || {
        let got = clients[2].inside(|| http_hostname_at((address(&service), 80), REACHED));
        Ok(got.is_ok_and(|name| name == third.name))
    };
    cluster
        .wait_for("and the ClusterIP on the third node", SOON, from_pod)
        .unwrap();
}

#[test]
fn a_tenants_node_port_leads_to_its_pods_from_every_node() {
    let cluster = &tenants().cluster;
    let nodes = cluster.nodes().unwrap();
    let mut made = Made::new(cluster, "red");
    let spec = json!({"type": "NodePort"});
    let first = made.server("open-1", &nodes[1], "open-to-all").unwrap();
    let service = made.service("open-to-all", &spec).unwrap();
    let port = port(&service);
    let ask = |node: &str| http_hostname_at((cluster.node_address(node).unwrap(), port), REACHED);
    // Each node leads to each of them, and to no other.
    let follows = |names: &[&str]| {
        let led = |node: &String| {
            let got = (0..8 * names.len())
                .map(|_| ask(node))
                .collect::<Result<BTreeSet<_>>>();
            got.is_ok_and(|got| got.iter().map(String::as_str).eq(names.iter().copied()))
        };
        let everywhere = || Ok(nodes.iter().all(led));
        cluster
            .wait_for(&format!("{names:?} from every node"), SOON, everywhere)
            .unwrap();
    };
    follows(&["open-1"]);
    let second = made.server("open-2", &nodes[2], "open-to-all").unwrap();
    follows(&["open-1", "open-2"]);
    // A process of a node does so, too.
    let own = || http_hostname_at((cluster.node_address(&nodes[0]).unwrap(), port), REACHED);
    assert!([&first.name, &second.name].contains(&&cluster.in_node(&nodes[0], own).unwrap()));
    delete(cluster, &["pod", "-n", "red", "open-1", "--now"]).unwrap();
    follows(&["open-2"]);
}

/// Returns the name that a pod answers to a datagram.
fn udp_hostname_at(at: (Ipv4Addr, u16)) -> Result<String> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    socket.set_read_timeout(Some(REACHED))?;
    socket.connect(at)?;
    socket.send(b"hostname")?;
    let mut answer = [0; 256];
    let length = uninterrupted(|| socket.recv(&mut answer))?;
    Ok(String::from_utf8_lossy(&answer[..length]).trim().to_owned())
}

#[test]
fn a_tenants_node_port_answers_by_udp_on_every_node() {
    let cluster = &tenants().cluster;
    let nodes = cluster.nodes().unwrap();
    let mut made = Made::new(cluster, "red");
    let pod = made.server("datagrams", &nodes[1], "datagrams").unwrap();
    let ports = json!([{"port": 80, "targetPort": PORT, "protocol": "UDP"}]);
    let service = made
        .service("datagrams", &json!({"type": "NodePort", "ports": ports}))
        .unwrap();
    let port = port(&service);
    for node in &nodes {
        let at = (cluster.node_address(node).unwrap(), port);
        let is_it = |name: Result<String>| Ok(name.is_ok_and(|name| name == pod.name));
        cluster
            .wait_for("the pod from outside", SOON, || is_it(udp_hostname_at(at)))
            .unwrap();
        // A process of a node that has no such pod asks this node.
        let own = || is_it(cluster.in_node(&nodes[0], || udp_hostname_at(at)));
        cluster.wait_for("the pod from a node", SOON, own).unwrap();
    }
    let direct = cluster.in_node(&nodes[1], || udp_hostname_at((pod.address, PORT)));
    assert_eq!(direct.unwrap(), pod.name, "from the pod's own node");
}

#[test]
fn tenants_local_node_port_reaches_the_tenants_pods() {
    let tenants = tenants();
    let cluster = &tenants.cluster;
    let nodes = cluster.nodes().unwrap();
    let mut made = Made::new(cluster, "red");
    let pod = made.server("published", &nodes[1], "published").unwrap();
    let service = made
        .service(
            "published",
            &json!({"type": "NodePort", "externalTrafficPolicy": "Local"}),
        )
        .unwrap();
    let port = port(&service);
    let at = |node: usize| cluster.node_address(&nodes[node]).unwrap();
    cluster
        .wait_for("the tenant's pod from outside", SOON, || {
            Ok(http_hostname_at((at(1), port), REACHED).is_ok_and(|name| name == pod.name))
        })
        .unwrap();
    assert!(http_hostname_at((at(0), port), NOT_REACHED).is_err());
    // The pod is not reached by its own address, and not by other tenants.
    assert!(
        cluster
            .in_node(&nodes[0], || http_hostname_at((pod.address, PORT), NOT_REACHED))
            .map_or(true, |name| name != pod.name)
    );
    let blue = tenants.vpc("blue");
    assert!(
        blue[0]
            .inside(|| http_hostname_at((at(1), port), NOT_REACHED))
            .is_err()
    );
}

#[test]
fn external_ip_serves_if_allowed_and_is_reported_if_not() {
    let cluster = &tenants().cluster;
    let nodes = cluster.nodes().unwrap();
    let mut made = Made::new(cluster, "default");
    let pod = made.server("external", &nodes[0], "external").unwrap();
    let refused = Ipv4Addr::new(203, 0, 113, 9);
    made.service(
        "external",
        &json!({"externalIPs": [EXTERNAL.to_string(), refused.to_string()]}),
    )
    .unwrap();
    let endpoint = wait_endpoint(cluster, "default", "external", "its backend", |endpoint| {
        endpoint["status"]["backends"] == 1
    });
    let told = condition(&endpoint, "ExternalIPs").unwrap();
    let message = told["message"].as_str().unwrap();
    assert!(
        message.contains("203.0.113.9") && message.contains("THUBAN_EXTERNAL_IP_CIDRS"),
        "{message}"
    );
    assert!(!message.contains(&EXTERNAL.to_string()), "{message}");
    let from = |to: Ipv4Addr, patience| cluster.in_node(&nodes[1], || http_hostname_at((to, 80), patience));
    cluster
        .wait_for("the external address", SOON, || {
            Ok(from(EXTERNAL, REACHED).is_ok_and(|name| name == pod.name))
        })
        .unwrap();
    assert!(from(refused, NOT_REACHED).is_err());
}

#[test]
fn host_port_reaches_pod_from_outside_and_its_own_node() {
    let cluster = &tenants().cluster;
    let nodes = cluster.nodes().unwrap();
    for (namespace, host_port) in [("default", 18080), ("red", 18081)] {
        let mut made = Made::new(cluster, namespace);
        let mut pod = netexec_manifest(namespace, "host-port", &nodes[1], None);
        pod["metadata"]["labels"] = json!({"app": "host-port"});
        pod["spec"]["containers"][0]["ports"] = json!([{"containerPort": PORT, "hostPort": host_port}]);
        made.make(&pod).unwrap();
        let pod = running(cluster, namespace, "host-port").unwrap();
        let at = cluster.node_address(&nodes[1]).unwrap();
        let name = http_hostname_at((at, host_port), REACHED).unwrap();
        assert_eq!(name, pod.name, "{namespace}, from outside");
        for own in [at, Ipv4Addr::LOCALHOST] {
            let name = cluster.in_node(&nodes[1], || http_hostname_at((own, host_port), REACHED));
            assert_eq!(name.unwrap(), pod.name, "{namespace}, by {own}");
        }
        if namespace == "default" {
            assert_eq!(client((at, host_port)).unwrap(), IpAddr::from(cluster.gateway()));
            let beside = made.server("host-port-beside", &nodes[1], "beside").unwrap();
            let name = beside.inside(|| http_hostname_at((at, host_port), REACHED));
            assert_eq!(name.unwrap(), pod.name, "a pod of the same node");
        }
        // Policies see the client's own address.
        for (range, is_accepted) in [
            ("203.0.113.0/24", false),
            (&*format!("{}/32", cluster.gateway()), true),
        ] {
            made.make(&json!({
                "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
                "metadata": {"name": "host-port", "namespace": namespace},
                "spec": {
                    "podSelector": {"matchLabels": {"app": "host-port"}}, "policyTypes": ["Ingress"],
                    "ingress": [{"from": [{"ipBlock": {"cidr": range}}]}],
                },
            }))
            .unwrap();
            let patience = if is_accepted { REACHED } else { NOT_REACHED };
            let as_said = || Ok(http_hostname_at((at, host_port), patience).is_ok() == is_accepted);
            cluster.wait_for("what the policy says", SOON, as_said).unwrap();
        }
        delete(cluster, &["pod", "-n", namespace, "host-port", "--now"]).unwrap();
        let is_gone = || Ok(http_hostname_at((at, host_port), NOT_REACHED).is_err());
        cluster.wait_for("no host port", SOON, is_gone).unwrap();
    }
}
