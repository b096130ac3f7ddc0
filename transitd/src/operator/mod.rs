//! The operator's side of transitd: dial it, hold one stream, apply what it sends.
//!
//! Invariant: nothing is torn down when the operator is away; the tables stay as they are.

pub mod client;
pub mod epoch;
pub mod peer;
#[cfg(test)]
mod scopes;
pub mod session;
