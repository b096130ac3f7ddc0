//! The memory of Services: kernel memory of Thuban's tables for them, and memory of processes.

use anyhow::{Context, Result};
use serde_json::Value;
use thuban_cluster::Cluster;

use crate::bench::float;

/// Tables that grow with Services. The next ones grow by traffic alone.
const TABLES: [&str; 3] = ["SERVICES", "SLOTS", "BACKENDS"];
const TABLES_OF_TRAFFIC: [&str; 4] = ["CONNECTIONS", "SHARES", "AFFINITY", "PENDING"];

/// Returns the MiB of a node's tables of Services, and of its tables of connections to Services, as the kernel accounts
/// them.
pub fn tables_mib(cluster: &Cluster, node: &str) -> Result<(f64, f64)> {
    let sum = |names: &[&str]| maps_mib(cluster, node, names);
    Ok((sum(&TABLES)?, sum(&TABLES_OF_TRAFFIC)?))
}

/// Returns the MiB of these maps of a node's transitd, as the kernel accounts them.
pub fn maps_mib(cluster: &Cluster, node: &str, names: &[&str]) -> Result<f64> {
    let bytes = names.iter().map(|name| {
        let show = format!(
            "for pin in /sys/fs/bpf/thuban/layout_*/maps/{name}; do bpftool -j map show pinned $pin; done"
        );
        let shown = cluster.exec_on_node(node, &["sh", "-c", &show])?;
        let shown: Value = serde_json::from_str(&shown).with_context(|| format!("{name}: {shown}"))?;
        shown["bytes_memlock"]
            .as_u64()
            .with_context(|| format!("{name} has no size"))
    });
    Ok(float(bytes.sum::<Result<u64>>()?) / float(1 << 20))
}

/// Returns the MiB of memory of the oldest process of that name on a node; nothing if none runs there.
pub fn process_mib(cluster: &Cluster, node: &str, name: &str) -> Option<f64> {
    let show = format!("cat /proc/$(pgrep -o -x {name})/status");
    let status = cluster.exec_on_node(node, &["sh", "-c", &show]).ok()?;
    let line = status.lines().find(|line| line.starts_with("VmRSS:"))?;
    let kib: f64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib / 1024.0)
}
