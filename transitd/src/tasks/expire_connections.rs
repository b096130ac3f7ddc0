//! Removes what programs remember of connections to services, and of flows that were judged, when its time is over.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use thuban_common::tables::EndpointKey;
use tokio::time::{MissedTickBehavior, interval};
use tracing::{debug, warn};

use crate::dataplane::connections::{Connections, Scan};
use crate::dataplane::tables::{TableError, TableKey};
use crate::node::Node;

const SCAN_INTERVAL: Duration = Duration::from_secs(10);

/// Runs until the daemon ends.
pub async fn run(node: Arc<Node>) {
    let mut interval = interval(SCAN_INTERVAL);
    interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        interval.tick().await;
        let node = Arc::clone(&node);
        // A scan takes up to a second of system calls if the table is full.
        match tokio::task::spawn_blocking(move || scan(&node)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => warn!(
                error = &error as &dyn std::error::Error,
                "connections to services could not be looked through, it is tried again"
            ),
            Err(_) => return,
        }
    }
}

fn scan(node: &Node) -> Result<(), TableError> {
    let here: HashSet<EndpointKey> = {
        let state = node.state();
        let local = state.tables.held().filter_map(|(key, _)| match key {
            TableKey::Local(key) => Some(*key),
            _ => None,
        });
        local.collect()
    };
    let vpcs: HashSet<u32> = here.iter().map(|endpoint| endpoint.vni).collect();
    let Scan {
        held,
        expired,
        services,
        flows,
    } = Connections::open(&node.settings.pins.maps())?.scan(
        |endpoint| here.contains(endpoint),
        vpcs.len(),
        |service| node.services().backends(service),
    )?;
    if expired > 0 {
        debug!(held, expired, "connections to services looked through");
    }
    let mut state = node.state();
    state.connections_held = held;
    state.services_in_use = services;
    state.flows_held = flows;
    Ok(())
}
