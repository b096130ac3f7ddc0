//! Thuban.

pub mod bench;
pub mod clusterip;
pub mod cni;
pub mod programs;
pub mod rig;
pub mod scale;
pub mod services;
