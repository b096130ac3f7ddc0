//! The tasks that run beside the CNI service and the operator's stream, from the daemon's start to its end; one task a
//! file.
//!
//! Tasks know the node. Only the daemon knows the tasks.

pub mod check_backends;
pub mod dns_views;
pub mod expire_connections;
pub mod expire_policies;
pub mod follow_routes;
pub mod health_checks;
pub mod host_endpoint;
pub mod limit_pods;
pub mod node_port_lease;
pub mod probe_members;
pub mod reclaim;
pub mod register;
pub mod report_denials;
pub mod report_loads;
pub mod restore_rules;
pub mod shape_pods;
pub mod subscribe;
pub mod tell_flows;
pub mod watch_uplink;
