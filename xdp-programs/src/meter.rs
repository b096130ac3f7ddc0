//! Holds endpoints and VPCs to their rates, whatever pods do to the queues at their own ends.
//!
//! Invariant: endpoints without a limit cost no look-up. A meter of another endpoint is never believed for longer than
//! a frame: an entry that was just given to another key holds up one frame, or lets one pass.

use core::intrinsics::{AtomicOrdering, atomic_xadd};

use thuban_common::{
    counters::Counter,
    meter::{MeterKey, Metered},
    tables::{ATTACHMENT_METERED, ATTACHMENT_VPC_METERED, AttachmentEntry},
};

use crate::{maps::METERS, work::now};

/// The flags of attachments that have meters.
pub const ANY: u8 = ATTACHMENT_METERED | ATTACHMENT_VPC_METERED;

/// Counts a frame of an endpoint, or says that it is more than the endpoint may send.
#[inline(always)]
pub fn admit_endpoint(attachment: &AttachmentEntry, length: u32) -> Result<(), Counter> {
    admit(
        attachment.flags & ATTACHMENT_METERED,
        &MeterKey::of_endpoint(attachment.ifindex),
        length,
    )
}

/// Counts a frame that is to leave this droplet, or says that it is more than the VPC may send from here.
#[inline(always)]
pub fn admit_to_leave(attachment: &AttachmentEntry, length: u32) -> Result<(), Counter> {
    admit(
        attachment.flags & ATTACHMENT_VPC_METERED,
        &MeterKey::of_vpc(attachment.vni),
        length,
    )
}

#[inline(always)]
fn admit(flag: u8, key: &MeterKey, length: u32) -> Result<(), Counter> {
    if flag != 0 && !takes(key, length) {
        return Err(Counter::RateExceeded);
    }
    Ok(())
}

/// Whether the meter takes a frame. Counts the frame.
#[inline(always)]
fn takes(key: &MeterKey, length: u32) -> bool {
    let Some(entry) = METERS.get_ptr_mut(key) else {
        return true;
    };
    // SAFETY: an element of a map, see `maps`. Both words are aligned, and each is right by itself.
    let (meter, next) = unsafe { (entry.read_volatile(), &raw mut (*entry).next) };
    match meter.judge(now(), length) {
        Metered::Beyond => return false,
        // CPUs may add at the same time. The target has no atomic types with operations.
        // SAFETY: as above.
        Metered::Later(cost) => unsafe {
            atomic_xadd::<u64, u64, { AtomicOrdering::Relaxed }>(next, cost);
        },
        // A count of another CPU that is lost here is one of a meter that was idle until now.
        // SAFETY: as above.
        Metered::From(time) => unsafe { next.write_volatile(time) },
    }
    true
}
