//! Services between three droplets: real sockets connect to a service's address and talk to a backend.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, UdpSocket};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use thuban_cluster::wait::uninterrupted;
use thuban_common::{
    counters::Counter,
    tables::{RemoteRow, SUBNET_SERVICES, SubnetEntry},
};
use thuban_e2e::{
    programs::members,
    rig::{
        droplet::Pod,
        topology::{BLUE, RED, Topology},
        traffic::{End, echo_udp_by, transfer_by},
    },
    services::Served,
};

use crate::{counter, each};

const SERVICE: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 96, 0, 10));
const SERVICE6: IpAddr = IpAddr::V6(Ipv6Addr::new(0xfd96, 0, 0, 0, 0, 0, 0, 0x10));
/// The port of the service, and the port of its backends.
const PORT: u16 = 80;
const BACKEND_PORT: u16 = 8080;
const BULK: usize = 8 << 20;

/// Adds the ranges of services in both VPCs, on every droplet.
fn add_ranges(topology: &mut Topology) -> Result<()> {
    for droplet in &mut topology.rig.droplets {
        for vni in [RED, BLUE] {
            let entry = SubnetEntry {
                network: 0,
                flags: SUBNET_SERVICES,
                bouncers: members(&[]),
            };
            droplet
                .programs
                .insert_subnet(vni, Ipv4Addr::new(10, 96, 0, 0), 16, entry)?;
            droplet
                .programs
                .insert_subnet(vni, Ipv6Addr::new(0xfd96, 0, 0, 0, 0, 0, 0, 0), 64, entry)?;
        }
    }
    Ok(())
}

/// Writes the rows of the service with one backend, on these droplets.
fn serve(topology: &mut Topology, droplets: &[usize], vni: u32, backend: (Ipv4Addr, Ipv6Addr)) -> Result<()> {
    for droplet in droplets {
        let programs = &mut topology.rig.droplet(*droplet)?.programs;
        for (id, service, address, protocol) in [
            (1, SERVICE, IpAddr::V4(backend.0), 6),
            (2, SERVICE, IpAddr::V4(backend.0), 17),
            (3, SERVICE6, IpAddr::V6(backend.1), 6),
            (4, SERVICE6, IpAddr::V6(backend.1), 17),
        ] {
            Served::new(vni, vni * 10 + id, service, PORT, protocol)
                .by(programs, &[(address, BACKEND_PORT)])?;
        }
    }
    Ok(())
}

/// Exchanges datagrams and bulk TCP both ways through the service, in both families.
fn exchange(from: &Pod, backend: &Pod) -> Result<()> {
    let ends: [(End, End, IpAddr); 2] = [
        (from.end(), backend.end(), SERVICE),
        (from.end6(), backend.end6(), SERVICE6),
    ];
    for (client, server, service) in ends {
        let seen = SocketAddr::new(service, PORT);
        // The last one goes in fragments.
        for size in [1, 1400, 8000] {
            ensure!(
                echo_udp_by(client, server, BACKEND_PORT, seen, size)?,
                "waited for the echo of {size} bytes of UDP by {service}"
            );
        }
        let time = transfer_by(client, server, BACKEND_PORT, seen, BULK)
            .with_context(|| format!("TCP by {service}"))?;
        let megabits = 2 * 8 * BULK as u128 / time.as_micros().max(1);
        println!("{} to {service}: {megabits} Mb/s", client.address);
    }
    Ok(())
}

#[test]
fn a_backend_of_the_clients_droplet_serves() -> Result<()> {
    each(|topology| {
        add_ranges(topology)?;
        let backend = (topology.neighbour.address, topology.neighbour.address6);
        serve(topology, &[1], RED, backend)?;
        exchange(&topology.first, &topology.neighbour)?;
        ensure!(counter(topology, 1, Counter::ServiceConnections)? >= 6);
        Ok(())
    })
}

#[test]
fn a_backend_of_another_droplet_serves_by_every_way() -> Result<()> {
    each(|topology| {
        add_ranges(topology)?;
        let backend = (topology.second.address, topology.second.address6);
        serve(topology, &[1], RED, backend)?;
        exchange(&topology.first, &topology.second).context("bounced")?;
        topology.make_direct()?;
        exchange(&topology.first, &topology.second).context("direct")?;
        let other = (topology.other.address, topology.other.address6);
        serve(topology, &[1], RED, other)?;
        exchange(&topology.first, &topology.other).context("divided")
    })
}

#[test]
fn a_pod_reaches_itself_by_its_service() -> Result<()> {
    each(|topology| {
        add_ranges(topology)?;
        let backend = (topology.first.address, topology.first.address6);
        serve(topology, &[1], RED, backend)?;
        exchange(&topology.first, &topology.first)
    })
}

#[test]
fn bouncer_picks_backend_if_client_droplet_lacks_service() -> Result<()> {
    each(|topology| {
        add_ranges(topology)?;
        let backend = (topology.second.address, topology.second.address6);
        serve(topology, &[3], RED, backend)?;
        exchange(&topology.first, &topology.second).context("in the bouncer's network")?;
        ensure!(counter(topology, 1, Counter::SentToBouncer)? > 0);
        let other = (topology.other.address, topology.other.address6);
        serve(topology, &[3], RED, other)?;
        exchange(&topology.first, &topology.other).context("on the bouncer's droplet")?;
        let own = (topology.neighbour.address, topology.neighbour.address6);
        serve(topology, &[3], RED, own)?;
        exchange(&topology.first, &topology.neighbour).context("back on the client's droplet")
    })
}

