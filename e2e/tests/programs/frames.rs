//! Frames byte by byte, written apart from the code under test; [`thuban_testkit::packets`] has the parts for IPv4 and
//! Geneve.

use std::net::{Ipv4Addr, Ipv6Addr};

use thuban_testkit::packets::checksum;
pub use thuban_testkit::packets::{Tunnel, header, probe, udp};

/// An IPv4 packet in an Ethernet frame.
#[derive(Clone)]
pub struct Packet {
    pub source_mac: [u8; 6],
    pub from: Ipv4Addr,
    pub to: Ipv4Addr,
    pub protocol: u8,
    pub fragment: u16,
    pub ttl: u8,
    pub traffic_class: u8,
    pub payload: Vec<u8>,
}

impl Packet {
    /// Returns a datagram to port 80.
    pub fn udp(source_mac: [u8; 6], from: Ipv4Addr, to: Ipv4Addr) -> Self {
        let payload = udp(1234, 80, b"hello");
        Self {
            source_mac,
            from,
            to,
            protocol: 17,
            fragment: 0x4000,
            ttl: 63,
            traffic_class: 0,
            payload,
        }
    }

    pub fn carrying(mut self, protocol: u8, payload: &[u8]) -> Self {
        self.protocol = protocol;
        self.payload = payload.to_vec();
        self
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut frame = vec![0x02, 0x54, 0x68, 0x75, 0x62, 0x61];
        frame.extend(self.source_mac);
        frame.extend([8, 0]);
        let header = header(
            self.traffic_class,
            self.payload.len(),
            self.fragment,
            self.ttl,
            self.protocol,
            self.from,
            self.to,
        );
        frame.extend(header);
        frame.extend(&self.payload);
        frame
    }
}

pub fn tcp(flags: u8) -> Vec<u8> {
    let mut bytes = vec![0x1f, 0x90, 0x80, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0x50, flags];
    bytes.extend([0xff, 0xff, 0, 0, 0, 0]);
    bytes
}

/// Returns an ARP frame: operation, sender's MAC and address, target's.
pub fn arp(source_mac: [u8; 6], operation: u8, mac: [u8; 6], sender: Ipv4Addr, target: Ipv4Addr) -> Vec<u8> {
    let mut frame = vec![0xff; 6];
    frame.extend(source_mac);
    frame.extend([8, 6, 0, 1, 8, 0, 6, 4, 0, operation]);
    frame.extend(mac);
    frame.extend(sender.octets());
    frame.extend([0; 6]);
    frame.extend(target.octets());
    frame
}

/// Returns a frame of another ethertype.
pub fn other(source_mac: [u8; 6], ethertype: u16, payload: &[u8]) -> Vec<u8> {
    let mut frame = vec![0x33, 0x33, 0, 0, 0, 1];
    frame.extend(source_mac);
    frame.extend(ethertype.to_be_bytes());
    frame.extend(payload);
    frame
}

/// An IPv6 packet in an Ethernet frame.
#[derive(Clone)]
pub struct Packet6 {
    pub source_mac: [u8; 6],
    pub from: Ipv6Addr,
    pub to: Ipv6Addr,
    pub next: u8,
    pub hop_limit: u8,
    pub traffic_class: u8,
    pub payload: Vec<u8>,
}

impl Packet6 {
    /// Returns a datagram to port 80.
    pub fn udp(source_mac: [u8; 6], from: Ipv6Addr, to: Ipv6Addr) -> Self {
        Self {
            source_mac,
            from,
            to,
            next: 17,
            hop_limit: 63,
            traffic_class: 0,
            payload: udp(1234, 80, b"hello"),
        }
    }

    pub fn carrying(mut self, next: u8, payload: &[u8]) -> Self {
        self.next = next;
        self.payload = payload.to_vec();
        self
    }

    /// Returns the same with an extension header of 8 bytes before a datagram.
    pub fn extended(&self, kind: u8) -> Self {
        let payload = [&[17, 0, 1, 4, 0, 0, 0, 0][..], &udp(1, 80, b"hello")].concat();
        self.clone().carrying(kind, &payload)
    }

    /// Makes it ICMPv6 of a type, and writes its checksum; `rest` follows the checksum. Hop limit 255.
    pub fn icmp(mut self, kind: u8, rest: &[u8]) -> Self {
        let mut message = vec![kind, 0, 0, 0];
        message.extend(rest);
        let sum = checksum(&[&self.pseudo_header(message.len(), 58), &message[..]].concat());
        message[2..4].copy_from_slice(&sum.to_be_bytes());
        self.hop_limit = 255;
        self.carrying(58, &message)
    }

    fn pseudo_header(&self, length: usize, next: u8) -> Vec<u8> {
        let mut bytes = [self.from.octets(), self.to.octets()].concat();
        bytes.extend((length as u32).to_be_bytes());
        bytes.extend([0, 0, 0, next]);
        bytes
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut frame = vec![0x02, 0x54, 0x68, 0x75, 0x62, 0x61];
        frame.extend(self.source_mac);
        frame.extend([
            0x86,
            0xdd,
            0x60 | self.traffic_class >> 4,
            self.traffic_class << 4,
            0,
            0,
        ]);
        frame.extend((self.payload.len() as u16).to_be_bytes());
        frame.extend([self.next, self.hop_limit]);
        frame.extend(self.from.octets());
        frame.extend(self.to.octets());
        frame.extend(&self.payload);
        frame
    }
}

/// Returns `::ffff:10.0.1.<host>`, the key of 10.0.1.<host> in tables.
pub fn mapped(host: u8) -> Ipv6Addr {
    Ipv4Addr::new(10, 0, 1, host).to_ipv6_mapped()
}
