//! The contestants that are compared.

use std::time::Duration;

use anyhow::Result;

use crate::{bench::plugin::Pod, rig::namespace::Namespace};

/// One way to wire a pod. Both ADD and DEL return how long they took.
pub trait Contestant: Sync {
    fn name(&self) -> &'static str;
    /// Returns the node on which the contestant works: the calling thread must be there.
    fn node(&self) -> &Namespace;
    /// Runs ADD in the namespace of the node.
    fn add_here(&self, pod: &Pod) -> Result<Duration>;
    fn del_here(&self, pod: &Pod) -> Result<Duration>;

    fn add(&self, pod: &Pod) -> Result<Duration> {
        self.node().run(|| self.add_here(pod))
    }

    fn del(&self, pod: &Pod) -> Result<Duration> {
        self.node().run(|| self.del_here(pod))
    }
}
