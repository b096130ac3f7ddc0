//! What policy denies: counted by what denied it, with a packet of each second, and told to whoever follows.
//!
//! Invariant: unless somebody follows, a denied packet costs one look-up and, once a second for each key, one write. Of
//! one key no more than [`DENIALS_PER_WINDOW`] packets are told in a second, so that a flood leaves the ring buffer to
//! others.

use aya_ebpf::{bindings::BPF_ANY, macros::map, maps::PerCpuArray};
use thuban_common::{
    counters::Counter,
    policy::{DENIAL_WINDOW, DENIALS_PER_WINDOW, DenialKey, DenialRecord, REJECTIONS_PER_WINDOW},
    services::ConnectionKey,
};

use crate::{
    count::count,
    maps::{DENIALS, DENIED, FOLLOWED},
    work::now,
};

/// The last denial of this CPU. One value is enough, see `trace`.
#[map]
static DENIAL: PerCpuArray<DenialRecord> = PerCpuArray::with_max_entries(1, 0);

#[inline(always)]
fn record() -> Option<&'static mut DenialRecord> {
    // SAFETY: this CPU's only value, and nobody else has it now.
    DENIAL.get_ptr_mut(0).map(|record| unsafe { &mut *record })
}

/// Begins a run of a program, for [`noted`].
#[inline(always)]
pub fn forget() {
    if let Some(record) = record() {
        record.key.set = 0;
    }
}

/// Returns what denied the packet of this run, which began with [`forget`].
#[inline(always)]
pub fn noted() -> Option<&'static DenialKey> {
    record().map(|record| &record.key).filter(|key| key.set != 0)
}

/// Whether a packet that was just noted may be answered: only so many are, of a rule and a pod in a second.
#[inline(always)]
pub fn may_be_answered() -> bool {
    record().is_some_and(|record| record.entry.recent <= REJECTIONS_PER_WINDOW)
}

/// Notes that a packet of a flow was denied.
#[inline(always)]
pub fn note(by: &DenialKey, flow: &ConnectionKey, is_error: bool) {
    if let Some(record) = record() {
        record.key = *by;
        record.entry.source = flow.source;
        record.entry.destination = flow.destination;
        record.entry.ports = flow.ports;
        record.entry.protocol = flow.protocol;
        record.entry.is_error = is_error.into();
        // SAFETY: this function's only reference to the value, and it ends here.
        unsafe { policy_tells(record) };
    }
}

/// Counts the denial of a record, and tells it. A global function, see `main`.
#[unsafe(no_mangle)]
#[inline(never)]
unsafe extern "C" fn policy_tells(record: *mut DenialRecord) -> u32 {
    // SAFETY: the caller's promise.
    if let Some(record) = unsafe { record.as_mut() } {
        tell(record);
    }
    0
}

#[inline(always)]
fn tell(record: &mut DenialRecord) {
    let entry = &mut record.entry;
    entry.time = now();
    (entry.packets, entry.recent) = (1, 1);
    let mut is_first = true;
    if let Some(known) = DENIALS.get_ptr_mut(&record.key) {
        // SAFETY: words of a value that stays allocated (preallocated LRU); counts lost between CPUs do no harm.
        unsafe {
            entry.packets = (*known).packets.wrapping_add(1);
            if entry.time.wrapping_sub((*known).time) < DENIAL_WINDOW {
                is_first = false;
                entry.recent = (*known).recent.saturating_add(1);
                (*known).packets = entry.packets;
                (*known).recent = entry.recent;
            }
        }
    }
    if is_first {
        // Another element, so that nobody reads a half of two packets.
        let _ = DENIALS.insert(&record.key, &*entry, u64::from(BPF_ANY));
    }
    let is_told =
        entry.recent <= DENIALS_PER_WINDOW && FOLLOWED.get(0).is_some_and(|until| entry.time < *until);
    if is_told && DENIED.output::<DenialRecord>(&*record, 0).is_err() {
        count(Counter::DenialsLost);
    }
}
