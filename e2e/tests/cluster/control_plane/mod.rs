//! Tests that end operators, the API server or etcd, or take them away.

mod crashes;
mod leaders;
mod network_policies;
mod outages;
mod restarts;
mod restore;
