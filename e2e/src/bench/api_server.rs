//! etcd and an API server for one benchmark, without nodes and controllers. They are taken down when dropped.

use std::path::Path;

use anyhow::{Context, Result};
use thuban_cluster::{Cluster, Instance, bare};

#[derive(Debug)]
pub struct ApiServer(Instance);

impl ApiServer {
    /// Brings both up as the instance of that name. `binaries` is the folder with etcd, kube-apiserver and kubectl.
    pub fn up(name: &str, binaries: &Path) -> Result<Self> {
        // The owner exists first, so that a start that fails is cleared away, too.
        let server = Self(Instance::named(name)?);
        bare::up(&server.0, binaries).context("etcd and the API server")?;
        Ok(server)
    }

    pub fn instance(&self) -> &Instance {
        &self.0
    }

    /// Returns kubectl as the administrator.
    pub fn cluster(&self) -> Result<Cluster> {
        Cluster::named(self.0.name())
    }
}

impl Drop for ApiServer {
    fn drop(&mut self) {
        if let Err(error) = thuban_cluster::down(&self.0) {
            eprintln!("{error:#}");
        }
    }
}
