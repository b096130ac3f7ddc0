//! Transit: handles packets that arrive by the NIC. Geneve of known droplets is checked, then delivered, forwarded,
//! bounced or divided. All other packets are a front's, or the host's and pass unchanged.

use thuban_common::{
    counters::Counter,
    packet::{
        ethernet::{self, EthernetHeader},
        flow,
        geneve::{self, GeneveHeader, OuterHeaders},
        ip::IpPacket,
        ipv4::{self, Ipv4Header},
        ipv6,
    },
    policy::{STAMP_FRONT, Stamp},
    select::contains,
    source::may_send,
    tables::{
        Address, ConfigEntry, DropletAddress, ENCAPSULATION_LENGTH, EndpointEntry, EndpointKey,
        LOAD_OF_DIVIDER, SUBNET_BOUNCER_HERE, SUBNET_FOREIGN, SUBNET_SERVICES, TracePoint, TransitMetadata,
        VPC_DIVIDER_HERE,
    },
};

use crate::{
    bounce, deliver, divide,
    frame::{Frame, Outcome, Verdict, tc::TcFrame},
    front, inner, load, maps, path_mtu, policy, probe, reject,
    rewrite::rewrite,
    service,
    trace::{Observed, record_outcome},
    work::Work,
};

/// Bytes of outer headers, inner Ethernet and IPv6, ports.
const HEADERS: u32 = (ENCAPSULATION_LENGTH + ethernet::LENGTH + ipv6::LENGTH + 4) as u32;

/// Where an inner IP header begins.
pub const INNER_IP: u32 = (ENCAPSULATION_LENGTH + ethernet::LENGTH) as u32;

/// The next droplet, and the role that chose it.
struct Hop {
    droplet: DropletAddress,
    counter: Counter,
    /// [`thuban_common::tables::LoadKey::network`] of the role that passes the packet on.
    role: Option<u32>,
}

#[inline(always)]
pub fn run<F: Frame>(frame: &mut F, point: TracePoint) -> Verdict {
    let Some(observed) = Observed::new(frame) else {
        return F::DROP;
    };
    let outcome = handle(frame, observed);
    record_outcome::<F>(point, observed, outcome)
}

/// Delivers a frame that XDP transit decapsulated, at the tc hook behind it.
#[inline(always)]
pub fn deliver(frame: &mut TcFrame, metadata: TransitMetadata) -> Verdict {
    let Some(observed) = Observed::new(frame) else {
        return TcFrame::DROP;
    };
    let outcome = deliver::decapsulated(frame, metadata, observed);
    record_outcome::<TcFrame>(TracePoint::TransitTc, observed, outcome)
}

#[inline(always)]
fn handle<F: Frame>(frame: &mut F, observed: &mut Observed) -> Outcome {
    let Some(config) = maps::config() else {
        return Ok((F::PASS, None));
    };
    let Some(outer) = ours(frame, config)? else {
        return front::take(frame, config, observed);
    };
    let sender = outer.source();
    if sender == config.droplet || !maps::is_droplet(sender) {
        return Err(Counter::UnknownDroplet);
    }
    if !frame.make_linear(HEADERS) {
        return Ok((F::PASS, None));
    }
    let headers: OuterHeaders = frame.load(ethernet::LENGTH).ok_or(Counter::Truncated)?;
    let options = match options(frame, &headers.geneve) {
        // Probes are tested only after the check has failed, where other packets end: the test costs others nothing.
        Err(_) if headers.geneve.is_probe() => return probe::take(frame, config, &outer),
        checked => checked?,
    };
    let vni = headers.geneve.vni();
    let header: EthernetHeader = inner::at(frame, ENCAPSULATION_LENGTH, options).ok_or(Counter::Truncated)?;
    observed.vni = vni;
    observed.stamp = Stamp::read(&header);
    let offset = ENCAPSULATION_LENGTH + ethernet::LENGTH;
    inner::read(frame, header.ethertype, offset, options, &mut observed.packet)?;
    if observed.stamp.flags & STAMP_FRONT != 0 {
        return front::arrive(frame, config, &outer, options, observed);
    }
    let packet = &observed.packet;
    let key = maps::key(vni, packet.destination);
    let endpoint = maps::rows(&key);
    check_source(&key, packet, sender, endpoint.forwarder)?;

    if endpoint.is_here() {
        let local = endpoint.local;
        let length = ENCAPSULATION_LENGTH as u32 + options;
        let offset = INNER_IP + options;
        match policy::admit(frame, vni, observed.stamp, &local, packet, None, offset) {
            Ok(true) => {}
            Ok(false) => return Ok((F::PASS, None)),
            Err(counter) => {
                let tc = frame
                    .tc()
                    .filter(|_| reject::may_answer(counter))
                    .ok_or(counter)?;
                let is_left = tc.checksum_place().is_some();
                let verdict = reject::by_agent(tc, length, outer.traffic_class(), is_left, observed);
                return Ok((verdict, Some(counter)));
            }
        }
        return deliver::from_wire(frame, length, outer.traffic_class(), vni, &local, packet);
    }
    let vpc = maps::vpc(vni).ok_or(Counter::UnknownVni)?;
    if is_service(&key) {
        let Some(tc) = frame.tc() else {
            return Ok((F::PASS, None));
        };
        if options != 0 {
            // No droplet of ours sends such a packet.
            return Err(Counter::BadHeader);
        }
        serve(tc, config, vpc.flags, observed)?;
        return if observed.next == config.droplet {
            deliver_served(tc, &outer, observed)
        } else {
            pass_served_on(tc, config, &outer, observed)
        };
    }
    let hop = find(&key, &endpoint, vpc.flags, packet, config, sender)?;
    observed.next = hop.droplet;
    let Some(verdict) = bounce::hop(frame, config, &outer, hop.droplet)? else {
        return Ok((F::PASS, None));
    };
    if let Some(network) = hop.role {
        load::count(vni, network);
    }
    Ok((verdict, Some(hop.counter)))
}

