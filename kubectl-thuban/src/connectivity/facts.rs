//! Reads what the test needs to know of the cluster before it makes anything. What is missing is said, and the checks
//! that need it are skipped.

use std::net::{IpAddr, SocketAddr};

use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::{ConfigMap, Node, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::api::ListParams;
use kube::{Api, Client, ResourceExt};
use thuban_api::cluster_dns::{ClusterDns, DnsService, USUAL_DNS_SERVICE};
use thuban_api::condition::find;
use thuban_api::{ConditionStatus, Droplet};

use super::checks::Dns;
use super::failed;
use super::plan::MAX_NODES;
use crate::error::CliError;

/// The name of the node daemon's DaemonSet, and of its container.
const TRANSITD: &str = "transitd";
/// The values of the installation.
const CONFIG: &str = "thuban-config";
const DNS_PORT: u16 = 53;
const USUAL_DOMAIN: &str = "cluster.local";
const SERVICE_LABEL: &str = "kubernetes.io/service-name";
/// The Service of the API server.
const KUBERNETES: (&str, &str) = ("default", "kubernetes");

/// Returns the image of transitd, which every node has.
pub async fn image(client: &Client, system: &str) -> Result<String, CliError> {
    let sets: Api<DaemonSet> = Api::namespaced(client.clone(), system);
    let set = Box::pin(sets.get_opt(TRANSITD)).await.map_err(failed)?;
    image_of(set).ok_or_else(|| CliError::NoImage(system.to_owned()))
}

fn image_of(set: Option<DaemonSet>) -> Option<String> {
    let containers = set?.spec.template.spec?.containers;
    let own = containers
        .into_iter()
        .find(|container| container.name == TRANSITD);
    own?.image
}

/// Returns the nodes that take pods and whose droplets work, by name.
pub async fn nodes(client: &Client) -> Result<Vec<String>, CliError> {
    let all = ListParams::default();
    let nodes: Api<Node> = Api::all(client.clone());
    let nodes = Box::pin(nodes.list(&all)).await.map_err(failed)?;
    let droplets: Api<Droplet> = Api::all(client.clone());
    let droplets = Box::pin(droplets.list(&all)).await.map_err(failed)?;
    Ok(fit(&nodes.items, &droplets.items))
}

/// Returns the nodes of the test: those that the user wants, or all that are fit.
pub fn choose(fit: Vec<String>, wanted: &[String]) -> Result<Vec<String>, CliError> {
    if wanted.is_empty() {
        return if fit.is_empty() {
            Err(CliError::NoNodes)
        } else {
            Ok(fit)
        };
    }
    let mut chosen: Vec<String> = Vec::new();
    for node in wanted {
        if !fit.contains(node) {
            return Err(CliError::NodeUnfit(node.clone()));
        }
        if !chosen.contains(node) {
            chosen.push(node.clone());
        }
    }
    if chosen.len() > MAX_NODES {
        return Err(CliError::TooManyNodes);
    }
    Ok(chosen)
}

fn fit(nodes: &[Node], droplets: &[Droplet]) -> Vec<String> {
    let works = |name: &String| {
        let own = droplets.iter().find(|droplet| droplet.name_any() == *name);
        let status = own.and_then(|droplet| droplet.status.as_ref());
        let ready = status.and_then(|status| find(&status.conditions, "Ready"));
        ready.is_some_and(|ready| ready.status == ConditionStatus::True)
    };
    let mut names: Vec<String> = nodes
        .iter()
        .filter(|node| takes_pods(node))
        .map(ResourceExt::name_any)
        .filter(works)
        .collect();
    names.sort();
    names
}

fn takes_pods(node: &Node) -> bool {
    let Some(spec) = &node.spec else {
        return true;
    };
    let mut taints = spec.taints.iter().flatten();
    let is_closed = taints.any(|taint| taint.effect != "PreferNoSchedule");
    !is_closed && spec.unschedulable != Some(true)
}

/// Returns the Service `default/kubernetes`, or why it is not known; and the API servers' own addresses.
pub async fn api_servers(client: &Client) -> Result<(Result<SocketAddr, String>, Vec<SocketAddr>), CliError> {
    let (namespace, name) = KUBERNETES;
    let services: Api<Service> = Api::namespaced(client.clone(), namespace);
    let service = Box::pin(services.get_opt(name)).await.map_err(failed)?;
    let service = service
        .and_then(|service| cluster_address(&service))
        .ok_or_else(|| "it has no IPv4 ClusterIP".to_owned());
    let slices = slices(client, namespace, name).await?;
    Ok((service, addresses(&slices)))
}

fn cluster_address(service: &Service) -> Option<SocketAddr> {
    let spec = service.spec.as_ref()?;
    let port = spec.ports.as_ref()?.first()?.port;
    let addresses = spec.cluster_ip.iter().chain(spec.cluster_ips.iter().flatten());
    // The pods of the test have no IPv6 address.
    let address = addresses
        .filter_map(|text| text.parse::<IpAddr>().ok())
        .find(IpAddr::is_ipv4)?;
    Some(SocketAddr::new(address, u16::try_from(port).ok()?))
}

async fn slices(client: &Client, namespace: &str, service: &str) -> Result<Vec<EndpointSlice>, CliError> {
    let slices: Api<EndpointSlice> = Api::namespaced(client.clone(), namespace);
    let of_service = ListParams::default().labels(&format!("{SERVICE_LABEL}={service}"));
    let slices = Box::pin(slices.list(&of_service)).await.map_err(failed)?;
    Ok(slices.items)
}

/// Returns the IPv4 addresses of ready endpoints, each with each port. The pods of the test have no IPv6 address.
fn addresses(slices: &[EndpointSlice]) -> Vec<SocketAddr> {
    let mut found = Vec::new();
    for slice in slices.iter().filter(|slice| slice.address_type == "IPv4") {
        let ports = slice.ports.iter().flatten().filter_map(|port| port.port);
        let ports: Vec<u16> = ports.filter_map(|port| u16::try_from(port).ok()).collect();
        for endpoint in slice.endpoints.iter().flatten() {
            let ready = endpoint.conditions.as_ref().and_then(|known| known.ready);
            if ready == Some(false) {
                continue;
            }
            let addresses = endpoint.addresses.iter().filter_map(|text| text.parse().ok());
            for address in addresses {
                found.extend(ports.iter().map(|port| SocketAddr::new(address, *port)));
            }
        }
    }
    found
}

/// Returns cluster DNS, or why it is not asked.
pub async fn dns(client: &Client, system: &str) -> Result<Result<Dns, String>, CliError> {
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), system);
    let Some(config) = Box::pin(maps.get_opt(CONFIG)).await.map_err(failed)? else {
        return Ok(Err(format!(
            "there is no ConfigMap {CONFIG} in namespace {system}"
        )));
    };
    let (dns, service) = match read_dns(&config) {
        Ok(read) => read,
        Err(why) => return Ok(Err(why)),
    };
    let slices = slices(client, &service.namespace, &service.name).await?;
    if addresses(&slices).is_empty() {
        let DnsService { namespace, name } = service;
        return Ok(Err(format!("Service {namespace}/{name} has no ready backend")));
    }
    Ok(Ok(dns))
}

