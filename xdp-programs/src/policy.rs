//! Network policy, at the droplet of the endpoint that a packet is for: both directions are judged here, the
//! destination's ingress set and the sender's egress set, which the packet's stamp names.
//!
//! Invariant: FLOWS permits nothing. It saves judging a flow again until policy changes, and tells answers from other
//! packets: the agent of who answers *vouches* for them in the stamp. Without an entry, the flow's next packet makes
//! one. Only the client keeps an entry alive: who answers could otherwise hold a way open to whoever has the client's
//! address next.

use aya_ebpf::{
    bindings::{BPF_EXIST, BPF_NOEXIST},
    macros::map,
    maps::PerCpuArray,
};
use thuban_common::{
    counters::Counter,
    packet::{ethernet, icmp, ip::IpPacket, ipv4},
    policy::{
        ANSWERED_LIFE, DENIAL_EGRESS, DENIAL_OUTSIDE, DenialKey, FlowEntry, NO_RULE, PEER_OUTSIDE,
        STAMP_GUARDED, STAMP_REPLY, Stamp, of_vpc, point, try_judge,
    },
    services::{ConnectionKey, FORWARD, SEEN, Signal, has_connections, refresh},
    tables::{Address, AttachmentEntry, EndpointKey, LOCAL_HAS_POLICY, LOCAL_REJECTS, LocalEntry},
};

use crate::{
    count::count,
    denials,
    fragments::{self, Judged},
    frame::{Frame, tc::TcFrame},
    gates, inner,
    maps::{self, FLOWS},
    rewrite::Flow,
    shares::{give_share_of_flows, has_share_of_flows, take_share_of_flows},
    work::now,
};

/// Bytes of an ICMP header before the quote.
const ICMP: u32 = 8;

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

/// Where the ports of a packet are to be found.
enum Shown {
    Here,
    /// In an earlier fragment.
    Earlier,
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

/// Judges a packet of a client outside by the ingress set of an endpoint of this droplet. `flow`: as the endpoint gets
/// it.
#[inline(never)]
pub fn lets_in(vni: u32, interface: u32, protocol: u8, flow: &Flow) -> Result<(), Counter> {
    let case = Case::get(vni).ok_or(Counter::PolicyUnreadable)?;
    if !read_server(case, interface) {
        return Err(Counter::NoAttachment);
    }
    if case.server.ingress_set == 0 {
        return Ok(());
    }
    case.key.source = flow.source;
    case.key.destination = flow.destination;
    case.key.ports = flow.ports;
    case.key.protocol = protocol;
    let set = of_vpc(vni, case.server.ingress_set);
    let point = point(protocol, u16::from_be(flow.ports[1]));
    let Some(rank) = denying(set, PEER_OUTSIDE, &case.key.source, point) else {
        return Ok(());
    };
    case.denial = DenialKey {
        set,
        interface,
        rank,
        flags: DENIAL_OUTSIDE,
    };
    denials::note(&case.denial, &case.key, false);
    Err(Counter::PolicyIngress)
}

/// What an endpoint's egress set says of a packet that leaves its VPC.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Out {
    Passes,
    /// No rule accepts it.
    Isolated,
    /// A rule denies it, or none could be asked: the packet can't be read, or the set isn't known.
    Denied,
}

/// Judges a packet that leaves its VPC, of an endpoint whose agent is at tc.
#[inline(never)]
pub fn lets_out<F: Frame>(frame: &mut F, sender: &AttachmentEntry, packet: &IpPacket) -> Out {
    let Some(case) = Case::get(sender.vni) else {
        return Out::Denied;
    };
    match describe(frame, packet, ethernet::LENGTH as u32, case) {
        Ok(Shown::Here) => {
            let set = of_vpc(sender.vni, sender.egress_set);
            // SAFETY: the address is valid for the call.
            let verdict =
                unsafe { policy_denies(set, PEER_OUTSIDE, &raw const case.key.destination, case.point) };
            if packet.is_fragment() {
                fragments::note(verdict == PASSES);
            }
            if verdict != PASSES && may_ask(case) {
                case.denial = DenialKey {
                    set,
                    interface: sender.ifindex,
                    rank: rank(verdict),
                    flags: DENIAL_EGRESS | DENIAL_OUTSIDE,
                };
                denials::note(&case.denial, &case.key, false);
            }
            match verdict {
                PASSES => Out::Passes,
                BY_DEFAULT => Out::Isolated,
                _ => Out::Denied,
            }
        }
        Ok(Shown::Earlier) if fragments::passes() => Out::Passes,
        // The stack judges a datagram by its first fragment.
        _ => Out::Denied,
    }
}

/// Whether a packet that leaves the VPC may be a question. TCP and SCTP say so themselves, and datagrams may be
/// either, except answers to an echo and errors.
#[inline(always)]
fn may_ask(case: &Case) -> bool {
    let [source, destination] = case.key.ports;
    let asks = match case.key.protocol {
        ipv4::TCP | ipv4::SCTP => case.signal.opens,
        ipv4::UDP => true,
        _ => source != 0 || destination == 0,
    };
    asks && !case.is_error
}