/// Returns the outer IPv4 header, if the frame is Geneve for this droplet: whole, without IP options, as droplets send
/// it. Geneve for this droplet in any other form is an error: the port is the overlay's, even if somebody else
/// listens.
#[inline(always)]
fn ours<F: Frame>(frame: &mut F, config: &ConfigEntry) -> Result<Option<Ipv4Header>, Counter> {
    frame.make_linear((ethernet::LENGTH + ipv4::LENGTH + 8) as u32);
    let header: Option<EthernetHeader> = frame.load(0);
    if header.is_none_or(|header| header.ethertype != ethernet::IPV4) || frame.is_vlan_tagged() {
        return Ok(None);
    }
    let Some(ip) = frame.load::<Ipv4Header>(ethernet::LENGTH) else {
        return Ok(None);
    };
    if ip.destination() != config.droplet {
        return Ok(None);
    }
    if ip.is_fragment() || ip.has_options() || !ip.is_valid() {
        return if hides_geneve(frame, &ip) {
            Err(Counter::BadHeader)
        } else {
            Ok(None)
        };
    }
    match ip.protocol() {
        ipv4::UDP => {
            let udp: Option<geneve::UdpHeader> = frame.load(ethernet::LENGTH + ipv4::LENGTH);
            Ok(udp.is_some_and(|udp| udp.is_geneve()).then_some(ip))
        }
        ipv4::ICMP if F::IS_LAST => {
            path_mtu::learn(frame, config);
            Ok(None)
        }
        _ => Ok(None),
    }
}

/// Whether a packet with IP options, or a first fragment, is for the port of Geneve. Without the first fragment the
/// later ones are never put together.
#[inline(never)]
fn hides_geneve<F: Frame>(frame: &F, ip: &Ipv4Header) -> bool {
    if ip.protocol() != ipv4::UDP || ip.is_later_fragment() {
        return false;
    }
    let udp = frame.load_far::<geneve::UdpHeader>((ethernet::LENGTH + ip.header_length()) as u32);
    udp.is_some_and(|udp| udp.is_geneve())
}

/// Checks the Geneve header. Returns the bytes of its options.
#[inline(always)]
fn options<F: Frame>(frame: &F, header: &GeneveHeader) -> Result<u32, Counter> {
    header.check()?;
    let length = header.options_length();
    if length != 0 {
        // Aggregation understands no options, so no aggregated frame may have them.
        if frame.segment_size() != 0 {
            return Err(Counter::BadHeader);
        }
        geneve::check_options(length, |offset| {
            frame.load_far(ENCAPSULATION_LENGTH as u32 + offset)
        })?;
    }
    Ok(length)
}

/// Checks the sender of an inner source. If a row says where the source lives, only that droplet may send it, or one
/// that passes packets on: dividers, bouncers of the destination's network, the destination's former droplet. A divider
/// believes bouncers of the source's network too: they choose backends for their clients (see [`serve`]). A source
/// without a row must at least be an address of the VPC.
#[inline(never)]
fn check_source(
    destination: &EndpointKey,
    packet: &IpPacket,
    sender: DropletAddress,
    forwarder: DropletAddress,
) -> Result<(), Counter> {
    let vni = destination.vni;
    let source = maps::endpoint(&maps::key(vni, packet.source));
    let here = source.as_ref().is_some_and(|source| source.local().is_some());
    let row = source.and_then(|source| source.home());
    // Nobody in the VPC has an address outside of it, or a service's.
    if !here
        && row.is_none()
        && maps::subnet(vni, packet.source).is_none_or(|subnet| subnet.flags & SUBNET_FOREIGN != 0)
    {
        return Err(maps::vpc(vni).map_or(Counter::UnknownVni, |_| Counter::SourceMismatch));
    }
    if !here && may_send(row, sender, false) {
        return Ok(());
    }
    let vpc = maps::vpc(vni);
    let relays = vpc.as_ref().is_some_and(|vpc| contains(vpc.dividers, sender))
        || is_bouncer_of(vni, packet.destination, sender)
        || forwarder == sender
        || vpc.is_some_and(|vpc| vpc.flags & VPC_DIVIDER_HERE != 0)
            && is_bouncer_of(vni, packet.source, sender);
    if relays {
        Ok(())
    } else {
        Err(Counter::SourceMismatch)
    }
}

