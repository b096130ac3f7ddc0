//! The pure core: objects in, rows and decisions out. No client, no clock, no I/O.

pub mod acks;
pub mod admission;
pub mod allocation;
pub mod annotations;
pub mod asked;
pub mod backends;
pub mod bandwidth;
pub mod budgets;
pub mod cached;
pub mod crowding;
pub mod denial_reports;
pub mod drop_reports;
pub mod droplet;
pub mod endpoint;
pub mod full_tables;
pub mod placement;
pub mod policy;
pub mod range_claims;
pub mod ranges;
pub mod rows;
pub mod scaling;
pub mod service;
pub mod sorted_set;
pub mod validation;
pub mod world;
