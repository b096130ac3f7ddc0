//! Fragments of datagrams to services, of answers, and of datagrams that policy judges. The first fragment shows the
//! ports and is treated as the whole datagram would be; FRAGMENTS tells the later ones what it became. Nothing is put
//! together here.
//!
//! Invariant: a later fragment is treated only as a first fragment of the same VPC, addresses and number was. A VPC has
//! places of its own, so no VPC takes another one's.

use aya_ebpf::{bindings::BPF_ANY, macros::map, maps::PerCpuArray};
use thuban_common::{
    counters::Counter,
    packet::{flow, geneve::UdpHeader, ip::IpPacket, ipv4, ipv6},
    services::{FRAGMENT_LIFE, FragmentEntry, FragmentKey, PLACES_OF_VPC},
};

use crate::{
    frame::{Frame, tc::TcFrame},
    maps::{self, FRAGMENTS},
    shares::payer,
    work::{Choice, Work, now},
};

/// Bytes of IPv6's fragment header.
const FRAGMENT_HEADER: u32 = 8;
/// Bytes of a UDP header.
const UDP: u32 = 8;

/// The datagram of the fragment that is worked on: data that is too large for the stack.
struct Datagram {
    /// The datagram, as if it were whole.
    packet: IpPacket,
    /// Bytes from the IP header to the transport header; 0 if the fragment has none.
    transport: u32,
    key: FragmentKey,
    /// The entry that the datagram gets, or has.
    entry: FragmentEntry,
}

/// One value for each user and CPU is enough, see `trace`.
#[map]
static DATAGRAM: PerCpuArray<Datagram> = PerCpuArray::with_max_entries(2, 0);

/// Index in DATAGRAM, and in units of [`PLACES_OF_VPC`] the first place.
const SERVICES: u32 = 0;
const POLICY: u32 = 1;

#[inline(always)]
fn datagram(user: u32) -> Option<&'static mut Datagram> {
    // SAFETY: this CPU's only value, and nobody else has it now.
    DATAGRAM
        .get_ptr_mut(user)
        .map(|datagram| unsafe { &mut *datagram })
}

/// Returns the packet, or for a first fragment its datagram as if it were whole; `None` for a later fragment. The IP
/// header lies at `offset`. Only UDP is known to be fragmented on purpose: other protocols are an error. `mark`:
/// [`Work::mark`].
#[inline(always)]
pub fn whole<'a>(
    frame: &TcFrame,
    vni: u32,
    mark: u32,
    packet: &'a IpPacket,
    offset: u32,
) -> Result<Option<&'a IpPacket>, Counter> {
    if !packet.is_fragment() {
        return Ok(Some(packet));
    }
    let datagram = datagram(SERVICES).ok_or(Counter::ServiceUnreadable)?;
    read(frame, vni, packet, offset, datagram)?;
    if datagram.packet.protocol != ipv4::UDP {
        return Err(Counter::ServiceUnreadable);
    }
    // What the node sends on takes a place of the pod's VPC.
    datagram.key.vni = payer(mark, vni);
    Ok((datagram.transport != 0).then_some(&datagram.packet))
}

