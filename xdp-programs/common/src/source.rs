//! Checks of senders as pure functions. The tables are looked up by the caller.

use crate::{
    packet::{
        ipv4::{ICMP, TCP},
        ipv6::ICMPV6,
    },
    tables::DropletAddress,
};

/// Whether a droplet may send packets of an inner source. `row` is the droplet on which a row says that the source
/// lives. `relays` says whether the sender is a bouncer of the destination's network or a divider of the VPC, which
/// pass on packets of others.
#[inline(always)]
pub fn may_send(row: Option<DropletAddress>, outer_source: DropletAddress, relays: bool) -> bool {
    match row {
        Some(home) => home == outer_source || relays,
        None => true,
    }
}

/// The fields that tell answers from questions: the family with ICMP's type, or TCP's byte of flags.
#[derive(Clone, Copy, Debug)]
pub struct Transport {
    pub is_v6: bool,
    pub icmp_type: u8,
    pub tcp_flags: u8,
}

/// Whether a packet of a pod to the host can only be an answer: TCP that opens nothing, ICMP echo replies and errors.
/// No more can be known without state. The host's own stack refuses packets that no socket waits for. UDP and SCTP are
/// conntrack's to judge: their answers go to another address ([`crate::tables::HOST_TRACKED`]).
#[inline(always)]
pub const fn is_reply(protocol: u8, transport: Transport) -> bool {
    const SYN_ACK: u8 = 0x12;
    const SYN: u8 = 0x02;
    match protocol {
        TCP => transport.tcp_flags & SYN_ACK != SYN,
        ICMP if !transport.is_v6 => matches!(transport.icmp_type, 0 | 3 | 11 | 12),
        ICMPV6 if transport.is_v6 => matches!(transport.icmp_type, 1..=4 | 129),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::{Transport, is_reply, may_send};

    const HERE: [u8; 4] = [10, 0, 0, 1];
    const THERE: [u8; 4] = [10, 0, 0, 2];

    #[test]
    fn a_row_binds_a_source_to_its_droplet() {
        assert!(may_send(None, HERE, false));
        assert!(may_send(Some(HERE), HERE, false));
        assert!(!may_send(Some(THERE), HERE, false));
        assert!(may_send(Some(THERE), HERE, true), "bouncers and dividers pass on");
    }

    #[test]
    fn only_answers_reach_the_host() {
        let says = |protocol, icmp_type, tcp_flags| {
            is_reply(
                protocol,
                Transport {
                    is_v6: protocol == 58,
                    icmp_type,
                    tcp_flags,
                },
            )
        };
        let of_other_family = Transport {
            is_v6: true,
            icmp_type: 0,
            tcp_flags: 0,
        };
        assert!(!is_reply(1, of_other_family));
        let tcp = |flags| says(6, 0, flags);
        assert!(!tcp(0x02) && !tcp(0xc2) && tcp(0x12) && tcp(0x10) && tcp(0x04) && tcp(0x11));
        let icmp = |kind| says(1, kind, 0);
        assert!(icmp(0) && icmp(3) && icmp(11) && !icmp(8) && !icmp(5) && !icmp(13));
        let icmpv6 = |kind| says(58, kind, 0);
        assert!(icmpv6(129) && icmpv6(1) && icmpv6(2) && !icmpv6(128) && !icmpv6(134) && !icmpv6(137));
        assert!(!says(17, 0, 0) && !says(132, 0, 0));
    }
}
