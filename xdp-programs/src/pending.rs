//! PENDING: flows to services whose backend an answer decides, or that go to a backend without a connection.

use aya_ebpf::bindings::BPF_ANY;
use thuban_common::{
    counters::Counter,
    packet::{ip::IpPacket, ipv4},
    services::{ALL_PENDING, PENDING_LIFE, PENDING_OF_VPC, PendingEntry, PendingKey, refresh},
    tables::Address,
};

use crate::{
    count::count,
    frame::tc::TcFrame,
    gates::open,
    inner::transport,
    maps::PENDING,
    shares::{add_share, has_less, payer},
    work::{Choice, Work, now},
};

/// Returns the key of the client's flow in PENDING.
#[inline(always)]
pub const fn pending_key(vni: u32, address: Address, port: u16, protocol: u8) -> PendingKey {
    PendingKey {
        vni,
        address,
        port,
        protocol,
        padding: 0,
    }
}

/// Notes a packet to a service without a row here: its answer decides the backend.
#[inline(never)]
pub fn expect_answer(frame: &TcFrame, packet: &IpPacket, work: &mut Work) -> Result<Choice, Counter> {
    let now = now();
    work.pending = pending_key(work.key.vni, packet.source, packet.ports[0], packet.protocol);
    if let Some(old) = PENDING.get_ptr_mut(&work.pending) {
        // SAFETY: words of a value that stays allocated (preallocated LRU).
        let old = unsafe { &mut *old };
        let is_same = old.service == packet.destination && old.service_port == packet.ports[1];
        if is_same && !work.signal.opens {
            if now.wrapping_sub(old.time) > refresh(packet.protocol) {
                old.time = now;
                open(work.interface, now + PENDING_LIFE);
            }
            if old.backend != [0; 16] {
                work.send_to(packet, &old.backend, old.backend_port);
                return Ok(Choice::Backend);
            }
            return Ok(Choice::NoRow);
        }
    }
    let mut acknowledgement = 0;
    if packet.protocol == ipv4::TCP {
        if !work.signal.opens {
            // No answer to this packet would be believed.
            return Ok(Choice::NoRow);
        }
        let sequence: [u16; 2] = transport(frame, packet, 4).ok_or(Counter::Truncated)?;
        acknowledgement = number(sequence).wrapping_add(1);
    }
    work.expected.backend = [0; 16];
    work.expected.backend_port = 0;
    if !expect(packet, work, now, acknowledgement) {
        count(Counter::ServiceStateless);
    }
    Ok(Choice::NoRow)
}

/// Notes that a packet without a connection goes to [`Work::to`]. Answers from there, and only from there, find the
/// service.
#[inline(never)]
pub fn expect_from(packet: &IpPacket, work: &mut Work) {
    work.pending = pending_key(work.key.vni, packet.source, packet.ports[0], packet.protocol);
    work.expected.backend = work.to.destination;
    work.expected.backend_port = work.to.ports[1];
    expect(packet, work, now(), 0);
}

/// Notes the flow in PENDING. Returns false if there is no room; a flow that is noted already stays.
#[inline(always)]
fn expect(packet: &IpPacket, work: &mut Work, now: u64, acknowledgement: u32) -> bool {
    // SAFETY: only whether it is there.
    let is_new = unsafe { PENDING.get(&work.pending) }.is_none();
    if is_new {
        work.expected.payer = payer(work.mark, work.pending.vni);
        work.share.vni = work.expected.payer;
        work.share.address = ALL_PENDING;
        if !has_less(&work.share, PENDING_OF_VPC) {
            return false;
        }
        add_share(&work.share, 1);
    }
    work.expected.time = now;
    work.expected.service = packet.destination;
    work.expected.service_port = packet.ports[1];
    work.expected.acknowledgement = acknowledgement;
    let _ = PENDING.insert(&work.pending, &work.expected, u64::from(BPF_ANY));
    open(work.interface, now + PENDING_LIFE);
    true
}

/// Returns two raw words as a number.
#[inline(always)]
fn number(words: [u16; 2]) -> u32 {
    u32::from(u16::from_be(words[0])) << 16 | u32::from(u16::from_be(words[1]))
}

/// Whether a TCP segment acknowledges the packet that opened the waiting flow.
#[inline(always)]
pub fn acknowledges(frame: &TcFrame, packet: &IpPacket, entry: &PendingEntry) -> Result<bool, Counter> {
    let acknowledged: [u16; 2] = transport(frame, packet, 8).ok_or(Counter::Truncated)?;
    Ok(number(acknowledged) == entry.acknowledgement)
}
