//! From a pod to the host's stack: replies to the host itself, and packets out of the VPC where it may.

use thuban_common::{
    counters::Counter,
    packet::{
        ethernet, flow,
        geneve::UdpHeader,
        ipv4::{self, Ipv4Header},
    },
    source::{Transport, is_reply},
    tables::{AttachmentEntry, VPC_HOST_ACCESS},
};

use crate::{
    count::count,
    frame::{Frame, Verdict},
    maps,
};

const TRANSPORT: usize = ethernet::LENGTH + ipv4::LENGTH;

/// To the host's own address towards pods: answers to kubelet's probes.
#[inline(always)]
pub fn reply<F: Frame>(frame: &F, attachment: &AttachmentEntry, ip: &Ipv4Header) -> Result<Verdict, Counter> {
    // Answers to probes need no fragments, whose later parts could not be judged.
    if !has_access(attachment) && (ip.is_fragment() || !is_answer(frame, ip)?) {
        return Err(Counter::HostForbidden);
    }
    pass(frame, ip)
}

/// To an address outside the VPC.
#[inline(always)]
pub fn leave<F: Frame>(frame: &F, attachment: &AttachmentEntry, ip: &Ipv4Header) -> Result<Verdict, Counter> {
    if !has_access(attachment) {
        return Err(Counter::OutsideVpc);
    }
    pass(frame, ip)
}

#[inline(always)]
fn has_access(attachment: &AttachmentEntry) -> bool {
    maps::vpc(attachment.vni).is_some_and(|vpc| vpc.flags & VPC_HOST_ACCESS != 0)
}

#[inline(always)]
fn is_answer<F: Frame>(frame: &F, ip: &Ipv4Header) -> Result<bool, Counter> {
    if ip.has_options() {
        return Ok(false);
    }
    let ports = frame.load(TRANSPORT).ok_or(Counter::Truncated)?;
    let mut tcp_flags = 0;
    if ip.protocol() == ipv4::TCP {
        let word: [u16; 1] = frame.load(TRANSPORT + 12).ok_or(Counter::Truncated)?;
        tcp_flags = word[0].to_ne_bytes()[1];
    }
    Ok(is_reply(ip.protocol(), Transport { ports, tcp_flags }))
}

/// Passes to the stack, but no Geneve: nobody else may speak to droplets in the host's name.
#[inline(always)]
fn pass<F: Frame>(frame: &F, ip: &Ipv4Header) -> Result<Verdict, Counter> {
    if ip.protocol() == ipv4::UDP {
        let is_geneve = match flow::has_ports(ip) {
            true => frame
                .load::<UdpHeader>(TRANSPORT)
                .ok_or(Counter::Truncated)?
                .is_geneve(),
            // Options or fragments hide the port: rare enough to look no further.
            false => ip.has_options() || ip.is_fragment() && !ip.is_later_fragment() && hides_geneve(frame),
        };
        if is_geneve {
            return Err(Counter::GeneveForbidden);
        }
    }
    if F::IS_LAST {
        count(Counter::ToHost);
    }
    Ok(F::PASS)
}

#[inline(always)]
fn hides_geneve<F: Frame>(frame: &F) -> bool {
    frame
        .load::<UdpHeader>(TRANSPORT)
        .is_none_or(|udp| udp.is_geneve())
}
