//! `values`: with which values Thuban is installed on a cluster, by what the API server says of it.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::net::IpAddr;

use ipnet::IpNet;
use serde::Serialize;
use serde_json::Value;

use crate::error::CliError;

/// Ranges of which the first that is free is the default VPC's, if nodes have no ranges for pods.
const DEFAULT_VPCS: [&str; 3] = ["10.244.0.0/16", "172.20.0.0/16", "192.168.0.0/16"];

const DEFAULT_PORT: &str = "6443";

/// The namespace and the usual name of the Service of cluster DNS.
pub const SYSTEM_NAMESPACE: &str = "kube-system";
const DNS_SERVICE: &str = "kube-dns";

/// A value of the chart, and of `install/config.env`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Setting {
    pub key: &'static str,
    /// Empty if the cluster does not say it.
    pub value: String,
    /// What people should know about it.
    pub note: &'static str,
}

/// Returns the values as the chart's, or as lines of `config.env`.
pub fn text(settings: &[Setting], is_env: bool) -> String {
    let mut text = String::new();
    if !is_env {
        text.push_str("config:\n");
    }
    for Setting { key, value, note } in settings {
        let _ = match (is_env, value.as_str()) {
            // The example has it already.
            (true, DEFAULT_PORT) => Ok(()),
            (true, "") => writeln!(text, "# {note}\n#{key}="),
            (true, value) => writeln!(text, "# {note}\n{key}={value}"),
            (false, value) => writeln!(text, "  # {note}\n  {key}: {value:?}"),
        };
    }
    text
}

/// Lists of objects that the API server has, as JSON.
#[derive(Clone, Debug, Default)]
pub struct Lists {
    /// EndpointSlices of the Service default/kubernetes.
    pub servers: Value,
    /// Null if the API server has none: one before 1.33.
    pub service_cidrs: Value,
    pub system_services: Value,
    pub nodes: Value,
}

/// Finds the values.
pub fn settings(cluster: &Lists) -> Result<Vec<Setting>, CliError> {
    let servers: BTreeSet<IpAddr> = items(&cluster.servers, "/endpoints")
        .flat_map(|endpoint| texts(&endpoint["addresses"]))
        .filter_map(|address| address.parse().ok())
        .collect();
    if servers.is_empty() {
        return Err(CliError::NoServers);
    }
    let mut slices = cluster.servers["items"].as_array().into_iter().flatten();
    let port = slices.find_map(|slice| slice["ports"][0]["port"].as_u64());
    let services: Vec<String> = items(&cluster.service_cidrs, "/spec/cidrs")
        .filter_map(|cidr| cidr.as_str().map(str::to_owned))
        .collect();
    let dns_service = dns_service(&cluster.system_services);
    let dns: Vec<String> = dns_service
        .iter()
        .flat_map(|service| texts(&service["spec"]["clusterIPs"]))
        .collect();
    let dns_name = dns_service.and_then(|service| service["metadata"]["name"].as_str());
    let addresses = items(&cluster.nodes, "/status/addresses")
        .filter(|address| address["type"] == "InternalIP")
        .filter_map(|address| address["address"].as_str()?.parse().ok());
    let underlay: BTreeSet<IpNet> = addresses.chain(servers.iter().copied()).map(around).collect();
    let pods: Vec<IpNet> = items(&cluster.nodes, "/spec/podCIDRs")
        .filter_map(|cidr| cidr.as_str()?.parse().ok())
        .collect();
    let taken: Vec<IpNet> = services
        .iter()
        .filter_map(|cidr| cidr.parse().ok())
        .chain(underlay.iter().copied())
        .collect();
    let setting = |key, value, note| Setting { key, value, note };
    let mut found = vec![
        setting(
            "KUBERNETES_SERVICE_HOST",
            joined(&servers),
            "The API servers, which are tried in turn.",
        ),
        setting(
            "KUBERNETES_SERVICE_PORT",
            port.map_or_else(|| DEFAULT_PORT.to_owned(), |port| port.to_string()),
            "Their port.",
        ),
        setting(
            "THUBAN_SERVICE_CIDRS",
            services.join(","),
            "The ServiceCIDR objects. If there are none: --service-cluster-ip-range of the API server.",
        ),
        setting(
            "THUBAN_UNDERLAY_CIDRS",
            joined(IpNet::aggregate(&underlay.into_iter().collect())),
            "Networks around the addresses of nodes and API servers. Add registries, DNS servers and all else that \
             nodes talk to.",
        ),
        setting(
            "THUBAN_DEFAULT_VPC_CIDR",
            default_vpc(&pods, &taken),
            "The range of pods in the VPC `default`.",
        ),
        setting(
            "THUBAN_CLUSTER_DNS",
            dns.join(","),
            "The Service of cluster DNS in kube-system.",
        ),
    ];
    if let Some(name) = dns_name.filter(|name| *name != DNS_SERVICE) {
        found.push(setting(
            "THUBAN_CLUSTER_DNS_SERVICE",
            format!("{SYSTEM_NAMESPACE}/{name}"),
            "The Service that VPCs share.",
        ));
    }
    Ok(found)
}

