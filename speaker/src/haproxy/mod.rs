//! HAProxy beside the speaker: serves the addresses of Vips whose pool has the driver `Haproxy`.
//!
//! HAProxy runs in a container of its own, as a master and a worker. The speaker writes its configuration and speaks to
//! the master's socket alone: after a reload, workers that end still answer at sockets of their own. Connections
//! survive a reload, because the former worker keeps them until they end. Members and certificates change without a
//! reload.
//!
//! Invariant: an address is reported as served only while the worker that takes new connections has it.

pub mod config;
pub mod control;
pub mod folder;
pub mod local;
pub mod manager;
pub mod ports;
pub mod reloads;
