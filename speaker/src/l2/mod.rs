//! Addresses of L2: this node answers ARP and neighbour discovery for those that lbaasd granted it.
//!
//! Invariant: no frame that says that an address is here is sent after the address's deadline, and none for an address
//! that a request did not name. What lbaasd is told ends with the thread that answers.

pub mod frames;
pub mod link;
pub mod owned;
pub mod responder;

use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use thiserror::Error;
use tokio::sync::oneshot;

use crate::deadlines::now;
use link::{Link, LinkError, Subnets};
use owned::Owned;
use responder::{Responder, ResponderError};

/// How long the thread may be silent before it counts as dead.
const SILENCE: Duration = Duration::from_secs(1);

#[derive(Debug, Error)]
pub enum L2Error {
    #[error(transparent)]
    Link(#[from] LinkError),
    #[error(transparent)]
    Responder(#[from] ResponderError),
    #[error("starting a thread: {0}")]
    Thread(#[from] std::io::Error),
}

/// What the thread that answers shares with the one that decides.
#[derive(Debug, Default)]
pub struct Shared {
    owned: Mutex<Owned>,
    /// When the thread that answers was seen last, in milliseconds since boot.
    seen: AtomicU64,
    /// The subnets of the uplink, as that thread saw them last.
    subnets: Mutex<Subnets>,
}

impl Shared {
    fn owned(&self) -> MutexGuard<'_, Owned> {
        self.owned.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn subnets(&self) -> MutexGuard<'_, Subnets> {
        self.subnets.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn beat(&self, now: Duration) {
        let milliseconds = u64::try_from(now.as_millis()).unwrap_or(u64::MAX);
        self.seen.store(milliseconds, Ordering::Relaxed);
    }

    fn is_alive(&self, now: Duration) -> bool {
        let seen = Duration::from_millis(self.seen.load(Ordering::Relaxed));
        now.saturating_sub(seen) < SILENCE
    }
}

/// The addresses of L2 of this node.
#[derive(Debug)]
pub struct L2 {
    shared: Arc<Shared>,
}

impl L2 {
    /// Starts the thread that answers. What is received at last is why the thread ended.
    pub fn start(node_ips: &[IpAddr]) -> Result<(Self, oneshot::Receiver<ResponderError>), L2Error> {
        let (link, shared) = (Link::find(node_ips)?, Arc::new(Shared::default()));
        shared.subnets().clone_from(&link.subnets);
        let responder = Responder::new(link, node_ips.to_vec(), shared.clone())?;
        let (sender, ended) = oneshot::channel();
        std::thread::Builder::new()
            .name("l2".to_owned())
            .spawn(move || drop(sender.send(responder.run())))?;
        Ok((Self { shared }, ended))
    }

    /// Returns what a node has whose thread lives and whose uplink has these subnets.
    #[cfg(test)]
    pub fn played(subnets: Subnets) -> Self {
        let shared = Arc::new(Shared::default());
        *shared.subnets() = subnets;
        shared.beat(now());
        Self { shared }
    }

    /// Returns the addresses that may be changed. They are none while nobody answers.
    pub fn owned(&self) -> MutexGuard<'_, Owned> {
        let mut owned = self.shared.owned();
        if !self.shared.is_alive(now()) {
            owned.clear();
        }
        owned
    }

    /// Whether the node can answer for an address.
    pub fn can_answer(&self, address: IpAddr) -> bool {
        self.shared.subnets().hold(address) && self.shared.is_alive(now())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_silent_thread_counts_as_dead() {
        let shared = Shared::default();
        shared.beat(Duration::from_secs(100));
        assert!(shared.is_alive(Duration::from_millis(100_999)));
        assert!(!shared.is_alive(Duration::from_secs(101)));
    }
}
