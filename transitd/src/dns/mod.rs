//! The DNS of tenants' pods: a view of the cluster's DNS for each VPC, in front of it (ADR 15).
//! Of crates only hickory-proto, for messages: hickory-server picks who answers by the name asked for, not by who asks.
//!
//! A query is known by its source address, which leads to a VPC. What the VPC may not see is answered here; the rest is asked
//! of the cluster's DNS, and what its answer names is checked again. Nothing is cached, and no state outlives a query
//! but a TCP connection.
//!
//! Untrusted: whatever a pod sends, and whatever the cluster's DNS was told by servers outside.

mod answer;
mod filter;
mod query;
mod server;
mod shares;
mod tcp;
mod udp;
mod upstream;
mod view;

#[cfg(test)]
mod tests;

/// The port of the listener, at the node's own address towards pods.
pub const DNS_PORT: u16 = 6085;

pub use server::{Asker, BindError, Limits, Server, Settings, Views};
pub use view::{DEFAULT_DOMAIN, Domain, Verdict, View, ViewError, Zone};
