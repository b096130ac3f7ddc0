//! Pods of a cluster that only hold network namespaces; threads and programs of a benchmark run in them.

use std::{
    fs::File,
    net::Ipv4Addr,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result};
use serde_json::{Value, json};
use thuban_cluster::{Cluster, NODES as ALL_NODES, Tasks, namespace};

/// The client's node, and the other one.
pub const NODES: [&str; 2] = ["node-a", "node-b"];
const READY_TIMEOUT: Duration = Duration::from_mins(3);

#[derive(Clone, Debug)]
pub struct Pod {
    pub name: String,
    pub address: Ipv4Addr,
    namespace: PathBuf,
}

impl Pod {
    /// Makes a pod of a network namespace that exists: programs outside of the cluster, or of a node, do the same work
    /// as those of pods.
    pub fn of(namespace: PathBuf, address: Ipv4Addr) -> Self {
        Self {
            name: namespace.display().to_string(),
            address,
            namespace,
        }
    }

    /// Moves the calling thread into the pod's network namespace, for good.
    pub fn enter(&self) -> Result<()> {
        namespace::enter(self.open()?)
    }

    /// Runs `work` on a thread of its own in the pod's network namespace.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        namespace::inside(self.open()?, work)
    }

    /// Returns the file of the pod's network namespace.
    pub fn namespace(&self) -> &Path {
        &self.namespace
    }

    fn open(&self) -> Result<File> {
        File::open(&self.namespace).with_context(|| format!("the network namespace of {}", self.name))
    }
}

/// Makes the Kubernetes namespace and these pods, each with its node, and waits until all run. Returns them in the
/// same order.
pub fn up(cluster: &Cluster, space: &str, wanted: &[(String, &str)]) -> Result<Vec<Pod>> {
    let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": space}});
    cluster.kubectl_apply(&namespace.to_string())?;
    let manifest = |(name, node): &(String, &str)| {
        json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": space},
            "spec": spec(node),
        })
    };
    let manifests: Vec<Value> = wanted.iter().map(manifest).collect();
    let list = json!({"apiVersion": "v1", "kind": "List", "items": manifests});
    // The namespace's ServiceAccount is made a moment after the namespace.
    cluster.wait_for("the pods made", READY_TIMEOUT, || {
        cluster.kubectl_apply(&list.to_string()).map(|_| true)
    })?;
    let mut pods = Vec::new();
    cluster.wait_for("the pods running", READY_TIMEOUT, || {
        pods = running(cluster, space)?;
        Ok(pods.len() == wanted.len())
    })?;
    let find = |(name, _): &(String, &str)| {
        let pod = pods.iter().find(|pod| pod.name == *name).cloned();
        pod.with_context(|| format!("pod {name} doesn't run"))
    };
    wanted.iter().map(find).collect()
}

/// Returns the spec of a pod that does nothing on a node.
pub fn spec(node: &str) -> Value {
    json!({
        "nodeSelector": {"kubernetes.io/hostname": node},
        "automountServiceAccountToken": false, "enableServiceLinks": false,
        "terminationGracePeriodSeconds": 0,
        "containers": [{"name": "pause", "image": "registry.k8s.io/pause:3.10"}],
    })
}

/// Returns the pods that run, with their network namespaces.
fn running(cluster: &Cluster, space: &str) -> Result<Vec<Pod>> {
    let list: Value = serde_json::from_str(&cluster.kubectl(&["get", "pods", "-n", space, "-o", "json"])?)?;
    let tasks = ALL_NODES.map(|node| Ok((node, Tasks::of(cluster, node)?)));
    let tasks = tasks.into_iter().collect::<Result<Vec<_>>>()?;
    let find = |pod: &Value| {
        let container = pod["status"]["containerStatuses"][0]["containerID"].as_str()?;
        let (_, tasks) = tasks.iter().find(|(node, _)| pod["spec"]["nodeName"] == *node)?;
        Some(Pod {
            name: pod["metadata"]["name"].as_str()?.to_owned(),
            address: pod["status"]["podIP"].as_str()?.parse().ok()?,
            namespace: tasks.network_namespace(container)?,
        })
    };
    Ok(list["items"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(find)
        .collect())
}
