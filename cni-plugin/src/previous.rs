//! The result of ADD as CHECK gets it: `prevResult`, in the shape of any supported version.
//!
//! It is the result of the whole list, so others may have added interfaces, addresses and routes.

use serde::Deserialize;
use serde_json::Value;
use thuban_proto::cni::{Previous, Route};

use crate::error::PluginError;

#[derive(Debug, Deserialize)]
struct Document {
    #[serde(default)]
    interfaces: Vec<Interface>,
    #[serde(default)]
    ips: Vec<Ip>,
    #[serde(default)]
    routes: Vec<RouteEntry>,
}

#[derive(Debug, Deserialize)]
struct Interface {
    name: String,
    #[serde(default)]
    mac: String,
    #[serde(default)]
    sandbox: String,
}

#[derive(Debug, Deserialize)]
struct Ip {
    address: String,
    interface: Option<usize>,
}

#[derive(Debug, Deserialize)]
struct RouteEntry {
    dst: String,
    #[serde(default)]
    gw: String,
}

/// Returns the part that is about the pod's interface `ifname`.
pub fn parse(previous: Option<&Value>, ifname: &str) -> Result<Previous, PluginError> {
    let previous = previous.ok_or(PluginError::Config {
        field: "prevResult",
        expected: "the result of ADD",
    })?;
    let document = Document::deserialize(previous).map_err(PluginError::Decode)?;
    let pod = document
        .interfaces
        .iter()
        .position(|interface| interface.name == ifname && !interface.sandbox.is_empty())
        .ok_or(PluginError::Config {
            field: "prevResult.interfaces",
            expected: "one with the name CNI_IFNAME and a sandbox",
        })?;
    let mac = document.interfaces[pod].mac.clone();
    let outside = document
        .interfaces
        .into_iter()
        .filter(|interface| interface.sandbox.is_empty());
    Ok(Previous {
        host_interfaces: outside.map(|interface| interface.name).collect(),
        mac,
        addresses: document
            .ips
            .into_iter()
            .filter(|ip| ip.interface.is_none_or(|index| index == pod))
            .map(|ip| ip.address)
            .collect(),
        routes: document
            .routes
            .into_iter()
            .map(|route| Route {
                destination: route.dst,
                gateway: route.gw,
            })
            .collect(),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn chained_result_is_reduced_to_the_pods_interface() {
        let result = json!({
            "cniVersion": "0.4.0",
            "interfaces": [
                {"name": "other0", "mac": "02:00:00:00:00:01"},
                {"name": "eth0", "mac": "02:00:0a:00:01:05", "sandbox": "/run/netns/x"},
                {"name": "thb0", "unknown": [1]},
                {"name": "net1", "sandbox": "/run/netns/x"},
            ],
            "ips": [
                {"version": "4", "interface": 1, "address": "10.0.1.5/24", "gateway": "10.0.1.1"},
                {"version": "4", "interface": 3, "address": "10.9.9.9/24"},
            ],
            "routes": [{"dst": "0.0.0.0/0", "gw": "10.0.1.1"}, {"dst": "10.8.0.0/16"}],
        });
        let previous = parse(Some(&result), "eth0").unwrap();
        assert_eq!(previous.host_interfaces, ["other0", "thb0"]);
        assert_eq!(previous.mac, "02:00:0a:00:01:05");
        assert_eq!(previous.addresses, ["10.0.1.5/24"]);
        assert_eq!(previous.routes[1].gateway, "");
        let code = |value: Option<&Value>| parse(value, "eth7").unwrap_err().code();
        assert_eq!(
            (code(None), code(Some(&result)), code(Some(&json!("x")))),
            (7, 7, 6)
        );
    }
}
