//! Tests that can't use the shared installation as it is: two need speakers that no other test has used, and one needs
//! that no process runs. They come after the tests that share it, and the last one removes it.

mod haproxy;
mod internal_bgp;
mod leases;

use anyhow::{Result, ensure};
use thuban_cluster::Cluster;

use super::{MANIFESTS, SYSTEM, install, wait_for_kinds};
use crate::support::delete;

/// What processes make in the namespace of Thuban.
const SECRETS: [[&str; 4]; 3] = [
    ["secret", "-n", SYSTEM, "thuban-cidrd-ca"],
    ["secret", "-n", SYSTEM, "thuban-lbaasd-ca"],
    ["configmap", "-n", SYSTEM, "thuban-lbaasd-ca"],
];

/// The whole installation, with speakers and gobgpds that no other test has used. The test may change their DaemonSet,
/// or start BGP with another AS number, which gobgpd keeps to its end. The speakers go when this is dropped, and the
/// next test that installs gets others.
struct OwnSpeakers<'a>(&'a Cluster);

impl<'a> OwnSpeakers<'a> {
    fn new(cluster: &'a Cluster) -> Result<Self> {
        end_speakers(cluster)?;
        let made = Self(cluster);
        install(cluster)?;
        Ok(made)
    }
}

impl Drop for OwnSpeakers<'_> {
    fn drop(&mut self) {
        let _ = end_speakers(self.0);
    }
}

/// Deletes the speakers' DaemonSet. The pods of the next one wait until the ports of these pods are free. An update
/// would replace one pod after the other.
fn end_speakers(cluster: &Cluster) -> Result<()> {
    delete(cluster, &["daemonset", "-n", SYSTEM, "thuban-speaker"])
}

/// The kinds of load balancers, and cidrd's account and what it may do, but no process. All that is installed goes
/// before, and these go when this is dropped.
struct WithoutProcesses<'a>(&'a Cluster);

impl<'a> WithoutProcesses<'a> {
    fn new(cluster: &'a Cluster) -> Result<Self> {
        remove(cluster)?;
        ensure_nothing_is_left(cluster)?;
        let made = Self(cluster);
        for file in ["10-crds.yaml", "20-cidrd.yaml"] {
            cluster.kubectl(&["apply", "-f", &format!("{MANIFESTS}/{file}")])?;
        }
        wait_for_kinds(cluster)?;
        Ok(made)
    }

    /// Removes everything, and asserts that nothing is left.
    fn end(self) -> Result<()> {
        let cluster = self.0;
        drop(self);
        ensure_nothing_is_left(cluster)
    }
}

impl Drop for WithoutProcesses<'_> {
    fn drop(&mut self) {
        let _ = remove(self.0);
    }
}

/// Removes the shared installation, and what its processes made.
fn remove(cluster: &Cluster) -> Result<()> {
    delete(cluster, &["-f", MANIFESTS])?;
    for secret in SECRETS {
        delete(cluster, &secret)?;
    }
    Ok(())
}

/// Asserts that a removal leaves no object of the manifests, and none that the processes made.
fn ensure_nothing_is_left(cluster: &Cluster) -> Result<()> {
    let get = ["get", "--ignore-not-found", "-o", "name"];
    let mut left = cluster.kubectl(&[&get[..], &["-f", MANIFESTS]].concat())?;
    for secret in SECRETS {
        left += &cluster.kubectl(&[&get[..], &secret].concat())?;
    }
    ensure!(left.trim().is_empty(), "the removal leaves {left}");
    Ok(())
}
