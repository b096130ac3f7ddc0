//! Frames for programs: UDP over IPv4, plain as a pod sends it, and in Geneve as a droplet sends it.

use std::net::Ipv4Addr;

use thuban_testkit::packets::checksum;

/// Bytes of a datagram: with its headers it is the smallest frame of Ethernet.
const PAYLOAD: usize = 22;
const GENEVE: u16 = 6081;
/// The protocol of all datagrams here.
pub const UDP: u8 = 17;
/// The port that datagrams come from.
pub const SOURCE_PORT: u16 = 1234;
/// The port that datagrams go to.
pub const PORT: u16 = 4321;

fn ipv4(from: Ipv4Addr, to: Ipv4Addr, ttl: u8, payload: &[u8]) -> Vec<u8> {
    let mut header = vec![0x45, 0];
    header.extend((20 + payload.len() as u16).to_be_bytes());
    header.extend([0, 0, 0x40, 0, ttl, UDP, 0, 0]);
    header.extend(from.octets());
    header.extend(to.octets());
    let sum = checksum(&header);
    header[10..12].copy_from_slice(&sum.to_be_bytes());
    header.extend(payload);
    header
}

fn udp(source: u16, destination: u16, payload: &[u8]) -> Vec<u8> {
    let mut datagram = source.to_be_bytes().to_vec();
    datagram.extend(destination.to_be_bytes());
    datagram.extend((8 + payload.len() as u16).to_be_bytes());
    datagram.extend([0, 0]);
    datagram.extend(payload);
    datagram
}

fn ethernet(to: [u8; 6], from: [u8; 6], packet: &[u8]) -> Vec<u8> {
    [&to[..], &from, &[8, 0], packet].concat()
}

/// Returns a datagram in an Ethernet frame.
pub fn plain(to_mac: [u8; 6], from_mac: [u8; 6], from: Ipv4Addr, to: Ipv4Addr) -> Vec<u8> {
    let datagram = udp(SOURCE_PORT, PORT, &[0x55; PAYLOAD]);
    ethernet(to_mac, from_mac, &ipv4(from, to, 64, &datagram))
}

/// Returns a frame in Geneve between droplets.
pub fn tunnelled(macs: [[u8; 6]; 2], from: Ipv4Addr, to: Ipv4Addr, vni: u32, inner: &[u8]) -> Vec<u8> {
    let mut geneve = vec![0, 0, 0x65, 0x58];
    geneve.extend((vni << 8).to_be_bytes());
    geneve.extend(inner);
    let [to_mac, from_mac] = macs;
    ethernet(
        to_mac,
        from_mac,
        &ipv4(from, to, 64, &udp(50000, GENEVE, &geneve)),
    )
}
