//! Lists of ranges of ports, by which a set's rules say what is decided: keys and entries of LISTS.

use super::decision::Decision;
use crate::packet::ipv4::{SCTP, TCP, UDP};

/// Key of LISTS: a part of a list.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ListKey {
    pub list: u32,
    /// 0 is the first part, which leads to the others.
    pub part: u32,
}

/// LISTS[(list, part)]: ranges in ascending order, none touched by another. A list with more than [`RANGES`] ranges is
/// a tree: the ranges of its inner parts lead to further parts, which hold all ranges within.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListEntry {
    pub count: u32,
    /// Whether the ranges lead to parts (1), or say what is decided (0).
    pub leads: u32,
    pub ranges: [PortRange; RANGES],
}

impl ListEntry {
    /// Returns a part with these ranges, at most [`RANGES`].
    #[cfg(any(test, feature = "user"))]
    pub fn new(of: &[PortRange], leads: u32) -> Self {
        let mut ranges = [PortRange::default(); RANGES];
        ranges[..of.len()].copy_from_slice(of);
        Self {
            count: of.len() as u32,
            leads,
            ranges,
        }
    }
}

/// A range of [`point`]s and what is decided there.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct PortRange {
    pub first: u32,
    /// The last one is in the range.
    pub last: u32,
    /// The [`Decision`]; in an inner part, the number of the part.
    pub decision: u32,
}

/// Ranges in a part of a list.
pub const RANGES: usize = 10;
/// The most parts on the way to a range.
pub const DEPTH: usize = 4;
/// The most ranges of a list.
pub const MAX_RANGES: usize = RANGES.pow(DEPTH as u32);
/// All points: any protocol and port.
pub const LAST_POINT: u32 = 0x3_ffff;

/// Entries of LISTS.
pub const LISTS_CAPACITY: u32 = 32_768;

/// Returns a protocol with a destination port (host order) as a number. Protocols that policies know no ports of are
/// all 0.
#[inline(always)]
pub const fn point(protocol: u8, port: u16) -> u32 {
    let number = match protocol {
        TCP => 1,
        UDP => 2,
        SCTP => 3,
        _ => return 0,
    };
    number << 16 | port as u32
}

/// Returns what a list says of a point. `part` looks a part up; one that isn't there ends the list with none.
#[inline(always)]
pub fn look_up<'a>(
    list: u32,
    point: u32,
    part: impl Fn(&ListKey) -> Option<&'a ListEntry>,
) -> Option<Decision> {
    if list == 0 {
        return Some(Decision::NONE);
    }
    let mut key = ListKey { list, part: 0 };
    for _ in 0..DEPTH {
        let entry = part(&key)?;
        let Some(found) = find(entry, point) else {
            return Some(Decision::NONE);
        };
        if entry.leads == 0 {
            return Some(Decision::read(found));
        }
        key.part = found;
    }
    None
}

#[inline(always)]
fn find(entry: &ListEntry, point: u32) -> Option<u32> {
    for (index, range) in entry.ranges.iter().enumerate() {
        if index >= entry.count as usize {
            break;
        }
        if range.first <= point && point <= range.last {
            return Some(range.decision);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn protocols_with_ports_share_no_point() {
        assert_eq!([point(1, 9), point(58, 0), point(0, 7)], [0; 3]);
        assert_eq!(
            [point(TCP, 0), point(UDP, 0), point(SCTP, 0xffff)],
            [0x1_0000, 0x2_0000, LAST_POINT]
        );
    }
}
