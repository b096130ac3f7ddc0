//! The agent: an endpoint's first hop. It holds the pod to its own addresses, answers ARP and neighbour discovery, and
//! finds where a packet goes: the host, this droplet, the endpoint's droplet, a bouncer or a divider.

use thuban_common::{
    counters::Counter,
    packet::{
        ethernet, flow,
        ip::IpPacket,
        ipv6::{self, ICMPV6},
        nd, words3,
    },
    policy::{SHARED_SERVICE_CLASS, STAMP_REPLY},
    skb::may_be_written,
    tables::{
        Address, AttachmentEntry, ConfigEntry, DropletAddress, ENCAPSULATION_LENGTH, EndpointKey,
        LOAD_OF_DIVIDER, LOCAL_TAKES_XDP, LocalEntry, NO_DROPLET, SUBNET_BY_NODE, SUBNET_CLOSED,
        SUBNET_SERVICES, SubnetEntry, TracePoint,
    },
};

use crate::{
    arp, bounce,
    count::count,
    deliver, divide,
    encapsulate::encapsulate,
    frame::{Frame, Outcome, Verdict},
    front, gates, host, inner, load, maps, meter, misses, nd as neighbours, policy, refuse, reject,
    rewrite::rewrite,
    service,
    shares::payer,
    too_big,
    trace::{Observed, record_outcome},
    work::{Choice, Work},
};

/// VLAN tags that XDP still sees in the frame (802.1Q, 802.1ad).
const VLAN: [u16; 2] = [0x8100_u16.to_be(), 0x88a8_u16.to_be()];
/// Bytes of Ethernet, IPv6 and the part that is read of the transport header.
const HEADERS: u32 = 14 + 40 + 20;

/// The droplet to which the agent sends packets for endpoints elsewhere.
struct NextHop {
    droplet: DropletAddress,
    counter: Counter,
    /// Whether the droplet is not the endpoint's: then the flow is worth a direct row if it stays.
    is_detour: bool,
    /// [`thuban_common::tables::LoadKey::network`] of this droplet's role that passes the packet on.
    role: Option<u32>,
}

#[inline(always)]
pub fn run<F: Frame>(frame: &mut F, point: TracePoint) -> Verdict {
    let Some((observed, attachment)) = Observed::with_attachment(frame) else {
        return F::DROP;
    };
    let outcome = handle(frame, observed, attachment);
    record_outcome::<F>(point, observed, outcome)
}

#[inline(always)]
fn handle<F: Frame>(frame: &mut F, observed: &mut Observed, attachment: &mut AttachmentEntry) -> Outcome {
    if !maps::read_attachment(frame.interface(), attachment) {
        return Err(Counter::NoAttachment);
    }
    let attachment = &*attachment;
    let config = maps::config().ok_or(Counter::NoConfig)?;
    observed.vni = attachment.vni;
    if observed.is_traced() {
        // A packet that ends before its addresses are read is the pod's nevertheless.
        observed.packet.source = attachment.address;
    }
    if frame.is_vlan_tagged() {
        return Err(Counter::VlanTagged);
    }
    if !frame.make_linear(HEADERS) {
        return Ok((F::PASS, None));
    }
    let header: ethernet::EthernetHeader = frame.load(0).ok_or(Counter::Truncated)?;
    if header.source != words3(attachment.mac) {
        return Err(Counter::SpoofedMac);
    }
    if attachment.flags & meter::ANY != 0 {
        // A frame that XDP leaves to tc would be counted twice.
        if !F::IS_LAST {
            return Ok((F::PASS, None));
        }
        meter::admit_endpoint(frame, attachment, header.ethertype)?;
    }
    match header.ethertype {
        ethernet::ARP => arp::answer(frame, attachment),
        tag if tag == VLAN[0] || tag == VLAN[1] => Err(Counter::VlanTagged),
        ethertype => {
            inner::read(frame, ethertype, ethernet::LENGTH, 0, &mut observed.packet)?;
            packet(frame, attachment, config, ethertype, observed)
        }
    }
}

