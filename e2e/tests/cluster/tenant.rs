//! The tenant of one test.

use anyhow::Result;
use serde_json::{Value, json};
use thuban_cluster::Cluster;

use crate::support::{
    apply, delete, delete_namespace, namespace_manifest, network_manifest, vpc_manifest, wait_provisioned,
};

/// A VPC, its network and a namespace with pods in it, all with one name. They are removed when this is dropped, also
/// when the test fails: leftovers of one test must not make the next one fail.
pub struct Tenant<'a> {
    cluster: &'a Cluster,
    name: String,
    is_removed: bool,
}

impl<'a> Tenant<'a> {
    /// Makes a tenant with these ranges; waits until the network is Provisioned.
    pub fn new(cluster: &'a Cluster, name: &str, vpc: &[&str], network: &[&str]) -> Result<Self> {
        Self::of(cluster, name, &manifests(name, vpc, network))
    }

    /// Makes a tenant of objects like those of [`manifests`].
    pub fn of(cluster: &'a Cluster, name: &str, objects: &[Value]) -> Result<Self> {
        let tenant = Self {
            cluster,
            name: name.to_owned(),
            is_removed: false,
        };
        apply(cluster, objects)?;
        wait_provisioned(cluster, &format!("networks.thuban.dev/{name}"))?;
        Ok(tenant)
    }

    /// Waits until all objects are gone.
    pub fn remove(mut self) -> Result<()> {
        self.is_removed = true;
        self.delete_all()
    }

    fn delete_all(&self) -> Result<()> {
        delete_namespace(self.cluster, &self.name)?;
        delete(self.cluster, &["networks.thuban.dev", &self.name])?;
        delete(self.cluster, &["vpcs.thuban.dev", &self.name])
    }
}

impl Drop for Tenant<'_> {
    fn drop(&mut self) {
        if !self.is_removed
            && let Err(error) = self.delete_all()
        {
            eprintln!("tenant {}: {error:#}", self.name);
        }
    }
}

/// Returns VPC, network and namespace, in this order.
pub fn manifests(name: &str, vpc_ranges: &[&str], network_ranges: &[&str]) -> [Value; 3] {
    let mut vpc = vpc_manifest(name, vpc_ranges[0], &[name]);
    vpc["spec"]["cidrs"] = json!(vpc_ranges);
    let mut network = network_manifest(name, name, network_ranges[0]);
    network["spec"]["cidrs"] = json!(network_ranges);
    [vpc, network, namespace_manifest(name, Some(name))]
}
