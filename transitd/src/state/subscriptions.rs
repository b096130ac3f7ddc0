//! The direct rows that this droplet asked for: a clock over their use, and a cap for each VPC.
//!
//! Invariant: every row of DIRECT_ROWS has a subscription, so every row is given back once it is idle.

use std::collections::HashMap;

use thuban_common::tables::EndpointKey;

/// The most direct rows that one VPC may have on this droplet.
const MAX_SUBSCRIPTIONS: usize = 4096;
/// Scans without use after which a row is given back, unless it must stay longer.
const IDLE_ROUNDS: u64 = 2;

#[derive(Debug, Default)]
pub struct Subscriptions {
    idle: HashMap<EndpointKey, u64>,
    /// How many rows each VPC has, if any: an event is judged without a look at all rows.
    held: HashMap<u32, usize>,
}

impl Subscriptions {
    pub fn new(keys: impl Iterator<Item = EndpointKey>) -> Self {
        let mut subscriptions = Self::default();
        keys.for_each(|key| subscriptions.adopt(key));
        subscriptions
    }

    pub fn keys(&self) -> impl Iterator<Item = &EndpointKey> {
        self.idle.keys()
    }

    /// Subscribes to a row that came, no matter who asked for it.
    pub fn adopt(&mut self, key: EndpointKey) {
        if self.idle.contains_key(&key) {
            return;
        }
        self.idle.insert(key, 0);
        *self.held.entry(key.vni).or_default() += 1;
    }

    /// Whether to ask for the row now.
    pub fn want(&mut self, key: EndpointKey) -> bool {
        let held = self.held.get(&key.vni).copied().unwrap_or_default();
        if self.idle.contains_key(&key) || held >= MAX_SUBSCRIPTIONS {
            return false;
        }
        self.adopt(key);
        true
    }

    /// Forgets those of a VPC.
    pub fn forget(&mut self, vni: u32) {
        if self.held.remove(&vni).is_some() {
            self.idle.retain(|key, _| key.vni != vni);
        }
    }

    /// Forgets all of them.
    pub fn take_all(&mut self) -> Vec<EndpointKey> {
        self.held.clear();
        self.idle.drain().map(|(key, _)| key).collect()
    }

    /// Does one scan. Returns the rows that have been idle long enough, and forgets them. `use_of` returns none for a
    /// row that was used, else how many scans more than others it stays.
    pub fn scan(&mut self, mut use_of: impl FnMut(&EndpointKey) -> Option<u64>) -> Vec<EndpointKey> {
        let mut given_back = Vec::new();
        self.idle.retain(|key, rounds| {
            let stays = match use_of(key) {
                None => {
                    *rounds = 0;
                    true
                }
                Some(more) => {
                    *rounds += 1;
                    *rounds < IDLE_ROUNDS.saturating_add(more)
                }
            };
            if !stays {
                given_back.push(*key);
            }
            stays
        });
        for key in &given_back {
            if let Some(held) = self.held.get_mut(&key.vni) {
                *held -= 1;
                if *held == 0 {
                    self.held.remove(&key.vni);
                }
            }
        }
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
    fn rows_of_a_forgotten_vpc_are_asked_for_again() {
        let mut subscriptions = Subscriptions::default();
        assert!(subscriptions.want(key(1, 1)) && subscriptions.want(key(2, 1)));
        subscriptions.forget(1);
        assert!(subscriptions.want(key(1, 1)), "the next VPC with this number");
        assert!(!subscriptions.want(key(2, 1)));
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
    fn what_each_vpc_has_is_counted_right_whatever_happens() {
        let mut random = fastrand::Rng::with_seed(18);
        let mut subscriptions = Subscriptions::new((0..20).map(|n| key(n, 1)));
        for _ in 0..2000 {
            let key = key(random.u32(..4), random.u16(..50));
            match random.u8(..10) {
                0 => drop(subscriptions.scan(|key| (key.address[15] % 3 != 0).then_some(0))),
                1 if random.bool() => drop(subscriptions.take_all()),
                2 | 3 => subscriptions.adopt(key),
                _ => drop(subscriptions.want(key)),
            }
            let mut held: HashMap<u32, usize> = HashMap::new();
            for key in subscriptions.keys() {
                *held.entry(key.vni).or_default() += 1;
            }
            assert_eq!(subscriptions.held, held);
        }
    }

    #[test]
    fn subscription_ends_after_two_idle_scans_and_can_restart() {
        let mut subscriptions = Subscriptions::new([key(1, 1)].into_iter());
        assert!(subscriptions.scan(|_| Some(0)).is_empty());
        assert!(subscriptions.scan(|_| None).is_empty());
        assert!(subscriptions.scan(|_| Some(0)).is_empty());
        assert_eq!(subscriptions.scan(|_| Some(0)), [key(1, 1)]);
        assert!(subscriptions.want(key(1, 1)));
    }

    #[test]
    fn a_row_that_must_stay_longer_stays_so_many_scans_more() {
        let mut subscriptions = Subscriptions::new([key(1, 1), key(1, 2)].into_iter());
        let more = |key: &EndpointKey| Some(if key.address[15] == 1 { 3 } else { 0 });
        let ended: Vec<_> = (0..5).map(|_| subscriptions.scan(more).len()).collect();
        assert_eq!(ended, [0, 1, 0, 0, 1]);
    }
}
