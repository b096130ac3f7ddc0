//! A whole transitd on real veths, in network namespaces of its own, against an operator played by the test.
//!
//! Needs root and the built programs (`cargo xtask build-ebpf`). Every rig removes its namespaces, mounts, processes
//! and files when it is dropped, also after a failure.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod affinity;
mod attach;
mod away;
mod bandwidth;
mod check;
mod churn;
mod clock;
mod denials;
mod dns;
mod drops;
mod dual_stack;
mod egress;
mod endpoints;
mod files;
mod flow;
mod flow_events;
mod flow_modes;
mod follow;
mod gc;
mod health_checks;
mod hooks;
mod host;
mod killed;
mod libcni;
mod limits;
mod loads;
mod lost_dels;
mod metrics;
mod moves;
mod neighbours;
mod nft_hangs;
mod node_port_lease;
mod overlay_port;
mod path_probes;
mod plugin;
mod policies;
mod policy_flows;
mod policy_packets;
mod policy_rows;
mod policy_starts;
mod policy_tables;
mod pressure;
mod program;
mod reconnect;
mod refused;
mod restart;
mod rig;
mod rows;
mod service_connections;
mod service_tables;
mod services;
mod silent;
mod socket;
mod spool;
mod status;
mod tcp;
mod upgrade;
mod uplink;
mod veth;
mod ways_in;
mod wire;

use thuban_testkit::operator;
