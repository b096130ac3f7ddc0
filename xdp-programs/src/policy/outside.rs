//! Judges packets between an endpoint of this droplet and addresses outside of its VPC, by the endpoint's own set.
//!
//! Invariant: nobody vouches for such packets, so FLOWS has no entry of them.

use thuban_common::{
    counters::Counter,
    packet::{ethernet, ip::IpPacket, ipv4},
    policy::{DENIAL_EGRESS, DENIAL_OUTSIDE, DenialKey, PEER_OUTSIDE, of_vpc, point},
    tables::AttachmentEntry,
};

use super::{
    Case,
    describe::{Shown, describe},
    read_server,
    sets::{BY_DEFAULT, PASSES, denying, policy_denies, rank},
};
use crate::{denials, fragments, frame::Frame, rewrite::Flow};

/// Judges a packet of a client outside by the ingress set of an endpoint of this droplet. `flow`: as the endpoint gets
/// it.
#[inline(never)]
pub fn lets_in(vni: u32, interface: u32, protocol: u8, flow: &Flow) -> Result<(), Counter> {
    let case = Case::get(vni).ok_or(Counter::PolicyUnreadable)?;
    if !read_server(case, interface) {
        return Err(Counter::NoAttachment);
    }
    if case.server.ingress_set == 0 {
        return Ok(());
    }
    case.key.source = flow.source;
    case.key.destination = flow.destination;
    case.key.ports = flow.ports;
    case.key.protocol = protocol;
    let set = of_vpc(vni, case.server.ingress_set);
    let point = point(protocol, u16::from_be(flow.ports[1]));
    let Some(rank) = denying(set, PEER_OUTSIDE, &case.key.source, point) else {
        return Ok(());
    };
    case.denial = DenialKey {
        set,
        interface,
        rank,
        flags: DENIAL_OUTSIDE,
    };
    denials::note(&case.denial, &case.key, false);
    Err(Counter::PolicyIngress)
}

/// What an endpoint's egress set says of a packet that leaves its VPC.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Out {
    Passes,
    /// No rule accepts it.
    Isolated,
    /// A rule denies it, or none could be asked: the packet can't be read, or the set isn't known.
    Denied,
}

/// Judges a packet that leaves its VPC, of an endpoint whose agent is at tc.
#[inline(never)]
pub fn lets_out<F: Frame>(frame: &mut F, sender: &AttachmentEntry, packet: &IpPacket) -> Out {
    let Some(case) = Case::get(sender.vni) else {
        return Out::Denied;
    };
    match describe(frame, packet, ethernet::LENGTH as u32, case) {
        Ok(Shown::Here) => {
            let set = of_vpc(sender.vni, sender.egress_set);
            // SAFETY: the address is valid for the call.
            let verdict =
                unsafe { policy_denies(set, PEER_OUTSIDE, &raw const case.key.destination, case.point) };
            if packet.is_fragment() {
                fragments::note(verdict == PASSES);
            }
            if verdict != PASSES && may_ask(case) {
                case.denial = DenialKey {
                    set,
                    interface: sender.ifindex,
                    rank: rank(verdict),
                    flags: DENIAL_EGRESS | DENIAL_OUTSIDE,
                };
                denials::note(&case.denial, &case.key, false);
            }
            match verdict {
                PASSES => Out::Passes,
                BY_DEFAULT => Out::Isolated,
                _ => Out::Denied,
            }
        }
        Ok(Shown::Earlier) if fragments::passes() => Out::Passes,
        // The stack judges a datagram by its first fragment.
        _ => Out::Denied,
    }
}

/// Whether a packet that leaves the VPC may be a question. TCP and SCTP say so themselves, and datagrams may be
/// either, except answers to an echo and errors.
#[inline(always)]
fn may_ask(case: &Case) -> bool {
    let [source, destination] = case.key.ports;
    let asks = match case.key.protocol {
        ipv4::TCP | ipv4::SCTP => case.signal.opens,
        ipv4::UDP => true,
        _ => source != 0 || destination == 0,
    };
    asks && !case.is_error
}
