//! The model of policy. All sets of the world allow everything, so that a packet is denied only if its sender's set is
//! not known, or if it hides its ports.

use thuban_common::{
    counters::Counter,
    policy::{STAMP_GUARDED, STAMP_REPLY, Stamp},
};

use crate::{
    model::{Local, Model, Packet, Refusal, attached},
    rows::{ATTACHED, ingress_set},
    world::Hook,
};

impl Model {
    /// Whether a packet is let in to an endpoint of this droplet; false: XDP leaves that to tc.
    pub fn admits(
        &self,
        vni: u32,
        stamp: Stamp,
        local: Local,
        packet: &Packet,
        hook: Hook,
    ) -> Result<bool, Refusal> {
        let is_guarded = stamp.flags & STAMP_GUARDED != 0;
        if !local.has_policy && stamp.egress_set == 0 && !is_guarded {
            return Ok(true);
        }
        if packet.is_fragment && hook == Hook::Xdp {
            return Ok(false);
        }
        let opens = opens(packet)?;
        if stamp.flags & STAMP_REPLY != 0 && !opens {
            return Ok(true);
        }
        // A set knows no direction: a broken stamp may name the ingress set of an endpoint, which allows it, too.
        let is_known = ATTACHED.iter().any(|endpoint| {
            let own = endpoint.stamp();
            endpoint.vni == vni && [own.egress_set, ingress_set(own)].contains(&stamp.egress_set)
        });
        if stamp.egress_set != 0 && !is_known {
            return Err(Counter::PolicyEgress);
        }
        let to = attached(local.interface).map_or(0, |endpoint| endpoint.stamp().egress_set);
        if is_guarded || to != 0 {
            self.asked.borrow_mut().insert(local.interface);
        }
        Ok(true)
    }
}

/// Whether a packet opens a connection. Refuses one that hides its ports.
fn opens(packet: &Packet) -> Result<bool, Refusal> {
    if packet.has_options {
        return Err(Counter::PolicyUnreadable);
    }
    if packet.is_fragment {
        return fragment(packet).map(|()| false);
    }
    let icmp = if packet.is_v6() { 58 } else { 1 };
    match packet.protocol {
        6 => {
            let flags = packet.rest.get(13).ok_or(Counter::Truncated)?;
            Ok(flags & 0x16 == 0x02)
        }
        132 => {
            let header = packet.rest.get(..14).ok_or(Counter::Truncated)?;
            Ok(header[12] == 1)
        }
        protocol if protocol == icmp && packet.rest.len() < 2 => Err(Counter::Truncated),
        _ => Ok(false),
    }
}

/// Refuses a fragment that shows no ports, unless its protocol has none. No later fragment has a first one here.
fn fragment(packet: &Packet) -> Result<(), Refusal> {
    const UNREADABLE: Result<(), Refusal> = Err(Counter::PolicyUnreadable);
    let (protocol, is_later, header) = if packet.is_v6() {
        let Some(header) = packet.rest.get(..8) else {
            return UNREADABLE;
        };
        let is_later = header[2] != 0 || header[3] & 0xf8 != 0;
        (header[0], is_later, 48)
    } else {
        (packet.protocol, packet.is_later_fragment, 20)
    };
    let is_extension = packet.is_v6() && matches!(protocol, 0 | 43 | 51 | 60 | 135 | 139 | 140);
    match protocol {
        6 | 132 => UNREADABLE,
        _ if is_extension => UNREADABLE,
        17 if is_later => UNREADABLE,
        17 => {
            let begin = if packet.is_v6() { 8 } else { 0 };
            let has_header = packet.rest.len() >= begin + 8 && packet.length >= header + 8;
            if has_header { Ok(()) } else { UNREADABLE }
        }
        _ => Ok(()),
    }
}
