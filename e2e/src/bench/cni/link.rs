//! A bare veth pair: the time that the kernel alone takes to make one and to delete it, both ends up, one of them in
//! the pod's namespace with an address and a route, as every plugin leaves it.
//!
//! `link`: one netlink request for the deletion, no process. `ip-link`: by `ip link del`.

use std::{
    fs::File,
    os::fd::AsRawFd,
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use netlink_packet_route::link::{InfoData, InfoVeth};
use rtnetlink::{Handle, LinkUnspec, LinkVeth, RouteMessageBuilder};

use super::contestant::Contestant;
use crate::{bench::plugin::Pod, rig::namespace::Namespace};

pub struct Link {
    node: Namespace,
}

pub struct LinkCommand(Link);

impl Link {
    pub fn new() -> Result<Self> {
        Ok(Self {
            node: Namespace::new("link")?,
        })
    }

    fn name(pod: &Pod) -> String {
        format!("bare{}", pod.number)
    }
}

impl Contestant for Link {
    fn name(&self) -> &'static str {
        "link"
    }

    fn node(&self) -> &Namespace {
        &self.node
    }

    fn add_here(&self, pod: &Pod) -> Result<Duration> {
        let name = Self::name(pod);
        let start = Instant::now();
        with_netlink(async |handle| {
            let namespace = File::open(pod.netns())?;
            let peer = LinkUnspec::new_with_name("eth0")
                .mtu(1450)
                .setns_by_fd(namespace.as_raw_fd())
                .build();
            let pair = LinkVeth::new(&name, "eth0")
                .mtu(1450)
                .set_info_data(InfoData::Veth(InfoVeth::Peer(peer)))
                .build();
            handle.link().add(pair).execute().await?;
            let up = LinkUnspec::new_with_name(&name).up().build();
            Ok(handle.link().set(up).execute().await?)
        })?;
        pod.namespace.run(|| {
            let index = nix::net::if_::if_nametoindex("eth0")?;
            with_netlink(async |handle| {
                let up = LinkUnspec::new_with_index(index).up().build();
                handle.link().set(up).execute().await?;
                let address = "10.2.0.2".parse()?;
                handle.address().add(index, address, 16).execute().await?;
                let route = RouteMessageBuilder::<std::net::Ipv4Addr>::new()
                    .gateway("10.2.0.1".parse()?)
                    .output_interface(index)
                    .build();
                Ok(handle.route().add(route).execute().await?)
            })
        })?;
        Ok(start.elapsed())
    }

    fn del_here(&self, pod: &Pod) -> Result<Duration> {
        let index = nix::net::if_::if_nametoindex(Self::name(pod).as_str())?;
        with_netlink(async |handle| {
            let start = Instant::now();
            handle.link().del(index).execute().await?;
            Ok(start.elapsed())
        })
    }
}

impl LinkCommand {
    pub fn new() -> Result<Self> {
        Ok(Self(Link::new()?))
    }
}

impl Contestant for LinkCommand {
    fn name(&self) -> &'static str {
        "ip-link"
    }

    fn node(&self) -> &Namespace {
        self.0.node()
    }

    fn add_here(&self, pod: &Pod) -> Result<Duration> {
        self.0.add_here(pod)
    }

    fn del_here(&self, pod: &Pod) -> Result<Duration> {
        let start = Instant::now();
        let status = Command::new("ip")
            .args(["link", "del", &Link::name(pod)])
            .status()
            .context("starting ip")?;
        ensure!(status.success(), "ip link del: {status}");
        Ok(start.elapsed())
    }
}

/// Runs work with netlink in the calling thread's namespace.
fn with_netlink<T>(work: impl AsyncFnOnce(Handle) -> Result<T>) -> Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let (connection, handle, _) = rtnetlink::new_connection().context("netlink")?;
        tokio::spawn(connection);
        work(handle).await
    })
}
