//! Holds endpoints and VPCs to their rates, whatever pods do to the queues at their own ends.
//!
//! Invariant: endpoints without a limit cost no look-up. A meter of another endpoint is never believed for longer than
//! a frame: an entry that was just given to another key holds up one frame, or lets one pass.

use core::intrinsics::{AtomicOrdering, atomic_cxchg, atomic_xadd};

use thuban_common::{
    counters::Counter,
    meter::{MeterKey, Metered},
    packet::{ethernet, geneve::UdpHeader, ipv4, ipv6},
    tables::{ATTACHMENT_METERED, ATTACHMENT_VPC_METERED, AttachmentEntry},
};

use crate::{frame::Frame, maps::METERS, reject, work::now};

/// The flags of attachments that have meters.
pub const ANY: u8 = ATTACHMENT_METERED | ATTACHMENT_VPC_METERED;

/// Counts a frame of an endpoint, or says that it is more than the endpoint may send.
#[inline(always)]
pub fn admit_endpoint<F: Frame>(
    frame: &mut F,
    attachment: &AttachmentEntry,
    ethertype: u16,
) -> Result<(), Counter> {
    // An answer in the endpoint's name is not what the endpoint sends.
    if attachment.flags & ATTACHMENT_METERED == 0 || reject::is_rejection(frame, attachment) {
        return Ok(());
    }
    admit(
        &MeterKey::of_endpoint(attachment.ifindex),
        length(frame, ethertype, 0),
    )
}

/// Counts a frame that leaves this droplet, or says that it is more than the VPC may send from here. `outer`: bytes of
/// the headers that each of its packets gets.
#[inline(always)]
pub fn admit_to_leave<F: Frame>(
    frame: &F,
    attachment: &AttachmentEntry,
    ethertype: u16,
    outer: u32,
) -> Result<(), Counter> {
    if attachment.flags & ATTACHMENT_VPC_METERED == 0 {
        return Ok(());
    }
    admit(&MeterKey::of_vpc(attachment.vni), length(frame, ethertype, outer))
}

#[inline(always)]
fn admit(key: &MeterKey, length: u32) -> Result<(), Counter> {
    takes(key, length).then_some(()).ok_or(Counter::RateExceeded)
}

/// Returns the bytes of the packets that a frame is sent as. A GSO frame is sent as one for each segment, and its
/// sender chooses how small these are.
#[inline(never)]
fn length<F: Frame>(frame: &F, ethertype: u16, outer: u32) -> u32 {
    let (length, size) = (frame.length(), frame.segment_size());
    if size == 0 {
        return length + outer;
    }
    let headers = headers(frame, ethertype);
    let further = length.saturating_sub(headers + 1) / size;
    length + outer + further * (headers + outer)
}

/// Returns the bytes from the Ethernet header to the payload. Extension headers of IPv6 don't count.
#[inline(always)]
fn headers<F: Frame>(frame: &F, ethertype: u16) -> u32 {
    let byte = |offset: u32| {
        let bytes: Option<[u16; 1]> = frame.load_far(offset);
        u32::from(bytes.unwrap_or_default()[0].to_ne_bytes()[0])
    };
    let ip = ethernet::LENGTH as u32;
    let (transport, protocol) = if ethertype == ethernet::IPV6 {
        (ip + ipv6::LENGTH as u32, byte(ip + 6))
    } else {
        (ip + (byte(ip) & 0xf) * 4, byte(ip + 9))
    };
    transport
        + if protocol == u32::from(ipv4::UDP) {
            size_of::<UdpHeader>() as u32
        } else {
            (byte(transport + 12) >> 4) * 4
        }
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
        // Of CPUs that find the same idle meter, one counts its frame.
        // SAFETY: as above.
        Metered::From(time) => unsafe {
            atomic_cxchg::<u64, { AtomicOrdering::SeqCst }, { AtomicOrdering::SeqCst }>(
                next, meter.next, time,
            );
        },
    }
    true
}
