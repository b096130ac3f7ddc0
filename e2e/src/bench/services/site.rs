//! One cluster with its pods and Services.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use kube::{
    Client, Config,
    config::{KubeConfigOptions, Kubeconfig},
};
use thuban_cluster::Cluster;
use tokio::runtime::Runtime;

use super::{
    change::FAR,
    objects::{self, Made},
    pods::Pods,
    traffic::{self, Taken, Target},
};
use crate::bench::pods::Pod;

pub struct Site {
    pub is_thuban: bool,
    pub cluster: Cluster,
    pub client: Client,
    pub pods: Pods,
    pub made: Made,
    /// Targets of the near backends without a Service.
    pub near: Vec<Target>,
    pub far: Vec<Target>,
    /// Bytes that the site's backends took.
    pub taken: Taken,
}

impl Site {
    /// Makes the pods and starts their work.
    pub fn up(runtime: &Runtime, name: &str, is_thuban: bool) -> Result<Self> {
        let cluster = Cluster::named(name)?;
        let client = runtime.block_on(client(&cluster))?;
        let pods = Pods::up(&cluster)?;
        let taken = Taken::default();
        for (number, pod) in (0..).zip(&pods.near).chain(FAR.zip(&pods.far)) {
            traffic::serve(pod, number, &taken)?;
        }
        Ok(Self {
            is_thuban,
            cluster,
            client,
            near: Self::direct(&pods.near),
            far: Self::direct(&pods.far),
            pods,
            made: Made::default(),
            taken: Arc::clone(&taken),
        })
    }

    pub const fn name(&self) -> &'static str {
        if self.is_thuban { "thuban" } else { "kube-proxy" }
    }

    /// Makes Services up to the size. Returns how long it took, and with Thuban how many became Provisioned.
    pub fn grow(&mut self, runtime: &Runtime, size: usize) -> Result<(Duration, Option<usize>)> {
        println!("{size} Services on the cluster of {}", self.name());
        let start = Instant::now();
        runtime.block_on(async {
            self.made.grow(&self.client, &self.pods, size).await?;
            let served = if self.is_thuban {
                Some(objects::provisioned(&self.client, size).await?)
            } else {
                None
            };
            Ok((start.elapsed(), served))
        })
    }

    fn direct(backends: &[Pod]) -> Vec<Target> {
        backends.iter().map(|pod| Target::new(pod.address, 0)).collect()
    }
}

/// Returns a client with the rights of the cluster's administrator.
pub async fn client(cluster: &Cluster) -> Result<Client> {
    let path = cluster.instance().kubeconfig();
    let read = Kubeconfig::read_from(&path).with_context(|| format!("reading {}", path.display()))?;
    let config = Config::from_custom_kubeconfig(read, &KubeConfigOptions::default()).await?;
    Client::try_from(config).with_context(|| format!("a client by {}", path.display()))
}
