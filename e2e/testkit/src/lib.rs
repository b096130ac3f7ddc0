//! Parts that tests of several crates share: the operator and thuban-observe that they play, a transitd's files and
//! arguments, packets made by hand, rates of streams, threads in network namespaces, waiting. A test that goes wrong
//! panics, and so does this code.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::missing_panics_doc
)]

pub mod observe;
pub mod operator;
pub mod packets;
pub mod rates;
mod tls;
pub mod transitd;

pub use thuban_cluster::{namespace, wait};
