//! Network policy, at the droplet of the endpoint that a packet is for: both directions are judged here, the
//! destination's ingress set and the sender's egress set, which the packet's stamp names.
//!
//! Invariant: FLOWS permits nothing. It saves judging a flow again until policy changes, and tells answers from other
//! packets: the agent of who answers *vouches* for them in the stamp. Without an entry, the flow's next packet makes
//! one. Only the client keeps an entry alive: who answers could otherwise hold a way open to whoever has the client's
//! address next.

mod describe;
mod outside;
mod sets;

use aya_ebpf::{
    bindings::{BPF_EXIST, BPF_NOEXIST},
    macros::map,
    maps::PerCpuArray,
};
use thuban_common::{
    counters::Counter,
    packet::{ethernet, ip::IpPacket},
    policy::{ANSWERED_LIFE, DenialKey, FlowEntry, STAMP_GUARDED, STAMP_REPLY, Stamp, point},
    services::{ConnectionKey, FORWARD, Signal, has_connections, refresh},
    tables::{AttachmentEntry, EndpointKey, LOCAL_HAS_POLICY, LOCAL_REJECTS, LocalEntry},
};

use describe::{Shown, describe};
pub use outside::{Out, lets_in, lets_out};
use sets::decide;

use crate::{
    count::count,
    denials, fragments,
    frame::Frame,
    gates,
    maps::{self, FLOWS},
    rewrite::Flow,
    shares::{give_share_of_flows, has_share_of_flows, take_share_of_flows},
    work::now,
};

/// The packet that is judged: data that is too large for the stack.
struct Case {
    /// Its flow.
    key: ConnectionKey,
    /// See [`point`].
    point: u32,
    signal: Signal,
    /// An ICMP error: the key is of the answers to the packet that it quotes.
    is_error: bool,
    stamp: Stamp,
    /// What the packet quotes, if it is such an error.
    quote: IpPacket,
    entry: FlowEntry,
    share: EndpointKey,
    /// The endpoint that the flow goes to.
    server: AttachmentEntry,
    /// What [`policy_let_in`] found.
    outcome: Result<(), Counter>,
    /// What denies the packet, if [`decide`] says that it is denied.
    denial: DenialKey,
    /// The flow that the packet is to have, if it is translated.
    translated: Option<Flow>,
}

/// One value for each CPU is enough, see `trace`.
#[map]
static CASE: PerCpuArray<Case> = PerCpuArray::with_max_entries(1, 0);

impl Case {
    #[inline(always)]
    fn get(vni: u32) -> Option<&'static mut Self> {
        // SAFETY: this CPU's only value, and nobody else has it now.
        let case = CASE.get_ptr_mut(0).map(|case| unsafe { &mut *case })?;
        case.key.vni = vni;
        case.key.direction = FORWARD;
        case.key.padding = 0;
        Some(case)
    }
}

/// Whether a packet may go to an endpoint of this droplet. `stamp`: what it says of its sender. `translated`: the
/// addresses and ports that it gets. `offset`: of its IP header. Returns false if only tc can tell.
#[inline(always)]
pub fn admit<F: Frame>(
    frame: &mut F,
    vni: u32,
    stamp: Stamp,
    local: &LocalEntry,
    packet: &IpPacket,
    translated: Option<&Flow>,
    offset: u32,
) -> Result<bool, Counter> {
    if !concerns(stamp, local) {
        return Ok(true);
    }
    if !F::IS_LAST && (packet.is_fragment() || local.flags & LOCAL_REJECTS != 0) {
        return Ok(false);
    }
    let case = Case::get(vni).ok_or(Counter::PolicyUnreadable)?;
    case.stamp = stamp;
    case.translated = translated.copied();
    examine(frame, packet, local.ifindex, offset, case)?;
    Ok(true)
}

/// Whether policy has anything to say of a packet, or its answers need somebody to vouch for them.
#[inline(always)]
pub fn concerns(stamp: Stamp, local: &LocalEntry) -> bool {
    local.flags & LOCAL_HAS_POLICY != 0 || stamp.egress_set != 0 || stamp.flags & STAMP_GUARDED != 0
}

/// Whether a packet of an endpoint of this droplet answers a flow that policy let in. `None`: only tc can tell.
#[inline(always)]
pub fn vouches<F: Frame>(frame: &mut F, sender: &AttachmentEntry, packet: &IpPacket) -> Option<bool> {
    if !gates::has_flows(frame.interface()) {
        return Some(false);
    }
    if packet.is_fragment() && !F::IS_LAST {
        return None;
    }
    Some(is_answer(frame, sender, packet))
}

#[inline(never)]
fn is_answer<F: Frame>(frame: &mut F, sender: &AttachmentEntry, packet: &IpPacket) -> bool {
    let Some(case) = Case::get(sender.vni) else {
        return false;
    };
    // Nobody vouches for a packet whose ports aren't known.
    let Ok(shown) = describe(frame, packet, ethernet::LENGTH as u32, case) else {
        return false;
    };
    if matches!(shown, Shown::Earlier) {
        return fragments::passes();
    }
    let key = &mut case.key;
    core::mem::swap(&mut key.source, &mut key.destination);
    key.ports = [key.ports[1], key.ports[0]];
    // SAFETY: this function's only reference to the value, and the call ends before it is used again.
    let is_answer = unsafe { policy_stands(case, sender.ifindex) } != 0;
    if packet.is_fragment() {
        fragments::note(is_answer);
    }
    is_answer
}

