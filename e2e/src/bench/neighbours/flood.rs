//! The traffic of attackers: packets at a steady rate, each with its own header, from raw sockets of their pods.

use std::{
    net::{Ipv4Addr, SocketAddrV4},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::Result;
use thuban_testkit::packets::{Ipv4, Raw, checksum, datagram, udp};

use super::{
    policies::DENIED_PORTS,
    servers::{SILENT, query},
    site::{DNS, PORT, SERVICE, SHARED, nobody, other},
};
use crate::rig::namespace::Namespace;

const TCP: u8 = 6;
const UDP: u8 = 17;
const TICK: Duration = Duration::from_millis(10);
/// TCP's window in attackers' packets: no socket's packet has this one.
pub const FLOOD_WINDOW: u16 = 1;

/// The kinds of floods that a pod sends all the time.
#[derive(Clone, Copy, Debug)]
pub enum Flood {
    /// Connections to the VPC's own Service, none of which is ever answered.
    Service,
    /// Connections to the Service that the node serves for all VPCs.
    Shared,
    /// As many to an address of nobody: what takes nothing of the others.
    Nobody,
    /// Queries for names whose servers never answer.
    SilentNames,
    /// The same number of queries for names that the node answers alone.
    OwnNames,
    /// A datagram to each address of the network.
    Scan,
    /// Datagrams to the VPC's other pod, each denied by another rule than the one before.
    Denied,
    /// New flows of datagrams to the VPC's other pod, which accepts them.
    Accepted,
}

impl Flood {
    fn packet(self, vni: u8, from: Ipv4Addr, number: u32) -> Vec<u8> {
        // All ports are used except the lowest.
        let port = 1024 + (number % 64_000) as u16;
        match self {
            Self::Service => syn(SocketAddrV4::new(from, port), SERVICE),
            Self::Shared => syn(SocketAddrV4::new(from, port), SHARED),
            Self::Nobody => {
                let to = SocketAddrV4::new(nobody(vni, 1), PORT);
                syn(SocketAddrV4::new(from, port), to)
            }
            Self::SilentNames => ask(SocketAddrV4::new(from, port), number, SILENT),
            Self::OwnNames => ask(SocketAddrV4::new(from, port), number, "hidden"),
            Self::Scan => {
                let payload = udp(port, 9, &[0; 8]);
                Ipv4::new(UDP, from, nobody(vni, number)).around(&payload)
            }
            Self::Denied | Self::Accepted => {
                let to = match self {
                    Self::Denied => 1 + (number % DENIED_PORTS) as u16,
                    _ => PORT,
                };
                let to = SocketAddrV4::new(other(vni, from), to);
                datagram(SocketAddrV4::new(from, port), to, &[0; 8])
            }
        }
    }
}

/// Sends until it is over; returns how many packets it sent.
pub fn send(
    namespace: &Namespace,
    (vni, from): (u8, Ipv4Addr),
    flood: Flood,
    rate: u32,
    is_over: &AtomicBool,
) -> Result<u64> {
    namespace.run(|| {
        let raw = Raw::open()?;
        let start = Instant::now();
        let mut sent = 0_u32;
        while !is_over.load(Ordering::Relaxed) {
            let due = start.elapsed().as_micros() * u128::from(rate) / 1_000_000;
            while u128::from(sent) < due && !is_over.load(Ordering::Relaxed) {
                // A packet for which the pod's own stack has no room is not sent.
                let _ = raw.send(&flood.packet(vni, from, sent));
                sent += 1;
            }
            thread::sleep(TICK);
        }
        Ok(sent.into())
    })
}

/// Returns the first packet of a connection.
fn syn(from: SocketAddrV4, to: SocketAddrV4) -> Vec<u8> {
    let mut segment = from.port().to_be_bytes().to_vec();
    segment.extend(to.port().to_be_bytes());
    segment.extend([0, 0, 0, 1, 0, 0, 0, 0, 0x50, 2]);
    segment.extend(FLOOD_WINDOW.to_be_bytes());
    segment.extend([0; 4]);
    let mut covered = [from.ip().octets(), to.ip().octets()].concat();
    covered.extend([0, TCP, 0, segment.len() as u8]);
    covered.extend(&segment);
    let sum = checksum(&covered).to_be_bytes();
    segment[16..18].copy_from_slice(&sum);
    Ipv4::new(TCP, *from.ip(), *to.ip()).around(&segment)
}

fn ask(from: SocketAddrV4, number: u32, first: &str) -> Vec<u8> {
    let name = format!("n{number}");
    let labels: &[&str] = match first {
        SILENT => &[SILENT, &name, "example"],
        _ => &[&name, first, "svc", "cluster", "local"],
    };
    let query = query(number as u16, labels);
    Ipv4::new(UDP, *from.ip(), *DNS.ip()).around(&udp(from.port(), DNS.port(), &query))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connections_first_packet_has_a_right_checksum() {
        let packet = syn("10.2.0.2:5000".parse().unwrap(), SERVICE);
        let mut covered = packet[12..20].to_vec();
        covered.extend([0, TCP, 0, 20]);
        covered.extend(&packet[20..]);
        assert_eq!(checksum(&covered), 0);
        assert_eq!(checksum(&packet[..20]), 0);
    }

    #[test]
    fn datagrams_meet_all_rules_or_are_flows_of_their_own() {
        let ports = |flood: Flood| {
            let packets = (0..DENIED_PORTS).map(|number| flood.packet(2, Ipv4Addr::new(10, 2, 0, 2), number));
            let packets: Vec<Vec<u8>> = packets.collect();
            assert!(packets.iter().all(|packet| packet[16..20] == [10, 2, 0, 3]));
            [20..22_usize, 22..24].map(|of| {
                let ports = packets.iter().map(|packet| packet[of.clone()].to_vec());
                ports.collect::<std::collections::BTreeSet<_>>().len()
            })
        };
        let all = DENIED_PORTS as usize;
        assert_eq!(ports(Flood::Denied), [all, all]);
        assert_eq!(ports(Flood::Accepted), [all, 1]);
    }

    #[test]
    fn a_scan_meets_another_address_with_each_packet() {
        let packets = (0..1000).map(|number| Flood::Scan.packet(2, Ipv4Addr::new(10, 2, 0, 2), number));
        let seen: std::collections::BTreeSet<Vec<u8>> =
            packets.map(|packet| packet[16..20].to_vec()).collect();
        assert_eq!(seen.len(), 1000);
    }
}
