//! An underlay host that is no droplet: a namespace on the cluster's bridge, removed when dropped.

use std::fs::{self, File};
use std::net::Ipv4Addr;
use std::time::Duration;

use anyhow::{Context, Result};
use thuban_cluster::Cluster;
use thuban_cluster::command::run;
use thuban_cluster::namespace::inside;
use thuban_cluster::wait::wait_for;

const LINK_TIMEOUT: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(10);
/// `BR_STATE_FORWARDING` of linux/if_bridge.h.
const FORWARDING: &str = "3";

pub struct Intruder {
    name: String,
    /// Its link at the bridge.
    link: String,
    pub address: Ipv4Addr,
}

fn ip(arguments: &[&str]) -> Result<()> {
    run("ip", arguments).map(drop)
}

impl Intruder {
    /// Makes a host at the first address that no other test has, in whatever process that test is.
    pub fn new(cluster: &Cluster) -> Result<Self> {
        let octets = cluster.gateway().octets();
        // Those below are of pools of load balancers.
        let mut numbers = 224..250;
        let intruder = loop {
            let number = numbers.next().context("every address of an intruder is taken")?;
            let name = format!("{}-x{number}", cluster.name());
            // The process that makes the name has the address.
            if ip(&["netns", "add", &name]).is_ok() {
                let address = Ipv4Addr::new(octets[0], octets[1], octets[2], number);
                let link = format!("x{number}-{}", std::process::id() % 100_000);
                break Self { name, link, address };
            }
        };
        let (name, link) = (&intruder.name, &intruder.link);
        let address = format!("{}/24", intruder.address);
        let peer = ["type", "veth", "peer", "name", "eth0", "netns", name];
        ip(&[&["link", "add", link][..], &peer].concat())?;
        ip(&["link", "set", link, "master", cluster.bridge(), "up"])?;
        ip(&["-n", name, "addr", "add", &address, "dev", "eth0"])?;
        ip(&["-n", name, "link", "set", "eth0", "up"])?;
        ip(&["-n", name, "link", "set", "lo", "up"])?;
        // The kernel may notice only after a second that the link works, and the bridge passes nothing until then.
        let state = format!("/sys/class/net/{link}/brport/state");
        wait_for("the intruder's link", LINK_TIMEOUT, PAUSE, || {
            Ok(fs::read_to_string(&state)?.trim() == FORWARDING)
        })?;
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
        // The namespace goes some time after its name, and the next intruder may have the link's name.
        let _ = ip(&["link", "del", &self.link]);
        let _ = ip(&["netns", "del", &self.name]);
    }
}
