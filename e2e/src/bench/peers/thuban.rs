//! Thuban, as the manifests of `install/` install it.

use anyhow::Result;
use serde_json::Value;
use thuban_cluster::Cluster;

use super::{Parts, peer::Peer};

pub struct Thuban;

/// Settings that the figures depend on.
const SETTINGS: [&str; 4] = [
    "THUBAN_TRANSIT_HOOK",
    "THUBAN_AGGREGATION",
    "THUBAN_DIRECT_PATHS",
    "THUBAN_AGENT_HOOK",
];

impl Peer for Thuban {
    fn name(&self) -> &'static str {
        "thuban"
    }

    fn is_overlay(&self) -> bool {
        true
    }

    /// A program at the NIC makes the tunnel, and no link.
    fn tunnel(&self) -> Option<&'static str> {
        None
    }

    fn daemons(&self) -> &'static [&'static str] {
        &["transitd"]
    }

    fn controllers(&self) -> &'static [&'static str] {
        &["thuban-operator"]
    }

    /// `cargo xtask bench peers` has installed it.
    fn install(&self, cluster: &Cluster, _: &Parts) -> Result<Vec<String>> {
        let config = cluster.kubectl(&[
            "get",
            "configmap",
            "-n",
            "thuban-system",
            "thuban-config",
            "-o",
            "json",
        ])?;
        let config: Value = serde_json::from_str(&config)?;
        let values =
            SETTINGS.map(|key| format!("{key}={}", config["data"][key].as_str().unwrap_or_default()));
        Ok(vec![
            format!("Thuban {}, Geneve", env!("CARGO_PKG_VERSION")),
            values.join(" "),
        ])
    }
}
