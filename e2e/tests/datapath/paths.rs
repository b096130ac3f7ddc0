//! Every path that a packet can take: ping, datagrams, bulk TCP both ways.

use std::net::Ipv4Addr;

use anyhow::{Context, Result, ensure};
use thuban_common::counters::Counter;
use thuban_e2e::rig::{
    Transit,
    droplet::Pod,
    topology::Topology,
    traffic::{End, echo_udp, ping, transfer},
};

use crate::{counter, each};

const BULK: usize = 8 << 20;

/// Exchanges traffic of both families.
pub fn exchange(from: &Pod, to: &Pod) -> Result<()> {
    exchange_between(from.end(), to.end(), 1450)?;
    exchange_between(from.end6(), to.end6(), 1450)
}

/// Sends pings, datagrams and bulk data both ways over a path with the given MTU.
pub fn exchange_between(from: End, to: End, mtu: usize) -> Result<()> {
    ensure!(
        ping(from.namespace, to.address, 56)?,
        "ping {} from {}",
        to.address,
        from.address
    );
    let full = mtu - if to.address.is_ipv4() { 28 } else { 48 };
    ensure!(
        ping(from.namespace, to.address, full)?,
        "ping {} with a full MTU",
        to.address
    );
    ensure!(echo_udp(from, to, 1)?, "one byte of UDP");
    ensure!(echo_udp(from, to, full)?, "UDP with a full MTU");
    ensure!(echo_udp(from, to, 8000)?, "fragmented UDP");
    for (from, to) in [(from, to), (to, from)] {
        let time = transfer(from, to, BULK)?;
        let megabits = 2 * 8 * BULK as u128 / time.as_micros().max(1);
        println!("{} to {}: {megabits} Mb/s", from.address, to.address);
    }
    Ok(())
}

#[test]
fn pods_of_one_droplet_reach_each_other() -> Result<()> {
    each(|topology| {
        exchange(&topology.first, &topology.neighbour)?;
        ensure!(counter(topology, 1, Counter::DeliveredLocal)? > 100);
        ensure!(
            counter(topology, 1, Counter::SentToBouncer)? == 0,
            "nothing left the droplet"
        );
        Ok(())
    })
}

#[test]
fn the_direct_path_takes_one_hop() -> Result<()> {
    each(|topology| {
        topology.make_direct()?;
        exchange(&topology.first, &topology.second)?;
        ensure!(counter(topology, 1, Counter::SentDirect)? > 100);
        ensure!(counter(topology, 2, Counter::Delivered)? > 100);
        ensure!(
            counter(topology, 3, Counter::Bounced)? == 0,
            "no bouncer was asked"
        );
        let (segments, frames) = (
            counter(topology, 2, Counter::DecapsulatedXdp)?,
            counter(topology, 2, Counter::Delivered)?,
        );
        match topology.transit {
            Transit::Xdp => ensure!(
                segments > 4 * frames,
                "GRO on inner frames: {segments} in, {frames} out"
            ),
            Transit::Tc => ensure!(segments == 0, "XDP was not asked"),
            Transit::Aggregated => {
                let least = (4 * BULK / 1400) as u64;
                ensure!(frames < least / 4, "{frames} frames for {least} segments");
            }
        }
        Ok(())
    })
}

#[test]
fn bouncers_reach_what_the_agent_does_not_know() -> Result<()> {
    each(|topology| {
        exchange(&topology.first, &topology.second)?;
        ensure!(counter(topology, 1, Counter::SentToBouncer)? > 100);
        ensure!(counter(topology, 3, Counter::Bounced)? > 200);
        ensure!(counter(topology, 2, Counter::Delivered)? > 100);
        Ok(())
    })
}

#[test]
fn dividers_reach_other_networks() -> Result<()> {
    each(|topology| {
        exchange(&topology.first, &topology.other)?;
        ensure!(counter(topology, 1, Counter::SentToDivider)? > 100);
        ensure!(counter(topology, 2, Counter::Divided)? > 200);
        ensure!(
            counter(topology, 1, Counter::Bounced)? > 100,
            "network 2's bouncer is on the sender's droplet"
        );
        ensure!(counter(topology, 3, Counter::Delivered)? > 100);
        Ok(())
    })
}

#[test]
fn agents_at_xdp_take_the_same_paths() -> Result<()> {
    let mut topology = Topology::with_agents_at_xdp()?;
    crate::run(&mut topology, &|topology| {
        exchange(&topology.first, &topology.neighbour).context("same droplet")?;
        exchange(&topology.first, &topology.second).context("bounced")?;
        exchange(&topology.first, &topology.other).context("divided")?;
        topology.make_direct()?;
        exchange(&topology.first, &topology.second).context("direct")?;
        let statistics = topology
            .rig
            .droplet(1)?
            .namespace
            .command(&format!("ethtool -S {}", topology.first.host_end))?;
        let redirected = statistics
            .lines()
            .find_map(|line| line.trim().strip_prefix("rx_queue_0_xdp_redirect: "));
        ensure!(
            redirected.is_some_and(|count| count.len() > 3),
            "XDP redirected {redirected:?}"
        );
        Ok(())
    })
}

#[test]
fn tunnels_of_pods_work() -> Result<()> {
    each(|topology| {
        let tunnel = [Ipv4Addr::new(10, 99, 0, 1), Ipv4Addr::new(10, 99, 0, 2)];
        let pods = [&topology.first, &topology.second];
        for ((pod, address), far) in pods.iter().zip(tunnel).zip([pods[1], pods[0]]) {
            let ends = format!("local {} remote {}", pod.address, far.address);
            pod.namespace.command(&format!(
                "ip link add tunnel type vxlan id 7 {ends} dstport 4789 dev eth0"
            ))?;
            pod.namespace
                .command(&format!("ip addr add {address}/24 dev tunnel"))?;
            pod.namespace.command("ip link set tunnel mtu 1400 up")?;
        }
        let [from, to] = [0, 1].map(|index| End {
            namespace: &pods[index].namespace,
            address: tunnel[index].into(),
        });
        exchange_between(from, to, 1400)?;
        ensure!(counter(topology, 1, Counter::AdjustRoomFailed)? == 0);
        Ok(())
    })
}
