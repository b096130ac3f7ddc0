//! Judges a flow by sets: by those of both sides, or by one of them.

use thuban_common::{
    counters::Counter,
    policy::{DENIAL_EGRESS, DenialKey, NO_RULE, of_vpc, try_judge},
    tables::Address,
};

use super::Case;
use crate::maps;

/// Judges the flow to an endpoint by both sides' sets. Sets the denial, if one of them denies the flow.
#[inline(never)]
pub(super) fn decide(case: &mut Case) -> Result<(), Counter> {
    let to = &case.server;
    let (vni, stamp) = (case.key.vni, case.stamp);
    if to.ingress_set != 0 {
        let set = of_vpc(vni, to.ingress_set);
        let peer = of_vpc(vni, stamp.class);
        if let Some(rank) = denying(set, peer, &case.key.source, case.point) {
            case.denial = DenialKey {
                set,
                interface: to.ifindex,
                rank,
                flags: 0,
            };
            return Err(Counter::PolicyIngress);
        }
    }
    if stamp.egress_set != 0 {
        let set = of_vpc(vni, stamp.egress_set);
        let peer = of_vpc(vni, to.class);
        if let Some(rank) = denying(set, peer, &case.key.destination, case.point) {
            case.denial = DenialKey {
                set,
                interface: to.ifindex,
                rank,
                flags: DENIAL_EGRESS,
            };
            return Err(Counter::PolicyEgress);
        }
    }
    Ok(())
}

/// [`policy_denies`]: the set lets the packet pass.
pub(super) const PASSES: u32 = u32::MAX;
/// The set is unknown, or not whole.
const UNDECIDED: u32 = u32::MAX - 1;
/// No rule accepts the packet.
pub(super) const BY_DEFAULT: u32 = NO_RULE as u32;

/// Returns the rank of the rule of a set that denies a packet, or [`NO_RULE`] if the set denies it by default. `None`:
/// the packet passes.
#[inline(always)]
pub(super) fn denying(set: u64, peer: u64, address: &Address, point: u32) -> Option<u16> {
    // SAFETY: `address` is valid for the call.
    match unsafe { policy_denies(set, peer, address, point) } {
        PASSES => None,
        verdict => Some(rank(verdict)),
    }
}

/// The rank of a verdict that denies.
#[inline(always)]
pub(super) const fn rank(verdict: u32) -> u16 {
    if verdict == UNDECIDED {
        NO_RULE
    } else {
        verdict as u16
    }
}

/// Does what [`try_judge`] does: returns [`PASSES`], [`UNDECIDED`] or the rank. A global function, see `main`.
#[unsafe(no_mangle)]
#[inline(never)]
pub(super) unsafe extern "C" fn policy_denies(
    set: u64,
    peer: u64,
    address: *const Address,
    point: u32,
) -> u32 {
    // SAFETY: the caller's promise.
    let Some(address) = (unsafe { address.as_ref() }) else {
        return UNDECIDED;
    };
    match try_judge(&maps::PolicyTables, set, peer, address, point) {
        None => UNDECIDED,
        Some((true, _)) => PASSES,
        Some((false, rank)) => rank.into(),
    }
}
