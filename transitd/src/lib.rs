//! The parts of transitd, for the daemon, and for who plays its side of the operator's stream without a data plane.

pub mod attachments;
pub mod boot;
pub mod cni;
pub mod connections;
pub mod daemon;
pub mod dataplane;
pub mod dns;
pub mod droplet;
pub mod endpoints;
pub mod health;
pub mod host_endpoint;
pub mod install;
pub mod loads;
pub mod metrics;
pub mod netfilter;
pub mod netlink;
pub mod node;
pub mod operator;
pub mod program;
pub mod reclaim;
pub mod rejection;
pub mod services;
pub mod settings;
pub mod state;
pub mod subscriptions;
pub mod trace;
