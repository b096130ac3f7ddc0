//! The IPv4 packet of an endpoint, as agent and transit read it: header and flow.

use thuban_common::{
    counters::Counter,
    packet::{flow, ipv4},
};

use crate::frame::Frame;

pub struct Inner {
    pub ip: ipv4::Ipv4Header,
    /// Hash of the flow.
    pub hash: u32,
}

/// Reads the packet whose IPv4 header lies at `offset + far`, `far` being 0 unless the headers before it have options.
#[inline(always)]
pub fn read<F: Frame>(frame: &F, offset: usize, far: u32) -> Result<Inner, Counter> {
    let ip: ipv4::Ipv4Header = at(frame, offset, far).ok_or(Counter::Truncated)?;
    if !ip.is_valid() {
        return Err(Counter::BadHeader);
    }
    let mut ports = [0; 2];
    if flow::has_ports(&ip) {
        ports = at(frame, offset + ipv4::LENGTH, far).ok_or(Counter::Truncated)?;
    }
    Ok(Inner {
        ip,
        hash: flow::hash(&ip, ports),
    })
}

/// The header at `offset + far`: directly where the offset is constant.
#[inline(always)]
pub fn at<F: Frame, H: thuban_common::packet::Header>(frame: &F, offset: usize, far: u32) -> Option<H> {
    if far == 0 {
        frame.load(offset)
    } else {
        frame.load_far(offset as u32 + far)
    }
}
