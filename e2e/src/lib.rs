//! The parts of tests on real kernels and clusters, and the benchmarks.

pub mod bench;
pub mod programs;
pub mod rig;
pub mod services;