/// Whether an address is the endpoint's own.
#[inline(always)]
pub fn is_own<F: Frame>(frame: &F, attachment: &AttachmentEntry, address: &Address) -> bool {
    *address == attachment.address
        || maps::endpoint(&maps::key(attachment.vni, *address))
            .is_some_and(|endpoint| endpoint.entry.local.ifindex == frame.interface())
}

#[inline(always)]
fn packet<F: Frame>(
    frame: &mut F,
    attachment: &AttachmentEntry,
    config: &ConfigEntry,
    ethertype: u16,
    observed: &mut Observed,
) -> Outcome {
    if observed.packet.is_v6()
        && let Some(kind) = discovery(frame, &observed.packet)
    {
        return neighbours::answer(frame, attachment, observed, kind);
    }
    let packet = &observed.packet;
    if !is_own(frame, attachment, &packet.source) {
        return Err(Counter::SpoofedSource);
    }
    if packet.is_v6() && packet.has_options() && hop_limit(frame) == Some(nd::HOP_LIMIT) {
        return Err(Counter::RouterForbidden);
    }
    if let Some(place) = frame.checksum_place()
        && !may_be_written(packet, place)
        && !reject::is_rejection(frame, attachment)
    {
        return Err(Counter::ChecksumMisplaced);
    }
    if packet.is_to_host() {
        return host::reply(frame, attachment, packet);
    }
    if packet.is_to_tracked_host() {
        return host::reply_tracked(frame, packet);
    }
    if !packet.is_to_unicast() {
        return Err(Counter::NotUnicast);
    }
    if packet.is_from_dhcp_server() {
        return Err(Counter::RouterForbidden);
    }
    if gates::is_open_for_fronts(frame.interface()) && front::is_answer(frame, attachment, &observed.packet) {
        return match frame.tc() {
            Some(tc) => front::answer(tc, attachment, config, observed),
            None => Ok((F::PASS, None)),
        };
    }
    // This is asked once, here: the verifier follows each way to the question.
    let Some(is_answer) = policy::vouches(frame, attachment, &observed.packet) else {
        return Ok((F::PASS, None));
    };
    observed.stamp = attachment.stamp();
    if is_answer || reject::take_mark(frame, attachment) {
        observed.stamp.flags |= STAMP_REPLY;
    }
    route(frame, attachment, config, ethertype, observed)
}

