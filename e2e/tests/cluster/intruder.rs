//! An underlay host that is no droplet: a namespace on the cluster's bridge, gone when dropped.

use std::fs::File;
use std::net::Ipv4Addr;
use std::process::Command;
use std::sync::atomic::{AtomicU8, Ordering};

use anyhow::{Result, bail};
use thuban_cluster::Cluster;

use crate::support::inside;

pub struct Intruder {
    name: String,
    pub address: Ipv4Addr,
}

fn ip(arguments: &[&str]) -> Result<()> {
    let output = Command::new("ip").args(arguments).output()?;
    if !output.status.success() {
        bail!("ip {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(())
}

impl Intruder {
    pub fn new(cluster: &Cluster) -> Result<Self> {
        static NEXT: AtomicU8 = AtomicU8::new(200);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("{}-x{number}", cluster.name());
        let octets = cluster.gateway().octets();
        let address = Ipv4Addr::new(octets[0], octets[1], octets[2], number);
        let intruder = Self {
            name: name.clone(),
            address,
        };
        let link = format!("x{number}-{}", std::process::id() % 100_000);
        ip(&["netns", "add", &name])?;
        ip(&[
            "link", "add", &link, "type", "veth", "peer", "name", "eth0", "netns", &name,
        ])?;
        ip(&["link", "set", &link, "master", cluster.bridge(), "up"])?;
        ip(&[
            "-n",
            &name,
            "addr",
            "add",
            &format!("{address}/24"),
            "dev",
            "eth0",
        ])?;
        ip(&["-n", &name, "link", "set", "eth0", "up"])?;
        ip(&["-n", &name, "link", "set", "lo", "up"])?;
        Ok(intruder)
    }

    pub fn inside<T: Send>(&self, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        inside(File::open(format!("/run/netns/{}", self.name))?, work)
    }

    pub fn command(&self, arguments: &[&str]) -> Result<()> {
        let mut all = vec!["netns", "exec", &self.name];
        all.extend(arguments);
        ip(&all)
    }
}

impl Drop for Intruder {
    fn drop(&mut self) {
        let _ = ip(&["netns", "del", &self.name]);
    }
}
