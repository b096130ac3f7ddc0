//! Encapsulation of an endpoint's frame for another droplet.

use thuban_common::{
    counters::Counter,
    packet::{
        ethernet::{self, EthernetHeader},
        flow,
        geneve::OuterHeaders,
        ip::IpPacket,
    },
    tables::{ConfigEntry, DropletAddress, ENCAPSULATION_LENGTH},
};

use crate::frame::{Exit, Frame};

#[inline(always)]
pub fn encapsulate<F: Frame>(
    frame: &mut F,
    config: &ConfigEntry,
    droplet: DropletAddress,
    vni: u32,
    packet: &IpPacket,
    hash: u32,
) -> Exit {
    let length = frame.length();
    let Some(next_hop) = frame.next_hop(config, droplet) else {
        return Ok(None);
    };
    let header: EthernetHeader = frame.load(0).ok_or(Counter::Truncated)?;
    frame.grow(packet.protocol)?;
    let outer = OuterHeaders::new(
        config.droplet,
        droplet,
        vni,
        length,
        packet.traffic_class,
        flow::source_port(hash),
    );
    frame.store(ethernet::LENGTH, &outer).ok_or(Counter::Truncated)?;
    frame
        .store(ENCAPSULATION_LENGTH, &header)
        .ok_or(Counter::Truncated)?;
    frame.send(&next_hop).map(Some)
}
