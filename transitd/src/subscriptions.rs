//! Which direct rows this droplet asked for: a clock over their use, and a cap for each VPC.
//!
//! Invariant: every DIRECT_ROWS row has a subscription, so every one is given back once idle.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use thuban_common::tables::EndpointKey;
use thuban_proto::transit::{Subscribe, Unsubscribe, droplet_message::Message};
use tokio::sync::mpsc;
use tracing::debug;

use crate::node::Node;
use crate::settings::DirectPaths;
use crate::state::State;

/// Direct rows that one VPC may have on this droplet.
const CAP: usize = 4096;
/// Scans without use after which a row is given back.
const IDLE_ROUNDS: u8 = 2;

#[derive(Debug, Default)]
pub struct Subscriptions {
    idle: HashMap<EndpointKey, u8>,
}

impl Subscriptions {
    pub fn new(keys: impl Iterator<Item = EndpointKey>) -> Self {
        Self {
            idle: keys.map(|key| (key, 0)).collect(),
        }
    }

    pub fn keys(&self) -> impl Iterator<Item = &EndpointKey> {
        self.idle.keys()
    }

    /// A row came: it is subscribed, whoever asked.
    pub fn adopt(&mut self, key: EndpointKey) {
        self.idle.entry(key).or_insert(0);
    }

    /// Whether to ask for the row now.
    fn want(&mut self, key: EndpointKey) -> bool {
        if self.idle.contains_key(&key)
            || self.idle.keys().filter(|other| other.vni == key.vni).count() >= CAP
        {
            return false;
        }
        self.idle.insert(key, 0);
        true
    }

    /// One scan; answers what has been idle long enough and forgets it.
    fn scan(&mut self, mut used: impl FnMut(&EndpointKey) -> bool) -> Vec<EndpointKey> {
        let mut given_back = Vec::new();
        self.idle.retain(|key, rounds| {
            *rounds = if used(key) { 0 } else { *rounds + 1 };
            if *rounds >= IDLE_ROUNDS {
                given_back.push(*key);
            }
            *rounds < IDLE_ROUNDS
        });
        given_back
    }
}

/// Runs until the daemon ends.
pub async fn run(node: Arc<Node>, mut wanted: mpsc::Receiver<EndpointKey>) {
    let mut interval = tokio::time::interval(Duration::from_secs(node.settings.scan_interval));
    interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    interval.tick().await;
    let is_off = node.settings.direct_paths == DirectPaths::Never;
    if is_off {
        // Those of an earlier transitd.
        let given_back: Vec<_> = node
            .state()
            .subscriptions
            .idle
            .drain()
            .map(|(key, _)| key)
            .collect();
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
                let given_back = subscriptions.scan(|key| state.direct_used(key));
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

#[cfg(test)]
mod tests {
    use super::*;

    fn key(vni: u32, n: u16) -> EndpointKey {
        let mut address = [0; 16];
        address[14..].copy_from_slice(&n.to_be_bytes());
        EndpointKey { vni, address }
    }

    #[test]
    fn a_row_is_asked_for_once() {
        let mut subscriptions = Subscriptions::default();
        assert!(subscriptions.want(key(1, 1)));
        assert!(!subscriptions.want(key(1, 1)));
    }

    #[test]
    fn one_vpc_at_its_cap_does_not_stop_another() {
        let mut subscriptions = Subscriptions::default();
        for n in 0..CAP {
            assert!(subscriptions.want(key(1, n as u16)));
        }
        assert!(!subscriptions.want(key(1, CAP as u16)));
        assert!(subscriptions.want(key(2, 0)));
    }

    #[test]
    fn a_row_is_given_back_after_two_idle_scans_and_use_starts_again() {
        let mut subscriptions = Subscriptions::new([key(1, 1)].into_iter());
        assert!(subscriptions.scan(|_| false).is_empty());
        assert!(subscriptions.scan(|_| true).is_empty());
        assert!(subscriptions.scan(|_| false).is_empty());
        assert_eq!(subscriptions.scan(|_| false), [key(1, 1)]);
        assert!(subscriptions.want(key(1, 1)));
    }
}
