//! The memory and the CPU time of a peer's programs.

use std::{fs, path::PathBuf};

use anyhow::{Context, Result, bail};
use thuban_cluster::Cluster;

use crate::bench::float;

/// The programs of some nodes.
#[derive(Debug)]
pub struct Daemons(Vec<PathBuf>);

impl Daemons {
    /// Finds programs on nodes. All of them must run on each node; with `anywhere` on some node.
    pub fn find(cluster: &Cluster, nodes: &[&str], names: &[&str], anywhere: bool) -> Result<Self> {
        let mut found = Vec::new();
        for name in names {
            let before = found.len();
            for node in nodes {
                let list = format!("pgrep -x {name} || true");
                let list = cluster.exec_on_node(node, &["sh", "-c", &list])?;
                let of_node = cluster.node_pid(node)?;
                let folders = list
                    .split_whitespace()
                    .map(|process| PathBuf::from(format!("/proc/{of_node}/root/proc/{process}")));
                found.extend(folders);
                if list.trim().is_empty() && !anywhere {
                    bail!("{name} does not run on {node}: see the cluster's folder logs");
                }
            }
            if found.len() == before {
                bail!("{name} does not run");
            }
        }
        Ok(Self(found))
    }

    /// Returns the milliseconds that the programs, and programs that they started and that have ended, have run.
    pub fn cpu_ms(&self) -> Result<f64> {
        let of = |folder: &PathBuf| {
            let path = folder.join("stat");
            let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
            ticks(&text).with_context(|| format!("{}: {text}", path.display()))
        };
        // A tick is 10 ms.
        let ticks = self.0.iter().map(of).sum::<Result<u64>>()?;
        Ok(float(ticks) * 10.0)
    }

    /// Returns the MiB of memory that the programs have.
    pub fn rss_mib(&self) -> Result<f64> {
        let of = |folder: &PathBuf| {
            let path = folder.join("status");
            let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
            let line = text.lines().find(|line| line.starts_with("VmRSS:"));
            let kib = line.and_then(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok());
            kib.with_context(|| format!("{} has no VmRSS", path.display()))
        };
        let kib = self.0.iter().map(of).sum::<Result<u64>>()?;
        Ok(float(kib) / 1024.0)
    }
}

/// Returns user and system time of a process and of its ended children from `/proc/PID/stat` (proc(5), fields 14 to
/// 17).
fn ticks(stat: &str) -> Option<u64> {
    // The name in parentheses, field 2, may contain spaces.
    let (_, rest) = stat.rsplit_once(')')?;
    let fields = rest.split_whitespace().skip(11).take(4);
    fields.map(|field| field.parse::<u64>().ok()).sum()
}

#[cfg(test)]
mod tests {
    use super::ticks;

    #[test]
    fn time_of_children_counts_and_names_may_have_spaces() {
        let stat = "7 (a (b) c) S 1 7 7 0 -1 4194560 1 2 3 4 10 20 300 4000 20 0 9 0 1";
        assert_eq!(ticks(stat), Some(4330));
        assert_eq!(ticks("7 (a) S 1"), Some(0));
        assert_eq!(ticks(""), None);
    }
}
