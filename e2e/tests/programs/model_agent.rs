//! The model of an agent.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use thuban_common::{
    counters::Counter,
    tables::{
        GENEVE_PORT, LEAST_PATH_MTU, SUBNET_BY_NODE, SUBNET_CLOSED, SUBNET_PRIVATE, VPC_EGRESS,
        VPC_HOST_ACCESS,
    },
};

use crate::{
    answers::{HOST, HOST6, TRACKED, TRACKED6, advertisement, arp_reply, too_big, too_big6},
    fixture::Expect,
    model::{
        Model, OVERHEAD, Packet, Refusal, TO_TC, attached, elsewhere, expected, first, member, reaches,
        subnet, vpc,
    },
    rows::{DROPLETS, Endpoint, HERE, Subnet},
    world::Hook,
};

/// A frame of the pod behind an interface.
struct Sent<'a> {
    endpoint: Endpoint,
    hook: Hook,
    frame: &'a [u8],
}

impl Model {
    pub fn agent(&self, index: u8, hook: Hook, frame: &[u8]) -> Expect {
        let Some(endpoint) = attached(index) else {
            return Expect::Drop(Counter::NoAttachment);
        };
        let sent = Sent {
            endpoint,
            hook,
            frame,
        };
        expected(self.sent(&sent))
    }

    fn sent(&self, sent: &Sent) -> Result<Expect, Refusal> {
        let (endpoint, frame) = (sent.endpoint, sent.frame);
        if frame[6..12] != endpoint.mac() {
            return Err(Counter::SpoofedMac);
        }
        match [frame[12], frame[13]] {
            [0x08, 0x06] if sent.hook == Hook::Xdp => Ok(TO_TC),
            [0x08, 0x06] => arp(endpoint, frame),
            [0x81, 0x00] | [0x88, 0xa8] => Err(Counter::VlanTagged),
            ethertype => self.packet(sent, &Packet::read(ethertype, &frame[14..])?),
        }
    }

    fn is_own(&self, endpoint: Endpoint, address: IpAddr) -> bool {
        address == IpAddr::V4(endpoint.address)
            || self
                .locals
                .get(&(endpoint.vni, address))
                .is_some_and(|local| local.interface == endpoint.index)
    }

    fn packet(&self, sent: &Sent, packet: &Packet) -> Result<Expect, Refusal> {
        let endpoint = sent.endpoint;
        if let IpAddr::V6(to) = packet.destination
            && let Some(outcome) = self.discovery(sent, packet, to)
        {
            return outcome;
        }
        if !self.is_own(endpoint, packet.source) {
            return Err(Counter::SpoofedSource);
        }
        // Discovery may be behind extension headers.
        if packet.is_v6() && packet.has_options && sent.frame[21] == 255 {
            return Err(Counter::RouterForbidden);
        }
        if packet.destination == IpAddr::V4(HOST) || packet.destination == IpAddr::V6(HOST6) {
            return if has_host_access(endpoint) || is_answer(packet)? {
                to_host(packet)
            } else {
                Err(Counter::HostForbidden)
            };
        }
        if packet.destination == IpAddr::V4(TRACKED) || packet.destination == IpAddr::V6(TRACKED6) {
            return if is_for_conntrack(packet)? {
                to_host(packet)
            } else {
                Err(Counter::HostForbidden)
            };
        }
        if !is_one_hosts(packet.destination) {
            return Err(Counter::NotUnicast);
        }
        let lease = if packet.is_v6() { [547, 546] } else { [67, 68] };
        if packet.protocol == 17 && packet.ports == lease {
            return Err(Counter::RouterForbidden);
        }
        // Only tc can tell whether fragments are answers.
        let is_asked = self.asked.borrow().contains(&endpoint.index);
        if packet.is_fragment && sent.hook == Hook::Xdp && is_asked {
            return Ok(TO_TC);
        }
        let Some(network) = subnet(endpoint.vni, packet.destination) else {
            let is_open = has_host_access(endpoint) || goes_out(endpoint) && !is_droplets(packet.destination);
            return if is_open && !is_private(endpoint, packet.source) {
                to_host(packet)
            } else {
                Err(Counter::OutsideVpc)
            };
        };
        match network.4 {
            SUBNET_BY_NODE => return to_host(packet),
            SUBNET_CLOSED => return Err(Counter::OutsideVpc),
            _ => {}
        }
        if let Some(local) = self.locals.get(&(endpoint.vni, packet.destination)) {
            if sent.hook == Hook::Xdp && !local.takes_xdp {
                return Ok(TO_TC);
            }
            let is_own = local.interface == endpoint.index;
            if !is_own && !self.admits(endpoint.vni, endpoint.stamp(), *local, packet, sent.hook)? {
                return Ok(TO_TC);
            }
            return Ok(Expect::Local { mac: local.mac });
        }
        let (droplet, counter) = self.way(endpoint, network, packet)?;
        let size = (sent.frame.len() - 14) as u32;
        let mtu = self.mtu(droplet);
        if size + OVERHEAD > mtu.max(LEAST_PATH_MTU) {
            return too_large(sent, packet, mtu - OVERHEAD);
        }
        if !reaches(sent.hook, droplet) {
            return Ok(TO_TC);
        }
        Ok(Expect::Encapsulated {
            to: droplet,
            vni: endpoint.vni,
            traffic_class: packet.class,
            counter,
        })
    }

