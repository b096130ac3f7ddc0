//! Random frames: assembled from parts that mean something to the tables, then sometimes damaged.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use thuban_common::policy::{STAMP_FRONT, STAMP_GUARDED, STAMP_REPLY};
use thuban_testkit::packets::checksum;

use crate::{
    answers::{HOST, HOST6, TRACKED, TRACKED6},
    fixture::stamp_bytes,
    frames::{Packet, Packet6, Tunnel, arp, header, mapped, other, probe, udp},
    rows::{
        ATTACHED, Endpoint, HERE, LOCALS, OTHERS, REMOTES, SECOND, SECRET, SPREAD, STRAY, THIRD, UNREACHED,
        ip, ip6,
    },
    world::Role,
};

const ETHERNET: [u8; 12] = [2, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2];
const SPECIAL: [Ipv4Addr; 8] = [
    ip(0, 0, 0, 0),
    ip(127, 0, 0, 1),
    ip(224, 0, 0, 1),
    ip(255, 255, 255, 255),
    ip(8, 8, 8, 8),
    HERE,
    SECOND,
    ip(169, 254, 64, 2),
];
const SPECIAL6: [Ipv6Addr; 6] = [
    Ipv6Addr::UNSPECIFIED,
    Ipv6Addr::LOCALHOST,
    Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1),
    Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1),
    Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1),
    Ipv6Addr::new(0, 0, 0, 0, 0, 0, 0x0a00, 0x010c),
];
const PORTS: [u16; 9] = [67, 68, 546, 547, 6081, 80, 53, 1, 40000];

/// The generator xorshift64* (Vigna 2016).
pub struct Random {
    state: u64,
}

impl Random {
    pub const fn new(seed: u64) -> Self {
        Self { state: seed | 1 }
    }

    pub const fn u32(&mut self) -> u32 {
        self.state ^= self.state >> 12;
        self.state ^= self.state << 25;
        self.state ^= self.state >> 27;
        (self.state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32) as u32
    }

    const fn u8(&mut self) -> u8 {
        self.u32() as u8
    }

    const fn below(&mut self, limit: usize) -> usize {
        self.u32() as usize % limit
    }

    /// Returns true once in this many times.
    const fn once_in(&mut self, times: usize) -> bool {
        self.below(times) == 0
    }

    fn one_of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    fn bytes(&mut self, length: usize) -> Vec<u8> {
        (0..length).map(|_| self.u8()).collect()
    }

    /// Returns a frame and the role that gets it.
    pub fn frame(&mut self) -> (Role, Vec<u8>) {
        let (role, mut frame) = if self.once_in(2) {
            let endpoint = if self.once_in(30) {
                STRAY
            } else {
                self.one_of(&ATTACHED)
            };
            (Role::Agent(endpoint.index), self.of_pod(endpoint))
        } else {
            (Role::Transit, self.of_wire())
        };
        if self.once_in(6) {
            self.damage(&mut frame);
        }
        if self.once_in(16) {
            frame.truncate(14 + self.below(frame.len() - 13));
        }
        (role, frame)
    }

    /// Changes some bytes of the headers.
    fn damage(&mut self, frame: &mut [u8]) {
        for _ in 0..=self.below(3) {
            let place = self.below(frame.len().min(120));
            frame[place] = match self.below(2) {
                0 => self.u8(),
                _ => frame[place] ^ 1 << self.below(8),
            };
        }
    }

    fn of_pod(&mut self, endpoint: Endpoint) -> Vec<u8> {
        let mac = if self.once_in(40) { [2; 6] } else { endpoint.mac() };
        match self.below(40) {
            0 => {
                let ethertype = self.one_of(&[0x8100, 0x88a8, 0x88cc, 0x0805]);
                other(mac, ethertype, &[0; 60])
            }
            1 | 2 => self.arp(mac, endpoint),
            3..=5 => self.solicitation(mac, endpoint),
            6..=23 => {
                let from = if self.once_in(12) {
                    self.v4(endpoint.vni)
                } else {
                    endpoint.address
                };
                let to = self.v4(endpoint.vni);
                self.v4_packet(mac, from, to)
            }
            _ => {
                let from = if self.once_in(12) {
                    self.v6(endpoint.vni)
                } else {
                    endpoint.v6
                };
                let to = self.v6(endpoint.vni);
                self.v6_packet(mac, from, to)
            }
        }
    }

