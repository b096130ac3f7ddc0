//! Ways in to pods from outside, by UDP and SCTP and in both families.

mod answers;
mod families;
mod peers;
mod policies;
mod world;
