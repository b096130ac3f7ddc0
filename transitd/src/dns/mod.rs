//! The DNS of tenants' pods: a view of the cluster's DNS for each VPC, in front of it (ADR 15).
//! The only crate used is hickory-proto, for messages: hickory-server picks who answers by the name asked for, not by
//! who asks.
//!
//! A query's source address leads to a VPC. Queries for names that the VPC may not see are answered here. The rest is
//! asked of the cluster's DNS, and the names in its answer are checked again. Nothing is cached, and no state outlives
//! a query but a TCP connection.
//!
//! Untrusted: everything that a pod sends, and everything that servers outside told the cluster's DNS.

mod answer;
mod filter;
mod query;
mod server;
mod shared;
mod shares;
mod tcp;
mod udp;
mod upstream;
mod view;

#[cfg(test)]
mod tests;

/// The port of the listener, at the node's own address towards pods.
pub const DNS_PORT: u16 = 6085;

pub use server::{BindError, Server, Settings};
pub use shared::{Asker, Limits, Views};
pub use view::{DEFAULT_DOMAIN, Domain, Verdict, View, ViewError, Zone};