/// Judges the flow to an endpoint by both sides' sets. Sets the denial, if one of them denies the flow.
#[inline(never)]
fn decide(case: &mut Case) -> Result<(), Counter> {
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
const PASSES: u32 = u32::MAX;
/// The set is unknown, or not whole.
const UNDECIDED: u32 = u32::MAX - 1;
/// No rule accepts the packet.
const BY_DEFAULT: u32 = NO_RULE as u32;

/// Returns the rank of the rule of a set that denies a packet, or [`NO_RULE`] if the set denies it by default. `None`:
/// the packet passes.
#[inline(always)]
fn denying(set: u64, peer: u64, address: &Address, point: u32) -> Option<u16> {
    // SAFETY: `address` is valid for the call.
    match unsafe { policy_denies(set, peer, address, point) } {
        PASSES => None,
        verdict => Some(rank(verdict)),
    }
}

/// The rank of a verdict that denies.
#[inline(always)]
const fn rank(verdict: u32) -> u16 {
    if verdict == UNDECIDED {
        NO_RULE
    } else {
        verdict as u16
    }
}

/// Does what [`try_judge`] does: returns [`PASSES`], [`UNDECIDED`] or the rank. A global function, see `main`.
#[unsafe(no_mangle)]
#[inline(never)]
unsafe extern "C" fn policy_denies(set: u64, peer: u64, address: *const Address, point: u32) -> u32 {
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

/// Sets the packet's flow, its [`point`] and signal.
#[inline(never)]
fn describe<F: Frame>(
    frame: &mut F,
    packet: &IpPacket,
    offset: u32,
    case: &mut Case,
) -> Result<Shown, Counter> {
    if packet.has_options() {
        return Err(Counter::PolicyUnreadable);
    }
    case.is_error = false;
    case.signal = Signal::DATAGRAM;
    case.key.source = packet.source;
    case.key.destination = packet.destination;
    case.key.ports = packet.ports;
    case.key.protocol = packet.protocol;
    if packet.is_fragment() {
        let tc = frame.tc().ok_or(Counter::PolicyUnreadable)?;
        return fragment(tc, packet, offset, case);
    }
    transport_of(frame, packet, offset + packet.header_length(), case)?;
    case.point = point(case.key.protocol, u16::from_be(case.key.ports[1]));
    Ok(Shown::Here)
}

/// Does what [`describe`] does, for a fragment.
#[inline(never)]
fn fragment(frame: &TcFrame, packet: &IpPacket, offset: u32, case: &mut Case) -> Result<Shown, Counter> {
    match fragments::judged(frame, case.key.vni, packet, offset).ok_or(Counter::PolicyUnreadable)? {
        Judged::Later => Ok(Shown::Earlier),
        Judged::Whole(datagram) => {
            case.key.ports = datagram.ports;
            case.key.protocol = datagram.protocol;
            case.point = point(datagram.protocol, u16::from_be(datagram.ports[1]));
            Ok(Shown::Here)
        }
    }
}

/// Reads what the transport header at `offset` says beside ports.
#[inline(never)]
fn transport_of<F: Frame>(frame: &F, packet: &IpPacket, offset: u32, case: &mut Case) -> Result<(), Counter> {
    match packet.protocol {
        ipv4::TCP | ipv4::SCTP => {
            let at = offset + Signal::OFFSET as u32;
            let [word] = frame.load_far(at).ok_or(Counter::Truncated)?;
            case.signal = Signal::read(packet.protocol, word);
        }
        protocol if protocol == icmp::protocol(packet.is_v6()) => {
            let word: [u16; 1] = frame.load_far(offset).ok_or(Counter::Truncated)?;
            if icmp::is_error(packet.is_v6(), word[0].to_ne_bytes()[0])
                && quoted(frame, packet, offset + ICMP, case)
            {
                case.is_error = true;
                case.signal.state = SEEN;
            } else {
                case.key.ports = echo(frame, packet.is_v6(), protocol, offset);
            }
        }
        _ => {}
    }
    Ok(())
}

/// Sets the flow of the answers to a quoted packet, which its receiver quotes to its sender. Returns false if the quote
/// is no such packet, or does not show whose it is.
#[inline(never)]
fn quoted<F: Frame>(frame: &F, packet: &IpPacket, offset: u32, case: &mut Case) -> bool {
    let quote = &mut case.quote;
    let ethertype = if packet.is_v6() {
        ethernet::IPV6
    } else {
        ethernet::IPV4
    };
    if inner::read(frame, ethertype, 0, offset, quote).is_err()
        || !quote.shows_transport()
        || quote.source != packet.destination
        || quote.destination != packet.source
    {
        return false;
    }
    let [first, second] = if quote.has_ports() {
        quote.ports
    } else {
        let offset = offset + packet.header_length();
        echo(frame, packet.is_v6(), quote.protocol, offset)
    };
    case.key.protocol = quote.protocol;
    case.key.ports = [second, first];
    true
}

/// Returns what stands for ports in the header at `offset` of a protocol without ports. An echo request has its
/// identifier for the first one, an answer to it for the second one. Others have none.
#[inline(never)]
fn echo<F: Frame>(frame: &F, is_v6: bool, protocol: u8, offset: u32) -> [u16; 2] {
    if protocol != icmp::protocol(is_v6) {
        return [0; 2];
    }
    let Some([first, _, identifier]) = frame.load_far::<[u16; 3]>(offset) else {
        return [0; 2];
    };
    let kind = first.to_ne_bytes()[0];
    if kind == icmp::echo_request(is_v6) {
        [identifier, 0]
    } else if kind == icmp::echo_reply(is_v6) {
        [0, identifier]
    } else {
        [0; 2]
    }
}
