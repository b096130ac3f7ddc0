//! Types and header code shared by the eBPF programs and user space. `no_std`, no I/O, no panics.
#![no_std]
#![allow(unsafe_code)]

pub mod tables;
