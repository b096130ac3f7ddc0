//! Bounds how much is held at once: in all, by a VPC, and by a pod of it.
//!
//! Invariant: a pod that holds little finds a place. If no place is left, the oldest place of the largest pod of the
//! largest VPC is taken away. Only that pod itself is refused, so that a flood neither silences others nor asks
//! upstream for more than it has places for.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};

use prometheus_client::metrics::gauge::Gauge;
use tokio_util::sync::CancellationToken;

/// The places. Nobody waits for one. Memory is used only for pods and VPCs that hold a place.
#[derive(Debug)]
pub(super) struct Shares {
    in_all: usize,
    of_vpc: usize,
    /// The number of all places held.
    gauge: Gauge,
    held: Mutex<Held>,
}

#[derive(Debug, Default)]
struct Held {
    in_all: usize,
    /// The ticket of the next place. Older places have lower ones.
    ticket: u64,
    by: HashMap<u32, OfVpc>,
}

#[derive(Debug, Default)]
struct OfVpc {
    in_all: usize,
    /// The places of each pod. No map in it is empty.
    by: HashMap<IpAddr, BTreeMap<u64, CancellationToken>>,
}

/// A place. Dropping it gives it back, unless it was taken away before.
#[derive(Debug)]
pub(super) struct Place {
    shares: Arc<Shares>,
    vpc: u32,
    pod: IpAddr,
    ticket: u64,
    is_lost: CancellationToken,
}

impl Place {
    /// Waits until the place is taken away; the work that it was for must end then.
    pub(super) async fn lost(&self) {
        self.is_lost.cancelled().await;
    }
}

impl Shares {
    pub(super) fn new(in_all: usize, of_vpc: usize, gauge: Gauge) -> Arc<Self> {
        Arc::new(Self {
            in_all,
            of_vpc,
            gauge,
            held: Mutex::default(),
        })
    }

    /// Takes a place for a pod, if necessary from the largest holder. Returns `None` if nobody holds more than this
    /// pod.
    pub(super) fn take(self: &Arc<Self>, vpc: u32, pod: IpAddr) -> Option<Place> {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let of_vpc = held.by.get(&vpc).map_or(0, |own| own.in_all);
        if of_vpc >= self.of_vpc || held.in_all >= self.in_all {
            let is_vpcs_own = of_vpc >= self.of_vpc;
            let (of, whose, ticket) = held.loser(vpc, pod, is_vpcs_own)?;
            if let Some(lost) = held.remove(of, whose, ticket) {
                lost.cancel();
                self.gauge.dec();
            }
        }
        let is_lost = CancellationToken::new();
        let ticket = held.insert(vpc, pod, is_lost.clone());
        self.gauge.inc();
        Some(Place {
            shares: Arc::clone(self),
            vpc,
            pod,
            ticket,
            is_lost,
        })
    }
}

impl Held {
    /// Finds the place that is given up for one of `pod`: its VPC, its pod, and the ticket. Returns `None` if that pod
    /// is as large as any.
    fn loser(&self, vpc: u32, pod: IpAddr, is_vpcs_own: bool) -> Option<(u32, IpAddr, u64)> {
        let own = self.by.get(&vpc);
        let of_vpc = own.map_or(0, |own| own.in_all);
        // If two holders are equal with the new place, neither takes from the other: they would take from each other
        // in turn.
        let largest = self.by.iter().max_by_key(|(_, of)| of.in_all);
        if let Some((of, largest)) = largest.filter(|(_, of)| !is_vpcs_own && of.in_all > of_vpc + 1) {
            let (whose, places) = largest.largest()?;
            return Some((*of, whose, *places.first_key_value()?.0));
        }
        let own = own?;
        let of_pod = own.by.get(&pod).map_or(0, BTreeMap::len);
        let (whose, places) = own.largest().filter(|(_, places)| places.len() > of_pod + 1)?;
        Some((vpc, whose, *places.first_key_value()?.0))
    }

    fn insert(&mut self, vpc: u32, pod: IpAddr, place: CancellationToken) -> u64 {
        let ticket = self.ticket;
        self.ticket += 1;
        self.in_all += 1;
        let own = self.by.entry(vpc).or_default();
        own.in_all += 1;
        own.by.entry(pod).or_default().insert(ticket, place);
        ticket
    }

    /// Removes a place. Returns `None` if it is gone already.
    fn remove(&mut self, vpc: u32, pod: IpAddr, ticket: u64) -> Option<CancellationToken> {
        let own = self.by.get_mut(&vpc)?;
        let places = own.by.get_mut(&pod)?;
        let place = places.remove(&ticket)?;
        if places.is_empty() {
            own.by.remove(&pod);
        }
        own.in_all -= 1;
        if own.in_all == 0 {
            self.by.remove(&vpc);
        }
        self.in_all -= 1;
        Some(place)
    }
}

