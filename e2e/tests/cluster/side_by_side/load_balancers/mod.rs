//! Load balancers: leased addresses, and routers that learn of them. What only load balancers need is installed by the
//! first test, and stays for the others. Tests run in the order of their names, so those of `unshared` come last. The
//! last one of these removes everything.

mod announcing;
mod fronts;
mod link;
mod name_server;
mod names;
mod routed;
mod tunnel;
mod unshared;
mod vips;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Value, json};
use thuban_cluster::Cluster;

use super::crd_validation::OF_LOAD_BALANCERS;
use crate::scrape::{addresses_of, ask, assert_well_formed};
use crate::support::{condition, delete, get};

const MANIFESTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../install/load-balancers");
const NAMESPACE: &str = "default";
/// The namespace of the tests with clients outside.
const TENANT: &str = "red";
const SYSTEM: &str = "thuban-system";
const SOON: Duration = Duration::from_mins(1);
/// The processes, and the ports of their metrics.
const PAGES: [(&str, u16); 3] = [
    ("thuban-cidrd", 6087),
    ("thuban-lbaasd", 6089),
    ("thuban-speaker", 6090),
];

/// Applies all manifests. The first test installs by this; later ones find the installation, and repair what a test
/// that failed has changed. The installation stays for the next tests.
fn install(cluster: &Cluster) -> Result<()> {
    cluster.kubectl(&["apply", "-f", MANIFESTS])?;
    wait_for_kinds(cluster)
}

/// Waits until the API server serves all kinds.
fn wait_for_kinds(cluster: &Cluster) -> Result<()> {
    let crds = OF_LOAD_BALANCERS.map(|kind| format!("crd/{kind}.thuban.dev"));
    let wait = ["wait", "--for=condition=Established", "--timeout=30s"];
    let arguments: Vec<&str> = wait.into_iter().chain(crds.iter().map(String::as_str)).collect();
    cluster.kubectl(&arguments).map(drop)
}

/// The objects of a test in the tenant's namespace, and the objects of the whole cluster that they need. They go when
/// this is dropped, in this order.
struct Made<'a> {
    cluster: &'a Cluster,
    /// The label of the objects in the namespace.
    label: &'static str,
    /// The other objects, each as kubectl's words.
    needed: &'static [&'static [&'static str]],
}

impl Drop for Made<'_> {
    fn drop(&mut self) {
        let labelled = ["vip,service,pod", "-n", TENANT, "-l", self.label, "--now"];
        let _ = delete(self.cluster, &labelled);
        // lbaasd deletes the Vips that it made for Services.
        let _ = self.cluster.wait_for("the end of the Vips", SOON, || {
            let vips = get(self.cluster, &["vip", "-n", TENANT])?;
            Ok(vips["items"].as_array().is_some_and(Vec::is_empty))
        });
        for objects in self.needed {
            let _ = delete(self.cluster, objects);
        }
    }
}

/// Waits until all processes run.
fn wait_for_processes(cluster: &Cluster) -> Result<()> {
    for workload in [
        "deployment/thuban-cidrd",
        "deployment/thuban-lbaasd",
        "daemonset/thuban-speaker",
    ] {
        cluster.kubectl(&["rollout", "status", "-n", SYSTEM, workload, "--timeout=120s"])?;
    }
    Ok(())
}

/// Waits until the tenant's Service has an address, and returns the address.
fn wait_for_address(cluster: &Cluster, service: &str) -> Result<IpAddr> {
    let mut address = None;
    cluster.wait_for("the Service's address", SOON, || {
        let service = get(cluster, &["service", "-n", TENANT, service])?;
        let ingress = &service["status"]["loadBalancer"]["ingress"][0];
        address = ingress["ip"].as_str().and_then(|ip| ip.parse::<IpAddr>().ok());
        Ok(address.is_some())
    })?;
    address.context("an address")
}

/// Waits until a condition of an object has a reason. `object`: the object as words of `kubectl get`.
fn wait_for_reason(cluster: &Cluster, object: &[&str], kind: &str, reason: &str) -> Result<()> {
    let mut last = Value::Null;
    cluster
        .wait_for(&format!("the reason {reason} of {kind}"), SOON, || {
            last = get(cluster, object)?;
            Ok(condition(&last, kind).is_some_and(|condition| condition["reason"] == reason))
        })
        .with_context(|| format!("{last:#}"))
}

/// Asserts that each process that runs has a page of metrics to which Prometheus' own tool has no objection.
fn ensure_pages_are_well_formed(cluster: &Cluster) -> Result<()> {
    for (name, port) in PAGES {
        let addresses = addresses_of(cluster, name);
        assert!(!addresses.is_empty(), "no pod of {name} runs");
        for address in addresses {
            let page = ask(SocketAddr::new(address.parse()?, port), "/metrics")?;
            assert_well_formed(name, &page);
        }
    }
    Ok(())
}

fn pool(name: &str, cidrs: &[&str], more: &[(&str, Value)]) -> Value {
    let mut spec = json!({"class": "public", "cidrs": cidrs, "allowedNamespaces": {
        "matchLabels": {"kubernetes.io/metadata.name": NAMESPACE},
    }});
    for (field, value) in more {
        spec[field] = value.clone();
    }
    json!({"apiVersion": "thuban.dev/v1alpha1", "kind": "IpPool", "metadata": {"name": name}, "spec": spec})
}

/// Returns a pool of [`TENANT`], whose addresses rest for a short time.
fn pool_of_tenant(name: &str, range: &str, more: &[(&str, Value)]) -> Value {
    let tenant = json!({"matchLabels": {"kubernetes.io/metadata.name": TENANT}});
    let terms = [("allowedNamespaces", tenant), ("quarantineSeconds", json!(5))];
    pool(name, &[range], &[&terms[..], more].concat())
}

/// Returns one with eight addresses of the nodes' own subnet. The first one ends with this byte.
fn pool_on_link(cluster: &Cluster, name: &str, first: u8, more: &[(&str, Value)]) -> Value {
    let [one, two, three, _] = cluster.gateway().octets();
    let range = format!("{}/29", Ipv4Addr::new(one, two, three, first));
    let announce = [("announce", json!("L2"))];
    pool_of_tenant(name, &range, &[&announce[..], more].concat())
}
