//! Which direct rows this droplet asked for: a clock over their use, and a cap for each VPC.
//!
//! Invariant: every DIRECT_ROWS row has a subscription, so every one is given back once idle.

use std::collections::HashMap;

use thuban_common::tables::EndpointKey;

/// Direct rows that one VPC may have on this droplet.
const MAX_SUBSCRIPTIONS: usize = 4096;
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
    pub fn want(&mut self, key: EndpointKey) -> bool {
        if self.idle.contains_key(&key)
            || self.idle.keys().filter(|other| other.vni == key.vni).count() >= MAX_SUBSCRIPTIONS
        {
            return false;
        }
        self.idle.insert(key, 0);
        true
    }

    /// Forgets all of them.
    pub fn take_all(&mut self) -> Vec<EndpointKey> {
        self.idle.drain().map(|(key, _)| key).collect()
    }

    /// One scan; answers what has been idle long enough and forgets it.
    pub fn scan(&mut self, mut used: impl FnMut(&EndpointKey) -> bool) -> Vec<EndpointKey> {
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
        for n in 0..MAX_SUBSCRIPTIONS {
            assert!(subscriptions.want(key(1, n as u16)));
        }
        assert!(!subscriptions.want(key(1, MAX_SUBSCRIPTIONS as u16)));
        assert!(subscriptions.want(key(2, 0)));
    }

    #[test]
    fn subscription_ends_after_two_idle_scans_and_can_restart() {
        let mut subscriptions = Subscriptions::new([key(1, 1)].into_iter());
        assert!(subscriptions.scan(|_| false).is_empty());
        assert!(subscriptions.scan(|_| true).is_empty());
        assert!(subscriptions.scan(|_| false).is_empty());
        assert_eq!(subscriptions.scan(|_| false), [key(1, 1)]);
        assert!(subscriptions.want(key(1, 1)));
    }
}