impl OfVpc {
    fn largest(&self) -> Option<(IpAddr, &BTreeMap<u64, CancellationToken>)> {
        let largest = self.by.iter().max_by_key(|(_, places)| places.len());
        largest.map(|(pod, places)| (*pod, places))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut held = self.shares.held.lock().unwrap_or_else(PoisonError::into_inner);
        if held.remove(self.vpc, self.pod, self.ticket).is_some() {
            self.shares.gauge.dec();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    fn pod(number: u8) -> IpAddr {
        Ipv4Addr::new(10, 0, 0, number).into()
    }

    fn shares(in_all: usize, of_vpc: usize) -> Arc<Shares> {
        Shares::new(in_all, of_vpc, Gauge::default())
    }

    /// Takes up to `count` places, as many as it gets.
    fn take(shares: &Arc<Shares>, vpc: u32, number: u8, count: usize) -> Vec<Place> {
        (0..count).filter_map(|_| shares.take(vpc, pod(number))).collect()
    }

    fn lost(places: &[Place]) -> Vec<bool> {
        places.iter().map(|place| place.is_lost.is_cancelled()).collect()
    }

    #[test]
    fn a_pod_alone_gets_its_vpcs_share_and_is_refused_then() {
        let shares = shares(5, 3);
        let first = take(&shares, 1, 1, 9);
        assert_eq!((first.len(), shares.gauge.get()), (3, 3));
        assert_eq!(lost(&first), [false; 3], "it takes nothing of its own");
    }

    #[test]
    fn the_oldest_of_the_largest_pod_of_the_largest_vpc_goes() {
        let shares = shares(8, 8);
        let small = take(&shares, 1, 1, 2);
        let large = take(&shares, 1, 2, 3);
        // The pod of the other VPC is larger than the second, but its VPC is not.
        let other = take(&shares, 2, 3, 3);
        let victim = shares.take(3, pod(4)).unwrap();
        assert_eq!(lost(&large), [true, false, false]);
        assert!(!lost(&small).contains(&true) && !lost(&other).contains(&true));
        assert!(!victim.is_lost.is_cancelled());
        assert_eq!(shares.gauge.get(), 8);
    }

    #[test]
    fn a_pod_gets_in_beside_a_larger_one_of_its_vpc() {
        let shares = shares(8, 4);
        let large = take(&shares, 1, 1, 9);
        let small = take(&shares, 1, 2, 9);
        assert_eq!(lost(&large), [true, true, false, false]);
        assert_eq!((lost(&small), shares.gauge.get()), (vec![false; 2], 4));
    }

    #[test]
    fn who_would_have_as_many_takes_nothing() {
        // First two VPCs, then two pods of one VPC. If the second took a place of the first, the second would only
        // become the larger one.
        for (in_all, of_vpc, other) in [(3, 3, 2), (9, 3, 1)] {
            let shares = shares(in_all, of_vpc);
            let (one, two) = (take(&shares, 1, 1, 2), take(&shares, other, 2, 2));
            assert_eq!((lost(&one), lost(&two)), (vec![false; 2], vec![false]));
        }
    }

    #[test]
    fn a_place_that_was_lost_is_not_given_back_again() {
        let shares = shares(3, 3);
        let large = take(&shares, 1, 1, 3);
        let victim = shares.take(2, pod(2)).unwrap();
        assert_eq!(shares.gauge.get(), 3);
        drop(large);
        assert_eq!(shares.gauge.get(), 1);
        drop(victim);
        let held = shares.held.lock().unwrap();
        assert_eq!((held.in_all, held.by.len(), shares.gauge.get()), (0, 0, 0));
    }

    /// Tests floods of all sizes, with a victim of few places. `THUBAN_SEED` chooses them.
    #[test]
    fn who_holds_little_always_gets_in_and_keeps_it() {
        let set = std::env::var("THUBAN_SEED").ok();
        let seed = set.map_or_else(|| fastrand::u64(..1 << 32), |text| text.parse().unwrap());
        println!("THUBAN_SEED={seed}");
        let mut random = fastrand::Rng::with_seed(seed);
        let shares = shares(128, 40);
        let (mut floods, mut victims) = (Vec::new(), Vec::new());
        for _ in 0..10_000 {
            let (vpc, number) = (random.u32(1..5), random.u8(1..4));
            floods.extend(shares.take(vpc, pod(number)));
            if !floods.is_empty() && random.u8(0..4) == 0 {
                floods.swap_remove(random.usize(..floods.len()));
            }
            // Either another VPC's pod, or a pod of the flooding VPC that is not one of the flood's.
            let (vpc, number) = random.choice([(9, 1), (1, 9)]).unwrap();
            victims.push(shares.take(vpc, pod(number)).expect("a place"));
            if victims.len() > 4 {
                victims.remove(0);
            }
            assert!(!lost(&victims).contains(&true));
            let held = shares.held.lock().unwrap();
            let counted: usize = held.by.values().map(|of| of.in_all).sum();
            assert!(held.in_all <= 128 && counted == held.in_all);
            assert_eq!(shares.gauge.get(), i64::try_from(counted).unwrap());
        }
    }
}
