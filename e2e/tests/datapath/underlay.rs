//! Underlays that aren't one flat network: a router between droplets, a link with a smaller MTU on the way.

use anyhow::{Context, Result, ensure};
use thuban_common::counters::Counter;
use thuban_e2e::rig::{
    Transit,
    topology::Topology,
    traffic::{ping, transfer},
};

use crate::{counter, paths::exchange};

/// Runs a scenario behind a router with every kind of transit.
pub fn routed(scenario: impl Fn(&mut Topology) -> Result<()>) -> Result<()> {
    for transit in Transit::ALL {
        let mut topology = Topology::routed(transit)?;
        crate::run(&mut topology, &scenario)?;
    }
    Ok(())
}

#[test]
fn droplets_behind_a_router_take_every_path() -> Result<()> {
    routed(|topology| {
        exchange(&topology.first, &topology.second).context("bounced")?;
        exchange(&topology.first, &topology.other).context("divided")?;
        topology.make_direct()?;
        exchange(&topology.first, &topology.second).context("direct")?;
        ensure!(counter(topology, 3, Counter::Bounced)? > 100);
        ensure!(counter(topology, 2, Counter::Divided)? > 100);
        ensure!(counter(topology, 1, Counter::SentDirect)? > 100);
        Ok(())
    })
}

/// The router answers the first packet that is too big, transit learns from it, and the agent tells the pod.
#[test]
fn a_smaller_link_on_the_way_is_told_to_pods() -> Result<()> {
    routed(|topology| {
        topology.make_direct()?;
        // Only one direction has the smaller MTU: the other would be droplet 2's own link.
        let way = "ip route replace 172.31.101.0/24 dev d2 mtu lock 1400";
        topology.rig.bridge.command(way)?;
        let (first, second) = (&topology.first, &topology.second);
        for (from, to) in [(first.end(), second.end()), (first.end6(), second.end6())] {
            ensure!(ping(from.namespace, to.address, 56)?, "a small ping");
            let full = if to.address.is_ipv4() {
                1450 - 28
            } else {
                1450 - 48
            };
            // One packet is lost on the way, one is lost and answered, and then the pod fragments.
            let lost = (0..4)
                .take_while(|_| !ping(from.namespace, to.address, full).unwrap_or(false))
                .count();
            ensure!((1..=2).contains(&lost), "{lost} pings lost to {}", to.address);
            let route = from.namespace.command(&format!("ip route get {}", to.address))?;
            ensure!(route.contains("mtu 1350"), "{route}");
            transfer(from, to, 4 << 20).context("bulk over the smaller link")?;
        }
        ensure!(counter(topology, 1, Counter::PathMtuLearnt)? > 0);
        ensure!(counter(topology, 1, Counter::TooBigAnswered)? > 0);
        Ok(())
    })
}
