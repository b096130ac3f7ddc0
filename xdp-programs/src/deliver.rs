//! Delivery to an endpoint of this droplet. The delivering side writes the MACs: the pod's, from the gateway's.

use thuban_common::{
    counters::Counter,
    packet::ethernet::{self, EthernetHeader},
    tables::{GATEWAY_MAC, LocalEntry, TransitMetadata},
};

use crate::{
    count::{count, settle},
    frame::{Exit, Frame, Verdict, tc::TcFrame},
    maps,
};

#[inline(always)]
fn header(local: &LocalEntry) -> EthernetHeader {
    EthernetHeader::new(local.mac, GATEWAY_MAC, ethernet::IPV4)
}

/// A plain frame of another endpoint of this droplet.
#[inline(always)]
pub fn from_agent<F: Frame>(frame: &mut F, local: &LocalEntry) -> Result<Verdict, Counter> {
    frame.store(0, &header(local)).ok_or(Counter::Truncated)?;
    count(Counter::DeliveredLocal);
    Ok(frame.deliver(local))
}

/// An encapsulated frame: `length` bytes of outer headers come off.
#[inline(always)]
pub fn from_wire<F: Frame>(frame: &mut F, length: u32, vni: u32, local: &LocalEntry) -> Exit {
    let exit = frame.decapsulate(length, &header(local), vni, local)?;
    if F::IS_LAST {
        count(Counter::Delivered);
    }
    Ok(exit)
}

/// A frame that XDP transit checked and decapsulated. The target is looked up again: it may have gone meanwhile.
#[inline(always)]
pub fn decapsulated(frame: &mut TcFrame, metadata: TransitMetadata) -> Verdict {
    let is_right =
        maps::attachment(metadata.ifindex).is_some_and(|attachment| attachment.vni == metadata.vni);
    if !is_right {
        return settle(Err(Counter::NoAttachment), TcFrame::DROP);
    }
    count(Counter::Delivered);
    frame.to_peer(metadata.ifindex)
}
