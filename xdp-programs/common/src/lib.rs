//! Types and header code shared by the eBPF programs and user space. `no_std`, no I/O, no panics.
#![cfg_attr(not(test), no_std)]
#![allow(unsafe_code)]
#![allow(
    clippy::inline_always,
    reason = "a call costs the eBPF programs stack and the verifier its ranges"
)]

pub mod counters;
pub mod flow_events;
pub mod host_stack;
pub mod meter;
pub mod packet;
pub mod policy;
pub mod select;
pub mod services;
pub mod skb;
pub mod source;
pub mod tables;
#[cfg(test)]
mod testing;