/// A fragment, as policy judges it.
pub enum Judged {
    /// As the datagram, as if it were whole. Fragments of protocols without ports are each judged so.
    Whole(&'static IpPacket),
    /// As the first one was.
    Later,
}

/// Does what [`whole`] does, for policy. `None`: nobody can tell the ports.
#[inline(always)]
pub fn judged(frame: &TcFrame, vni: u32, packet: &IpPacket, offset: u32) -> Option<Judged> {
    let datagram = datagram(POLICY)?;
    read(frame, vni, packet, offset, datagram).ok()?;
    datagram.key.place += POLICY * PLACES_OF_VPC;
    match datagram.packet.protocol {
        ipv4::UDP if datagram.transport == 0 => Some(Judged::Later),
        ipv4::TCP | ipv4::SCTP => None,
        next if packet.is_v6() && ipv6::is_extension(next) => None,
        _ => Some(Judged::Whole(&datagram.packet)),
    }
}

#[inline(never)]
fn read(
    frame: &TcFrame,
    vni: u32,
    packet: &IpPacket,
    offset: u32,
    datagram: &mut Datagram,
) -> Result<(), Counter> {
    let (number, place, protocol, header);
    if packet.is_v6() {
        let words: [u16; 4] = frame
            .load_far(offset + ipv6::LENGTH as u32)
            .ok_or(Counter::Truncated)?;
        let [first, at, high, low] = words;
        protocol = first.to_ne_bytes()[0];
        // The lowest bits say whether more fragments follow.
        place = u16::from_be(at) & 0xfff8;
        number = u32::from(high) << 16 | u32::from(low);
        header = ipv6::LENGTH as u32 + FRAGMENT_HEADER;
    } else {
        let words: [u16; 2] = frame.load_far(offset + 4).ok_or(Counter::Truncated)?;
        protocol = packet.protocol;
        number = u32::from(words[0]);
        place = u16::from_be(words[1]) & 0x1fff;
        header = ipv4::LENGTH as u32;
    }
    if packet.has_options() {
        return Err(Counter::ServiceUnreadable);
    }
    let mut ports = [0; 2];
    datagram.transport = 0;
    if place == 0 && protocol == ipv4::UDP {
        let udp: Option<UdpHeader> = frame.load_far(offset + header);
        let udp = udp.filter(|_| packet.length >= header + UDP);
        let udp = udp.ok_or(Counter::ServiceUnreadable)?;
        ports = [udp.source, udp.destination];
        datagram.transport = header;
    }
    datagram.packet = packet.whole(protocol, ports);
    datagram.key = FragmentKey {
        vni,
        // All fragments show the same addresses, and none of them ports.
        place: flow::finish(flow::hash(packet) ^ number) % PLACES_OF_VPC,
    };
    datagram.entry.vni = vni;
    datagram.entry.number = number;
    Ok(())
}

/// Notes for the later fragments what the first one becomes: [`Work::to`], or unchanged if a bouncer knows its backend.
#[inline(never)]
pub fn remember(is_changed: bool, work: &Work) {
    let Some(datagram) = datagram(SERVICES) else {
        return;
    };
    datagram.entry.to_source = work.to.source;
    datagram.entry.to_destination = if is_changed { work.to.destination } else { [0; 16] };
    insert(datagram);
}

#[inline(always)]
fn insert(datagram: &mut Datagram) {
    let entry = &mut datagram.entry;
    entry.time = now();
    entry.source = datagram.packet.source;
    entry.destination = datagram.packet.destination;
    // Without room the later fragments are lost.
    let _ = FRAGMENTS.insert(&datagram.key, entry, u64::from(BPF_ANY));
}

/// Notes for the later fragments of the datagram that policy judged whether they pass.
#[inline(never)]
pub fn note(passes: bool) {
    if !passes {
        return forget(POLICY);
    }
    if let Some(datagram) = datagram(POLICY) {
        insert(datagram);
    }
}

/// Whether a later fragment passes, because the first one did.
#[inline(never)]
pub fn passes() -> bool {
    datagram(POLICY)
        .is_some_and(|datagram| find(datagram) && now().wrapping_sub(datagram.entry.time) <= FRAGMENT_LIFE)
}

/// Removes what an earlier datagram with the same addresses and number became.
#[inline(never)]
pub fn forget_answer() {
    forget(SERVICES);
}

#[inline(always)]
fn forget(user: u32) {
    if let Some(datagram) = datagram(user)
        && find(datagram)
    {
        // A missing entry is as good.
        let _ = FRAGMENTS.remove(&datagram.key);
    }
}

/// Reads the entry of the place. Returns whether it is of a datagram with the same addresses and number.
#[inline(always)]
fn find(datagram: &mut Datagram) -> bool {
    let (vni, number) = (datagram.entry.vni, datagram.entry.number);
    let entry = &mut datagram.entry;
    maps::read_fragment(&datagram.key, entry)
        && [entry.vni, entry.number] == [vni, number]
        && entry.source == datagram.packet.source
        && entry.destination == datagram.packet.destination
}

/// Finds what a later fragment becomes.
#[inline(never)]
pub fn follow(work: &mut Work) -> Result<Choice, Counter> {
    let datagram = datagram(SERVICES).ok_or(Counter::FragmentWithoutFirst)?;
    let is_known = find(datagram);
    let entry = &datagram.entry;
    if !is_known || now().wrapping_sub(entry.time) > FRAGMENT_LIFE {
        return Err(Counter::FragmentWithoutFirst);
    }
    if entry.to_destination == [0; 16] {
        return Ok(Choice::NoRow);
    }
    work.to.source = entry.to_source;
    work.to.destination = entry.to_destination;
    Ok(Choice::Backend)
}

/// Returns a fragment's datagram as [`whole`] left it, and the bytes from its IP header to its transport header (0:
/// this fragment has none).
#[inline(always)]
pub fn shape() -> Option<(&'static IpPacket, u32)> {
    datagram(SERVICES).map(|datagram| (&datagram.packet, datagram.transport))
}