    fn of_wire(&mut self) -> Vec<u8> {
        if self.once_in(60) {
            return self.fragmentation_needed();
        }
        if self.once_in(30) {
            return self.probe();
        }
        let mac = [2, 0, 0, 0, 0, 9];
        let vni = if self.once_in(30) {
            999
        } else {
            self.one_of(&[100, 100, 100, 101, 102, 102, 103])
        };
        let mut inner = if self.once_in(60) {
            let ethertype = self.one_of(&[0x8100, 0x0806]);
            other(mac, ethertype, &[0; 60])
        } else if self.once_in(2) {
            let (from, to) = (self.v4(vni), self.v4(vni));
            self.v4_packet(mac, from, to)
        } else {
            let (from, to) = (self.v6(vni), self.v6(vni));
            self.v6_packet(mac, from, to)
        };
        if self.once_in(2) {
            let endpoint = self.one_of(&ATTACHED);
            let mut stamp = endpoint.stamp();
            if self.once_in(8) {
                stamp.egress_set = 1 + u32::from(self.u8() % 4);
            }
            stamp.flags ^= self.one_of(&[0, 0, 0, 0, STAMP_REPLY, STAMP_GUARDED, STAMP_FRONT]);
            inner[..12].copy_from_slice(&stamp_bytes(stamp));
        }
        let sender = self.droplet();
        let to = if self.once_in(30) { THIRD } else { HERE };
        let mut tunnel = Tunnel::new(sender, to, vni);
        tunnel.traffic_class = self.u8();
        tunnel.ttl = self.one_of(&[64, 64, 64, 64, 2, 1, 0, 255]);
        if self.once_in(6) {
            let options = self.options();
            tunnel = tunnel.with_options(&options);
        }
        if self.once_in(50) {
            tunnel.first[1] = self.one_of(&[0x80, 0x40, 0xc0, 0x01]);
        }
        let mut frame = tunnel.around(ETHERNET, &inner);
        match self.below(60) {
            // This makes outer fragments, and options out of the bytes that follow.
            0 => frame[20..22].copy_from_slice(&self.one_of(&[[0x20, 0], [0x20, 4], [0, 4], [0x80, 0]])),
            1 => frame[14] = 0x40 + self.u8() % 16,
            _ => {}
        }
        frame
    }

    fn probe(&mut self) -> Vec<u8> {
        let sender = self.droplet();
        let mut tunnel = Tunnel::probe(sender, HERE);
        tunnel.ttl = self.one_of(&[64, 64, 64, 2, 1, 0]);
        let kind = self.one_of(&[1, 1, 2, 2, 3, 3, 0, 4]);
        let secret = if self.once_in(4) { 1 } else { SECRET };
        tunnel.around(ETHERNET, &probe(kind, secret))
    }

    fn droplet(&mut self) -> Ipv4Addr {
        let known = [SECOND, SECOND, SECOND, THIRD, THIRD, THIRD, UNREACHED, UNREACHED];
        match self.below(25) {
            0 => HERE,
            1 => ip(192, 0, 2, 99),
            _ => self.one_of(&known),
        }
    }

    /// Returns options that mostly end where they say.
    fn options(&mut self) -> Vec<u8> {
        let mut options = Vec::new();
        for _ in 0..self.below(5) {
            let words = self.below(8);
            let kind = if self.once_in(20) { 0x80 } else { self.u8() & 0x7f };
            options.extend([1, 2, kind, words as u8]);
            options.extend(self.bytes(4 * words));
        }
        if self.once_in(10) {
            options.extend([1, 2, 3, self.u8() & 0x1f]);
        }
        options
    }

