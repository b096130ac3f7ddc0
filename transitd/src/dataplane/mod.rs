//! The eBPF side of a droplet: pinned maps, pinned links, and the typed tables over them.
//!
//! Invariant: maps and links outlive the daemon. Nothing here unpins what still carries traffic.

pub mod bpffs;
pub mod connections;
pub mod contract;
pub mod counters;
pub mod denials;
pub mod drops;
mod endpoints;
pub mod events;
pub mod filter;
pub mod hook;
pub mod hooks;
mod inherited;
pub mod links;
pub mod loader;
pub mod loads;
pub mod maglev;
mod misses;
pub mod pins;
pub mod policy;
pub mod probes;
pub mod quota;
pub mod reserve;
pub mod ring;
pub mod rows;
pub mod seen_flows;
pub mod services;
pub mod sk_buff;
pub mod tables;
pub mod traced;
pub mod untold_flows;
pub mod walk;
