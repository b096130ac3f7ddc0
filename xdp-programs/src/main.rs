//! The eBPF programs of a droplet: agent (a pod's first hop) and transit (the NIC), each for tc and XDP.
//!
//! Roles are generic over [`frame::Frame`], so both hooks run the same code. Invariant: a program either takes a
//! packet to its end (sent, delivered, dropped with a counted reason) or leaves it unchanged for the next hook. Only
//! user space writes tables. Programs write only counters, misses, the `used` mark, path MTUs that routers report,
//! clients' connections to services and their fragments, flows that policy let in, what policy denied, what meters
//! let through, the times of probed droplets' answers, drops of pods' packets, flows that they tell of, and traces.
//!
//! The verifier follows each way to a function anew, except to a *global function* (kernel documentation, "BPF Type
//! Format": `BTF_FUNC_GLOBAL`), which it checks once, for any arguments of the types that it declares. So what much is
//! done in and many ways lead to is a global function: `extern "C"` and `no_mangle`, with numbers and pointers to
//! structures as arguments, which return a `u32`. The kernel has it check pointers for null. A load costs half as
//! much so.
#![no_std]
#![no_main]
#![feature(core_intrinsics)]
#![allow(internal_features, reason = "the only way to add atomically on this target")]
#![allow(unsafe_code)]
#![allow(
    clippy::inline_always,
    reason = "a call costs stack and the verifier its ranges"
)]

mod agent;
mod arp;
mod bounce;
mod connections;
mod count;
mod deliver;
mod denials;
mod divide;
mod drops;
mod encapsulate;
mod flows;
mod fragments;
mod frame;
mod front;
mod front_icmp;
mod gates;
mod host;
mod inner;
mod load;
mod maps;
mod meter;
mod misses;
mod nd;
mod path_mtu;
mod pending;
mod policy;
mod probe;
mod quoted;
mod refuse;
mod reject;
mod rewrite;
mod service;
mod shares;
mod too_big;
mod trace;
mod transit;
mod work;

use aya_ebpf::{
    bindings::xdp_action,
    macros::{classifier, xdp},
    programs::{TcContext, XdpContext},
};
use frame::{tc::TcFrame, xdp::XdpFrame};
use thuban_common::tables::{CONFIG_TRANSIT_AT_XDP, TracePoint};

/// Runs the agent at the host's end of a pod's veth, tc ingress.
#[classifier]
pub fn agent_tc(context: TcContext) -> i32 {
    agent::run(&mut TcFrame::new(context), TracePoint::AgentTc)
}

/// Runs the agent at the host's end of a pod's veth, XDP; `agent_tc` behind it handles the packets that it passes.
#[xdp(frags)]
pub fn agent_xdp(context: XdpContext) -> u32 {
    agent::run(&mut XdpFrame::new(context), TracePoint::AgentXdp).cast_unsigned()
}

/// Runs transit at the NIC, tc ingress: for all packets, or for those that `transit_xdp` decapsulated or passed.
#[classifier]
pub fn transit_tc(context: TcContext) -> i32 {
    let mut frame = TcFrame::new(context);
    let is_behind_xdp = maps::config().is_some_and(|config| config.flags & CONFIG_TRANSIT_AT_XDP != 0);
    if is_behind_xdp && let Some(metadata) = frame.take_metadata() {
        return transit::deliver(&mut frame, metadata);
    }
    transit::run(&mut frame, TracePoint::TransitTc)
}

/// Runs transit at the NIC, XDP: checks, bounces, divides, and decapsulates for `transit_tc`.
#[xdp(frags)]
pub fn transit_xdp(context: XdpContext) -> u32 {
    transit::run(&mut XdpFrame::new(context), TracePoint::TransitXdp).cast_unsigned()
}

/// Sends a probe. The program is attached nowhere: transitd runs it with a probe that it wants sent, and transit finds
/// that at the NIC.
#[classifier]
pub fn probe_tc(context: TcContext) -> i32 {
    probe::inject(&context)
}

/// Passes everything: for the far end of a veth that must accept the frames that XDP sends.
#[xdp(frags)]
pub fn xdp_pass(_context: XdpContext) -> u32 {
    xdp_action::XDP_PASS
}

/// The kernel's helpers are for GPL-compatible programs; this crate is Apache-2.0 OR GPL-2.0.
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 4] = *b"GPL\0";

#[cfg(target_arch = "bpf")]
#[panic_handler]
fn panic(_info: &core::panic::PanicInfo) -> ! {
    loop {}
}
