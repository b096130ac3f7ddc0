//! The addresses that this node answers for, each until its deadline. Pure.
//!
//! Times are by CLOCK_BOOTTIME. Invariant: an address is here only if lbaasd's last answer granted it, if transitd
//! serves it, and if every request since has said so.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv6Addr};
use std::time::Duration;

use thuban_api::routes::{Announced, Route};

/// How often a new address is told to all neighbours in a row.
const TIMES: u8 = 3;
/// The time between two of these.
const PAUSE: Duration = Duration::from_secs(1);
/// The time between two later ones, which make up for frames that were lost.
const AGAIN: Duration = Duration::from_mins(1);

#[derive(Debug)]
struct Holding {
    uid: String,
    deadline: Duration,
    /// How often neighbours were told, up to [`TIMES`], and when they are told next.
    told: u8,
    next: Duration,
}

#[derive(Debug, Default)]
pub struct Owned(BTreeMap<IpAddr, Holding>);

impl Owned {
    /// Takes an answer of lbaasd to a request that was sent at `sent`. Addresses that it does not give are dropped.
    pub fn answered(&mut self, routes: &[Route], served: &BTreeSet<IpAddr>, sent: Duration, now: Duration) {
        let mut before = std::mem::take(&mut self.0);
        let given = routes
            .iter()
            .filter(|route| route.l2 && served.contains(&route.address));
        let held = given.filter_map(|route| {
            let known = before.remove(&route.address);
            let known = known.filter(|known| known.uid == route.uid && now < known.deadline);
            let deadline = match route.remaining_seconds {
                Some(remaining) => sent.saturating_add(Duration::from_secs(remaining)),
                None => known.as_ref()?.deadline,
            };
            let (told, next) = known.map_or((0, now), |known| (known.told, known.next));
            let holding = Holding {
                uid: route.uid.clone(),
                deadline,
                told,
                next,
            };
            (now < deadline).then_some((route.address, holding))
        });
        self.0 = held.collect();
    }

    /// Drops what transitd does not serve.
    pub fn served(&mut self, served: &BTreeSet<IpAddr>) {
        self.0.retain(|address, _| served.contains(address));
    }

    /// Drops everything.
    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// Drops what is over, and returns the rest: what a request does not say, the node has no more.
    pub fn renounce(&mut self, now: Duration) -> Vec<Announced> {
        self.0.retain(|_, holding| now < holding.deadline);
        self.report(now)
    }

    /// Returns the addresses that the node answers for.
    pub fn report(&self, now: Duration) -> Vec<Announced> {
        let held = self.0.iter().filter(|(_, holding)| now < holding.deadline);
        let announced = held.map(|(address, holding)| Announced {
            uid: holding.uid.clone(),
            address: *address,
        });
        announced.collect()
    }

    /// Whether the node answers for an address.
    pub fn answers(&self, address: IpAddr, now: Duration) -> bool {
        self.0.get(&address).is_some_and(|holding| now < holding.deadline)
    }

    /// Returns the addresses that neighbours are to be told of now, each with whether it is new.
    pub fn due(&mut self, now: Duration) -> Vec<(IpAddr, bool)> {
        let mut due = Vec::new();
        for (address, holding) in &mut self.0 {
            if holding.next <= now && now < holding.deadline {
                due.push((*address, holding.told == 0));
                holding.told = TIMES.min(holding.told + 1);
                let pause = if holding.told < TIMES { PAUSE } else { AGAIN };
                holding.next = now.saturating_add(pause);
            }
        }
        due
    }

    /// Returns the IPv6 addresses.
    pub fn v6(&self) -> impl Iterator<Item = Ipv6Addr> {
        self.0.keys().filter_map(|address| match address {
            IpAddr::V6(address) => Some(*address),
            IpAddr::V4(_) => None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(last: u8) -> IpAddr {
        IpAddr::from([192, 0, 2, last])
    }

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn route(last: u8, remaining_seconds: Option<u64>) -> Route {
        Route {
            uid: format!("uid-{last}"),
            address: ip(last),
            remaining_seconds,
            l2: true,
        }
    }

    fn served() -> BTreeSet<IpAddr> {
        [ip(1), ip(2)].into()
    }

    /// Returns what has 1 until 102 s, at 100 s.
    fn owning() -> Owned {
        let mut owned = Owned::default();
        owned.answered(&[route(1, Some(2))], &served(), at(100), at(100));
        owned
    }

    #[test]
    fn an_address_is_answered_for_until_its_deadline() {
        let mut owned = owning();
        assert!(owned.answers(ip(1), at(101)) && !owned.answers(ip(2), at(101)));
        assert!(!owned.answers(ip(1), at(102)));
        owned.answered(&[route(1, Some(2))], &served(), at(101), at(101));
        assert!(owned.answers(ip(1), at(102)) && !owned.answers(ip(1), at(103)));
        owned.answered(&[route(1, None)], &served(), at(102), at(102));
        assert!(owned.answers(ip(1), at(102)) && !owned.answers(ip(1), at(103)));
        owned.answered(&[], &served(), at(102), at(102));
        assert!(!owned.answers(ip(1), at(102)));
    }

    #[test]
    fn a_late_answer_counts_from_its_request() {
        let mut owned = Owned::default();
        owned.answered(&[route(1, Some(2))], &served(), at(100), at(103));
        assert!(owned.report(at(103)).is_empty());
        owned.answered(&[route(1, None)], &served(), at(103), at(103));
        assert!(owned.report(at(103)).is_empty(), "never given");
    }

    #[test]
    fn only_addresses_of_l2_that_are_served_are_taken() {
        let mut owned = Owned::default();
        let bgp = Route {
            l2: false,
            ..route(2, Some(9))
        };
        owned.answered(&[route(3, Some(9)), bgp], &served(), at(100), at(100));
        assert!(owned.report(at(100)).is_empty());
        let mut owned = owning();
        owned.served(&BTreeSet::new());
        owned.served(&served());
        assert!(!owned.answers(ip(1), at(100)), "it comes by an answer only");
    }

    #[test]
    fn what_is_over_comes_back_by_an_answer_only() {
        let mut owned = owning();
        assert_eq!(owned.renounce(at(101)).len(), 1);
        assert!(owned.renounce(at(102)).is_empty());
        owned.answered(&[route(1, None)], &served(), at(101), at(101));
        assert!(!owned.answers(ip(1), at(101)));
    }

    #[test]
    fn a_new_address_is_told_three_times_and_each_minute() {
        let mut owned = owning();
        let mut told = Vec::new();
        for tenths in 1000..2300 {
            let now = Duration::from_millis(tenths * 100);
            if tenths % 5 == 0 {
                owned.answered(&[route(1, Some(2))], &served(), now, now);
            }
            told.extend(owned.due(now).iter().map(|_| tenths));
        }
        assert_eq!(told, [1000, 1010, 1020, 1620, 2220]);
        owned.answered(&[], &served(), at(230), at(230));
        owned.answered(&[route(1, Some(2))], &served(), at(230), at(230));
        assert_eq!(owned.due(at(230)), [(ip(1), true)], "a new takeover");
        assert_eq!(owned.due(at(231)), [(ip(1), false)]);
    }
}
