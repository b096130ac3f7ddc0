//! The model of transit.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use thuban_common::{
    counters::Counter,
    policy::{STAMP_FRONT, Stamp},
    tables::{LEAST_PATH_MTU, SUBNET_BOUNCER_HERE, SUBNET_CLOSED, SUBNET_FOREIGN, VPC_DIVIDER_HERE},
};

use crate::{
    fixture::Expect,
    model::{Local, Model, Packet, Refusal, TO_TC, elsewhere, expected, first, member, reaches, subnet, vpc},
    rows::{ASKED, DROPLETS, HERE, MTU, SECRET},
    world::Hook,
};

/// The mask of more fragments and offset.
const FRAGMENT: u16 = 0x3fff;
const OFFSET: u16 = 0x1fff;
/// The size of outer Ethernet, IP, UDP and Geneve without options.
const OUTER: usize = 14 + 20 + 8 + 8;
/// The Geneve header of a probe.
const PROBE: [u8; 8] = [0, 0x80, 0x88, 0xb5, 0, 0, 0, 0];

fn address(bytes: &[u8], at: usize) -> Ipv4Addr {
    Ipv4Addr::new(bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3])
}

/// Reads what the inner Ethernet header says of the sender.
fn stamp(header: [u8; 14]) -> Stamp {
    if header[0] & 0xf != 6 {
        return Stamp::default();
    }
    Stamp {
        class: u32::from_be_bytes([0, header[7], header[8], header[9]]),
        egress_set: u32::from_be_bytes([0, header[1], header[2], header[3]]),
        flags: u16::from(header[6] & 0x1c),
    }
}

/// The kinds of an outer packet for this droplet.
enum Outer {
    Foreign,
    Geneve,
    /// A packet for Geneve's port, in a form that no droplet sends.
    Malformed,
    Icmp,
}

fn outer(frame: &[u8]) -> Outer {
    if frame[12..14] != [8, 0] || frame.len() < 34 || address(frame, 30) != HERE {
        return Outer::Foreign;
    }
    let fragment = u16::from_be_bytes([frame[20], frame[21]]) & FRAGMENT;
    let is_plain = frame[14] == 0x45 && u16::from_be_bytes([frame[16], frame[17]]) >= 20 && fragment == 0;
    let udp = 14 + usize::from(frame[14] & 15) * 4;
    let is_to_port = |at: usize| {
        frame
            .get(at + 2..at + 8)
            .is_some_and(|udp| udp[..2] == 6081_u16.to_be_bytes())
    };
    match frame[23] {
        17 if is_plain && is_to_port(34) => Outer::Geneve,
        17 if !is_plain && fragment & OFFSET == 0 && is_to_port(udp) => Outer::Malformed,
        1 if is_plain => Outer::Icmp,
        _ => Outer::Foreign,
    }
}

impl Model {
    pub fn transit(&mut self, hook: Hook, frame: &[u8]) -> Expect {
        match outer(frame) {
            Outer::Geneve => expected(self.arrived(hook, frame)),
            Outer::Malformed => expected(Err(Counter::BadHeader)),
            Outer::Icmp if hook == Hook::Tc => Expect::Pass(self.learn(&frame[34..])),
            _ => Expect::Pass(None),
        }
    }

    /// Learns from ICMP "fragmentation needed" about Geneve from this droplet to another one.
    fn learn(&mut self, icmp: &[u8]) -> Option<Counter> {
        let quoted = icmp.get(8..36)?;
        let droplet = address(quoted, 16);
        let mtu = u32::from(u16::from_be_bytes([icmp[6], icmp[7]]));
        let is_about_us = icmp[..2] == [3, 4]
            && quoted[0] & 15 == 5
            && quoted[9] == 17
            && address(quoted, 12) == HERE
            && quoted[22..24] == 6081_u16.to_be_bytes();
        if !is_about_us || !DROPLETS.contains(&droplet) || mtu == 0 || mtu >= MTU {
            return None;
        }
        self.paths.insert(droplet, mtu.max(LEAST_PATH_MTU));
        Some(Counter::PathMtuLearnt)
    }

