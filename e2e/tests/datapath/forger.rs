//! A host on the underlay that forges Geneve: every combination of outer source, VNI and inner source.
//!
//! What a droplet can judge without authentication is whether the three fit together. A forger that may use a droplet's
//! address as its own can say what that droplet could say, and no more.

use std::{net::Ipv4Addr, time::Duration};

use anyhow::{Result, ensure};
use thuban_common::counters::Counter;
use thuban_e2e::rig::{
    capture::Wire,
    topology::{BLUE, RED, Topology},
};

use crate::{
    each,
    isolation::{datagram, geneve, listen},
};

const PORT: u16 = 7700;

/// All drops of a droplet.
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
        // Nobody answers what arrives.
        let _listeners = [
            listen(&topology.second.namespace, second, PORT)?,
            listen(&topology.second_blue.namespace, second, PORT)?,
        ];
        let mut tried = 0;
        for outer in [one, two, three, stranger] {
            for vni in [RED, BLUE, 300] {
                for inner in [first, neighbour, second, other, nobody, outer] {
                    // Droplet 2 holds `second` in both VPCs, is red's divider and has a direct row for red's `first`;
                    // droplet 3 is the bouncer of both networks.
                    let fits = match (outer, vni) {
                        (outer, RED | BLUE) if outer == one || outer == three => {
                            let is_of_vpc = inner != outer && (inner != other || vni == RED);
                            // Of its own endpoints only a bouncer may send this droplet anything.
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
                    let (reds, blues) = (
                        red.collect(time, is_forged).len(),
                        blue.collect(time, is_forged).len(),
                    );
                    let case = format!("outer {outer} VNI {vni} inner {inner}");
                    let expected = if fits {
                        (usize::from(vni == RED), usize::from(vni == BLUE))
                    } else {
                        (0, 0)
                    };
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
