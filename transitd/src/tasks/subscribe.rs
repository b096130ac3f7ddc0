//! Asks the operator for direct rows that agents want, and gives idle ones back.

use std::sync::Arc;
use std::time::Duration;

use thuban_common::tables::EndpointKey;
use thuban_proto::transit::{Subscribe, Unsubscribe, droplet_message::Message};
use tokio::sync::mpsc;
use tracing::debug;

use crate::node::Node;
use crate::settings::DirectPaths;
use crate::state::State;

/// Runs until the daemon ends.
pub async fn run(node: Arc<Node>, mut wanted: mpsc::Receiver<EndpointKey>) {
    let mut interval = tokio::time::interval(Duration::from_secs(node.settings.scan_interval));
    interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    interval.tick().await;
    let is_off = node.settings.direct_paths == DirectPaths::Never;
    if is_off {
        // These are subscriptions of an earlier transitd.
        let given_back = node.state().subscriptions.take_all();
        give_back(&mut node.state(), given_back);
    }
    loop {
        tokio::select! {
            key = wanted.recv() => {
                let Some(key) = key else { return };
                if is_off {
                    continue;
                }
                let mut state = node.state();
                if state.subscriptions.want(key) {
                    debug!(vni = key.vni, address = ?key.address, "subscribing");
                    state.send(Message::Subscribe(Subscribe { vni: key.vni, address: key.address.to_vec() }));
                }
            }
            _ = interval.tick() => {
                let mut state = node.state();
                let mut subscriptions = std::mem::take(&mut state.subscriptions);
                let given_back = subscriptions.scan(|key| {
                    let seconds = state.affinity_at(key);
                    (!state.direct_used(key)).then(|| seconds.div_ceil(node.settings.scan_interval.max(1)))
                });
                state.subscriptions = subscriptions;
                give_back(&mut state, given_back);
            }
        }
    }
}

fn give_back(state: &mut State, keys: Vec<EndpointKey>) {
    for key in keys {
        state.drop_direct(&key);
        state.send(Message::Unsubscribe(Unsubscribe {
            vni: key.vni,
            address: key.address.to_vec(),
        }));
    }
}
