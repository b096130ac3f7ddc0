//! Thuban.

pub mod programs;
pub mod rig;
