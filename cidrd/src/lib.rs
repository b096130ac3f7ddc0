//! cidrd: leases addresses of IpPools to load balancers, and tells nobody else's about them.
//!
//! An address has at most one holder, because the name of its lease is the address. Any number of cidrds may work at
//! once, and each may end between any two writes. See `docs/adr/0037-leases-of-addresses.md`.

pub mod client;
pub mod expiry;
pub mod http;
pub mod lease;
pub mod metrics;
pub mod pools;
pub mod problem;
pub mod server;
pub mod status;
pub mod store;
pub mod watches;

/// The name by which clients verify cidrd's certificate.
pub const TLS_NAME: &str = "cidrd.thuban-system.svc";
