//! Ways in to pods of tenants, by UDP and SCTP and in both families.

mod answers;
mod families;
mod peers;
mod world;