/// The client's bouncer isn't a bouncer of the backend's network, so it sends by the divider, which knows where the
/// client lives.
#[test]
fn bouncer_reaches_backends_of_another_network_by_a_divider() -> Result<()> {
    each(|topology| {
        add_ranges(topology)?;
        topology.make_direct()?;
        let at_divider = add_backend(topology, 2, Ipv4Addr::new(10, 0, 2, 21))?;
        let at_client = add_backend(topology, 1, Ipv4Addr::new(10, 0, 2, 11))?;
        for (backend, place) in [(at_divider, "the divider's"), (at_client, "the client's")] {
            serve(topology, &[3], RED, (backend.address, backend.address6))?;
            exchange(&topology.first, &backend).with_context(|| format!("on {place} droplet"))?;
        }
        ensure!(counter(topology, 2, Counter::SourceMismatch)? == 0);
        Ok(())
    })
}

/// Adds a pod of network 2, with rows at that network's bouncer.
fn add_backend(topology: &mut Topology, droplet: usize, address: Ipv4Addr) -> Result<Pod> {
    let home = topology.rig.droplet(droplet)?;
    let pod = home.add_pod(RED, 2, address)?;
    let home = home.address;
    let bouncer = topology.rig.droplet(1)?;
    bouncer.set_row(RemoteRow::Bouncer, RED, address, home)?;
    bouncer.set_row(RemoteRow::Bouncer, RED, pod.address6, home)?;
    Ok(pod)
}

#[test]
fn agents_at_xdp_leave_services_to_tc() -> Result<()> {
    let mut topology = Topology::with_agents_at_xdp()?;
    crate::run(&mut topology, &|topology| {
        add_ranges(topology)?;
        for (backend, is_far) in [(false, "same droplet"), (true, "another droplet")] {
            let pod = if backend {
                &topology.second
            } else {
                &topology.neighbour
            };
            let addresses = (pod.address, pod.address6);
            serve(topology, &[1], RED, addresses)?;
            let pod = if backend {
                &topology.second
            } else {
                &topology.neighbour
            };
            exchange(&topology.first, pod).context(is_far)?;
        }
        Ok(())
    })
}

#[test]
fn vpcs_with_the_same_service_reach_their_own_backends() -> Result<()> {
    each(|topology| {
        add_ranges(topology)?;
        let red = (topology.second.address, topology.second.address6);
        let blue = (topology.second_blue.address, topology.second_blue.address6);
        serve(topology, &[1], RED, red)?;
        serve(topology, &[1], BLUE, blue)?;
        exchange(&topology.first, &topology.second).context("red")?;
        exchange(&topology.first_blue, &topology.second_blue).context("blue")
    })
}

#[test]
fn what_nobody_serves_is_refused_to_sockets_at_once() -> Result<()> {
    each(|topology| {
        add_ranges(topology)?;
        let backend = (topology.second.address, topology.second.address6);
        serve(topology, &[1], RED, backend)?;
        for service in [SERVICE, SERVICE6] {
            let refused = SocketAddr::new(service, PORT + 1);
            let error = topology
                .first
                .namespace
                .run(|| Ok(TcpStream::connect_timeout(&refused, Duration::from_secs(2)).err()))?;
            let kind = error.map(|error| error.kind());
            ensure!(
                kind == Some(std::io::ErrorKind::ConnectionRefused),
                "TCP to {service}: {kind:?}"
            );
            let kind = topology.first.namespace.run(|| {
                let any: SocketAddr = if service.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" }.parse()?;
                let socket = UdpSocket::bind(any)?;
                socket.set_read_timeout(Some(Duration::from_secs(2)))?;
                socket.connect(refused)?;
                socket.send(b"?")?;
                Ok(uninterrupted(|| socket.recv(&mut [0; 8]))
                    .err()
                    .map(|error| error.kind()))
            })?;
            ensure!(
                kind == Some(std::io::ErrorKind::ConnectionRefused),
                "UDP to {service}: {kind:?}"
            );
        }
        // A backend without such a socket reports it, and the client takes the error for the service's.
        for service in [SERVICE, SERVICE6] {
            let unheard = SocketAddr::new(service, PORT);
            let kind = topology.first.namespace.run(|| {
                let any: SocketAddr = if service.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" }.parse()?;
                let socket = UdpSocket::bind(any)?;
                socket.set_read_timeout(Some(Duration::from_secs(2)))?;
                socket.connect(unheard)?;
                socket.send(b"?")?;
                Ok(uninterrupted(|| socket.recv(&mut [0; 8]))
                    .err()
                    .map(|error| error.kind()))
            })?;
            ensure!(
                kind == Some(std::io::ErrorKind::ConnectionRefused),
                "the backend's word by {service}: {kind:?}"
            );
        }
        Ok(())
    })
}