/// Reads the values of the installation about cluster DNS.
fn read_dns(config: &ConfigMap) -> Result<(Dns, DnsService), String> {
    let value = |key: &str| {
        let value = config.data.as_ref().and_then(|data| data.get(key));
        value.map(String::as_str).filter(|value| !value.is_empty())
    };
    let Some(addresses) = value("THUBAN_CLUSTER_DNS") else {
        return Err("THUBAN_CLUSTER_DNS is not set, so VPCs share no cluster DNS".to_owned());
    };
    let dns: ClusterDns = addresses
        .parse()
        .map_err(|error| format!("THUBAN_CLUSTER_DNS: {error}"))?;
    let Some(address) = dns.addresses().find(IpAddr::is_ipv4) else {
        return Err("cluster DNS has no IPv4 address".to_owned());
    };
    let service = value("THUBAN_CLUSTER_DNS_SERVICE").unwrap_or(USUAL_DNS_SERVICE);
    let service: DnsService = service
        .parse()
        .map_err(|error| format!("THUBAN_CLUSTER_DNS_SERVICE: {error}"))?;
    let dns = Dns {
        server: SocketAddr::new(address, DNS_PORT),
        domain: value("THUBAN_CLUSTER_DOMAIN").unwrap_or(USUAL_DOMAIN).to_owned(),
    };
    Ok((dns, service))
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::ConfigMap;
    use k8s_openapi::api::discovery::v1::EndpointSlice;
    use serde_json::{Value, json};

    use super::{addresses, choose, cluster_address, fit, image_of, read_dns};
    use crate::testing::{self, object};

    #[test]
    fn nodes_that_take_no_pods_are_left_out() {
        let droplets = testing::status().droplets.unwrap();
        let node = |name: &str, spec: Value| object(json!({"metadata": {"name": name}, "spec": spec}));
        let taint = |effect: &str| json!({"taints": [{"key": "k", "effect": effect}]});
        let names = |first: Value| fit(&[node("node-b", json!({})), node("node-a", first)], &droplets);
        assert_eq!(names(json!({})), ["node-a", "node-b"]);
        assert_eq!(names(taint("PreferNoSchedule")), ["node-a", "node-b"]);
        for closed in [
            taint("NoSchedule"),
            taint("NoExecute"),
            json!({"unschedulable": true}),
        ] {
            assert_eq!(names(closed), ["node-b"]);
        }
        assert!(
            fit(&[node("node-z", json!({}))], &droplets).is_empty(),
            "no droplet"
        );
    }

    #[test]
    fn nodes_that_the_user_wants_are_taken_if_they_are_fit() {
        let list = |names: &[&str]| -> Vec<String> { names.iter().map(|name| (*name).to_owned()).collect() };
        let fit = list(&["node-a", "node-b", "node-c"]);
        let chosen = |wanted: &[&str]| choose(fit.clone(), &list(wanted));
        assert_eq!(chosen(&[]).unwrap(), fit);
        assert_eq!(chosen(&["node-c", "node-a"]).unwrap(), ["node-c", "node-a"]);
        assert_eq!(chosen(&["node-b", "node-b"]).unwrap(), ["node-b"]);
        assert!(chosen(&["node-z"]).unwrap_err().to_string().contains("node-z"));
        assert!(chosen(&["node-a", "node-b", "node-c"]).is_err());
        assert!(choose(Vec::new(), &[]).is_err());
    }

    #[test]
    fn a_service_is_asked_at_its_ipv4_address() {
        let address = |spec: Value| cluster_address(&object(json!({"metadata": {}, "spec": spec})));
        let ports = json!([{"port": 443}]);
        let found =
            address(json!({"ports": ports, "clusterIP": "fd00::1", "clusterIPs": ["fd00::1", "10.96.0.1"]}));
        assert_eq!(found, Some("10.96.0.1:443".parse().unwrap()));
        assert_eq!(address(json!({"ports": ports, "clusterIP": "fd00::1"})), None);
        assert_eq!(address(json!({"ports": ports, "clusterIP": "None"})), None);
    }

    #[test]
    fn the_image_is_that_of_transitd() {
        let set = |name: &str| {
            object(
                json!({"metadata": {}, "spec": {"selector": {}, "template": {"spec": {"containers": [
                {"name": "other", "image": "x"}, {"name": name, "image": "thuban.dev/transitd:1"}]}}}}),
            )
        };
        assert_eq!(
            image_of(Some(set("transitd"))).as_deref(),
            Some("thuban.dev/transitd:1")
        );
        assert_eq!(image_of(Some(set("another"))), None);
        assert_eq!(image_of(None), None);
    }

    #[test]
    fn addresses_are_those_of_ready_endpoints() {
        let slice: EndpointSlice = object(json!({
            "metadata": {}, "addressType": "IPv4", "ports": [{"port": 6443}],
            "endpoints": [
                {"addresses": ["192.0.2.10"]},
                {"addresses": ["192.0.2.11"], "conditions": {"ready": false}},
                {"addresses": ["192.0.2.12"], "conditions": {"ready": true}},
            ],
        }));
        let found: Vec<String> = addresses(&[slice]).iter().map(ToString::to_string).collect();
        assert_eq!(found, ["192.0.2.10:6443", "192.0.2.12:6443"]);
    }

    #[test]
    fn cluster_dns_is_read_from_the_installations_values() {
        let read = |data: Value| {
            let config: ConfigMap = object(json!({"metadata": {}, "data": data}));
            read_dns(&config)
        };
        assert!(read(json!({})).unwrap_err().contains("THUBAN_CLUSTER_DNS"));
        let (dns, service) = read(json!({"THUBAN_CLUSTER_DNS": "10.96.0.10"})).unwrap();
        assert_eq!(dns.server.to_string(), "10.96.0.10:53");
        assert_eq!(dns.domain, "cluster.local");
        assert_eq!(service.name, "kube-dns");
        let (dns, service) = read(json!({
            "THUBAN_CLUSTER_DNS": "fd00::a,10.96.0.10", "THUBAN_CLUSTER_DNS_SERVICE": "dns/rke2",
            "THUBAN_CLUSTER_DOMAIN": "example.test",
        }))
        .unwrap();
        assert_eq!(dns.server.to_string(), "10.96.0.10:53");
        assert_eq!(
            (dns.domain.as_str(), service.namespace.as_str()),
            ("example.test", "dns")
        );
        assert!(read(json!({"THUBAN_CLUSTER_DNS": "x"})).is_err());
    }
}
