//! Fairness between the peers of a server: whose connection ends when there are too many, and how often a peer may do
//! what takes work.
//!
//! Invariant: a peer that takes more than others uses up its own share first. Memory is bounded, however many addresses
//! peers come from.

use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};

use tokio::task::JoinHandle;

use crate::rate_limit::RateLimit;

/// The most peers whose limits are kept.
const MAX_PEERS: usize = 1024;

/// The connections of a server, oldest first.
#[derive(Default)]
pub struct Connections(VecDeque<(IpAddr, JoinHandle<()>)>);

impl Connections {
    /// Makes room for a connection of this peer, if there are `most`: ends the oldest of the peer that has the most.
    pub fn make_room(&mut self, newcomer: IpAddr, most: usize) {
        self.0.retain(|(_, connection)| !connection.is_finished());
        if self.0.len() < most {
            return;
        }
        let peers: Vec<IpAddr> = self.0.iter().map(|(peer, _)| *peer).collect();
        if let Some(index) = dispensable(&peers, newcomer)
            && let Some((_, connection)) = self.0.remove(index)
        {
            connection.abort();
        }
    }

    pub fn add(&mut self, peer: IpAddr, connection: JoinHandle<()>) {
        self.0.push_back((peer, connection));
    }
}

/// Returns the place of the first connection of the peer that has the most, with the newcomer's one.
fn dispensable(peers: &[IpAddr], newcomer: IpAddr) -> Option<usize> {
    let mut counts: HashMap<IpAddr, usize> = HashMap::from([(newcomer, 1)]);
    for peer in peers {
        *counts.entry(*peer).or_default() += 1;
    }
    let most = peers.iter().filter_map(|peer| counts.get(peer)).max()?;
    peers.iter().position(|peer| counts.get(peer) == Some(most))
}

/// A limit for each peer.
pub struct PeerLimits {
    a_second: u32,
    at_once: u32,
    limits: Mutex<HashMap<IpAddr, RateLimit>>,
}

impl PeerLimits {
    /// Makes a limit of so many actions a second, and so many at once after a rest, for each peer.
    pub fn new(a_second: u32, at_once: u32) -> Self {
        Self {
            a_second,
            at_once,
            limits: Mutex::default(),
        }
    }

    /// Takes one action of the peer, and returns whether it may be done now.
    pub fn take(&self, peer: IpAddr) -> bool {
        let mut limits = self.limits.lock().unwrap_or_else(PoisonError::into_inner);
        if limits.len() >= MAX_PEERS && !limits.contains_key(&peer) {
            // Peers that have come back begin anew. Keeping out those that are new would be worse.
            limits.clear();
        }
        let limit = limits
            .entry(peer)
            .or_insert_with(|| RateLimit::new(self.a_second, self.at_once));
        limit.take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(number: u8) -> IpAddr {
        IpAddr::from([192, 0, 2, number])
    }

    #[test]
    fn oldest_connection_of_the_peer_with_most_makes_room() {
        let place = |peers: &[u8], newcomer: u8| {
            let peers: Vec<IpAddr> = peers.iter().map(|number| peer(*number)).collect();
            dispensable(&peers, peer(newcomer))
        };
        assert_eq!(place(&[1, 2, 2, 3], 3), Some(1), "the first of those with two");
        assert_eq!(place(&[1, 2, 3, 3], 2), Some(1));
        assert_eq!(place(&[1, 2, 3], 2), Some(1), "the newcomer counts");
        assert_eq!(place(&[1, 2, 3], 4), Some(0), "the oldest, if all have one");
        assert_eq!(place(&[], 1), None);
    }

    #[tokio::test]
    async fn connections_that_have_ended_take_no_place() {
        let mut connections = Connections::default();
        let ended = tokio::spawn(async {});
        while !ended.is_finished() {
            tokio::task::yield_now().await;
        }
        connections.add(peer(1), ended);
        for _ in 0..3 {
            connections.add(peer(2), tokio::spawn(std::future::pending()));
        }
        connections.make_room(peer(1), 4);
        assert_eq!(connections.0.len(), 3);
        connections.add(peer(1), tokio::spawn(std::future::pending()));
        connections.make_room(peer(3), 4);
        let left: Vec<IpAddr> = connections.0.iter().map(|(peer, _)| *peer).collect();
        assert_eq!(left, [peer(2), peer(2), peer(1)]);
    }

    #[tokio::test(start_paused = true)]
    async fn each_peer_has_a_limit_in_bounded_memory() {
        let limits = PeerLimits::new(1, 3);
        let taken = |number: u8| (0..10).filter(|_| limits.take(peer(number))).count();
        assert_eq!((taken(1), taken(1), taken(2)), (3, 0, 3));
        tokio::time::advance(std::time::Duration::from_secs(2)).await;
        assert_eq!(taken(1), 2);
        for number in 0..4 * MAX_PEERS as u128 {
            assert!(limits.take(std::net::Ipv6Addr::from_bits(number).into()));
        }
        let known = limits.limits.lock().unwrap_or_else(PoisonError::into_inner);
        assert!(known.len() <= MAX_PEERS);
    }
}
