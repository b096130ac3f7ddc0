//! Tests that disturb a node, its transitd or its runtime.

mod agent_xdp;
mod bouncer_dies;
mod capacity;
mod containerd;
mod deletion;
mod droplet_lost;
mod installation;
mod policy_without_stream;
mod role_moves;
mod runtime;
mod stolen_stream;
mod told;
