//! Counts detours, and announces a flow that stays, so that user space asks for a direct row.
//!
//! Invariant: a VPC announces no more than its share in a second, and takes no more places than its share in a window.
//! So a VPC that scans delays nobody else's rows, and rarely takes the place of another's count.

use aya_ebpf::{bindings::BPF_ANY, helpers::bpf_ktime_get_ns};
use thuban_common::{
    counters::Counter,
    tables::{
        ANNOUNCEMENTS_PER_SECOND, AnnouncedEntry, EndpointKey, MissEntry, NOTED_PER_WINDOW, NOTED_WINDOW,
    },
};

use crate::{
    count::count,
    maps::{ANNOUNCED, DIRECT_WANTED, MISSES},
};

/// The packet to an endpoint at which the endpoint is announced.
pub const FEW: u32 = 3;
/// The packet to a service at which the service is announced: until its row comes, its clients don't share the load of
/// bouncers.
pub const FIRST: u32 = 1;
/// The most packets between two announcements.
const MANY: u32 = 64;

/// Counts a packet. Announces the packet of that number, and again those at powers of two up to [`MANY`] and at its
/// multiples, so that a lost event heals.
#[inline(always)]
pub fn note(key: &EndpointKey, seed: u32, number: u32) {
    let (place, tag) = MissEntry::place(key, seed);
    let Some(entry) = MISSES.get_ptr_mut(place) else {
        return;
    };
    // SAFETY: words of an array's element, which stays. A count lost between CPUs does no harm.
    let entry = unsafe { &mut *entry };
    let packets = if entry.tag == tag && entry.packets != 0 {
        entry.packets = entry.packets.saturating_add(1);
        entry.packets
    } else {
        if may_note(key.vni) {
            *entry = MissEntry { tag, packets: 1 };
        } else {
            count(Counter::DirectPaced);
        }
        1
    };
    let is_announced =
        packets == number || packets > FEW && (packets & (packets - 1) == 0 || packets % MANY == 0);
    if !is_announced {
        return;
    }
    if !has_share(key.vni) {
        count(Counter::DirectPaced);
    } else if DIRECT_WANTED.output::<EndpointKey>(key, 0).is_ok() {
        count(Counter::DirectWanted);
    }
}

/// Whether the VPC may announce once more in this second; counts it.
#[inline(always)]
fn has_share(vni: u32) -> bool {
    let second = second();
    let Some(entry) = ANNOUNCED.get_ptr_mut(&vni) else {
        begin(vni, second, 1, 0);
        return true;
    };
    // SAFETY: words of a value that stays allocated (preallocated LRU); counts lost between CPUs do no harm.
    unsafe {
        if (*entry).second != second {
            (*entry).second = second;
            (*entry).events = 0;
        }
        (*entry).events += 1;
        (*entry).events <= ANNOUNCEMENTS_PER_SECOND
    }
}

/// Whether the VPC may take a place in MISSES in this window; counts it.
#[inline(always)]
fn may_note(vni: u32) -> bool {
    let second = second();
    let Some(entry) = ANNOUNCED.get_ptr_mut(&vni) else {
        begin(vni, second, 0, 1);
        return true;
    };
    let window = second / NOTED_WINDOW;
    // SAFETY: as in `has_share`.
    unsafe {
        if (*entry).window != window {
            (*entry).window = window;
            (*entry).noted = 0;
        }
        if (*entry).noted >= NOTED_PER_WINDOW {
            return false;
        }
        (*entry).noted += 1;
    }
    true
}

#[inline(always)]
fn begin(vni: u32, second: u32, events: u32, noted: u32) {
    let entry = AnnouncedEntry {
        second,
        events,
        window: second / NOTED_WINDOW,
        noted,
    };
    let _ = ANNOUNCED.insert(&vni, entry, u64::from(BPF_ANY));
}

/// Returns the seconds since boot.
#[inline(always)]
fn second() -> u32 {
    // SAFETY: helper without arguments.
    (unsafe { bpf_ktime_get_ns() } / 1_000_000_000) as u32
}
