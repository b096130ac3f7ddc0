//! The answers of an agent to a pod, byte by byte, written apart from the code under test.

use std::net::{Ipv4Addr, Ipv6Addr};

use thuban_testkit::packets::checksum;

use crate::{
    frames::{Packet6, arp, header},
    rows::{Endpoint, ip},
};

const GATEWAY: [u8; 6] = [0x02, 0x54, 0x68, 0x75, 0x62, 0x61];
/// The host's address for pods: 169.254.64.1 and fe80::5468:7562:6101.
pub const HOST: Ipv4Addr = ip(169, 254, 64, 1);
pub const HOST6: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0x5468, 0x7562, 0x6101);
/// The host's other address for pods, which nobody has: 169.254.64.2 and 100::5468:7562:6102.
pub const TRACKED: Ipv4Addr = ip(169, 254, 64, 2);
pub const TRACKED6: Ipv6Addr = Ipv6Addr::new(0x100, 0, 0, 0, 0, 0x5468, 0x7562, 0x6102);
/// The number of bytes of the packet that an error quotes.
const QUOTE: usize = 128;

/// Returns the gateway's answer to the endpoint's ARP request.
pub fn arp_reply(endpoint: Endpoint, target: Ipv4Addr) -> Vec<u8> {
    let mut bytes = arp(GATEWAY, 2, GATEWAY, target, endpoint.address);
    bytes[..6].copy_from_slice(&endpoint.mac());
    bytes[32..38].copy_from_slice(&endpoint.mac());
    bytes
}

/// Returns the gateway's advertisement of the target to an address of the endpoint: from a router, solicited,
/// overrides.
pub fn advertisement(endpoint: Endpoint, source: Ipv6Addr, target: Ipv6Addr) -> Vec<u8> {
    let rest = [&[0xe0, 0, 0, 0][..], &target.octets(), &[2, 1], &GATEWAY].concat();
    let mut bytes = Packet6::udp(GATEWAY, target, source).icmp(136, &rest).bytes();
    bytes[..6].copy_from_slice(&endpoint.mac());
    bytes
}

/// Returns the bytes of an error's ICMP part: type, code, checksum still zero, MTU, quote.
fn message(kind: u8, code: u8, mtu: u16, frame: &[u8]) -> Vec<u8> {
    let mut message = vec![kind, code, 0, 0, 0, 0];
    message.extend(mtu.to_be_bytes());
    message.extend(&frame[14..14 + QUOTE]);
    message
}

/// Returns the answer to a frame of the endpoint that is too big, IPv4.
pub fn too_big(endpoint: Endpoint, frame: &[u8], mtu: u16) -> Vec<u8> {
    let mut icmp = message(3, 4, mtu, frame);
    let sum = checksum(&icmp);
    icmp[2..4].copy_from_slice(&sum.to_be_bytes());
    let mut answer = [&endpoint.mac()[..], &GATEWAY, &[8, 0]].concat();
    answer.extend(header(0, icmp.len(), 0, 64, 1, HOST, endpoint.address));
    answer.extend(icmp);
    answer
}

/// Returns the same, IPv6.
pub fn too_big6(endpoint: Endpoint, frame: &[u8], mtu: u16) -> Vec<u8> {
    let quote = &message(2, 0, mtu, frame)[4..];
    let mut from_host = Packet6::udp(GATEWAY, HOST6, endpoint.v6).icmp(2, quote);
    from_host.hop_limit = 64;
    let mut answer = from_host.bytes();
    answer[..6].copy_from_slice(&endpoint.mac());
    answer
}
