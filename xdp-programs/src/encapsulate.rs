//! Encapsulation of an endpoint's frame for another droplet.

use thuban_common::{
    counters::Counter,
    packet::{ethernet, flow, geneve::OuterHeaders, ip::IpPacket},
    policy::Stamp,
    tables::{ConfigEntry, DropletAddress, ENCAPSULATION_LENGTH},
};

use crate::frame::{Exit, Frame};

/// `class` is DSCP and ECN of the outer header. The inner Ethernet header bears the sender's stamp. The delivering
/// droplet writes the MACs.
#[inline(always)]
pub fn encapsulate<F: Frame>(
    frame: &mut F,
    config: &ConfigEntry,
    droplet: DropletAddress,
    vni: u32,
    stamp: Stamp,
    packet: &IpPacket,
    class: u8,
    hash: u32,
) -> Exit {
    let length = frame.length();
    let Some(next_hop) = frame.next_hop(config, droplet) else {
        return Ok(None);
    };
    let ethertype = if packet.is_v6() {
        ethernet::IPV6
    } else {
        ethernet::IPV4
    };
    frame.grow(packet.protocol)?;
    let outer = OuterHeaders::new(
        config.droplet,
        droplet,
        vni,
        length,
        class,
        flow::source_port(hash),
    );
    frame.store(ethernet::LENGTH, &outer).ok_or(Counter::Truncated)?;
    frame
        .store(ENCAPSULATION_LENGTH, &stamp.header(ethertype))
        .ok_or(Counter::Truncated)?;
    frame.send(&next_hop).map(Some)
}
