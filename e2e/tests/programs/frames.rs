//! Frames byte by byte, written apart from the code under test.

use std::net::{Ipv4Addr, Ipv6Addr};

use thuban_e2e::rig::traffic::checksum;

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
    /// A datagram to port 80.
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

/// An IPv4 header without options, checksum right.
pub fn header(
    traffic_class: u8,
    payload: usize,
    fragment: u16,
    ttl: u8,
    protocol: u8,
    from: Ipv4Addr,
    to: Ipv4Addr,
) -> Vec<u8> {
    let mut header = vec![0x45, traffic_class];
    header.extend((20 + payload as u16).to_be_bytes());
    header.extend([0, 0]);
    header.extend(fragment.to_be_bytes());
    header.extend([ttl, protocol, 0, 0]);
    header.extend(from.octets());
    header.extend(to.octets());
    let sum = checksum(&header);
    header[10..12].copy_from_slice(&sum.to_be_bytes());
    header
}

pub fn udp(source: u16, destination: u16, payload: &[u8]) -> Vec<u8> {
    let mut bytes = source.to_be_bytes().to_vec();
    bytes.extend(destination.to_be_bytes());
    bytes.extend((8 + payload.len() as u16).to_be_bytes());
    bytes.extend([0, 0]);
    bytes.extend(payload);
    bytes
}

pub fn tcp(flags: u8) -> Vec<u8> {
    let mut bytes = vec![0x1f, 0x90, 0x80, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0x50, flags];
    bytes.extend([0xff, 0xff, 0, 0, 0, 0]);
    bytes
}

/// Geneve around a frame, everything but the outer Ethernet header as droplets write it.
#[derive(Clone)]
pub struct Tunnel {
    pub from: Ipv4Addr,
    pub to: Ipv4Addr,
    pub vni: u32,
    pub ttl: u8,
    pub traffic_class: u8,
    pub source_port: u16,
    /// Version and option length, flags.
    pub first: [u8; 2],
    pub protocol: u16,
    pub options: Vec<u8>,
}

impl Tunnel {
    pub fn new(from: Ipv4Addr, to: Ipv4Addr, vni: u32) -> Self {
        Self {
            from,
            to,
            vni,
            ttl: 64,
            traffic_class: 0,
            source_port: 50000,
            first: [0, 0],
            protocol: 0x6558,
            options: Vec::new(),
        }
    }

    /// With options, their length announced.
    pub fn with_options(mut self, options: &[u8]) -> Self {
        self.first[0] = (options.len() / 4) as u8;
        self.options = options.to_vec();
        self
    }

    pub fn around(&self, ethernet: [u8; 12], inner: &[u8]) -> Vec<u8> {
        let mut geneve = self.first.to_vec();
        geneve.extend(self.protocol.to_be_bytes());
        geneve.extend((self.vni << 8).to_be_bytes());
        geneve.extend(&self.options);
        geneve.extend(inner);
        let udp = udp(self.source_port, 6081, &geneve);
        let mut frame = ethernet.to_vec();
        frame.extend([8, 0]);
        frame.extend(header(
            self.traffic_class,
            udp.len(),
            0x4000,
            self.ttl,
            17,
            self.from,
            self.to,
        ));
        frame.extend(udp);
        frame
    }
}

/// ARP: operation, sender's MAC and address, target's.
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

/// A frame of another ethertype.
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
    /// A datagram to port 80.
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

    /// The same with an extension header of 8 bytes before a datagram.
    pub fn extended(&self, kind: u8) -> Self {
        let payload = [&[17, 0, 1, 4, 0, 0, 0, 0][..], &udp(1, 80, b"hello")].concat();
        self.clone().carrying(kind, &payload)
    }

    /// With ICMPv6 of a type, whose checksum is written; `rest` follows it. Hop limit 255.
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

/// `::ffff:10.0.1.<host>`, which is how tables key 10.0.1.<host>.
pub fn mapped(host: u8) -> Ipv6Addr {
    Ipv4Addr::new(10, 0, 1, host).to_ipv6_mapped()
}
