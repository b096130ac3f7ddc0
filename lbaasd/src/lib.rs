//! lbaasd: gives Services of type LoadBalancer addresses that cidrd leases, and tells nodes which of them to announce.
//!
//! Any number of lbaasds may work at once, and each may end between any two writes: all that must outlive one is in the
//! objects, and each write is under the resourceVersion that its decision was made from. See
//! `docs/adr/0038-who-announces-an-address.md`.

pub mod certificates;
pub mod ctl;
pub mod derived;
pub mod dns;
pub mod driver;
pub mod events;
pub mod leases;
pub mod metrics;
pub mod objects;
pub mod proxies;
pub mod routes;
pub mod service;
pub mod vip;

/// The class of the Services that get a Vip.
pub const CLASS: &str = "thuban.dev/vip";
/// The label of EndpointSlices with the name of their Service.
pub const SERVICE_LABEL: &str = "kubernetes.io/service-name";
/// The ConfigMap with the CAs that verify it, as `ca.crt`.
pub const CA_CONFIG_MAP: &str = "thuban-lbaasd-ca";
