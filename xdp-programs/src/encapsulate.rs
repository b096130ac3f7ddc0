//! Encapsulation of an endpoint's frame for another droplet.

use thuban_common::{
    counters::Counter,
    packet::{
        ethernet::{self, EthernetHeader},
        flow, geneve,
        geneve::OuterHeaders,
    },
    tables::{ConfigEntry, DropletAddress, ENCAPSULATION_LENGTH},
};

use crate::{
    frame::{Exit, Frame},
    inner::Inner,
};

/// IPv4 and TCP without options: the least that each segment of a GSO frame has before its payload.
const LEAST_HEADERS: u32 = 20 + 20;

#[inline(always)]
pub fn encapsulate<F: Frame>(
    frame: &mut F,
    config: &ConfigEntry,
    droplet: DropletAddress,
    vni: u32,
    inner: &Inner,
) -> Exit {
    let length = frame.length();
    let packet = match frame.segment_size() {
        0 => length - ethernet::LENGTH as u32,
        size => size + LEAST_HEADERS,
    };
    if packet + ethernet::LENGTH as u32 + geneve::OUTER_IP_LENGTH as u32 > config.mtu {
        return Err(Counter::TooBig);
    }
    let Some(next_hop) = frame.next_hop(config, droplet) else {
        return Ok(None);
    };
    let header: EthernetHeader = frame.load(0).ok_or(Counter::Truncated)?;
    frame.grow()?;
    let outer = OuterHeaders::new(
        config.droplet,
        droplet,
        vni,
        length,
        inner.ip.traffic_class(),
        flow::source_port(inner.hash),
    );
    frame.store(ethernet::LENGTH, &outer).ok_or(Counter::Truncated)?;
    frame
        .store(ENCAPSULATION_LENGTH, &header)
        .ok_or(Counter::Truncated)?;
    frame.send(&next_hop).map(Some)
}
