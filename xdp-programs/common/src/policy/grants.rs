//! What a set says of a peer, by the peer's class or by its address: keys and entries of GRANTS and BLOCKS.

use crate::tables::Address;

/// Key of GRANTS.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GrantKey {
    /// [`super::of_vpc`].
    pub set: u64,
    /// The other side's class ([`super::of_vpc`]), or one of [`PEER_OTHER`] and the constants behind it.
    pub peer: u64,
}

/// [`GrantKey::peer`]: a class that has no entry of its own.
pub const PEER_OTHER: u64 = 0;
/// [`GrantKey::peer`]: an address outside of the VPC.
pub const PEER_OUTSIDE: u64 = 1;

/// GRANTS[(set, peer)]: what a set says of a peer whatever its address, and BLOCKS[(set, address)]: what it says of an
/// address. Without an entry, even of [`PEER_OTHER`], the set isn't known and all is denied.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Grant {
    /// The list; 0: no rule.
    pub list: u32,
    /// [`GRANT_DENIES`], [`GRANT_ASKS_BLOCKS`]. In GRANTS the other bits are those of [`Grant::of`].
    pub flags: u32,
}

/// [`Grant::flags`]: what no rule decides is denied.
pub const GRANT_DENIES: u32 = 1;
/// [`Grant::flags`]: BLOCKS may have more to say.
pub const GRANT_ASKS_BLOCKS: u32 = 2;
const GRANT_FLAGS: u32 = GRANT_DENIES | GRANT_ASKS_BLOCKS;

impl Grant {
    /// Returns the grant as GRANTS has it: with bits that tell whose it is. The kernel gives a removed element to the
    /// next key at once, while programs still read it. An entry is one word, so its parts are of one grant.
    #[inline(always)]
    #[must_use]
    pub const fn of(self, key: &GrantKey) -> Self {
        Self {
            list: self.list,
            flags: self.flags & GRANT_FLAGS | key.tag(),
        }
    }

    /// Returns the grant of an entry of GRANTS, if it is the key's.
    #[inline(always)]
    pub const fn read(self, key: &GrantKey) -> Option<Self> {
        if self.flags & !GRANT_FLAGS != key.tag() {
            return None;
        }
        Some(Self {
            list: self.list,
            flags: self.flags & GRANT_FLAGS,
        })
    }
}

impl GrantKey {
    #[inline(always)]
    const fn tag(&self) -> u32 {
        let set = self.set.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mixed = (set ^ set >> 32 ^ self.peer).wrapping_mul(0xff51_afd7_ed55_8ccd);
        (mixed >> 32) as u32 & !GRANT_FLAGS
    }
}

/// Data of the LPM key of BLOCKS. The set is network order, so that prefixes of 64 + n bits cover it whole.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockKey {
    /// [`super::of_vpc`].
    pub set: [u8; 8],
    pub address: Address,
}

/// Entries of GRANTS.
pub const GRANTS_CAPACITY: u32 = 131_072;
/// Entries of BLOCKS.
pub const BLOCKS_CAPACITY: u32 = 65_536;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{policy::of_vpc, testing::Random};

    #[test]
    fn an_element_that_another_key_has_by_now_is_no_grant() {
        let mut random = Random::from_clock();
        for _ in 0..10_000 {
            let mut key = || GrantKey {
                set: of_vpc(random.u32() & 0xff, random.u32() & 0xff),
                peer: of_vpc(7, random.u32() & 0xff),
            };
            let (own, other) = (key(), key());
            let grant = Grant {
                list: random.u32(),
                flags: random.u32() & GRANT_FLAGS,
            };
            assert_eq!(grant.of(&own).read(&own), Some(grant));
            let is_read = grant.of(&own).read(&other).is_some();
            assert_eq!(is_read, own == other, "seed {}: {own:?} {other:?}", random.seed());
        }
    }
}
