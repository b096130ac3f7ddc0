//! What tests on real kernels and clusters are made of, and the benchmarks.

pub mod bench;
pub mod programs;
pub mod rig;
pub mod services;