    fn arrived(&self, hook: Hook, frame: &[u8]) -> Result<Expect, Refusal> {
        let sender = address(frame, 26);
        if sender == HERE || !DROPLETS.contains(&sender) {
            return Err(Counter::UnknownDroplet);
        }
        let geneve: [u8; 8] = first(&frame[42..])?;
        if geneve == PROBE {
            return probe(hook, sender, frame);
        }
        let length = options(geneve, &frame[OUTER..])?;
        let vni = u32::from_be_bytes([0, geneve[4], geneve[5], geneve[6]]);
        let inner = &frame[(OUTER + length).min(frame.len())..];
        let ethernet: [u8; 14] = first(inner)?;
        let packet = Packet::read([ethernet[12], ethernet[13]], &inner[14..])?;
        let said = stamp(ethernet);
        if said.flags & STAMP_FRONT != 0 {
            return fronted(hook, (vni, said), length, &packet);
        }
        let (vpc_flags, dividers) = vpc(vni).ok_or(Counter::UnknownVni)?;
        let destination = (vni, packet.destination);
        let network = subnet(vni, packet.destination);

        // A packet may come from the droplet where a row says that its source lives. Otherwise only a droplet that
        // passes on others' packets may send it; to a divider a bouncer of the source's network may too. Without a row
        // the source must at least be an address of the VPC.
        let source = (vni, packet.source);
        let is_here = self.locals.contains_key(&source);
        let home = self.bouncer.get(&source).or_else(|| self.direct.get(&source));
        let is_of_vpc = subnet(vni, packet.source).is_some_and(|(.., flags, _)| flags & SUBNET_FOREIGN == 0);
        if !is_here && home.is_none() && !is_of_vpc {
            return Err(Counter::SourceMismatch);
        }
        let is_foreign = is_here || home.is_some_and(|home| *home != sender);
        let passes_on = dividers.contains(&sender)
            || network.is_some_and(|(.., bouncers)| bouncers.contains(&sender))
            || self.forwarders.get(&destination) == Some(&sender)
            || vpc_flags & VPC_DIVIDER_HERE != 0
                && subnet(vni, packet.source).is_some_and(|(.., bouncers)| bouncers.contains(&sender));
        if is_foreign && !passes_on {
            return Err(Counter::SourceMismatch);
        }

        if let Some(local) = self.locals.get(&destination) {
            if !self.admits(vni, said, *local, &packet, hook)? {
                return Ok(TO_TC);
            }
            return deliver(*local, vni, frame[15], &packet, inner, OUTER + length);
        }
        let next = self.next(vni, vpc_flags, sender, &packet)?;
        if frame[22] <= 1 {
            return Err(Counter::TtlExpired);
        }
        Ok(if reaches(hook, next.0) {
            Expect::Hop {
                to: next.0,
                counter: next.1,
            }
        } else {
            TO_TC
        })
    }

    /// Chooses the next droplet: a forward row, else the bouncer's role, else the divider's.
    fn next(
        &self,
        vni: u32,
        vpc_flags: u32,
        sender: Ipv4Addr,
        packet: &Packet,
    ) -> Result<(Ipv4Addr, Counter), Refusal> {
        let key = (vni, packet.destination);
        let (droplet, counter) = if let Some(droplet) = self.forward.get(&key) {
            (elsewhere(Some(*droplet))?, Counter::Forwarded)
        } else {
            let (.., flags, bouncers) = subnet(vni, packet.destination).ok_or(Counter::NoEndpoint)?;
            let is_bouncer = flags & SUBNET_BOUNCER_HERE != 0;
            if !is_bouncer {
                if vpc_flags & VPC_DIVIDER_HERE == 0 {
                    return Err(Counter::NoEndpoint);
                }
                let bouncer = member(bouncers, packet).ok_or(Counter::NoBouncer)?;
                if bouncer != HERE {
                    return Ok((bouncer, Counter::Divided));
                }
            }
            (elsewhere(self.bouncer.get(&key).copied())?, Counter::Bounced)
        };
        if droplet == sender {
            return Err(Counter::WouldReturn);
        }
        Ok((droplet, counter))
    }
}

/// Judges a packet that a front sent, or an answer to one. This droplet knows no front.
fn fronted(
    hook: Hook,
    (vni, said): (u32, Stamp),
    options: usize,
    packet: &Packet,
) -> Result<Expect, Refusal> {
    if options != 0 {
        return Err(Counter::BadHeader);
    }
    if hook == Hook::Xdp {
        return Ok(TO_TC);
    }
    if said.class & 0xffff == 3 {
        return Err(Counter::FrontAnswerUnknown);
    }
    let is_outside = subnet(vni, packet.source).is_none_or(|(.., flags, _)| flags & SUBNET_CLOSED != 0);
    let shows_transport = !packet.is_fragment && !packet.has_options;
    let is_icmp = shows_transport && packet.protocol == if packet.is_v6() { 58 } else { 1 };
    let has_ports = shows_transport && matches!(packet.protocol, 6 | 17 | 132);
    if is_icmp && is_outside && may_be_client(packet.source) {
        return Err(Counter::FrontErrorUnknown);
    }
    if !has_ports || !is_outside || !may_be_client(packet.source) {
        return Err(Counter::SourceMismatch);
    }
    if packet.protocol != 17 {
        first::<14>(&packet.rest)?;
    }
    Err(Counter::FrontUnknown)
}