/// Whether a droplet is a bouncer of the network that holds an address.
#[inline(always)]
fn is_bouncer_of(vni: u32, address: Address, droplet: DropletAddress) -> bool {
    maps::subnet(vni, address).is_some_and(|subnet| contains(&subnet.bouncers, droplet))
}

#[inline(always)]
fn is_service(key: &EndpointKey) -> bool {
    maps::subnet(key.vni, key.address).is_some_and(|subnet| subnet.flags & SUBNET_SERVICES != 0)
}

/// Gives a client's packet to a service that its agent doesn't know yet to a backend, as that agent will choose it.
/// [`Observed::next`] is the droplet that gets the packet, which may be this one. If this droplet has no row of the
/// backend, that is a divider: dividers believe bouncers of the client's network, and the whole VPC believes dividers.
#[inline(never)]
fn serve(
    frame: &mut TcFrame,
    config: &ConfigEntry,
    vpc_flags: u32,
    observed: &mut Observed,
) -> Result<(), Counter> {
    let packet = &observed.packet;
    let work = Work::get().ok_or(Counter::NoBackend)?;
    service::to_backend_for_other(frame, observed.vni, packet, INNER_IP, work)?;
    let key = maps::key(observed.vni, work.to.destination);
    let endpoint = maps::rows(&key);
    observed.next = config.droplet;
    if !endpoint.is_here() {
        observed.next = match find(&key, &endpoint, vpc_flags, packet, config, [0; 4]) {
            Ok(hop) => hop.droplet,
            Err(_) => divide::divider(key.vni, flow::hash(packet))?,
        };
        if observed.next == config.droplet {
            return Err(Counter::NoEndpoint);
        }
    }
    rewrite(frame, INNER_IP, packet, &work.to)
}

/// Sends on a packet that [`serve`] gave to a backend of another droplet.
#[inline(never)]
fn pass_served_on(
    frame: &mut TcFrame,
    config: &ConfigEntry,
    outer: &Ipv4Header,
    observed: &Observed,
) -> Outcome {
    let Some(verdict) = bounce::hop(frame, config, outer, observed.next)? else {
        return Ok((TcFrame::PASS, None));
    };
    if let Some(subnet) = maps::subnet(observed.vni, observed.packet.source) {
        load::count(observed.vni, subnet.network);
    }
    Ok((verdict, Some(Counter::Bounced)))
}

/// Delivers a packet that [`serve`] gave to a backend of this droplet. It is from a client, and no answer.
#[inline(never)]
fn deliver_served(frame: &mut TcFrame, outer: &Ipv4Header, observed: &Observed) -> Outcome {
    let (vni, packet) = (observed.vni, &observed.packet);
    let to = Work::get().map(|work| &work.to).ok_or(Counter::NoBackend)?;
    let local = maps::rows(&maps::key(vni, to.destination)).local;
    policy::admit(frame, vni, observed.stamp, &local, packet, Some(to), INNER_IP)?;
    let length = ENCAPSULATION_LENGTH as u32;
    deliver::unwrap(frame, length, outer.traffic_class(), vni, &local, packet)?;
    Ok((frame.deliver(&local), Some(Counter::Delivered)))
}

/// Finds the next hop of a packet for an endpoint elsewhere.
#[inline(always)]
fn find(
    key: &EndpointKey,
    endpoint: &EndpointEntry,
    vpc_flags: u32,
    packet: &IpPacket,
    config: &ConfigEntry,
    sender: DropletAddress,
) -> Result<Hop, Counter> {
    let mut next = maps::row(endpoint.forward).map(|droplet| Hop {
        droplet,
        counter: Counter::Forwarded,
        role: None,
    });
    if next.is_none() {
        let subnet = maps::subnet(key.vni, key.address).ok_or(Counter::NoEndpoint)?;
        let mut bounces = subnet.flags & SUBNET_BOUNCER_HERE != 0;
        if !bounces && vpc_flags & VPC_DIVIDER_HERE != 0 {
            let bouncer = divide::bouncer(subnet, flow::hash(packet))?;
            if bouncer != config.droplet {
                // The packet may go back to the sender: that droplet may be both the divider's client and a bouncer.
                return Ok(Hop {
                    droplet: bouncer,
                    counter: Counter::Divided,
                    role: Some(LOAD_OF_DIVIDER),
                });
            }
            bounces = true;
        }
        if bounces {
            next = Some(Hop {
                droplet: bounce::home(endpoint.bouncer, config.droplet)?,
                counter: Counter::Bounced,
                role: Some(subnet.network),
            });
        }
    }
    match next {
        Some(hop) if hop.droplet == config.droplet => Err(Counter::NoEndpoint),
        // The sender has no such endpoint, or it would not have sent the packet here: the row is stale.
        Some(hop) if hop.droplet == sender => Err(Counter::WouldReturn),
        Some(found) => Ok(found),
        None => Err(Counter::NoEndpoint),
    }
}
