//! Load balancers: leased addresses, and routers that learn of them. What only load balancers need is installed by each
//! test, and goes with it.

mod announcing;
mod fronts;
mod leases;
mod link;
mod vips;

use std::net::SocketAddr;

use anyhow::Result;
use serde_json::{Value, json};
use thuban_cluster::Cluster;

use crate::scrape::{addresses_of, ask, assert_well_formed};
use crate::support::delete;

const MANIFESTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../install/load-balancers");
/// What processes make in the namespace of Thuban.
const SECRETS: [[&str; 4]; 3] = [
    ["secret", "-n", "thuban-system", "thuban-cidrd-ca"],
    ["secret", "-n", "thuban-system", "thuban-lbaasd-ca"],
    ["configmap", "-n", "thuban-system", "thuban-lbaasd-ca"],
];
const NAMESPACE: &str = "default";
/// The processes, and the ports of their metrics.
const PAGES: [(&str, u16); 3] = [
    ("thuban-cidrd", 6087),
    ("thuban-lbaasd", 6089),
    ("thuban-speaker", 6090),
];

/// What a test needs of the manifests.
enum Parts {
    /// The kinds, the accounts and what these may do.
    Leases,
    /// Everything.
    All,
}

/// The manifests. All that they made goes when this is dropped.
struct Installed<'a>(&'a Cluster);

impl<'a> Installed<'a> {
    fn new(cluster: &'a Cluster, parts: &Parts) -> Result<Self> {
        let made = Self(cluster);
        let files: &[&str] = match parts {
            Parts::Leases => &["10-crds.yaml", "20-cidrd.yaml"],
            Parts::All => &[
                "10-crds.yaml",
                "20-cidrd.yaml",
                "30-lbaasd.yaml",
                "50-workloads.yaml",
            ],
        };
        for file in files {
            cluster.kubectl(&["apply", "-f", &format!("{MANIFESTS}/{file}")])?;
        }
        for kind in ["ippools", "ipleases", "vips", "vipprofiles", "bgppeers"] {
            let crd = format!("crd/{kind}.thuban.dev");
            cluster.kubectl(&["wait", "--for=condition=Established", &crd, "--timeout=30s"])?;
        }
        Ok(made)
    }
}

impl Drop for Installed<'_> {
    fn drop(&mut self) {
        let _ = delete(self.0, &["-f", MANIFESTS, "--ignore-not-found"]);
        for secret in SECRETS {
            let _ = delete(self.0, &secret);
        }
    }
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
