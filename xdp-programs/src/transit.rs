//! Transit: what arrives by the NIC. Geneve of known droplets is checked, then delivered, forwarded, bounced or
//! divided; all else is the host's and passes unchanged.

use thuban_common::{
    counters::Counter,
    packet::{
        ethernet::{self, EthernetHeader},
        geneve::{self, GeneveHeader, OuterHeaders},
        ipv4,
    },
    select::contains,
    source::may_send,
    tables::{
        ConfigEntry, DropletAddress, ENCAPSULATION_LENGTH, EndpointKey, SUBNET_BOUNCER_HERE,
        VPC_DIVIDER_HERE, VpcEntry,
    },
};

use crate::{
    bounce,
    count::{count, settle},
    deliver, divide,
    frame::{Frame, Verdict},
    inner::{self, Inner},
    maps,
};

/// Outer headers, inner Ethernet and IPv4, ports.
const HEADERS: u32 = (ENCAPSULATION_LENGTH + ethernet::LENGTH + ipv4::LENGTH + 4) as u32;

#[inline(always)]
pub fn run<F: Frame>(frame: &mut F) -> Verdict {
    settle(handle(frame), F::DROP)
}

#[inline(always)]
fn handle<F: Frame>(frame: &mut F) -> Result<Verdict, Counter> {
    let Some(config) = maps::config() else {
        return Ok(F::PASS);
    };
    let Some(outer) = ours(frame, config) else {
        return Ok(F::PASS);
    };
    let sender = outer.source();
    if sender == config.droplet || !maps::is_droplet(sender) {
        return Err(Counter::UnknownDroplet);
    }
    if !frame.make_linear(HEADERS) {
        return Ok(F::PASS);
    }
    let headers: OuterHeaders = frame.load(ethernet::LENGTH).ok_or(Counter::Truncated)?;
    let options = options(frame, &headers.geneve)?;
    let vni = headers.geneve.vni();
    let vpc = maps::vpc(vni).ok_or(Counter::UnknownVni)?;
    let header: EthernetHeader = inner::at(frame, ENCAPSULATION_LENGTH, options).ok_or(Counter::Truncated)?;
    if header.ethertype != ethernet::IPV4 {
        return Err(Counter::NotIpv4);
    }
    let inner = inner::read(frame, ENCAPSULATION_LENGTH + ethernet::LENGTH, options)?;
    check_source(vni, vpc, &inner, sender)?;

    let key = maps::key(vni, inner.ip.destination());
    if let Some(local) = maps::local(&key) {
        let exit = deliver::from_wire(frame, ENCAPSULATION_LENGTH as u32 + options, vni, local)?;
        return Ok(exit.unwrap_or(F::PASS));
    }
    let (droplet, counter) = find(&key, vpc, &inner, config, sender)?;
    let Some(verdict) = bounce::hop(frame, config, &outer, droplet)? else {
        return Ok(F::PASS);
    };
    count(counter);
    Ok(verdict)
}

/// The outer IPv4 header, if the frame is Geneve for this droplet: whole, without IP options, as droplets send it.
#[inline(always)]
fn ours<F: Frame>(frame: &mut F, config: &ConfigEntry) -> Option<ipv4::Ipv4Header> {
    frame.make_linear((ethernet::LENGTH + ipv4::LENGTH + 8) as u32);
    let header: EthernetHeader = frame.load(0)?;
    if header.ethertype != ethernet::IPV4 || frame.is_vlan_tagged() {
        return None;
    }
    let ip: ipv4::Ipv4Header = frame.load(ethernet::LENGTH)?;
    if ip.protocol() != ipv4::UDP
        || ip.destination() != config.droplet
        || ip.is_fragment()
        || ip.has_options()
        || !ip.is_valid()
    {
        return None;
    }
    let udp: geneve::UdpHeader = frame.load(ethernet::LENGTH + ipv4::LENGTH)?;
    udp.is_geneve().then_some(ip)
}

/// Checks the Geneve header; the bytes that options take.
#[inline(always)]
fn options<F: Frame>(frame: &F, header: &GeneveHeader) -> Result<u32, Counter> {
    header.check()?;
    let length = header.options_length();
    if length != 0 {
        geneve::check_options(length, |offset| {
            frame.load_far(ENCAPSULATION_LENGTH as u32 + offset)
        })?;
    }
    Ok(length)
}

/// Where a row says that the inner source lives, only that droplet may send it, or one that passes packets on.
#[inline(always)]
fn check_source(vni: u32, vpc: &VpcEntry, inner: &Inner, sender: DropletAddress) -> Result<(), Counter> {
    let key = maps::key(vni, inner.ip.source());
    let here = maps::local(&key).is_some();
    let row = maps::bouncer_row(&key).or_else(|| maps::direct(&key));
    if !here && may_send(row, sender, false) {
        return Ok(());
    }
    let relays = contains(&vpc.dividers, sender)
        || maps::subnet(vni, inner.ip.destination()).is_some_and(|subnet| contains(&subnet.bouncers, sender));
    if relays {
        Ok(())
    } else {
        Err(Counter::SourceMismatch)
    }
}

/// The next droplet and the role that says so.
#[inline(always)]
fn find(
    key: &EndpointKey,
    vpc: &VpcEntry,
    inner: &Inner,
    config: &ConfigEntry,
    sender: DropletAddress,
) -> Result<(DropletAddress, Counter), Counter> {
    let mut next = maps::forward_row(key).map(|droplet| (droplet, Counter::Forwarded));
    if next.is_none() {
        let subnet = maps::subnet(key.vni, inner.ip.destination()).ok_or(Counter::NoEndpoint)?;
        let mut bounces = subnet.flags & SUBNET_BOUNCER_HERE != 0;
        if !bounces && vpc.flags & VPC_DIVIDER_HERE != 0 {
            let bouncer = divide::bouncer(subnet, inner.hash)?;
            if bouncer != config.droplet {
                // Back to the sender too: it may be the divider's client and a bouncer.
                return Ok((bouncer, Counter::Divided));
            }
            bounces = true;
        }
        if bounces {
            next = Some((bounce::home(key, config.droplet)?, Counter::Bounced));
        }
    }
    match next {
        Some((droplet, _)) if droplet == config.droplet => Err(Counter::NoEndpoint),
        // The sender has no such endpoint, or it would not have sent it here: a stale row.
        Some((droplet, _)) if droplet == sender => Err(Counter::WouldReturn),
        Some(found) => Ok(found),
        None => Err(Counter::NoEndpoint),
    }
}
