//! Shares of CONNECTIONS, PENDING and FLOWS: how many entries a client and its VPC have.

use core::intrinsics::{AtomicOrdering, atomic_xadd};

use aya_ebpf::bindings::BPF_ANY;
use thuban_common::{
    host_stack::{MARK_HOST_ENDPOINT, MARK_MASK},
    policy::{FLOWS_OF_VPC, FLOWS_SHARED},
    services::{
        ALL_CONNECTIONS, ALL_FLOWS, CONNECTIONS_OF_CLIENT, QUOTA_FLOWS_HELD, QUOTA_FLOWS_RESERVE, QUOTA_HELD,
        QUOTA_RESERVE, QUOTA_SHARED,
    },
    tables::{Address, EndpointKey},
};

use crate::{
    maps::{self, QUOTAS, SHARES},
    work::Work,
};

/// The number of high halves of an interface's number that are tried: a node makes at most so many times 65,536
/// interfaces while it is up.
const EPOCHS: u32 = 8;
/// Returns the VPC of the pod whose packet this is, if the node sends it on by its own endpoint in the VPC `vni`. A
/// global function, see `main`.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn payer(mark: u32, vni: u32) -> u32 {
    if mark & MARK_MASK != MARK_HOST_ENDPOINT || mark >> 16 == 0 {
        return vni;
    }
    // The mark has the low half of an interface's number.
    for high in 0..EPOCHS {
        if let Some(vni) = maps::vpc_of(high << 16 | mark >> 16) {
            return vni;
        }
    }
    vni
}

/// Whether the client may have more entries. Its VPC must have less than its reserve, or half of the table must be
/// free.
#[inline(always)]
pub fn has_share(work: &mut Work, vni: u32, client: &Address) -> bool {
    work.share.vni = vni;
    work.share.address = *client;
    has_less(&work.share, CONNECTIONS_OF_CLIENT) && has_share_of_vpc(work, vni)
}

/// Whether the VPC may have more entries, whoever the client is.
#[inline(always)]
fn has_share_of_vpc(work: &mut Work, vni: u32) -> bool {
    work.share.vni = vni;
    work.share.address = ALL_CONNECTIONS;
    has_less(&work.share, quota(QUOTA_RESERVE)) || quota(QUOTA_HELD) < quota(QUOTA_SHARED)
}

/// Whether the VPC may have more entries for clients outside. A quarter of what it may have is left to its own clients,
/// whatever comes from outside.
#[inline(always)]
pub fn has_share_of_fronts(work: &mut Work, vni: u32) -> bool {
    work.share.vni = vni;
    work.share.address = ALL_CONNECTIONS;
    let most = |quota: u32| quota - quota / 4;
    has_less(&work.share, most(quota(QUOTA_RESERVE))) || quota(QUOTA_HELD) < most(quota(QUOTA_SHARED))
}

#[inline(always)]
fn quota(index: u32) -> u32 {
    QUOTAS.get(index).copied().unwrap_or(0)
}

#[inline(never)]
pub fn has_less(of: &EndpointKey, most: u32) -> bool {
    // SAFETY: a single word of an element, see `maps`.
    let held = unsafe { SHARES.get(of) };
    held.is_none_or(|held| *held < most)
}

/// Whether the VPC may have one more flow in FLOWS. Sets `share` to the VPC's.
#[inline(always)]
pub fn has_share_of_flows(share: &mut EndpointKey, vni: u32) -> bool {
    share.vni = vni;
    share.address = ALL_FLOWS;
    has_less(share, FLOWS_OF_VPC)
        && (quota(QUOTA_FLOWS_HELD) < FLOWS_SHARED || has_less(share, quota(QUOTA_FLOWS_RESERVE)))
}

/// Counts a flow. `share` is the VPC's.
#[inline(always)]
pub fn take_share_of_flows(share: &EndpointKey) {
    add_share(share, 1);
    if let Some(held) = QUOTAS.get_ptr_mut(QUOTA_FLOWS_HELD) {
        add(held, 1);
    }
}

/// Gives back the share of a flow that is forgotten. Sets `share` to the VPC's.
#[inline(always)]
pub fn give_share_of_flows(share: &mut EndpointKey, vni: u32) {
    share.vni = vni;
    share.address = ALL_FLOWS;
    give_back(share, 1);
    if let Some(held) = QUOTAS.get_ptr_mut(QUOTA_FLOWS_HELD) {
        take(held, 1);
    }
}

/// Counts a connection's entries.
#[inline(always)]
pub fn take_share(work: &mut Work, vni: u32, client: &Address) {
    work.share.vni = vni;
    work.share.address = *client;
    add_share(&work.share, 2);
    take_share_of_vpc(work, vni);
}

/// Counts a connection's entries for its VPC alone.
#[inline(always)]
pub fn take_share_of_vpc(work: &mut Work, vni: u32) {
    work.share.vni = vni;
    work.share.address = ALL_CONNECTIONS;
    add_share(&work.share, 2);
    if let Some(held) = QUOTAS.get_ptr_mut(QUOTA_HELD) {
        add(held, 2);
    }
}

/// Gives back the share of a connection that is forgotten.
#[inline(always)]
pub fn give_share(work: &mut Work, vni: u32, client: &Address) {
    work.share.vni = vni;
    work.share.address = *client;
    give_back(&work.share, 2);
    give_share_of_vpc(work, vni);
}

/// Gives back what [`take_share_of_vpc`] took.
#[inline(always)]
pub fn give_share_of_vpc(work: &mut Work, vni: u32) {
    work.share.vni = vni;
    work.share.address = ALL_CONNECTIONS;
    give_back(&work.share, 2);
    if let Some(held) = QUOTAS.get_ptr_mut(QUOTA_HELD) {
        take(held, 2);
    }
}

#[inline(always)]
pub fn give_back(of: &EndpointKey, less: u32) {
    if let Some(share) = SHARES.get_ptr_mut(of) {
        take(share, less);
    }
}

/// Adds to a count. Nothing is lost between CPUs: what is not counted would be room beyond the limit.
#[inline(always)]
fn add(count: *mut u32, more: u32) {
    // SAFETY: as in `has_less`; a single word.
    unsafe { atomic_xadd::<u32, u32, { AtomicOrdering::Relaxed }>(count, more) };
}

/// Subtracts from a count that is not less. A count that several CPUs bring below zero at once is right again after as
/// many additions, or when user space counts anew.
#[inline(always)]
fn take(count: *mut u32, less: u32) {
    // SAFETY: as in `has_less`; a single word.
    if unsafe { count.read_volatile() } >= less {
        add(count, less.wrapping_neg());
    }
}

#[inline(never)]
pub fn add_share(of: &EndpointKey, more: u32) {
    match SHARES.get_ptr_mut(of) {
        Some(share) => add(share, more),
        None => {
            let _ = SHARES.insert(of, more, u64::from(BPF_ANY));
        }
    }
}
