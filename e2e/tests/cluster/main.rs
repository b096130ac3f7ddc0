//! Black-box tests of a real cluster with Thuban installed from `install/`, run by `cargo xtask test`.
//!
//! The tests see everything that a user sees (kubectl, pods, packets on the wire), and do everything that a malicious
//! tenant can do. Each test is in the lane of the part that it disturbs (`xtask/src/test/lanes.rs` says which lanes
//! share a cluster):
//!
//! - `side_by_side`: only objects of the test's own. Files run side by side, the tests of a file one after the other.
//! - `alone`: a node, a transitd or a runtime. One after the other.
//! - `control_plane`: operators, API server, etcd. One after the other.
//! - `gone`: takes nodes away with the pods of all tenants on them. Last.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests fail as tests do

mod actor;
mod alone;
mod api;
mod audit;
mod control_plane;
mod direct;
mod flows;
mod gone;
mod holdings;
mod intruder;
mod leadership;
mod operator_stream;
mod own_operator;
mod packets;
mod path_questions;
mod requests;
mod scrape;
mod service_objects;
mod side_by_side;
mod support;
mod tenant;
mod tenants;
mod transfer;
