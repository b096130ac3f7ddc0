//! Who is compared, and the pods that all of them serve.

use std::time::Duration;

use anyhow::Result;

use crate::rig::namespace::Namespace;

/// A network namespace that is wired and freed again and again, with the name of its container.
pub struct Pod {
    pub number: usize,
    pub namespace: Namespace,
}

impl Pod {
    pub fn new(number: usize) -> Result<Self> {
        let namespace = Namespace::new(&format!("p{number}"))?;
        Ok(Self { number, namespace })
    }

    /// Of its container, and the UID of its pod.
    pub fn name(&self) -> String {
        format!("bench-{}", self.number)
    }

    pub fn netns(&self) -> String {
        format!("/run/netns/{}", self.namespace.name())
    }
}

/// One way to wire a pod. Both answer how long it took.
pub trait Contestant: Sync {
    fn name(&self) -> &'static str;
    /// Where it works: the calling thread must be there.
    fn node(&self) -> &Namespace;
    /// In the namespace of the node.
    fn add_here(&self, pod: &Pod) -> Result<Duration>;
    fn del_here(&self, pod: &Pod) -> Result<Duration>;

    fn add(&self, pod: &Pod) -> Result<Duration> {
        self.node().run(|| self.add_here(pod))
    }

    fn del(&self, pod: &Pod) -> Result<Duration> {
        self.node().run(|| self.del_here(pod))
    }
}
