//! The runtime of reconcilers of every kind: watches, writes, events, errors and pauses.

pub mod clocks;
pub mod error;
pub mod events;
pub mod lanes;
pub mod objects;
pub mod pace;
pub mod resync;
pub mod turns;
pub mod waits;
pub mod watch;
