//! Probes: whether a droplet that carries a role passes packets on. Transit asks and answers. No daemon takes part in
//! an answer, so a droplet whose daemon restarts does not look dead.
//!
//! Invariant: only a known droplet's question is answered, with as many bytes, to where it came from. An answer is
//! never answered. An answer without a question changes nothing.

use aya_ebpf::{
    bindings::{BPF_F_INGRESS, TC_ACT_OK, TC_ACT_SHOT},
    helpers::{bpf_clone_redirect, bpf_ktime_get_ns},
    programs::TcContext,
};
use thuban_common::{
    counters::Counter,
    packet::{
        ipv4::Ipv4Header,
        probe::{ANSWER, ProbeHeader, QUESTION, WANTED},
    },
    tables::{ConfigEntry, DropletAddress, ENCAPSULATION_LENGTH, ProbeEntry},
};

use crate::{
    bounce,
    frame::{Frame, Outcome, Verdict},
    maps::{self, PROBES},
};

/// Handles a probe from a known droplet, or one in its name from this droplet's transitd.
#[inline(never)]
pub fn take<F: Frame>(frame: &mut F, config: &ConfigEntry, outer: &Ipv4Header) -> Outcome {
    let probe: ProbeHeader = frame.load(ENCAPSULATION_LENGTH).ok_or(Counter::Truncated)?;
    let droplet = outer.source();
    let (kind, counter) = match probe.kind {
        QUESTION => (ANSWER, Counter::ProbesAnswered),
        WANTED => {
            asked(droplet, &probe).ok_or(Counter::ProbeUnasked)?;
            (QUESTION, Counter::ProbesSent)
        }
        ANSWER => {
            let entry = asked(droplet, &probe).ok_or(Counter::ProbeUnasked)?;
            // SAFETY: an element of a map, see `maps`; a single word. The helper has no arguments.
            unsafe { (&raw mut (*entry).heard).write_volatile(bpf_ktime_get_ns()) };
            return Ok((F::DROP, Some(Counter::ProbesHeard)));
        }
        _ => return Err(Counter::BadHeader),
    };
    // A probe takes the same way as a packet that a role of this droplet passes on.
    let Some(verdict) = bounce::hop(frame, config, outer, droplet)? else {
        return Ok((F::PASS, None));
    };
    let turned = ProbeHeader { kind, ..probe };
    frame
        .store(ENCAPSULATION_LENGTH, &turned)
        .ok_or(Counter::Truncated)?;
    Ok((verdict, Some(counter)))
}

/// Returns the entry of a droplet that this one asks, if the probe repeats its secret.
#[inline(always)]
fn asked(droplet: DropletAddress, probe: &ProbeHeader) -> Option<*mut ProbeEntry> {
    let entry = PROBES.get_ptr_mut(&droplet)?;
    // SAFETY: an element of a map, see `maps`; a single word.
    let secret = unsafe { (&raw const (*entry).secret).read_volatile() };
    (ProbeHeader::new(probe.kind, secret).secret == probe.secret).then_some(entry)
}

/// Gives the frame to the NIC, as if the NIC had received it.
#[inline(always)]
pub fn inject(context: &TcContext) -> Verdict {
    let Some(config) = maps::config() else {
        return TC_ACT_SHOT as Verdict;
    };
    // SAFETY: helper on our own context.
    let result = unsafe { bpf_clone_redirect(context.skb.skb, config.uplink, u64::from(BPF_F_INGRESS)) };
    if result == 0 {
        TC_ACT_OK as Verdict
    } else {
        TC_ACT_SHOT as Verdict
    }
}