    /// Chooses the way: a direct row, else the bouncer (own network) or divider; roles of this droplet run at once.
    fn way(
        &self,
        endpoint: Endpoint,
        (_, _, _, network, _, bouncers): Subnet,
        packet: &Packet,
    ) -> Result<(Ipv4Addr, Counter), Refusal> {
        let key = (endpoint.vni, packet.destination);
        if let Some(droplet) = self.direct.get(&key) {
            return Ok((elsewhere(Some(*droplet))?, Counter::SentDirect));
        }
        let is_own_network = network != 0 && network == endpoint.network;
        if !is_own_network {
            let (_, dividers) = vpc(endpoint.vni).ok_or(Counter::UnknownVni)?;
            let divider = member(dividers, packet).ok_or(Counter::NoDivider)?;
            if divider != HERE {
                return Ok((divider, Counter::SentToDivider));
            }
        }
        let bouncer = member(bouncers, packet).ok_or(Counter::NoBouncer)?;
        if bouncer == HERE {
            let home = elsewhere(self.bouncer.get(&key).copied())?;
            return Ok((home, Counter::Bounced));
        }
        let counter = if is_own_network {
            Counter::SentToBouncer
        } else {
            Counter::Divided
        };
        Ok((bouncer, counter))
    }

    /// Returns the result of neighbour and multicast discovery; `None` if the packet is neither.
    fn discovery(&self, sent: &Sent, packet: &Packet, to: Ipv6Addr) -> Option<Result<Expect, Refusal>> {
        let kind = match packet.protocol {
            0 if to.is_multicast() => return Some(Err(Counter::Ipv6Discovery)),
            58 if packet.rest.len() >= 2 => packet.rest[0],
            _ => return None,
        };
        match kind {
            134 | 137 => Some(Err(Counter::RouterForbidden)),
            135 if sent.hook == Hook::Xdp => Some(Ok(TO_TC)),
            135 => Some(self.solicited(sent, packet)),
            133 | 136 => Some(Err(Counter::Ipv6Discovery)),
            _ if to.is_multicast() => Some(Err(Counter::Ipv6Discovery)),
            _ => None,
        }
    }

    fn solicited(&self, sent: &Sent, packet: &Packet) -> Result<Expect, Refusal> {
        let IpAddr::V6(source) = packet.source else {
            return Err(Counter::Ipv6Discovery);
        };
        // The conditions: hop limit, code, a target and a MAC.
        let is_valid = sent.frame[21] == 255
            && packet.rest.len() >= 32
            && packet.rest[1] == 0
            && packet.length >= 40 + 32
            && !source.is_unspecified();
        if !is_valid {
            return Err(Counter::Ipv6Discovery);
        }
        if !source.is_unicast_link_local() && !self.is_own(sent.endpoint, packet.source) {
            return Err(Counter::SpoofedSource);
        }
        let target: Ipv6Addr = first::<16>(&packet.rest[8..])?.into();
        let is_nobodys = target.is_multicast() || target.to_ipv4_mapped().is_some();
        if is_nobodys || self.is_own(sent.endpoint, target.into()) {
            return Err(Counter::Ipv6Discovery);
        }
        let mut bytes = advertisement(sent.endpoint, source, target);
        bytes.extend(sent.frame.get(bytes.len()..).unwrap_or_default());
        Ok(Expect::Reply {
            bytes,
            counter: Counter::NeighbourReplies,
        })
    }
}

fn arp(endpoint: Endpoint, frame: &[u8]) -> Result<Expect, Refusal> {
    let body: [u8; 28] = first(&frame[14..])?;
    let address = |at: usize| Ipv4Addr::new(body[at], body[at + 1], body[at + 2], body[at + 3]);
    let (sender, target) = (address(14), address(24));
    if body[..6] != [0, 1, 8, 0, 6, 4] {
        return Err(Counter::BadHeader);
    }
    if body[8..14] != endpoint.mac() || sender != endpoint.address && !sender.is_unspecified() {
        return Err(Counter::SpoofedArp);
    }
    if body[6..8] != [0, 1] || sender.is_unspecified() || target == endpoint.address {
        return Err(Counter::ArpIgnored);
    }
    let mut bytes = arp_reply(endpoint, target);
    bytes.extend(&frame[42..]);
    Ok(Expect::Reply {
        bytes,
        counter: Counter::ArpReplies,
    })
}

