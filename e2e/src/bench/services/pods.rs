//! The pods of one cluster: clients, four backends on their node (near), and four on another one (far).

use anyhow::Result;
use thuban_cluster::Cluster;

use crate::bench::pods::{self, NODES, Pod};

pub const SPACE: &str = "services";
pub const BACKENDS: usize = 4;
const CROWD: usize = 4;

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
        let numbered = |word: &'static str, count: usize, node: &'static str| {
            (0..count).map(move |index| (format!("{word}-{index}"), node))
        };
        let [here, there] = NODES;
        let wanted: Vec<(String, &str)> = numbered("crowd", CROWD, here)
            .chain(numbered("near", BACKENDS, here))
            .chain(numbered("far", BACKENDS, there))
            .chain([("client".to_owned(), here)])
            .collect();
        let mut pods = pods::up(cluster, SPACE, &wanted)?;
        let client = pods.remove(CROWD + 2 * BACKENDS);
        let far = pods.split_off(CROWD + BACKENDS);
        let near = pods.split_off(CROWD);
        Ok(Self {
            client,
            crowd: pods,
            near,
            far,
        })
    }
}
