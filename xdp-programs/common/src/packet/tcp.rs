//! TCP's fixed header (RFC 9293), as far as resets need it.

use super::{Header, checksum};

pub const FIN: u8 = 0x01;
pub const SYN: u8 = 0x02;
pub const RST: u8 = 0x04;
pub const ACK: u8 = 0x10;
/// Where the word lies in the header whose second byte has the flags.
pub const FLAGS_OFFSET: usize = 12;

/// The 20 bytes as raw words.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TcpHeader {
    pub words: [u16; 10],
}

// SAFETY: repr(C), ten u16.
unsafe impl Header for TcpHeader {}

impl TcpHeader {
    /// Bytes without options.
    pub const LENGTH: usize = 20;

    /// Returns the reset that answers this segment of `length` bytes, header included (RFC 9293 section 3.10.7.1), its
    /// checksum still zero. Nothing answers a reset.
    #[inline(always)]
    pub const fn reset(&self, length: u32) -> Option<Self> {
        let [offset, flags] = self.words[6].to_ne_bytes();
        if flags & RST != 0 {
            return None;
        }
        let (sequence, acknowledged, flags) = if flags & ACK != 0 {
            (self.number(4), 0, RST)
        } else {
            let header = (offset >> 4) as u32 * 4;
            let data = length.wrapping_sub(header) + (flags & SYN != 0) as u32 + (flags & FIN != 0) as u32;
            (0, self.number(2).wrapping_add(data), RST | ACK)
        };

        Some(Self {
            words: [
                self.words[1],
                self.words[0],
                ((sequence >> 16) as u16).to_be(),
                (sequence as u16).to_be(),
                ((acknowledged >> 16) as u16).to_be(),
                (acknowledged as u16).to_be(),
                u16::from_ne_bytes([5 << 4, flags]),
                0,
                0,
                0,
            ],
        })
    }

    /// Returns the same header with its checksum; `pseudo` is the sum of the pseudo header.
    #[inline(always)]
    #[must_use]
    pub const fn with_checksum(mut self, pseudo: u32) -> Self {
        self.words[8] = 0;
        self.words[8] = !checksum::fold(checksum::sum(self.words) + pseudo);
        self
    }

    /// Returns the same header with what a NIC begins with, if the frame leaves the checksum to it.
    #[inline(always)]
    #[must_use]
    pub const fn with_checksum_left(mut self, pseudo: u32) -> Self {
        self.words[8] = checksum::fold(pseudo);
        self
    }

    #[inline(always)]
    const fn number(&self, word: usize) -> u32 {
        (u16::from_be(self.words[word]) as u32) << 16 | u16::from_be(self.words[word + 1]) as u32
    }
}

const _: () = assert!(size_of::<TcpHeader>() == TcpHeader::LENGTH);

#[cfg(test)]
mod tests {
    use super::TcpHeader;

    fn segment(flags: u8) -> TcpHeader {
        let mut words = [0; 10];
        words[0] = 1000_u16.to_be();
        words[1] = 80_u16.to_be();
        words[2] = 0x1234_u16.to_be();
        words[3] = 0xffff_u16.to_be();
        words[5] = 77_u16.to_be();
        words[6] = u16::from_ne_bytes([0x60, flags]);
        TcpHeader { words }
    }

    #[test]
    fn a_reset_is_in_the_window_of_who_gets_it() {
        let answer = segment(0x02).reset(24 + 3).unwrap();
        assert_eq!(answer.words[..2], [80_u16.to_be(), 1000_u16.to_be()]);
        assert_eq!(
            (answer.number(2), answer.number(4)),
            (0, 0x1234_ffff + 4),
            "SYN and 3 bytes"
        );
        assert_eq!(answer.words[6].to_ne_bytes(), [0x50, 0x14]);
        let answer = segment(0x11).reset(24).unwrap();
        assert_eq!(
            (answer.number(2), answer.number(4)),
            (77, 0),
            "what was acknowledged comes next"
        );
        assert_eq!(answer.words[6].to_ne_bytes(), [0x50, 0x04]);
        assert_eq!(segment(0x04).reset(24), None);
        assert_eq!(segment(0x14).reset(24), None);
    }
}
