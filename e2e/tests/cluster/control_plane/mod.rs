//! Tests that end operators, the API server or etcd, or make them unreachable.

mod crashes;
mod leaders;
mod outages;
pub mod policy_changes;
mod restarts;
mod restore;
