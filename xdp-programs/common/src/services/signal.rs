//! What a packet says of its connection.

use super::{FINISHED, RESET, SEEN};
use crate::packet::ipv4;

/// The meaning of a transport header's first bytes for its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Signal {
    /// The packet opens a connection: TCP SYN alone, SCTP INIT.
    pub opens: bool,
    /// The packet, as an answer, proves that a packet was received: TCP SYN-ACK or RST, any of UDP and SCTP.
    pub decides: bool,
    /// The packet, as a client's, is answered by a reset if the client never got an answer: a TCP ACK. As a backend's,
    /// it is sent to a client that showed what only an answer tells: an SCTP chunk but INIT, INIT ACK, ABORT and
    /// SHUTDOWN COMPLETE.
    pub confirms: bool,
    /// The bits of [`super::ConnectionEntry::state`] that the packet sets.
    pub state: u16,
}

impl Signal {
    /// Where the two bytes of a transport header lie that [`Self::read`] reads.
    pub const OFFSET: usize = 12;

    /// Reads the two bytes of a transport header at [`Self::OFFSET`], as they are in memory.
    #[inline(always)]
    pub const fn read(protocol: u8, word: u16) -> Self {
        let [first, second] = word.to_ne_bytes();
        match protocol {
            ipv4::UDP => Self::DATAGRAM,
            ipv4::TCP => Self::of_tcp(second),
            _ => Self::of_sctp(first),
        }
    }

    /// Returns the signal of TCP's byte of flags.
    #[inline(always)]
    const fn of_tcp(flags: u8) -> Self {
        let (finishes, resets) = (flags & 1 != 0, flags & 4 != 0);
        Self {
            opens: flags & 0x16 == 0x02,
            decides: flags & 0x12 == 0x12 || resets,
            confirms: flags & 0x16 == 0x10,
            state: SEEN | if finishes { FINISHED } else { 0 } | if resets { RESET } else { 0 },
        }
    }

    /// Returns the signal of an SCTP packet's first chunk (RFC 9260 section 3.2).
    #[inline(always)]
    const fn of_sctp(chunk: u8) -> Self {
        let state = match chunk {
            6 => RESET,
            7 | 8 | 14 => FINISHED,
            _ => 0,
        };
        Self {
            opens: chunk == 1,
            decides: true,
            confirms: !matches!(chunk, 1 | 2 | 6 | 14),
            state: SEEN | state,
        }
    }

    /// The signal of a datagram.
    pub const DATAGRAM: Self = Self {
        opens: false,
        decides: true,
        confirms: false,
        state: SEEN,
    };
}

#[cfg(test)]
mod tests {
    use super::{FINISHED, RESET, SEEN, Signal};

    #[test]
    fn signals_of_tcp_and_sctp() {
        let tcp = Signal::of_tcp;
        assert!(tcp(0x02).opens && tcp(0xc2).opens && !tcp(0x12).opens && !tcp(0x06).opens);
        assert!(tcp(0x12).decides && tcp(0x14).decides && !tcp(0x10).decides && !tcp(0x02).decides);
        assert_eq!(tcp(0x11).state, SEEN | FINISHED);
        assert_eq!(tcp(0x14).state, SEEN | RESET);
        let sctp = Signal::of_sctp;
        assert!(sctp(1).opens && !sctp(2).opens);
        assert_eq!(
            (sctp(0).state, sctp(6).state, sctp(7).state),
            (SEEN, SEEN | RESET, SEEN | FINISHED)
        );
    }
}
