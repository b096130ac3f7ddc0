//! Policies on every way between endpoints, in both families. What a packet says of its sender's class and egress set
//! arrives with it, and so does the word of the server's droplet for an answer.

use std::{net::UdpSocket, time::Duration};

use anyhow::{Context, Result, ensure};
use thuban_common::{
    counters::Counter,
    policy::{GRANT_DENIES, Grant, GrantKey, PEER_OTHER, of_vpc},
    tables::{LOCAL_HAS_POLICY, LOCAL_TAKES_XDP},
};
use thuban_e2e::rig::{
    droplet::{Droplet, Pod},
    topology::{RED, Topology},
    traffic::{End, echo_udp, ping, transfer},
};
use thuban_testkit::wait::wait_for;

use crate::{counter, each};

const CLIENT: u32 = 0x31;
const SERVER: u32 = 0x32;
/// The servers' ingress set: it accepts the client.
const INGRESS: u32 = 0x41;
/// The client's egress set: it accepts the servers.
const EGRESS: u32 = 0x42;
/// The client's ingress set: it accepts nobody.
const CLOSED: u32 = 0x43;
/// A port without a socket.
const PORT: u16 = 7599;
const BULK: usize = 1 << 20;
const LATE: Duration = Duration::from_secs(5);

/// Gives an endpoint a class, an ingress set and an egress set.
pub fn judge(droplet: &mut Droplet, pod: &Pod, class: u32, [ingress, egress]: [u32; 2]) -> Result<()> {
    droplet.change_rows(pod, LOCAL_TAKES_XDP | LOCAL_HAS_POLICY, |row| {
        (row.class, row.ingress_set, row.egress_set) = (class, ingress, egress);
    })?;
    droplet.programs.raise_epoch()
}

/// Has a set accept a class at all ports; class 0: says what the set does with all others.
pub fn grant(droplet: &mut Droplet, vni: u32, set: u32, class: u32, accepts: bool) -> Result<()> {
    let key = GrantKey {
        set: of_vpc(vni, set),
        peer: if class == 0 {
            PEER_OTHER
        } else {
            of_vpc(vni, class)
        },
    };
    let flags = if accepts { 0 } else { GRANT_DENIES };
    let grant = Grant { list: 0, flags };
    droplet.programs.insert("GRANTS", key, grant.of(&key))?;
    droplet.programs.raise_epoch()
}

/// Returns the server on a droplet.
fn server(topology: &Topology, droplet: usize) -> &Pod {
    match droplet {
        1 => &topology.neighbour,
        2 => &topology.second,
        _ => &topology.other,
    }
}

/// Returns the client's end and a server's end, in each family.
fn ends(topology: &Topology, droplet: usize) -> [(End<'_>, End<'_>); 2] {
    let (client, server) = (&topology.first, server(topology, droplet));
    [(client.end(), server.end()), (client.end6(), server.end6())]
}

/// Isolates all servers, and the client in both directions.
fn isolate(topology: &mut Topology) -> Result<()> {
    let Topology {
        rig,
        first,
        neighbour,
        second,
        other,
        ..
    } = topology;
    for (number, server) in [(1, &*neighbour), (2, &*second), (3, &*other)] {
        let droplet = rig.droplet(number)?;
        for set in [INGRESS, EGRESS, CLOSED] {
            grant(droplet, RED, set, 0, false)?;
        }
        grant(droplet, RED, INGRESS, CLIENT, true)?;
        grant(droplet, RED, EGRESS, SERVER, true)?;
        judge(droplet, server, SERVER, [INGRESS, 0])?;
    }
    judge(rig.droplet(1)?, first, CLIENT, [CLOSED, EGRESS])
}

/// Asserts that what the client asks is answered: pings, datagrams whole and in fragments, and a stream.
fn ensure_answered(topology: &Topology, droplet: usize) -> Result<()> {
    for (from, to) in ends(topology, droplet) {
        ensure!(ping(from.namespace, to.address, 56)?, "ping {}", to.address);
        for size in [1, 8000] {
            ensure!(echo_udp(from, to, size)?, "{size} bytes of UDP to {}", to.address);
        }
        transfer(from, to, BULK).with_context(|| format!("TCP to {}", to.address))?;
    }
    Ok(())
}

/// Asserts that the server's droplet drops what the client asks.
fn ensure_denied(topology: &Topology, droplet: usize, reason: Counter) -> Result<()> {
    for (from, to) in ends(topology, droplet) {
        let before = counter(topology, droplet, reason)?;
        from.namespace.run(|| {
            let socket = UdpSocket::bind((from.address, 0))?;
            socket.send_to(b"?", (to.address, PORT))?;
            Ok(())
        })?;
        let what = format!("{} for a datagram to {}", reason.name(), to.address);
        wait_for(&what, LATE, Duration::from_millis(5), || {
            Ok(counter(topology, droplet, reason)? > before)
        })?;
    }
    Ok(())
}

/// Checks the way from the client to a server.
fn check(topology: &mut Topology, droplet: usize) -> Result<()> {
    ensure_answered(topology, droplet)?;
    for (set, class, reason) in [
        (INGRESS, CLIENT, Counter::PolicyIngress),
        (EGRESS, SERVER, Counter::PolicyEgress),
    ] {
        grant(topology.rig.droplet(droplet)?, RED, set, class, false)?;
        ensure_denied(topology, droplet, reason)?;
        grant(topology.rig.droplet(droplet)?, RED, set, class, true)?;
    }
    Ok(())
}

#[test]
fn policies_hold_on_every_way() -> Result<()> {
    each(|topology| {
        isolate(topology)?;
        check(topology, 1).context("same droplet")?;
        check(topology, 2).context("bounced")?;
        check(topology, 3).context("divided")?;
        for (droplet, counted) in [(3, Counter::Bounced), (2, Counter::Divided)] {
            ensure!(counter(topology, droplet, counted)? > 20, "{}", counted.name());
        }
        topology.make_direct()?;
        check(topology, 2).context("direct")?;
        ensure!(counter(topology, 1, Counter::SentDirect)? > 20, "not direct");
        // Nobody vouches for what no client has asked.
        let closed = Counter::PolicyIngress;
        let before = counter(topology, 1, closed)?;
        let (client, server) = (topology.first.end(), topology.second.end());
        ensure!(
            !ping(server.namespace, client.address, 56)?,
            "the client accepts nobody"
        );
        ensure!(counter(topology, 1, closed)? > before, "it was not judged");
        Ok(())
    })
}