/// Whether the flow is in FLOWS, and policy still lets it in. `interface`: of the endpoint that it goes to. A global
/// function, see `main`.
#[unsafe(no_mangle)]
#[inline(never)]
unsafe extern "C" fn policy_stands(case: *mut Case, interface: u32) -> u32 {
    // SAFETY: the caller's promise.
    unsafe { case.as_mut() }
        .is_some_and(|case| stands(case, interface))
        .into()
}

#[inline(always)]
fn stands(case: &mut Case, interface: u32) -> bool {
    if !maps::read_flow(&case.key, &mut case.entry) {
        return false;
    }
    let epoch = maps::policy_epoch();
    let mut has_changed = case.entry.epoch != epoch;
    if has_changed {
        case.entry.epoch = epoch;
        case.stamp = Stamp {
            class: case.entry.class,
            egress_set: case.entry.egress_set,
            flags: 0,
        };
        case.point = point(case.key.protocol, u16::from_be(case.key.ports[1]));
        if !read_server(case, interface) || decide(case).is_err() {
            forget(case);
            return false;
        }
    }
    let is_over = !has_connections(case.key.protocol) && now().wrapping_sub(case.entry.time) > ANSWERED_LIFE;
    if is_over {
        return false;
    }
    // An error says nothing of the connection.
    let state = case.entry.answers | if case.is_error { 0 } else { case.signal.state };
    has_changed |= state != case.entry.answers;
    case.entry.answers = state;
    if has_changed {
        write(case);
    }
    true
}

#[inline(never)]
fn examine<F: Frame>(
    frame: &mut F,
    packet: &IpPacket,
    interface: u32,
    offset: u32,
    case: &mut Case,
) -> Result<(), Counter> {
    if matches!(describe(frame, packet, offset, case)?, Shown::Earlier) {
        return if fragments::passes() {
            Ok(())
        } else {
            Err(Counter::PolicyUnreadable)
        };
    }
    if let Some(flow) = &case.translated {
        case.key.source = flow.source;
        case.key.destination = flow.destination;
        case.key.ports = flow.ports;
        case.point = point(case.key.protocol, u16::from_be(flow.ports[1]));
    }
    let is_vouched = case.stamp.flags & STAMP_REPLY != 0 && !case.signal.opens;
    let outcome = if is_vouched {
        Ok(())
    } else {
        // SAFETY: this function's only reference to the value, and the call ends before it is used again.
        unsafe { policy_let_in(case, interface) };
        case.outcome
    };
    if packet.is_fragment() {
        fragments::note(outcome.is_ok());
    }
    outcome
}

/// Judges the flow to the endpoint behind an interface, and sets the outcome. A global function, see `main`.
#[unsafe(no_mangle)]
#[inline(never)]
unsafe extern "C" fn policy_let_in(case: *mut Case, interface: u32) -> u32 {
    // SAFETY: the caller's promise.
    if let Some(case) = unsafe { case.as_mut() } {
        case.outcome = let_in(case, interface);
    }
    0
}

#[inline(always)]
fn read_server(case: &mut Case, interface: u32) -> bool {
    maps::read_attachment(interface, &mut case.server) && case.server.vni == case.key.vni
}

/// Judges the flow, unless FLOWS has it as it is, and notes it there if its answers must be vouched for.
#[inline(always)]
fn let_in(case: &mut Case, interface: u32) -> Result<(), Counter> {
    if !read_server(case, interface) {
        return Err(Counter::NoAttachment);
    }
    let epoch = maps::policy_epoch();
    let is_known = maps::read_flow(&case.key, &mut case.entry);
    let stamp = case.stamp;
    let entry = &case.entry;
    let is_judged = is_known
        && entry.epoch == epoch
        && entry.class == stamp.class
        && entry.egress_set == stamp.egress_set;
    if !is_judged && let Err(reason) = decide(case) {
        if is_known {
            forget(case);
        }
        denials::note(&case.denial, &case.key, case.is_error);
        return Err(reason);
    }
    if case.is_error || stamp.flags & STAMP_GUARDED == 0 && case.server.egress_set == 0 {
        return Ok(());
    }
    gates::open_for_flows(interface);
    let entry = &mut case.entry;
    entry.epoch = epoch;
    entry.class = stamp.class;
    entry.egress_set = stamp.egress_set;
    if is_known {
        let state = entry.state | case.signal.state;
        let has_changed = !is_judged || state != entry.state;
        entry.state = state;
        let now = now();
        if has_changed || now.wrapping_sub(entry.time) > refresh(case.key.protocol) {
            entry.time = now;
            write(case);
        }
    } else {
        make(case);
    }
    Ok(())
}

/// Writes the entry of a flow that FLOWS has.
#[inline(always)]
fn write(case: &Case) {
    let _ = FLOWS.insert(&case.key, &case.entry, u64::from(BPF_EXIST));
}

#[inline(always)]
fn make(case: &mut Case) {
    case.entry.tag = FlowEntry::tag(&case.key);
    case.entry.time = now();
    case.entry.state = case.signal.state;
    case.entry.answers = 0;
    case.entry.padding = 0;
    let is_made = has_share_of_flows(&mut case.share, case.key.vni)
        && FLOWS
            .insert(&case.key, &case.entry, u64::from(BPF_NOEXIST))
            .is_ok();
    if is_made {
        take_share_of_flows(&case.share);
    } else {
        count(Counter::PolicyUnvouched);
    }
}

#[inline(always)]
fn forget(case: &mut Case) {
    if FLOWS.remove(&case.key).is_ok() {
        give_share_of_flows(&mut case.share, case.key.vni);
    }
}