/// Whether a host outside of the nodes may have an address.
fn may_be_client(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => {
            let first = v4.octets()[0];
            first != 0 && first != 127 && first < 224 && !v4.is_link_local() && !DROPLETS.contains(&v4)
        }
        IpAddr::V6(v6) => {
            let is_low = v6.segments()[..6] == [0; 6];
            let is_tracked = v6 == Ipv6Addr::new(0x100, 0, 0, 0, 0, 0x5468, 0x7562, 0x6102);
            !v6.is_multicast() && !v6.is_unicast_link_local() && !is_low && !is_tracked
        }
    }
}

/// Judges a probe. A question becomes an answer. A message of transitd that wants a question becomes a question. An
/// answer is noted.
fn probe(hook: Hook, sender: Ipv4Addr, frame: &[u8]) -> Result<Expect, Refusal> {
    let probe: [u8; 12] = first(&frame[OUTER..])?;
    let is_asked = ASKED.contains(&sender) && probe[4..] == SECRET.to_ne_bytes();
    let (kind, counter) = match probe[..2] {
        [0, 2] => (3, Counter::ProbesAnswered),
        [0, 1] if is_asked => (2, Counter::ProbesSent),
        [0, 3] if is_asked => return Ok(Expect::Taken(Counter::ProbesHeard)),
        [0, 1 | 3] => return Err(Counter::ProbeUnasked),
        _ => return Err(Counter::BadHeader),
    };
    if frame[22] <= 1 {
        return Err(Counter::TtlExpired);
    }
    let to = sender;
    Ok(if reaches(hook, to) {
        Expect::Turned { to, kind, counter }
    } else {
        TO_TC
    })
}

/// Returns the number of bytes of Geneve's options, none of them critical.
fn options(geneve: [u8; 8], behind: &[u8]) -> Result<usize, Refusal> {
    let is_control = geneve[1] & 0x80 != 0;
    if geneve[0] >> 6 != 0 || is_control || geneve[2..4] != [0x65, 0x58] {
        return Err(Counter::BadHeader);
    }
    if geneve[1] & 0x40 != 0 {
        return Err(Counter::CriticalOption);
    }
    let length = usize::from(geneve[0] & 0x3f) * 4;
    let mut at = 0;
    while at < length {
        let option: [u8; 4] = first(behind.get(at..).unwrap_or_default())?;
        if option[2] & 0x80 != 0 {
            return Err(Counter::CriticalOption);
        }
        at += 4 + usize::from(option[3] & 0x1f) * 4;
    }
    if at == length {
        Ok(length)
    } else {
        Err(Counter::BadHeader)
    }
}

/// Delivers the packet to the endpoint, with the outer congestion mark combined with the inner (RFC 6040).
fn deliver(
    local: Local,
    vni: u32,
    outer_class: u8,
    packet: &Packet,
    inner: &[u8],
    length: usize,
) -> Result<Expect, Refusal> {
    const CONGESTED: u8 = 3;
    let mark = match (outer_class & 3, packet.class & 3) {
        (CONGESTED, 0) => return Err(Counter::CongestionUnknown),
        (CONGESTED, _) => CONGESTED,
        (1, 2) => 1,
        (_, inside) => inside,
    };
    let mac = local.mac;
    if mark == packet.class & 3 {
        return Ok(Expect::Delivered { mac, length, vni });
    }
    let mut inner = inner.to_vec();
    if packet.is_v6() {
        inner[15] = inner[15] & 0xcf | mark << 4;
    } else {
        // This is equation 3 of RFC 1624, so that a wrong checksum stays wrong.
        let old = u16::from_be_bytes([inner[14], inner[15]]);
        inner[15] = inner[15] & 0xfc | mark;
        let new = u16::from_be_bytes([inner[14], inner[15]]);
        let checksum = u16::from_be_bytes([inner[24], inner[25]]);
        let mut sum = u32::from(!checksum) + u32::from(!old) + u32::from(new);
        while sum > 0xffff {
            sum = (sum & 0xffff) + (sum >> 16);
        }
        inner[24..26].copy_from_slice(&(!(sum as u16)).to_be_bytes());
    }
    Ok(Expect::DeliveredAs { inner, mac, vni })
}
