//! Who may say what: checks of senders as pure functions. The tables are looked up by the caller.

use crate::{
    packet::ipv4::{ICMP, TCP, UDP},
    tables::DropletAddress,
};

/// Whether a droplet may send packets of an inner source. `row` is where a row says that the source lives,
/// `relays` whether the droplet is a bouncer of the destination's network or a divider of the VPC, which pass on what
/// others sent.
#[inline(always)]
pub fn may_send(row: Option<DropletAddress>, outer_source: DropletAddress, relays: bool) -> bool {
    match row {
        Some(home) => home == outer_source || relays,
        None => true,
    }
}

/// First words of a transport header, raw: ports, or ICMP type and code; TCP's flags apart.
#[derive(Clone, Copy, Debug)]
pub struct Transport {
    pub ports: [u16; 2],
    /// TCP: the byte of flags.
    pub tcp_flags: u8,
}

/// Whether a packet of a pod to the host can only be an answer: TCP that opens nothing, UDP to an ephemeral port,
/// ICMP echo replies and errors. Without state this is all that can be said; the host's own stack refuses what no
/// socket waits for.
#[inline(always)]
pub const fn is_reply(protocol: u8, transport: Transport) -> bool {
    const SYN_ACK: u8 = 0x12;
    const SYN: u8 = 0x02;
    match protocol {
        TCP => transport.tcp_flags & SYN_ACK != SYN,
        UDP => u16::from_be(transport.ports[1]) >= 32768,
        ICMP => matches!(transport.ports[0].to_ne_bytes()[0], 0 | 3 | 11 | 12),
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
        let tcp = |flags| {
            is_reply(
                6,
                Transport {
                    ports: [0; 2],
                    tcp_flags: flags,
                },
            )
        };
        assert!(!tcp(0x02) && !tcp(0xc2) && tcp(0x12) && tcp(0x10) && tcp(0x04) && tcp(0x11));
        let udp = |port: u16| {
            is_reply(
                17,
                Transport {
                    ports: [0, port.to_be()],
                    tcp_flags: 0,
                },
            )
        };
        assert!(!udp(53) && !udp(6081) && !udp(32767) && udp(32768) && udp(60999));
        let icmp = |kind| {
            is_reply(
                1,
                Transport {
                    ports: [u16::from_ne_bytes([kind, 0]), 0],
                    tcp_flags: 0,
                },
            )
        };
        assert!(icmp(0) && icmp(3) && icmp(11) && !icmp(8) && !icmp(5) && !icmp(13));
        assert!(!is_reply(
            132,
            Transport {
                ports: [0; 2],
                tcp_flags: 0
            }
        ));
    }
}
