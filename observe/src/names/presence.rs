//! Where endpoints are, and where they were a short while ago.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::Duration;

use tokio::time::Instant;

use super::{Name, SWEEP_FROM};

/// How long flows of an endpoint may be told after the endpoint is gone: droplets tell of silent flows up to 60 s late.
const TOLD_LATE: Duration = Duration::from_secs(90);

/// Addresses that endpoints have had a short while ago, by VPC. Memory is bounded by the endpoints that go meanwhile.
#[derive(Debug, Default)]
pub struct Departed {
    left: HashMap<(Name, IpAddr), Left>,
    sweep_at: usize,
}

/// Who had an address.
#[derive(Debug)]
pub struct Left {
    pub namespace: Option<Name>,
    at: Instant,
}

impl Left {
    fn is_recent(&self) -> bool {
        self.at.elapsed() < TOLD_LATE
    }
}

impl Departed {
    /// Notes that an endpoint of the namespace has the address no more.
    pub fn note(&mut self, place: (Name, IpAddr), namespace: Option<Name>) {
        if self.left.len() >= self.sweep_at {
            self.left.retain(|_, left| left.is_recent());
            self.sweep_at = SWEEP_FROM.max(2 * self.left.len());
        }
        let at = Instant::now();
        self.left.insert(place, Left { namespace, at });
    }

    /// Returns who had the address a short while ago.
    pub fn recent(&self, place: &(Name, IpAddr)) -> Option<&Left> {
        self.left.get(place).filter(|left| left.is_recent())
    }
}

/// How many endpoints of a VPC, or of a namespace, a droplet has.
#[derive(Debug, Default)]
pub struct Presence(HashMap<(Name, Name), usize>);

impl Presence {
    pub fn add(&mut self, whose: Option<&Name>, droplet: Option<&Name>) {
        if let (Some(whose), Some(droplet)) = (whose, droplet) {
            *self.0.entry((whose.clone(), droplet.clone())).or_default() += 1;
        }
    }

    pub fn remove(&mut self, whose: Option<&Name>, droplet: Option<&Name>) {
        let (Some(whose), Some(droplet)) = (whose, droplet) else {
            return;
        };
        let place = (whose.clone(), droplet.clone());
        if let Some(count) = self.0.get_mut(&place) {
            *count -= 1;
            if *count == 0 {
                self.0.remove(&place);
            }
        }
    }

    pub fn has(&self, whose: &Name, droplet: &Name) -> bool {
        self.0.contains_key(&(whose.clone(), droplet.clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(number: u32) -> (Name, IpAddr) {
        ("red".into(), IpAddr::from(number.to_be_bytes()))
    }

    #[tokio::test(start_paused = true)]
    async fn an_address_is_remembered_for_a_while_after_its_endpoint() {
        let mut departed = Departed::default();
        departed.note(place(1), Some("blue".into()));
        let left = departed.recent(&place(1)).unwrap();
        assert_eq!(left.namespace.as_deref(), Some("blue"));
        assert!(departed.recent(&place(2)).is_none());
        tokio::time::advance(TOLD_LATE).await;
        assert!(departed.recent(&place(1)).is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn addresses_of_long_ago_take_no_memory() {
        let mut departed = Departed::default();
        for number in 0..20_000 {
            departed.note(place(number), None);
            tokio::time::advance(Duration::from_secs(1)).await;
        }
        assert!(departed.left.len() <= SWEEP_FROM, "{}", departed.left.len());
    }

    #[test]
    fn a_droplet_is_there_until_its_last_endpoint_goes() {
        let mut presence = Presence::default();
        let (red, droplet) = (Name::from("red"), Name::from("node-a"));
        presence.add(Some(&red), Some(&droplet));
        presence.add(Some(&red), Some(&droplet));
        presence.add(Some(&red), None);
        presence.remove(Some(&red), Some(&droplet));
        assert!(presence.has(&red, &droplet) && !presence.has(&droplet, &red));
        presence.remove(Some(&red), Some(&droplet));
        presence.remove(Some(&red), Some(&droplet));
        assert!(presence.0.is_empty());
    }
}
