//! Reads and writes objects: one watch a kind feeds store, world and triggers; one kube controller a kind reconciles.
//!
//! Every write carries a resourceVersion, every delete UID and resourceVersion; a conflict means trying again.
//!
//! Arrows go one way: [`run`] and [`observe`] know all kinds; the kinds know [`context`] and, of each other, only what is
//! below: VPCs and networks know roles and claims, endpoints Services and claims; `context` knows `cache` and `runtime`, which
//! know none of these.

mod address;
mod admission;
mod cache;
mod claim;
mod context;
pub mod defaults;
mod deletion;
mod denial;
mod droplet;
mod endpoint;
mod kinds;
mod network;
mod network_policy;
mod observe;
mod parent;
pub mod role;
pub mod run;
mod runtime;
mod service;
mod vni_claim;
mod vpc;
mod wake;
