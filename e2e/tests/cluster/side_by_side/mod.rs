//! Tests that disturb nobody: they make objects of their own, or lock the objects that they change.

mod admission;
mod bandwidth;
mod command_line;
mod connectivity;
mod crd_validation;
mod dns;
mod drops;
mod dual_stack;
mod egress;
mod endpoint_moves;
mod hosts;
mod isolation;
mod load_balancers;
mod membership;
mod metrics;
mod network_policies;
mod overlapping_vpcs;
mod overlay_port;
mod paths;
mod probes;
mod rights;
mod rolling_update;
mod services;
mod stolen_token;
mod traces;
mod traffic_policies;