    fn fragmentation_needed(&mut self) -> Vec<u8> {
        let from = if self.once_in(6) { THIRD } else { HERE };
        let to = self.droplet();
        let quoted = Tunnel::new(from, to, 100).around([0; 12], &[0; 40]).split_off(14);
        let code = if self.once_in(6) { self.u8() & 7 } else { 4 };
        let mtu = self.one_of(&[0, 68, 626, 700, 1280, 1400, 1499, 1500, 9000]);
        let mut icmp = [&[3, code, 0, 0, 0, 0][..], &u16::to_be_bytes(mtu), &quoted[..60]].concat();
        let sum = checksum(&icmp);
        icmp[2..4].copy_from_slice(&sum.to_be_bytes());
        let mut frame = [&ETHERNET[..], &[8, 0]].concat();
        frame.extend(header(0, icmp.len(), 0, 64, 1, ip(198, 51, 100, 1), HERE));
        frame.extend(icmp);
        frame
    }

    fn arp(&mut self, mac: [u8; 6], endpoint: Endpoint) -> Vec<u8> {
        let sender = if self.once_in(4) {
            self.v4(endpoint.vni)
        } else {
            endpoint.address
        };
        let target = if self.once_in(4) {
            endpoint.address
        } else {
            self.v4(endpoint.vni)
        };
        let operation = if self.once_in(6) { 2 } else { 1 };
        let mut frame = arp(mac, operation, endpoint.mac(), sender, target);
        let padding = self.below(20);
        frame.extend(self.bytes(padding));
        frame
    }

    fn solicitation(&mut self, mac: [u8; 6], endpoint: Endpoint) -> Vec<u8> {
        let target = if self.once_in(6) {
            endpoint.v6
        } else {
            self.v6(endpoint.vni)
        };
        let from = if self.once_in(4) {
            self.v6(endpoint.vni)
        } else {
            endpoint.v6
        };
        let rest = [&[0; 4][..], &target.octets(), &[1, 1], &mac].concat();
        let to = if self.once_in(3) {
            target
        } else {
            Ipv6Addr::new(0xff02, 0, 0, 0, 0, 1, 0xff00, 1)
        };
        let kind = if self.once_in(6) { 133 + self.u8() % 5 } else { 135 };
        let mut packet = Packet6::udp(mac, from, to).icmp(kind, &rest);
        if self.once_in(8) {
            packet.hop_limit = 254;
        }
        packet.bytes()
    }

    /// Returns an address: one that some row knows, mostly of the VPC, or a special one, or one of a network.
    fn v4(&mut self, vni: u32) -> Ipv4Addr {
        match self.below(20) {
            0 if self.once_in(2) => TRACKED,
            0 => HOST,
            1 => self.one_of(&SPECIAL),
            2..=5 => ip(10, second_byte(vni), self.u8() % 5, self.u8()),
            _ => {
                let is_of_any = self.once_in(8);
                let known: Vec<Ipv4Addr> = known()
                    .filter(|(number, _)| is_of_any || *number == vni)
                    .filter_map(|(_, address)| match address {
                        IpAddr::V4(address) => Some(address),
                        IpAddr::V6(_) => None,
                    })
                    .collect();
                self.one_of_or(&known, SPECIAL[0])
            }
        }
    }

    fn v6(&mut self, vni: u32) -> Ipv6Addr {
        match self.below(20) {
            0 if self.once_in(2) => TRACKED6,
            0 => HOST6,
            1 if self.once_in(2) => mapped(self.one_of(&[11, 12, 50, 70])),
            1 => self.one_of(&SPECIAL6),
            2..=5 => ip6(
                u16::from(second_byte(vni)),
                u16::from(self.u8() % 5),
                u16::from(self.u8()),
            ),
            _ => {
                let is_of_any = self.once_in(8);
                let known: Vec<Ipv6Addr> = known()
                    .filter(|(number, _)| is_of_any || *number == vni)
                    .filter_map(|(_, address)| match address {
                        IpAddr::V6(address) => Some(address),
                        IpAddr::V4(_) => None,
                    })
                    .collect();
                self.one_of_or(&known, SPECIAL6[0])
            }
        }
    }

    fn one_of_or<T: Copy>(&mut self, choices: &[T], otherwise: T) -> T {
        if choices.is_empty() {
            otherwise
        } else {
            self.one_of(choices)
        }
    }