/// Returns the Service of cluster DNS: the one with the usual name, or else one that takes DNS queries.
fn dns_service(services: &Value) -> Option<&Value> {
    let services = services["items"].as_array()?;
    let takes_queries = |service: &&Value| {
        let mut ports = service["spec"]["ports"].as_array().into_iter().flatten();
        service["spec"]["clusterIP"] != "None"
            && ports.any(|port| port["port"] == 53 && port["protocol"] == "UDP")
    };
    let mut usual = services
        .iter()
        .filter(|service| service["metadata"]["name"] == DNS_SERVICE);
    usual.next().or_else(|| services.iter().find(takes_queries))
}

/// Yields the elements of a list in each item of a list of objects.
fn items<'a>(list: &'a Value, pointer: &'a str) -> impl Iterator<Item = &'a Value> {
    let items = list["items"].as_array().into_iter().flatten();
    items
        .filter_map(move |item| item.pointer(pointer)?.as_array())
        .flatten()
}

fn texts(list: &Value) -> impl Iterator<Item = String> {
    let texts = list.as_array().into_iter().flatten();
    texts.filter_map(|text| text.as_str().map(str::to_owned))
}

fn joined(list: impl IntoIterator<Item = impl ToString>) -> String {
    let list: Vec<String> = list.into_iter().map(|item| item.to_string()).collect();
    list.join(",")
}

/// Returns the usual network of an address.
fn around(address: IpAddr) -> IpNet {
    let length = if address.is_ipv4() { 24 } else { 64 };
    IpNet::new(address, length).map_or_else(|_| address.into(), |range| range.trunc())
}

