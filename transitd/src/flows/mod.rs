//! Flows: transitd reads what the programs tell of them, and tells thuban-observe.
//!
//! The [`reader`] takes events out of the ring buffer, and puts them into the [`queue`]. The [`relay`] dials
//! thuban-observe again and again, and holds one stream at a time: [`session`]. Nothing here knows the node.
//!
//! Invariant: nothing waits for thuban-observe, and memory is bounded. Events that it does not hear of are counted, and
//! it hears of their number.

mod deniers;
pub mod flow;
pub mod queue;
pub mod reader;
pub mod relay;
mod session;
#[cfg(test)]
mod tests;