/// The result of looking a destination up in the tables.
enum Target {
    Local(LocalEntry),
    Remote(DropletAddress),
    /// An address of this range, and the droplet of its bouncer row.
    Range(&'static SubnetEntry, DropletAddress),
    /// The node's own stack serves it for the VPC.
    ByNode,
    /// Outside of the VPC, and closed to it.
    Closed,
    Outside,
}

#[inline(always)]
fn look_up(key: &EndpointKey) -> Target {
    let mut home = NO_DROPLET;
    if let Some(endpoint) = maps::endpoint(key) {
        if let Some(local) = endpoint.local() {
            return Target::Local(local);
        }
        if let Some(droplet) = endpoint.use_direct() {
            return Target::Remote(droplet);
        }
        home = endpoint.entry.bouncer;
    }
    match maps::subnet(key.vni, key.address) {
        None => Target::Outside,
        Some(subnet) if subnet.flags & SUBNET_BY_NODE != 0 => Target::ByNode,
        Some(subnet) if subnet.flags & SUBNET_CLOSED != 0 => Target::Closed,
        Some(subnet) => Target::Range(subnet, home),
    }
}

#[inline(always)]
fn route<F: Frame>(
    frame: &mut F,
    attachment: &AttachmentEntry,
    config: &ConfigEntry,
    ethertype: u16,
    observed: &mut Observed,
) -> Outcome {
    let packet = &observed.packet;
    let mut key = maps::key(attachment.vni, packet.destination);
    let mut target = look_up(&key);
    let mut translation = None;
    let mut is_unknown = false;
    if let Target::Range(subnet, _) = target
        && subnet.flags & SUBNET_SERVICES != 0
    {
        let (Some(tc), Some(work)) = (frame.tc(), Work::get()) else {
            return Ok((F::PASS, None));
        };
        work.mark = host::mark_of_sent_on(tc, attachment);
        work.interface = tc.interface();
        // A pod that is unknown, because it has just gone, is not taken for one of this VPC.
        if work.mark >> 16 != 0 && payer(work.mark, 0) != attachment.vni {
            observed.stamp.class = SHARED_SERVICE_CLASS;
        }
        match service::to_backend(tc, attachment.vni, packet, work)? {
            Choice::Backend => {
                key.address = work.to.destination;
                target = look_up(&key);
                translation = Some(work);
            }
            Choice::NoRow => is_unknown = true,
            Choice::Refused | Choice::New => return refuse::answer(frame, attachment, packet),
        }
    }
    if translation.is_none()
        && !is_unknown
        && matches!(target, Target::Local(_) | Target::Remote(_) | Target::Range(..))
        && !service::may_be_direct(frame, attachment.vni, packet)?
    {
        if !F::IS_LAST {
            return Ok((F::PASS, None));
        }
        count(Counter::ServiceCollision);
        return refuse::answer(frame, attachment, packet);
    }
    let hash = flow::hash(packet);
    let next_hop = match target {
        Target::Local(local) => {
            return to_local(frame, attachment, &local, ethertype, observed, translation);
        }
        Target::Remote(droplet) if droplet == config.droplet => return Err(Counter::NoEndpoint),
        Target::Remote(droplet) => NextHop {
            droplet,
            counter: Counter::SentDirect,
            is_detour: false,
            role: None,
        },
        Target::Range(..) if is_unknown => to_own_bouncer(attachment, config, packet, hash)?,
        Target::Range(subnet, home) => find(attachment, config, subnet, home, hash)?,
        Target::Closed => return Err(Counter::OutsideVpc),
        Target::ByNode | Target::Outside if translation.is_some() => return Err(Counter::NoEndpoint),
        Target::ByNode | Target::Outside => {
            let is_served = matches!(target, Target::ByNode);
            let outcome = host::leave(frame, attachment, packet, is_served)?;
            meter::admit_to_leave(frame, attachment, ethertype, 0)?;
            return Ok(outcome);
        }
    };
    observed.next = next_hop.droplet;
    // The check comes before anything is written: the error quotes the packet as the pod sent it.
    if let Some(mtu) = too_big::exceeded(frame, config, packet, next_hop.droplet) {
        return too_big::answer(frame, attachment, packet, mtu);
    }
    meter::admit_to_leave(frame, attachment, ethertype, ENCAPSULATION_LENGTH as u32)?;
    translate(frame, packet, translation)?;
    let Some(verdict) = encapsulate(
        frame,
        config,
        next_hop.droplet,
        attachment.vni,
        observed.stamp,
        packet,
        attachment.outer_class(packet.traffic_class),
        hash,
    )?
    else {
        return Ok((F::PASS, None));
    };
    if let Some(network) = next_hop.role {
        load::count(attachment.vni, network);
    }
    if next_hop.is_detour {
        misses::note(
            &key,
            config.seed,
            if is_unknown { misses::FIRST } else { misses::FEW },
        );
    }
    Ok((verdict, Some(next_hop.counter)))
}

/// Delivers to an endpoint of this droplet: a backend, or an endpoint that may be waiting for a service's answer.
#[inline(always)]
fn to_local<F: Frame>(
    frame: &mut F,
    attachment: &AttachmentEntry,
    local: &LocalEntry,
    ethertype: u16,
    observed: &Observed,
    translation: Option<&'static mut Work>,
) -> Outcome {
    let (packet, stamp) = (&observed.packet, observed.stamp);
    if !F::IS_LAST
        && (local.flags & LOCAL_TAKES_XDP == 0
            || service::may_be_answer(local.ifindex, attachment.vni, packet))
    {
        return Ok((F::PASS, None));
    }
    // A pod is always let in by itself.
    if local.ifindex != frame.interface() && policy::concerns(stamp, local) {
        let to = translation.as_ref().map(|work| &work.to);
        let offset = ethernet::LENGTH as u32;
        match policy::admit(frame, attachment.vni, stamp, local, packet, to, offset) {
            Ok(true) => {}
            Ok(false) => return Ok((F::PASS, None)),
            Err(counter) => return reject::to_pod(frame, attachment, packet, counter),
        }
    }
    if translation.is_some() {
        translate(frame, packet, translation)?;
    } else {
        service::restore(frame, local.ifindex, attachment.vni, packet)?;
    }
    deliver::from_agent(frame, local, ethertype)
}

/// Writes the service's changes into the packet.
#[inline(always)]
fn translate<F: Frame>(
    frame: &mut F,
    packet: &IpPacket,
    translation: Option<&'static mut Work>,
) -> Result<(), Counter> {
    match (frame.tc(), translation) {
        (Some(frame), Some(work)) => rewrite(frame, ethernet::LENGTH as u32, packet, &work.to),
        _ => Ok(()),
    }
}

/// Returns the way to a service without a row here: the bouncers of the pod's own network know all services of its
/// VPC. If that bouncer is this droplet, nobody knows the service.
#[inline(always)]
fn to_own_bouncer(
    attachment: &AttachmentEntry,
    config: &ConfigEntry,
    packet: &IpPacket,
    hash: u32,
) -> Result<NextHop, Counter> {
    let subnet = maps::subnet(attachment.vni, packet.source).ok_or(Counter::NoBouncer)?;
    let droplet = divide::bouncer(subnet, hash)?;
    if droplet == config.droplet {
        return Err(Counter::NoBackend);
    }
    Ok(NextHop {
        droplet,
        counter: Counter::SentToBouncer,
        is_detour: true,
        role: None,
    })
}

/// Returns the hop limit of an IPv6 packet. A packet with 255 and extension headers may hide discovery (RFC 6980),
/// which a receiver takes for its link's.
#[inline(always)]
fn hop_limit<F: Frame>(frame: &F) -> Option<u8> {
    let word: [u16; 1] = frame.load(ethernet::LENGTH + 6)?;
    Some(word[0].to_ne_bytes()[1])
}

/// Returns the type, if the packet is neighbour discovery; listener reports (ICMPv6, maybe behind a hop-by-hop header,
/// to a multicast address) count as such.
#[inline(always)]
fn discovery<F: Frame>(frame: &F, packet: &IpPacket) -> Option<u8> {
    let is_multicast = packet.destination[0] == 0xff;
    match packet.protocol {
        ipv6::HOP_BY_HOP if is_multicast => Some(0),
        ICMPV6 => {
            let first: [u16; 1] = inner::transport(frame, packet, 0)?;
            let kind = first[0].to_ne_bytes()[0];
            (is_multicast || nd::is_discovery(kind)).then_some(kind)
        }
        _ => None,
    }
}

/// Finds a bouncer (own network) or a divider (any other). Roles of this very droplet run here.
#[inline(always)]
fn find(
    attachment: &AttachmentEntry,
    config: &ConfigEntry,
    subnet: &SubnetEntry,
    home: DropletAddress,
    hash: u32,
) -> Result<NextHop, Counter> {
    let (mut counter, mut role) = (Counter::SentToBouncer, None);
    if subnet.network == 0 || subnet.network != attachment.network {
        let divider = divide::divider(attachment.vni, hash)?;
        if divider != config.droplet {
            return Ok(NextHop {
                droplet: divider,
                counter: Counter::SentToDivider,
                is_detour: true,
                role,
            });
        }
        (counter, role) = (Counter::Divided, Some(LOAD_OF_DIVIDER));
    }
    let bouncer = divide::bouncer(subnet, hash)?;
    if bouncer != config.droplet {
        return Ok(NextHop {
            droplet: bouncer,
            counter,
            is_detour: true,
            role,
        });
    }
    let droplet = bounce::home(home, config.droplet)?;
    Ok(NextHop {
        droplet,
        counter: Counter::Bounced,
        is_detour: false,
        role: Some(subnet.network),
    })
}
