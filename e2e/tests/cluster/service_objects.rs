//! Services, and the scaled Endpoints that follow them.

use std::net::Ipv4Addr;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Value, json};
use thuban_cluster::Cluster;

use crate::support::{PORT, apply, get};

const SOON: Duration = Duration::from_secs(30);

pub fn manifest(namespace: &str, name: &str, selector: &Value) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": {"name": name, "namespace": namespace, "annotations": {}},
        "spec": {"selector": selector, "ports": [
            {"name": "tcp", "protocol": "TCP", "port": PORT}, {"name": "udp", "protocol": "UDP", "port": PORT}]},
    })
}

/// Makes the Service; returns its address.
pub fn made(cluster: &Cluster, manifest: &Value) -> Result<Ipv4Addr> {
    apply(cluster, std::slice::from_ref(manifest))?;
    let part = |field: &str| manifest["metadata"][field].as_str().context("manifest");
    let service = get(cluster, &["service", "-n", part("namespace")?, part("name")?])?;
    Ok(service["spec"]["clusterIP"]
        .as_str()
        .context("clusterIP")?
        .parse()?)
}

/// Returns the scaled Endpoint of a Service, if there is one.
pub fn endpoint(cluster: &Cluster, namespace: &str, service: &str) -> Result<Option<Value>> {
    let all = get(cluster, &["endpoints.thuban.dev", "-n", namespace])?;
    let mut all = all["items"].as_array().into_iter().flatten();
    Ok(all
        .find(|endpoint| endpoint["spec"]["serviceRef"]["name"] == service)
        .cloned())
}

/// Waits until the scaled Endpoint is as wanted.
pub fn wait_endpoint(
    cluster: &Cluster,
    namespace: &str,
    service: &str,
    what: &str,
    is_so: impl Fn(&Value) -> bool,
) -> Value {
    let mut last = Value::Null;
    let result = cluster.wait_for(&format!("scaled endpoint of {service}: {what}"), SOON, || {
        last = endpoint(cluster, namespace, service)?.unwrap_or_default();
        Ok(is_so(&last))
    });
    result.unwrap_or_else(|error| panic!("{error:#}: {last:#}"));
    last
}

pub fn serves(backends: u64) -> impl Fn(&Value) -> bool {
    move |endpoint| endpoint["status"]["phase"] == "Provisioned" && endpoint["status"]["backends"] == backends
}
