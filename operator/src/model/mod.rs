//! The pure core: objects in, rows and decisions out. No client, no clock, no I/O.

pub mod acks;
pub mod admission;
pub mod allocation;
pub mod backends;
pub mod few;
pub mod placement;
pub mod rows;
pub mod scaling;
pub mod service;
pub mod validation;
pub mod world;
