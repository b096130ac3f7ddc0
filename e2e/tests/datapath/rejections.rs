//! Who is denied by network policy hears so at once in a VPC that rejects: connections are refused and datagrams come
//! back as errors, from endpoints of the same droplet and of another one, also to a client that takes nothing unasked.

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, TcpStream, UdpSocket};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use nix::sys::socket::{setsockopt, sockopt::Mark};
use thuban_cluster::wait::uninterrupted;
use thuban_common::host_stack::MARK_REJECTION;
use thuban_common::tables::{ATTACHMENT_REJECTS, LOCAL_HAS_POLICY, LOCAL_REJECTS};
use thuban_e2e::rig::topology::Topology;

use crate::each;

/// A set that no droplet knows: it denies everything.
const UNKNOWN: u32 = 0x99;
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// Returns how long a connection and a datagram waited for their refusal.
fn refused(to: IpAddr) -> Result<[Duration; 2]> {
    let address = SocketAddr::from((to, 80));
    let start = Instant::now();
    let error = TcpStream::connect_timeout(&address, ANSWER_TIMEOUT)
        .err()
        .map(|error| error.kind());
    ensure!(error == Some(ErrorKind::ConnectionRefused), "{to}: {error:?}");
    let connection = start.elapsed();
    let any: IpAddr = if to.is_ipv4() {
        [0; 4].into()
    } else {
        [0_u16; 8].into()
    };
    let socket = UdpSocket::bind((any, 0))?;
    socket.set_read_timeout(Some(ANSWER_TIMEOUT))?;
    socket.connect(address)?;
    let start = Instant::now();
    socket.send(b"?")?;
    let error = uninterrupted(|| socket.recv(&mut [0; 8]))
        .err()
        .map(|error| error.kind());
    // IPv4 says EHOSTUNREACH of ICMP 3/13, IPv6 EACCES of 1/1.
    let is_told = matches!(
        error,
        Some(ErrorKind::HostUnreachable | ErrorKind::PermissionDenied)
    );
    ensure!(is_told, "{to}: {error:?}");
    Ok([connection, start.elapsed()])
}

fn are_refused_at_once(topology: &mut Topology) -> Result<()> {
    let Topology {
        rig,
        first,
        neighbour,
        second,
        ..
    } = topology;
    for (droplet, pod) in [(0, &*first), (0, &*neighbour), (1, &*second)] {
        let flags = LOCAL_HAS_POLICY | LOCAL_REJECTS;
        rig.droplets[droplet].change_rows(pod, flags, |attachment| {
            attachment.flags = ATTACHMENT_REJECTS;
            attachment.ingress_set = UNKNOWN;
        })?;
    }
    for (pod, way) in [(&*neighbour, "same droplet"), (&*second, "another droplet")] {
        for to in [IpAddr::V4(pod.address), IpAddr::V6(pod.address6)] {
            let took = first.namespace.run(move || refused(to))?;
            ensure!(
                took.iter().all(|took| *took < ANSWER_TIMEOUT / 2),
                "{way}: {took:?}"
            );
        }
    }
    // A mark that a pod sets for itself is gone before its agent sees the packet.
    let receiving = first
        .namespace
        .run(|| Ok(UdpSocket::bind((first.address, 90))?))?;
    receiving.set_read_timeout(Some(Duration::from_millis(500)))?;
    second.namespace.run(|| {
        let socket = UdpSocket::bind((second.address, 0))?;
        setsockopt(&socket, Mark, &MARK_REJECTION)?;
        socket.send_to(b"!", (first.address, 90))?;
        Ok(())
    })?;
    ensure!(
        uninterrupted(|| receiving.recv(&mut [0; 8])).is_err(),
        "a pod vouches for itself"
    );
    Ok(())
}

#[test]
fn what_policy_denies_is_refused_in_a_vpc_that_rejects() -> Result<()> {
    each(are_refused_at_once)
}
