//! Heartbeats of droplets: one Lease for each droplet, which its transitd makes and renews. A heartbeat is read only
//! while its droplet has no stream.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease;
use kube::{Api, Client};
use thuban_api::HEARTBEAT_NAMESPACE;
use tokio::time::Instant;

use crate::controller::runtime::objects::{WriteError, get};

/// How long a heartbeat may stay unchanged, by this process's own clock, before it counts as stopped.
pub const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(40);
/// The name of a droplet's Lease is this and the droplet's.
pub const PREFIX: &str = "droplet-";

/// The version of each droplet's Lease that was last seen, and since when, by droplet.
#[derive(Debug, Default)]
pub struct Heartbeats(Mutex<HashMap<String, (Option<String>, Instant)>>);

impl Heartbeats {
    /// Returns how long the droplet's heartbeat has not changed, as far as this leader knows.
    pub async fn stopped_for(&self, client: Client, droplet: &str) -> Result<Duration, WriteError> {
        let lease = get(&leases(client), &format!("{PREFIX}{droplet}")).await?;
        let version = lease.and_then(|lease| lease.metadata.resource_version);
        let mut seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let entry = seen.entry(droplet.to_owned()).or_insert((version.clone(), now));
        if entry.0 != version {
            *entry = (version, now);
        }
        Ok(entry.1.elapsed())
    }

    /// Forgets the heartbeat of a droplet that is back: a later silence is timed from its own start.
    pub fn forget(&self, droplet: &str) {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(droplet);
    }
}

/// Returns access to the Leases of heartbeats.
pub fn leases(client: Client) -> Api<Lease> {
    Api::namespaced(client, HEARTBEAT_NAMESPACE)
}
