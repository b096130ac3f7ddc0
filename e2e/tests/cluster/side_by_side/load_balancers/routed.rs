//! What tests of addresses that a router learns of by BGP have in common: a pool, a session, a Service and its backend.
//! All objects of a test have the test's name. Those of the tenant have it as the labels `app` and `test`, too.

use serde_json::{Value, json};
use thuban_cluster::router::{ASN, Router};

use super::{TENANT, pool_of_tenant};
use crate::support::{PORT, netexec_manifest};

/// Returns the metadata of an object of the tenant.
pub fn metadata(name: &str) -> Value {
    json!({"name": name, "namespace": TENANT, "labels": {"app": name, "test": name}})
}

/// Returns a pool for the tenant, and the nodes' session with the router. `local_asn`: the nodes' autonomous system.
pub fn pool_and_peer(name: &str, range: &str, router: &Router, local_asn: u32) -> [Value; 2] {
    let peer = json!({"apiVersion": "thuban.dev/v1alpha1", "kind": "BgpPeer", "metadata": {"name": name}, "spec": {
        "address": router.address(), "asn": ASN, "localAsn": local_asn, "holdSeconds": 3}});
    [pool_of_tenant(name, range, &[]), peer]
}

/// Returns a Service that gets an address of the pool, with these annotations besides.
pub fn balanced_service(name: &str, annotations: &[(&str, &str)]) -> Value {
    let mut service = json!({"apiVersion": "v1", "kind": "Service", "metadata": metadata(name), "spec": {
        "type": "LoadBalancer", "loadBalancerClass": "thuban.dev/vip", "selector": {"app": name},
        "ports": [{"port": 80, "targetPort": PORT}]}});
    service["metadata"]["annotations"] = json!({"thuban.dev/ip-pool": name});
    for (annotation, value) in annotations {
        service["metadata"]["annotations"][annotation] = json!(value);
    }
    service
}

/// Returns the backend, on a node.
pub fn backend(name: &str, node: &str) -> Value {
    let mut pod = netexec_manifest(TENANT, name, node, None);
    pod["metadata"]["labels"] = metadata(name)["labels"].clone();
    pod
}
