//! The divider's role: it knows which bouncers serve each network of its VPC.

use thuban_common::{
    counters::Counter,
    select::pick,
    tables::{DropletAddress, SubnetEntry},
};

use crate::maps;

/// Returns the VPC's divider for a flow.
#[inline(always)]
pub fn divider(vni: u32, hash: u32) -> Result<DropletAddress, Counter> {
    let vpc = maps::vpc(vni).ok_or(Counter::UnknownVni)?;
    pick(vpc.dividers, hash).ok_or(Counter::NoDivider)
}

/// Returns the network's bouncer for a flow.
#[inline(always)]
pub fn bouncer(subnet: &SubnetEntry, hash: u32) -> Result<DropletAddress, Counter> {
    pick(&subnet.bouncers, hash).ok_or(Counter::NoBouncer)
}
