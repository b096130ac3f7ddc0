//! Thuban.

pub mod bench;
pub mod programs;
pub mod rig;
pub mod scale;
