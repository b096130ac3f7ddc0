//! Network policy in packets and tables: the stamp by which a packet says whose it is, and what the rules say of it.
//!
//! A *class* is the endpoints of a VPC that the peer selectors of its policies don't tell apart. A *set* is all that
//! applies to an endpoint in one direction. Both have ids of 24 bits that are unique in their VPC. A set never changes:
//! other rules are another set.
//!
//! Invariant: as in [`crate::tables`]: `repr(C)`, integers only, explicit padding, sizes asserted. Numbers are host
//! order.

mod decision;
mod denials;
mod flows;
mod grants;
mod lists;
mod stamp;
mod verdict;

pub use decision::{Action, Decision, MAX_RANK, NO_RULE, ranked};
pub use denials::{
    DENIAL_EGRESS, DENIAL_OUTSIDE, DENIAL_WINDOW, DENIALS_CAPACITY, DENIALS_PER_WINDOW, DenialEntry,
    DenialKey, DenialRecord, REJECTIONS_PER_WINDOW,
};
pub use flows::{ANSWERED_LIFE, FLOWS_CAPACITY, FLOWS_OF_VPC, FLOWS_SHARED, FlowEntry};
pub use grants::{
    BLOCKS_CAPACITY, BlockKey, GRANT_ASKS_BLOCKS, GRANT_DENIES, GRANTS_CAPACITY, Grant, GrantKey, PEER_OTHER,
    PEER_OUTSIDE,
};
pub use lists::{
    DEPTH, LAST_POINT, LISTS_CAPACITY, ListEntry, ListKey, MAX_RANGES, PortRange, RANGES, look_up, point,
};
pub use stamp::{ANSWER, AT_LAST, BY_FORMER, BY_TABLE, STAMP_FRONT, STAMP_GUARDED, STAMP_REPLY, Stamp};
pub use verdict::{Lookups, judge, try_judge};

/// The greatest id of a class or set.
pub const MAX_ID: u32 = 0xff_ffff;
/// The class of a packet that says none. No endpoint has it.
pub const UNKNOWN_CLASS: u32 = 0;
/// The class of what nodes send on for pods of other VPCs, which share a Service of the nodes' VPC. No endpoint has it.
pub const SHARED_SERVICE_CLASS: u32 = MAX_ID;

/// Returns a class or set of a VPC as keys have it.
#[inline(always)]
pub const fn of_vpc(vni: u32, id: u32) -> u64 {
    (vni as u64) << 24 | id as u64
}

/// Returns the VPC, and the class or set in it, of a number that [`of_vpc`] returned.
#[inline(always)]
pub const fn in_vpc(number: u64) -> (u32, u32) {
    ((number >> 24) as u32, number as u32 & MAX_ID)
}

const _: () = {
    assert!(size_of::<GrantKey>() == 16);
    assert!(size_of::<BlockKey>() == 24);
    assert!(size_of::<Grant>() == 8 && align_of::<Grant>() == 8);
    assert!(size_of::<FlowEntry>() == 32);
    assert!(size_of::<ListKey>() == 8);
    assert!(size_of::<PortRange>() == 12);
    assert!(size_of::<ListEntry>() == 128);
    assert!(size_of::<DenialKey>() == 16);
    assert!(size_of::<DenialEntry>() == 64);
    assert!(size_of::<DenialRecord>() == 80);
};

#[cfg(feature = "user")]
mod pod {
    use super::{
        BlockKey, DenialEntry, DenialKey, DenialRecord, FlowEntry, Grant, GrantKey, ListEntry, ListKey,
    };
    macro_rules! pod {
        ($($t:ty),*) => {
            // SAFETY: repr(C) of integers and arrays without implicit padding (sizes asserted above).
            $(unsafe impl aya::Pod for $t {})*
        };
    }
    pod!(
        BlockKey,
        DenialEntry,
        DenialKey,
        DenialRecord,
        FlowEntry,
        Grant,
        GrantKey,
        ListEntry,
        ListKey
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_of_other_vpcs_are_others() {
        assert_ne!(of_vpc(1, MAX_ID), of_vpc(2, 0));
        assert!(of_vpc(1, 0) > PEER_OUTSIDE, "no class is a constant");
        assert_eq!(of_vpc(0xff_ffff, MAX_ID), 0xffff_ffff_ffff);
    }
}
