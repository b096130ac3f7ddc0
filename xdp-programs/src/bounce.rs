//! The bouncer's role: it knows which droplet holds each endpoint of its network.

use thuban_common::{
    counters::Counter,
    packet::{ethernet, ipv4::Ipv4Header},
    tables::{ConfigEntry, DropletAddress},
};

use crate::{
    frame::{Exit, Frame},
    maps,
};

/// Returns the droplet that holds an endpoint, by its bouncer row. It is never this droplet, whose local rows were
/// asked before.
#[inline(always)]
pub fn home(row: DropletAddress, here: DropletAddress) -> Result<DropletAddress, Counter> {
    maps::row(row)
        .filter(|droplet| *droplet != here)
        .ok_or(Counter::NoEndpoint)
}

/// Sends an encapsulated frame on to another droplet: outer addresses, TTL and checksum; nothing else changes.
#[inline(always)]
pub fn hop<F: Frame>(
    frame: &mut F,
    config: &ConfigEntry,
    outer: &Ipv4Header,
    droplet: DropletAddress,
) -> Exit {
    let outer = outer.hop(config.droplet, droplet).ok_or(Counter::TtlExpired)?;
    let Some(next_hop) = frame.next_hop(config, droplet) else {
        return Ok(None);
    };
    frame.store(ethernet::LENGTH, &outer).ok_or(Counter::Truncated)?;
    frame.send(&next_hop).map(Some)
}
