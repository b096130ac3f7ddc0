//! The pods of one cluster: clients, four backends on their node (near), and four on another one (far). They only hold
//! network namespaces; threads of this program run in them.

use std::{fs::File, net::Ipv4Addr, path::PathBuf, time::Duration};

use anyhow::{Context, Result};
use serde_json::{Value, json};
use thuban_cluster::{Cluster, Tasks, namespace};

pub const SPACE: &str = "services";
pub const BACKENDS: usize = 4;
const CROWD: usize = 4;
/// The client's node, and the other one.
pub const NODES: [&str; 2] = ["node-a", "node-b"];
const PATIENCE: Duration = Duration::from_mins(3);

#[derive(Clone, Debug)]
pub struct Pod {
    pub name: String,
    pub address: Ipv4Addr,
    namespace: PathBuf,
}

#[derive(Debug)]
pub struct Pods {
    pub client: Pod,
    /// Further pods on the client's node, for many connections. Closed connections are remembered for a minute, and a
    /// client has room for only so many of them.
    pub crowd: Vec<Pod>,
    pub near: Vec<Pod>,
    pub far: Vec<Pod>,
}

impl Pods {
    /// Makes the pods and waits until all run.
    pub fn up(cluster: &Cluster) -> Result<Self> {
        let space = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SPACE}});
        cluster.kubectl_apply(&space.to_string())?;
        let numbered = |word: &str, count| (0..count).map(|index| format!("{word}-{index}")).collect();
        let client = "client".to_owned();
        let (crowd, near, far): (Vec<String>, Vec<String>, Vec<String>) = (
            numbered("crowd", CROWD),
            numbered("near", BACKENDS),
            numbered("far", BACKENDS),
        );
        let here = [&client].into_iter().chain(&crowd).chain(&near);
        let wanted: Vec<(&String, &str)> = here
            .map(|name| (name, NODES[0]))
            .chain(far.iter().map(|name| (name, NODES[1])))
            .collect();
        let manifests: Vec<Value> = wanted.iter().map(|(name, node)| manifest(name, node)).collect();
        let list = json!({"apiVersion": "v1", "kind": "List", "items": manifests});
        // The namespace's ServiceAccount is made a moment after the namespace.
        cluster.wait_for("the pods made", PATIENCE, || {
            cluster.kubectl_apply(&list.to_string()).map(|_| true)
        })?;
        let mut pods = Vec::new();
        cluster.wait_for("the pods running", PATIENCE, || {
            pods = running(cluster)?;
            Ok(pods.len() == wanted.len())
        })?;
        let find = |name: &String| {
            let pod = pods.iter().find(|pod| pod.name == *name).cloned();
            pod.with_context(|| format!("pod {name} doesn't run"))
        };
        Ok(Self {
            client: find(&client)?,
            crowd: crowd.iter().map(find).collect::<Result<_>>()?,
            near: near.iter().map(find).collect::<Result<_>>()?,
            far: far.iter().map(find).collect::<Result<_>>()?,
        })
    }
}

fn manifest(name: &str, node: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": SPACE},
        "spec": {
            "nodeSelector": {"kubernetes.io/hostname": node},
            "automountServiceAccountToken": false, "enableServiceLinks": false,
            "terminationGracePeriodSeconds": 0,
            "containers": [{"name": "pause", "image": "registry.k8s.io/pause:3.10"}],
        },
    })
}

/// Returns the pods that run, with their network namespaces.
fn running(cluster: &Cluster) -> Result<Vec<Pod>> {
    let list: Value = serde_json::from_str(&cluster.kubectl(&["get", "pods", "-n", SPACE, "-o", "json"])?)?;
    let tasks = NODES.map(|node| Ok((node, Tasks::of(cluster, node)?)));
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

impl Pod {
    /// Moves the calling thread into the pod's network namespace, for good.
    pub fn enter(&self) -> Result<()> {
        namespace::enter(self.open()?)
    }

    /// Runs `work` on a thread of its own in the pod's network namespace.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        namespace::inside(self.open()?, work)
    }

    fn open(&self) -> Result<File> {
        File::open(&self.namespace).with_context(|| format!("the network namespace of {}", self.name))
    }
}
