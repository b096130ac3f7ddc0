//! Containers that run on a node, as its containerd lists them.

use std::path::PathBuf;

use anyhow::Result;

use crate::handle::Cluster;

/// The containers of one node, at one moment.
#[derive(Debug)]
pub struct Tasks {
    /// The node's first process, as the root PID namespace sees it.
    node: u32,
    text: String,
}

impl Tasks {
    pub fn of(cluster: &Cluster, node: &str) -> Result<Self> {
        Ok(Self {
            text: cluster.exec_on_node(node, &["ctr", "-n", "k8s.io", "task", "ls"])?,
            node: cluster.node_pid(node)?,
        })
    }

    /// Returns the file of a running container's network namespace; `container` is written as in a pod's status.
    pub fn network_namespace(&self, container: &str) -> Option<PathBuf> {
        let container = container.trim_start_matches("containerd://");
        let line = self.text.lines().find(|line| line.starts_with(container))?;
        let mut words = line.split_whitespace();
        let (process, state) = (words.nth(1)?, words.next()?);
        let node = self.node;
        (state == "RUNNING").then(|| format!("/proc/{node}/root/proc/{process}/ns/net").into())
    }
}
