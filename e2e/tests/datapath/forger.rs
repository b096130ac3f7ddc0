//! A host on the underlay that forges Geneve: every combination of outer source, VNI and inner source, every form in
//! which no droplet sends it, and what its stamp says of policy.
//!
//! Without authentication, a droplet can judge whether the three fit together. A forger that may use a droplet's
//! address as its own can say everything that this droplet could say, and no more.

mod shapes;
mod stamps;

use std::{
    collections::BTreeSet,
    net::{Ipv4Addr, UdpSocket},
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use thuban_cluster::wait::uninterrupted;
use thuban_common::counters::Counter;
use thuban_e2e::rig::{
    Transit,
    capture::Wire,
    topology::{BLUE, RED, Topology},
};
use thuban_testkit::packets::{self, GENEVE, Ipv4, udp};

use self::shapes::shapes;
use crate::{
    counter, each,
    isolation::{datagram, geneve, listen},
};

const PORT: u16 = 7700;
/// A port that nobody uses.
const OTHER: u16 = 7701;

/// How long what comes is waited for: a machine may stand still for a while, and all that waits for it.
const LATE: Duration = Duration::from_secs(5);

/// Returns all drops of a droplet.
fn drops(topology: &Topology, droplet: usize) -> Result<u64> {
    Counter::ALL
        .iter()
        .filter(|counter| counter.is_drop() && **counter != Counter::Ipv6Discovery)
        .map(|counter| crate::counter(topology, droplet, *counter))
        .sum()
}

#[test]
fn only_consistent_frames_pass_and_others_count_as_drops() -> Result<()> {
    each(|topology| {
        topology.make_direct()?;
        let [one, two, three] = [0, 1, 2].map(|index| topology.rig.droplets[index].address);
        let stranger = Ipv4Addr::new(172, 31, 99, 77);
        let (first, neighbour) = (topology.first.address, topology.neighbour.address);
        let (second, other) = (topology.second.address, topology.other.address);
        let nobody = Ipv4Addr::new(10, 0, 1, 250);
        let wire = Wire::open(&topology.rig.bridge, "d2")?;
        let red = Wire::open(&topology.second.namespace, "eth0")?;
        let blue = Wire::open(&topology.second_blue.namespace, "eth0")?;
        // These sockets answer nothing that arrives.
        let _listeners = [
            listen(&topology.second.namespace, second, PORT)?,
            listen(&topology.second_blue.namespace, second, PORT)?,
        ];
        let mut tried = 0;
        for outer in [one, two, three, stranger] {
            for vni in [RED, BLUE, 300] {
                for inner in [first, neighbour, second, other, nobody, outer] {
                    // Droplet 2 holds `second` in both VPCs, is red's divider and has a direct row for red's `first`.
                    // Droplet 3 is the bouncer of both networks.
                    let fits = match (outer, vni) {
                        (outer, RED | BLUE) if outer == one || outer == three => {
                            let is_of_vpc = inner != outer && (inner != other || vni == RED);
                            // Only a bouncer may send packets of this droplet's own endpoints to it.
                            is_of_vpc && (inner != second || outer == three)
                        }
                        _ => false,
                    };
                    let before = drops(topology, 2)?;
                    let frame = geneve(topology, outer, 2, vni, &datagram(inner, second, PORT))?;
                    wire.inject(&frame)?;
                    let is_forged = |frame: &[u8]| {
                        frame.len() >= 42
                            && frame[26..30] == inner.octets()
                            && frame[36..38] == PORT.to_be_bytes()
                    };
                    let time = Duration::from_millis(30);
                    let case = format!("outer {outer} VNI {vni} inner {inner}");
                    let expected = if fits {
                        (usize::from(vni == RED), usize::from(vni == BLUE))
                    } else {
                        (0, 0)
                    };
                    let (mut reds, mut blues) = (0, 0);
                    let deadline = Instant::now() + LATE;
                    loop {
                        reds += red.collect(time, is_forged).len();
                        blues += blue.collect(time, is_forged).len();
                        if (reds, blues) == expected || Instant::now() >= deadline {
                            break;
                        }
                    }
                    ensure!(
                        (reds, blues) == expected,
                        "{case}: {reds} in red, {blues} in blue"
                    );
                    let dropped = drops(topology, 2)? - before;
                    ensure!(dropped == u64::from(!fits), "{case}: {dropped} drops counted");
                    tried += 1;
                }
            }
        }
        ensure!(tried == 72);
        Ok(())
    })
}

/// Returns the content that [`geneve`] builds, for any shape: VNI 100 and a frame of 10.0.1.11.
fn forged(to: Ipv4Addr, marker: &str) -> Vec<u8> {
    let payload = udp(7777, PORT, marker.as_bytes());
    let inner = Ipv4::new(17, Ipv4Addr::new(10, 0, 1, 11), to).around(&payload);
    let header = [0, 0, 0x65, 0x58, 0, 0, RED as u8, 0];
    udp(
        50_000,
        GENEVE,
        &[&header[..], &packets::ethernet(&inner)].concat(),
    )
}

/// Returns the names of the shapes that arrived, until none arrives any more.
fn came(socket: &UdpSocket) -> BTreeSet<String> {
    let mut buffer = [0; 2000];
    let mut came = BTreeSet::new();
    while let Ok(length) = uninterrupted(|| socket.recv(&mut buffer)) {
        came.insert(
            String::from_utf8_lossy(&buffer[..length])
                .trim_end_matches('.')
                .to_owned(),
        );
    }
    came
}

/// A droplet rejects even content that another droplet could send, if its form is one that no droplet uses.
#[test]
fn geneve_in_any_other_form_reaches_nobody() -> Result<()> {
    each(|topology| {
        topology.make_direct()?;
        let [one, node, three] = [0, 1, 2].map(|index| topology.rig.droplets[index].address);
        let stranger = Ipv4Addr::new(172, 31, 99, 77);
        let second = topology.second.address;
        let namespace = &topology.rig.droplets[1].namespace;
        let mac = geneve(topology, one, 2, RED, &[])?;
        let shapes = shapes(topology, mac.first_chunk().copied().unwrap_or_default())?;
        let wire = Wire::open(&topology.rig.bridge, "d2")?;
        let others = [
            listen(namespace, Ipv4Addr::UNSPECIFIED, OTHER)?,
            namespace.run(|| Ok(UdpSocket::bind((shapes::SECOND6, OTHER))?))?,
        ];
        others[1].set_read_timeout(Some(Duration::from_millis(100)))?;
        let sockets = [
            listen(&topology.second.namespace, second, PORT)?,
            listen(&topology.second_blue.namespace, second, PORT)?,
            listen(namespace, Ipv4Addr::UNSPECIFIED, PORT)?,
        ];

        let mut expected = BTreeSet::new();
        for shape in &shapes {
            // The payload is long enough for every fragment.
            let marker = format!("{:.<160}", shape.name);
            for frame in (shape.build)(stranger, &udp(7777, OTHER, marker.as_bytes())) {
                wire.inject(&frame)?;
            }
            if shape.comes_to_node {
                expected.insert(shape.name.clone());
            }
        }
        let (mut reached, deadline) = (BTreeSet::new(), Instant::now() + LATE);
        while !reached.is_superset(&expected) && Instant::now() < deadline {
            reached.extend(others.iter().flat_map(came));
        }
        ensure!(
            reached == expected,
            "shapes for another port: {:?}",
            reached.symmetric_difference(&expected)
        );

        let before = counter(topology, 2, Counter::BadHeader)?;
        let mut counted = 0;
        for shape in &shapes {
            for from in [one, three, stranger] {
                for to in [second, node] {
                    let marker = format!("{:.<160}", shape.name);
                    for frame in (shape.build)(from, &forged(to, &marker)) {
                        wire.inject(&frame)?;
                    }
                    counted += u64::from(shape.is_counted);
                }
            }
        }
        for (socket, whose) in sockets.iter().zip(["red's pod", "blue's pod", "the node"]) {
            let came = came(socket);
            ensure!(came.is_empty(), "{whose} received {came:?}");
        }
        let bad = counter(topology, 2, Counter::BadHeader)? - before;
        ensure!(bad == counted, "{bad} of {counted} counted");
        if topology.transit == Transit::Aggregated {
            let taken = namespace.command("cat /sys/class/net/thuban-gro/statistics/rx_packets")?;
            ensure!(taken.trim() == "0", "thuban-gro took {taken}");
        }
        wire.inject(&geneve(
            topology,
            one,
            2,
            RED,
            &datagram(topology.first.address, second, PORT),
        )?)?;
        ensure!(
            uninterrupted(|| sockets[0].recv(&mut [0; 8])).is_ok(),
            "in a droplet's form it is right"
        );
        Ok(())
    })
}