    /// Returns the beginning of a transport header, and more.
    fn payload(&mut self) -> Vec<u8> {
        let length = match self.below(12) {
            0 => 0,
            1 => self.below(12),
            2 => 540 + self.below(60),
            3 => 1190 + self.below(280),
            _ => 8 + self.below(60),
        };
        let (from, to) = (self.one_of(&PORTS), self.one_of(&PORTS));
        let mut bytes = udp(from, to, &[0; 8]);
        if self.once_in(3) {
            // The bytes are an ICMP type; and flags, if the packet is TCP.
            bytes[0] = self.one_of(&[0, 3, 8, 11, 1, 2, 128, 129, 131, 133, 134, 135, 136, 137]);
        }
        bytes[13] = self.one_of(&[0x02, 0x12, 0x10, 0x04, 0xc2, 0x00]);
        bytes.resize(length.max(16), 0);
        bytes.truncate(length);
        bytes
    }

    fn v4_packet(&mut self, mac: [u8; 6], from: Ipv4Addr, to: Ipv4Addr) -> Vec<u8> {
        let protocol = self.one_of(&[6, 6, 17, 17, 17, 1, 1, 132, 58, 50]);
        let payload = self.payload();
        let mut packet = Packet::udp(mac, from, to).carrying(protocol, &payload);
        packet.traffic_class = self.u8();
        packet.ttl = self.u8();
        packet.fragment = if self.once_in(8) {
            self.one_of(&[0, 0x2000, 0x2010, 0x0010, 0x8000, 0x6000])
        } else {
            0x4000
        };
        let mut frame = packet.bytes();
        // No later fragment has a first one. The checksum is made right for it.
        let number = u16::from(self.u8()) << 1 | u16::from(packet.fragment & 0x1fff != 0);
        frame[18..20].copy_from_slice(&number.to_be_bytes());
        frame[24..26].fill(0);
        let sum = checksum(&frame[14..34]);
        frame[24..26].copy_from_slice(&sum.to_be_bytes());
        match self.below(30) {
            // This makes options out of the payload's first bytes.
            0 | 1 => frame[14] = 0x45 + self.u8() % 11,
            2 => frame[14] = 0x40 + self.u8() % 16,
            3 => frame[16..18].copy_from_slice(&[0, 18 + self.u8() % 30]),
            _ => {}
        }
        frame
    }

    fn v6_packet(&mut self, mac: [u8; 6], from: Ipv6Addr, to: Ipv6Addr) -> Vec<u8> {
        let next = self.one_of(&[
            6, 6, 6, 17, 17, 17, 17, 58, 58, 58, 0, 43, 44, 51, 60, 59, 132, 1, 135, 253,
        ]);
        let mut payload = self.payload();
        if next == 44 && payload.len() >= 8 {
            let is_later = payload[2] != 0 || payload[3] & 0xf8 != 0;
            payload[7] = payload[7] & !1 | u8::from(is_later);
        }
        let mut packet = Packet6::udp(mac, from, to).carrying(next, &payload);
        packet.traffic_class = self.u8();
        packet.hop_limit = self.one_of(&[64, 255, 1]);
        let mut frame = packet.bytes();
        if self.once_in(30) {
            frame[18..20].copy_from_slice(&[0, self.u8() % 40]);
        }
        frame
    }
}

/// Returns the addresses of all rows, each with its VPC.
fn known() -> impl Iterator<Item = (u32, IpAddr)> {
    let own = ATTACHED.into_iter().flat_map(|endpoint| {
        let Endpoint { vni, address, v6, .. } = endpoint;
        [(vni, IpAddr::V4(address)), (vni, IpAddr::V6(v6))]
    });
    let local = LOCALS.into_iter().map(|(vni, address, _)| (vni, address));
    let remote = REMOTES.into_iter().map(|(_, vni, address, _)| (vni, address));
    let others = OTHERS.into_iter().map(|address| (SPREAD.vni, address));
    own.chain(local).chain(remote).chain(others)
}

/// Returns the second byte of the addresses of a VPC.
const fn second_byte(vni: u32) -> u8 {
    match vni {
        101 => 5,
        102 => 7,
        _ => 0,
    }
}
