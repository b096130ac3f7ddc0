//! Black-box tests of a real cluster with Thuban installed from `install/`, run by `cargo xtask test`.
//!
//! They see what a user sees (kubectl, pods, packets on the wire) and what a malicious tenant can do. All tests
//! share one cluster and one set of tenants, and run one after the other.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests fail as tests do

mod actor;
mod admission;
mod agent_xdp;
mod audit;
mod capacity;
mod connectivity;
mod containerd;
mod crashes;
mod deletion;
mod direct;
mod droplet_lost;
mod dual_stack;
mod egress;
mod endpoint_moves;
mod flows;
mod hosts;
mod installation;
mod intruder;
mod isolation;
mod leaders;
mod membership;
mod metrics;
mod names;
mod network_policies;
mod outages;
mod outside;
mod overlay_port;
mod packets;
mod paths;
mod policies;
mod probes;
mod requests;
mod restarts;
mod restore;
mod rights;
mod role_moves;
mod rolling_update;
mod rules;
mod runtime;
mod services;
mod stolen_token;
mod support;
mod tenants;
mod transfer;
mod twins;
mod vanished;
