//! The success result of ADD in the shape of each supported version.
//!
//! 0.4.0 has `version` in each address; 1.1.0 has `mtu` in each interface; 1.0.0 has neither.

use serde_json::{Map, Value, json};
use thuban_proto::cni::Attached;

/// Returns the result: `interfaces[0]` is the host's end, `interfaces[1]` the pod's; `dns` is the configuration's.
pub fn document(
    version: &str,
    ifname: &str,
    netns: &str,
    attached: &Attached,
    dns: &Map<String, Value>,
) -> Value {
    let mut host = json!({"name": attached.host_interface, "mac": attached.host_mac});
    let mut pod = json!({"name": ifname, "mac": attached.pod_mac, "sandbox": netns});
    if version == "1.1.0" {
        host["mtu"] = json!(attached.mtu);
        pod["mtu"] = json!(attached.mtu);
    }
    let addresses: Vec<Value> = attached
        .addresses
        .iter()
        .map(|address| {
            let mut entry = json!({"interface": 1, "address": address.address, "gateway": address.gateway});
            if version == "0.4.0" {
                entry["version"] = json!(if address.address.contains(':') { "6" } else { "4" });
            }
            entry
        })
        .collect();
    let routes: Vec<Value> = attached
        .routes
        .iter()
        .map(|route| json!({"dst": route.destination, "gw": route.gateway}))
        .collect();
    json!({"cniVersion": version, "interfaces": [host, pod], "ips": addresses, "routes": routes, "dns": dns})
}
