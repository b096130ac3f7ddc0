//! Path MTUs from ICMP messages of routers on the underlay about the tunnel's packets (RFC 1191). No socket of the
//! kernel receives these messages, so transit stores the MTUs for the agents.

use aya_ebpf::{bindings::BPF_ANY, helpers::bpf_ktime_get_ns};
use thuban_common::{
    counters::Counter,
    packet::{
        ethernet,
        geneve::UdpHeader,
        icmp::{FRAGMENTATION_NEEDED, IcmpHeader},
        ipv4::{self, Ipv4Header},
    },
    tables::{ConfigEntry, LEAST_PATH_MTU, PathMtuEntry},
};

use crate::{
    count::count,
    frame::Frame,
    maps::{self, PATH_MTU_LEARNT, PATH_MTUS},
};

const ICMP: usize = ethernet::LENGTH + ipv4::LENGTH;
const QUOTED_IP: usize = ICMP + size_of::<IcmpHeader>();
const QUOTED_UDP: usize = QUOTED_IP + ipv4::LENGTH;

/// Whether any path's MTU was ever learnt here. Most underlays have one MTU: then no packet needs a look-up.
#[inline(always)]
pub fn is_any_learnt() -> bool {
    PATH_MTU_LEARNT.get(0).is_some_and(|learnt| *learnt != 0)
}

/// Learns from an ICMP packet to this droplet, if it is "fragmentation needed" about Geneve of ours to a known
/// droplet. The packet is the host's in any case.
#[inline(always)]
pub fn learn<F: Frame>(frame: &mut F, config: &ConfigEntry) -> Option<()> {
    frame.make_linear((QUOTED_UDP + size_of::<UdpHeader>()) as u32);
    let icmp: IcmpHeader = frame.load(ICMP)?;
    let quoted: Ipv4Header = frame.load(QUOTED_IP)?;
    let udp: UdpHeader = frame.load(QUOTED_UDP)?;
    let is_ours = icmp.kind == FRAGMENTATION_NEEDED
        && quoted.source() == config.droplet
        && quoted.protocol() == ipv4::UDP
        && !quoted.has_options()
        && udp.is_geneve();
    let (droplet, mtu) = (quoted.destination(), u32::from(icmp.next_hop_mtu()));
    if !is_ours || mtu == 0 || mtu >= config.mtu || !maps::is_droplet(droplet) {
        return None;
    }
    let entry = PathMtuEntry {
        // SAFETY: helper without arguments.
        time: unsafe { bpf_ktime_get_ns() },
        mtu: mtu.max(LEAST_PATH_MTU),
        padding: 0,
    };
    PATH_MTUS.insert(&droplet, entry, u64::from(BPF_ANY)).ok()?;
    // After the entry: who sees the word finds the entry.
    if let Some(learnt) = PATH_MTU_LEARNT.get_ptr_mut(0) {
        // SAFETY: a word of an array's element, which stays.
        unsafe { *learnt = 1 };
    }
    count(Counter::PathMtuLearnt);
    Some(())
}
