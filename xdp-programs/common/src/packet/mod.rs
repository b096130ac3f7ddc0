//! Headers as they lie on the wire, and pure functions over them.
//!
//! Invariant: every header is `repr(C)` of `u16` words in network order (raw), so that it can be copied from a frame
//! whose bytes are 2-aligned, as network stacks keep them. No function here touches a frame.

pub mod arp;
pub mod checksum;
pub mod ecn;
pub mod ethernet;
pub mod flow;
pub mod geneve;
pub mod icmp;
pub mod ip;
pub mod ipv4;
pub mod ipv6;
pub mod nd;
pub mod probe;
pub mod tcp;

/// Headers that may be copied from and to frames byte by byte.
///
/// # Safety
/// `repr(C)`, alignment at most 2, integers and arrays only, no padding.
pub unsafe trait Header: Copy {}

// SAFETY: plain arrays of u16.
unsafe impl<const N: usize> Header for [u16; N] {}

/// Returns two raw words as the four bytes of an IPv4 address.
#[inline(always)]
pub const fn bytes4(words: [u16; 2]) -> [u8; 4] {
    let (a, b) = (words[0].to_ne_bytes(), words[1].to_ne_bytes());
    [a[0], a[1], b[0], b[1]]
}

/// Returns the four bytes of an IPv4 address as two raw words.
#[inline(always)]
pub const fn words2(bytes: [u8; 4]) -> [u16; 2] {
    [
        u16::from_ne_bytes([bytes[0], bytes[1]]),
        u16::from_ne_bytes([bytes[2], bytes[3]]),
    ]
}

/// Returns six bytes of a MAC as three raw words.
#[inline(always)]
pub const fn words3(bytes: [u8; 6]) -> [u16; 3] {
    [
        u16::from_ne_bytes([bytes[0], bytes[1]]),
        u16::from_ne_bytes([bytes[2], bytes[3]]),
        u16::from_ne_bytes([bytes[4], bytes[5]]),
    ]
}

/// Returns the bytes of three raw words.
#[inline(always)]
pub const fn bytes6(words: [u16; 3]) -> [u8; 6] {
    let [first, second, third] = words;
    let (first, second, third) = (first.to_ne_bytes(), second.to_ne_bytes(), third.to_ne_bytes());
    [first[0], first[1], second[0], second[1], third[0], third[1]]
}
