//! Fronts on an underlay that checks sources: the router drops a packet unless it would route an answer to the packet
//! by the same link. So a node may send from the load balancer's address only while the router leads the address to it.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use anyhow::{Context, Result, ensure};
use thuban_common::{
    counters::Counter,
    services::{FRONTS, SERVICE_TUNNEL},
};
use thuban_e2e::{
    rig::{
        namespace::Namespace,
        topology::{RED, Topology},
        traffic::{End, echo_udp_by, transfer_by},
    },
    services::Served,
};

use crate::{counter, underlay::routed};

const FRONT: IpAddr = IpAddr::V4(Ipv4Addr::new(203, 0, 113, 80));
const CLIENT: IpAddr = IpAddr::V4(Ipv4Addr::new(198, 51, 100, 7));
/// The port of the front, and the port of its backend.
const PORT: u16 = 80;
const BACKEND_PORT: u16 = 8080;
const BULK: usize = 8 << 20;

/// Makes a client behind the router, which checks what droplets send.
fn join_client(topology: &Topology) -> Result<Namespace> {
    let (router, client) = (&topology.rig.bridge, Namespace::new("client")?);
    let link = format!(
        "ip link add client type veth peer name eth0 netns {}",
        client.name()
    );
    router.command(&link)?;
    router.command("ip addr add 198.51.100.1/24 dev client")?;
    router.command("ip link set client up")?;
    client.command(&format!("ip addr add {CLIENT}/24 dev eth0"))?;
    client.command("ip link set eth0 up")?;
    client.command("ip route add default via 198.51.100.1")?;
    for droplet in 1..=topology.rig.droplets.len() {
        router.sysctl(&format!("ipv4/conf/d{droplet}/rp_filter"), "1")?;
    }
    Ok(client)
}

/// Has the router lead the front's address to a droplet.
fn lead_to(topology: &Topology, droplet: usize) -> Result<()> {
    let address = topology.rig.droplets[droplet - 1].address;
    let route = format!("ip route replace {FRONT} via {address} dev d{droplet}");
    topology.rig.bridge.command(&route)?;
    Ok(())
}

/// Writes the front's rows on all droplets, with a backend on droplet 2.
fn serve(topology: &mut Topology, flags: u32) -> Result<()> {
    let home = topology.rig.droplets[1].address;
    let backend = IpAddr::V4(topology.second.address);
    for droplet in &mut topology.rig.droplets {
        for (id, protocol) in [(1, 6), (2, 17)] {
            let served = Served {
                flags,
                ..Served::new(FRONTS, id, FRONT, PORT, protocol)
            };
            served.by_fronts(&mut droplet.programs, RED, &[(backend, BACKEND_PORT, home)])?;
        }
    }
    Ok(())
}

#[test]
fn answers_pass_a_router_that_checks_sources_by_their_front() -> Result<()> {
    routed(|topology| {
        let client = join_client(topology)?;
        let client = End {
            namespace: &client,
            address: CLIENT,
        };
        let seen = SocketAddr::new(FRONT, PORT);
        serve(topology, 0)?;
        lead_to(topology, 1)?;
        let is_answered = echo_udp_by(client, topology.second.end(), BACKEND_PORT, seen, 100)?;
        ensure!(!is_answered, "the router checks no sources");
        ensure!(
            counter(topology, 2, Counter::FrontAnswered)? > 0,
            "it was the router"
        );
        serve(topology, SERVICE_TUNNEL)?;
        for front in [1, 3] {
            lead_to(topology, front)?;
            let returned = counter(topology, front, Counter::FrontReturned)?;
            for size in [1, 1400] {
                let is_answered = echo_udp_by(client, topology.second.end(), BACKEND_PORT, seen, size)?;
                ensure!(is_answered, "no echo of {size} bytes by droplet {front}");
            }
            transfer_by(client, topology.second.end(), BACKEND_PORT, seen, BULK)
                .with_context(|| format!("TCP by droplet {front}"))?;
            ensure!(counter(topology, front, Counter::FrontReturned)? > returned + 2);
        }
        // The front has the backend itself.
        lead_to(topology, 2)?;
        transfer_by(client, topology.second.end(), BACKEND_PORT, seen, BULK).context("TCP by droplet 2")?;
        ensure!(counter(topology, 2, Counter::FrontReturned)? == 0);
        Ok(())
    })
}
