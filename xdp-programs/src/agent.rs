//! The agent: an endpoint's first hop. It holds the pod to its own addresses, answers ARP, and finds where a packet
//! goes: the host, this droplet, the endpoint's droplet, a bouncer or a divider.

use thuban_common::{
    counters::Counter,
    packet::{ethernet, words3},
    tables::{
        AttachmentEntry, ConfigEntry, DropletAddress, EndpointKey, HOST_SOURCE, LOCAL_TAKES_XDP, SubnetEntry,
    },
};

use crate::{
    arp, bounce,
    count::{count, settle},
    deliver, divide,
    encapsulate::encapsulate,
    frame::{Frame, Verdict},
    host,
    inner::{self, Inner},
    maps, misses,
};

/// VLAN tags that XDP still sees in the frame (802.1Q, 802.1ad).
const VLAN: [u16; 2] = [0x8100_u16.to_be(), 0x88a8_u16.to_be()];
/// Ethernet, IPv4 and what is read of the transport header.
const HEADERS: u32 = 14 + 20 + 20;

/// Where the agent sends what isn't on this droplet.
struct Way {
    droplet: DropletAddress,
    counter: Counter,
    /// Not the endpoint's droplet: worth a direct row if the flow stays.
    is_detour: bool,
}

#[inline(always)]
pub fn run<F: Frame>(frame: &mut F) -> Verdict {
    settle(handle(frame), F::DROP)
}

#[inline(always)]
fn handle<F: Frame>(frame: &mut F) -> Result<Verdict, Counter> {
    let attachment = maps::attachment(frame.interface()).ok_or(Counter::NoAttachment)?;
    let config = maps::config().ok_or(Counter::NoConfig)?;
    if frame.is_vlan_tagged() {
        return Err(Counter::VlanTagged);
    }
    if !frame.make_linear(HEADERS) {
        return Ok(F::PASS);
    }
    let header: ethernet::EthernetHeader = frame.load(0).ok_or(Counter::Truncated)?;
    if header.source != words3(attachment.mac) {
        return Err(Counter::SpoofedMac);
    }
    match header.ethertype {
        ethernet::IPV4 => packet(frame, attachment, config),
        ethernet::ARP => arp::answer(frame, attachment),
        ethernet::IPV6 => Err(discovery_or(frame, Counter::NotIpv4)),
        tag if tag == VLAN[0] || tag == VLAN[1] => Err(Counter::VlanTagged),
        _ => Err(Counter::NotIpv4),
    }
}

/// IPv6 isn't served; neighbour and listener discovery (ICMPv6, maybe behind a hop-by-hop header) is expected.
#[inline(always)]
fn discovery_or<F: Frame>(frame: &F, other: Counter) -> Counter {
    match frame
        .load::<[u16; 4]>(ethernet::LENGTH)
        .map(|words| words[3].to_ne_bytes()[0])
    {
        Some(0 | 58) => Counter::Ipv6Discovery,
        _ => other,
    }
}

#[inline(always)]
fn packet<F: Frame>(
    frame: &mut F,
    attachment: &AttachmentEntry,
    config: &ConfigEntry,
) -> Result<Verdict, Counter> {
    let inner = inner::read(frame, ethernet::LENGTH, 0)?;
    if maps::key(attachment.vni, inner.ip.source()).address != attachment.address {
        return Err(Counter::SpoofedSource);
    }
    if !inner.ip.is_to_unicast() {
        return Err(Counter::NotUnicast);
    }
    let destination = inner.ip.destination();
    if destination == HOST_SOURCE {
        return host::reply(frame, attachment, &inner.ip);
    }
    let Some(subnet) = maps::subnet(attachment.vni, destination) else {
        return host::leave(frame, attachment, &inner.ip);
    };
    let key = maps::key(attachment.vni, destination);
    if let Some(local) = maps::local(&key) {
        if !F::IS_LAST && local.flags & LOCAL_TAKES_XDP == 0 {
            return Ok(F::PASS);
        }
        return deliver::from_agent(frame, local);
    }
    let way = find(attachment, config, subnet, &key, &inner)?;
    let Some(verdict) = encapsulate(frame, config, way.droplet, attachment.vni, &inner)? else {
        return Ok(F::PASS);
    };
    count(way.counter);
    if way.is_detour {
        misses::note(&key);
    }
    Ok(verdict)
}

/// Direct row, else bouncer (own network) or divider (any other). Roles of this very droplet run here.
#[inline(always)]
fn find(
    attachment: &AttachmentEntry,
    config: &ConfigEntry,
    subnet: &SubnetEntry,
    key: &EndpointKey,
    inner: &Inner,
) -> Result<Way, Counter> {
    if let Some(droplet) = maps::use_direct(key) {
        if droplet == config.droplet {
            return Err(Counter::NoEndpoint);
        }
        return Ok(Way {
            droplet,
            counter: Counter::SentDirect,
            is_detour: false,
        });
    }
    let mut counter = Counter::SentToBouncer;
    if subnet.network == 0 || subnet.network != attachment.network {
        let divider = divide::divider(attachment.vni, inner.hash)?;
        if divider != config.droplet {
            return Ok(Way {
                droplet: divider,
                counter: Counter::SentToDivider,
                is_detour: true,
            });
        }
        counter = Counter::Divided;
    }
    let bouncer = divide::bouncer(subnet, inner.hash)?;
    if bouncer != config.droplet {
        return Ok(Way {
            droplet: bouncer,
            counter,
            is_detour: true,
        });
    }
    let droplet = bounce::home(key, config.droplet)?;
    Ok(Way {
        droplet,
        counter: Counter::Bounced,
        is_detour: false,
    })
}
