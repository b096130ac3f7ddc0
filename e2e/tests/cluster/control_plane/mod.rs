//! Tests that end operators, the API server or etcd, or make them unreachable.

mod crashes;
mod leaders;
mod network_policies;
mod outages;
mod restarts;
mod restore;
