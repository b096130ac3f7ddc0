//! Reads and writes objects: one watch for each kind feeds store, world and triggers; one kube controller for each kind
//! reconciles.
//!
//! Every write carries a resourceVersion, every delete a UID and a resourceVersion; a conflict means trying again.
//!
//! Dependencies go one way: [`run`] and [`observe`] know all kinds. The kinds know [`context`] and, of each other, only
//! what is below: VPCs and networks know roles and claims, endpoints know Services and claims. `context` knows `cache`
//! and `runtime`, which know none of these.

mod address;
mod admission;
mod annotations;
mod attach;
mod cache;
mod claim;
mod cluster_network_policy;
mod context;
mod crowding;
pub mod defaults;
mod deletion;
mod denial;
mod droplet;
mod dropped;
mod endpoint;
mod kinds;
mod network;
mod network_policy;
mod node;
mod observe;
mod parent;
mod path_trace;
mod policy_state;
mod ranges;
pub mod role;
pub mod run;
mod runtime;
mod service;
mod shared_services;
mod vip_members;
mod vni_claim;
mod vpc;
mod wake;
