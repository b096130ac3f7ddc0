//! Reads and writes objects: one watch a kind feeds store, world and triggers; one kube controller a kind reconciles.
//!
//! Every write carries a resourceVersion, every delete UID and resourceVersion; a conflict means trying again.

mod address;
mod attach;
pub mod bouncer;
pub mod claim;
pub mod context;
pub mod defaults;
mod deletion;
pub mod divider;
pub mod droplet;
pub mod endpoint;
mod events;
mod heartbeat;
mod host;
mod index;
pub mod network;
mod network_policy;
pub mod objects;
pub mod observe;
mod observe_services;
mod outside_address;
mod pace;
mod patrol;
pub mod pick;
pub mod pod;
pub mod role;
pub mod run;
mod scale;
mod scaled;
mod service;
mod service_address;
mod show;
mod slices;
pub mod trim;
pub mod vni_claim;
pub mod vpc;
pub mod watch;