fn goes_out(endpoint: Endpoint) -> bool {
    vpc(endpoint.vni).is_some_and(|(flags, _)| flags & VPC_EGRESS != 0)
}

/// Whether the endpoint's network is private, or has no row.
fn is_private(endpoint: Endpoint, source: IpAddr) -> bool {
    subnet(endpoint.vni, source)
        .is_none_or(|(.., network, flags, _)| network != endpoint.network || flags & SUBNET_PRIVATE != 0)
}

fn is_droplets(address: IpAddr) -> bool {
    DROPLETS.iter().any(|droplet| address == *droplet)
}

fn has_host_access(endpoint: Endpoint) -> bool {
    vpc(endpoint.vni).is_some_and(|(flags, _)| flags & VPC_HOST_ACCESS != 0)
}

/// Whether the packet is an answer: TCP that opens nothing, ICMP echo replies and errors. A packet that hides its kind
/// is none.
fn is_answer(packet: &Packet) -> Result<bool, Refusal> {
    if packet.is_fragment || packet.has_options {
        return Ok(false);
    }
    let [kind, _] = first(&packet.rest)?;
    Ok(match packet.protocol {
        6 if packet.length < if packet.is_v6() { 60 } else { 40 } => false,
        6 => {
            let header: [u8; 14] = first(&packet.rest)?;
            let (syn, ack) = (header[13] & 0x02 != 0, header[13] & 0x10 != 0);
            !syn || ack
        }
        1 if !packet.is_v6() => matches!(kind, 0 | 3 | 11 | 12),
        58 if packet.is_v6() => matches!(kind, 1..=4 | 129),
        _ => false,
    })
}

/// Whether an ICMP error is about a packet to its own sender.
fn quotes_own(packet: &Packet) -> bool {
    let quoted = match packet.source {
        IpAddr::V4(_) => packet.rest.get(24..28).map(<[u8]>::to_vec),
        IpAddr::V6(_) => packet.rest.get(32..48).map(<[u8]>::to_vec),
    };
    let own = match packet.source {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    };
    quoted == Some(own)
}

/// Whether conntrack judges the packet: UDP, SCTP, ICMP errors about packets to the pod, and fragments of IPv6.
fn is_for_conntrack(packet: &Packet) -> Result<bool, Refusal> {
    match packet.protocol {
        6 => Ok(false),
        17 | 132 => Ok(true),
        _ if packet.is_v6() && packet.is_fragment => Ok(true),
        _ => Ok(is_answer(packet)? && quotes_own(packet)),
    }
}

/// Judges a packet to the host. Nobody may send Geneve to droplets in the host's name, also not in fragments.
fn to_host(packet: &Packet) -> Result<Expect, Refusal> {
    let passed = Ok(Expect::Pass(Some(Counter::ToHost)));
    // Droplets take it only by IPv4.
    if packet.protocol != 17 || packet.is_v6() {
        return passed;
    }
    if packet.has_options {
        return Err(Counter::GeneveForbidden);
    }
    if packet.is_later_fragment {
        return passed;
    }
    match first::<8>(&packet.rest) {
        Ok([_, _, high, low, ..]) if u16::from_be_bytes([high, low]) == GENEVE_PORT => {
            Err(Counter::GeneveForbidden)
        }
        Err(_) if packet.is_fragment => Err(Counter::GeneveForbidden),
        Err(reason) => Err(reason),
        Ok(_) => passed,
    }
}

fn is_one_hosts(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => {
            let [first, ..] = address.octets();
            first != 0 && !address.is_loopback() && first < 224
        }
        IpAddr::V6(address) => {
            let is_low = address.segments()[..6] == [0; 6];
            !address.is_multicast() && !address.is_unicast_link_local() && !is_low
        }
    }
}

/// Tells the path's MTU to the pod, unless no error may answer its packet.
fn too_large(sent: &Sent, packet: &Packet, mtu: u32) -> Result<Expect, Refusal> {
    if sent.hook == Hook::Xdp {
        return Ok(TO_TC);
    }
    let kind = packet.rest.first().copied().unwrap_or(0);
    let is_error = match packet.protocol {
        _ if packet.has_options || packet.is_fragment => false,
        1 => kind != 0 && kind != 8,
        58 => kind < 128,
        _ => false,
    };
    if is_error || packet.is_later_fragment && !packet.is_v6() {
        return Err(Counter::TooBig);
    }
    let bytes = match packet.source {
        IpAddr::V4(address) => {
            let asker = Endpoint {
                address,
                ..sent.endpoint
            };
            too_big(asker, sent.frame, mtu as u16)
        }
        IpAddr::V6(v6) => {
            let asker = Endpoint { v6, ..sent.endpoint };
            too_big6(asker, sent.frame, mtu.max(1280) as u16)
        }
    };
    Ok(Expect::Reply {
        bytes,
        counter: Counter::TooBigAnswered,
    })
}