/// Returns the IPv4 range that holds the nodes' ranges of pods, or one that is free.
fn default_vpc(pods: &[IpNet], taken: &[IpNet]) -> String {
    let mut held = pods.iter().filter(|range| matches!(range, IpNet::V4(_)));
    let Some(first) = held.next().copied() else {
        let is_free = |range: &IpNet| {
            !taken
                .iter()
                .any(|other| other.contains(range) || range.contains(other))
        };
        let ranges = DEFAULT_VPCS.iter().filter_map(|range| range.parse().ok());
        return ranges
            .filter(is_free)
            .map(|range| range.to_string())
            .next()
            .unwrap_or_default();
    };
    // A node's range is usually a /24 of a /16.
    let mut range = first;
    let holds_all = |range: &IpNet| {
        pods.iter()
            .filter(|other| matches!(other, IpNet::V4(_)))
            .all(|other| range.contains(other))
    };
    while !holds_all(&range) || range.prefix_len() > 16 {
        match range.supernet() {
            Some(larger) => range = larger,
            None => break,
        }
    }
    range.to_string()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::{Lists, settings, text};

    fn cluster() -> Lists {
        let node = |address: &str, pods: &[&str]| {
            json!({"spec": {"podCIDRs": pods}, "status": {"addresses": [
                {"type": "Hostname", "address": "a"}, {"type": "InternalIP", "address": address}]}})
        };
        let service = |name: &str, port: u16| {
            let kind = if port == 53 { "UDP" } else { "TCP" };
            json!({"metadata": {"name": name}, "spec": {"clusterIP": "10.96.0.10", "clusterIPs": ["10.96.0.10"],
                "ports": [{"port": port, "protocol": kind}]}})
        };
        Lists {
            servers: json!({"items": [{"ports": [{"port": 6444}], "endpoints": [
                {"addresses": ["192.0.2.11"]}, {"addresses": ["192.0.2.10"]}, {"addresses": ["192.0.2.11"]}]}]}),
            service_cidrs: json!({"items": [{"spec": {"cidrs": ["10.96.0.0/12", "fd00:96::/108"]}}]}),
            system_services: json!({"items": [service("metrics", 443), service("kube-dns", 53)]}),
            nodes: json!({"items": [node("192.0.3.11", &["10.32.1.0/24"]), node("2001:db8::1", &["10.32.2.0/24"])]}),
        }
    }

    fn of(cluster: &Lists, key: &str) -> String {
        let found = settings(cluster).unwrap();
        found
            .into_iter()
            .find(|setting| setting.key == key)
            .unwrap()
            .value
    }

    #[test]
    fn a_cluster_says_with_which_values_thuban_is_installed() {
        let cluster = cluster();
        for (key, value) in [
            ("KUBERNETES_SERVICE_HOST", "192.0.2.10,192.0.2.11"),
            ("KUBERNETES_SERVICE_PORT", "6444"),
            ("THUBAN_SERVICE_CIDRS", "10.96.0.0/12,fd00:96::/108"),
            ("THUBAN_UNDERLAY_CIDRS", "192.0.2.0/23,2001:db8::/64"),
            ("THUBAN_DEFAULT_VPC_CIDR", "10.32.0.0/16"),
            ("THUBAN_CLUSTER_DNS", "10.96.0.10"),
        ] {
            assert_eq!(of(&cluster, key), value, "{key}");
        }
    }

    #[test]
    fn a_dns_service_of_another_name_is_found_by_its_port() {
        let mut cluster = cluster();
        let name = "THUBAN_CLUSTER_DNS_SERVICE";
        assert!(
            settings(&cluster)
                .unwrap()
                .iter()
                .all(|setting| setting.key != name)
        );
        cluster.system_services["items"][1]["metadata"]["name"] = json!("rke2-coredns-rke2-coredns");
        assert_eq!(of(&cluster, name), "kube-system/rke2-coredns-rke2-coredns");
        assert_eq!(of(&cluster, "THUBAN_CLUSTER_DNS"), "10.96.0.10");
        // A headless one has no address.
        cluster.system_services["items"][1]["spec"]["clusterIP"] = json!("None");
        assert_eq!(of(&cluster, "THUBAN_CLUSTER_DNS"), "");
    }

    #[test]
    fn what_a_cluster_does_not_say_is_left_to_people() {
        let mut cluster = cluster();
        cluster.nodes =
            json!({"items": [{"status": {"addresses": [{"type": "InternalIP", "address": "10.244.0.9"}]}}]});
        cluster.service_cidrs = Value::Null;
        assert_eq!(of(&cluster, "THUBAN_SERVICE_CIDRS"), "");
        assert_eq!(of(&cluster, "THUBAN_DEFAULT_VPC_CIDR"), "172.20.0.0/16");
        cluster.servers = json!({"items": []});
        assert!(settings(&cluster).is_err());
    }

    #[test]
    fn values_are_those_of_the_chart_or_of_the_environment() {
        let mut cluster = cluster();
        cluster.service_cidrs = Value::Null;
        let found = settings(&cluster).unwrap();
        let chart: Value = serde_yaml_ng::from_str(&text(&found, false)).unwrap();
        assert_eq!(chart["config"]["THUBAN_DEFAULT_VPC_CIDR"], "10.32.0.0/16");
        assert_eq!(chart["config"]["THUBAN_SERVICE_CIDRS"], "");
        let env = text(&found, true);
        assert!(env.contains("\nTHUBAN_DEFAULT_VPC_CIDR=10.32.0.0/16\n"), "{env}");
        assert!(env.contains("\n#THUBAN_SERVICE_CIDRS=\n"), "{env}");
    }
}
