//! A number whose changes others wait for. All waiters are woken in the order in which they came: tokio's `watch` wakes
//! them in a random order.

use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::Notify;

#[derive(Debug, Default)]
pub struct Signal {
    number: AtomicU64,
    changed: Notify,
}

impl Signal {
    pub fn get(&self) -> u64 {
        self.number.load(Ordering::Relaxed)
    }

    pub fn set(&self, number: u64) {
        self.number.store(number, Ordering::Relaxed);
        self.changed.notify_waiters();
    }

    /// Waits until the number differs from `seen`, and returns it.
    pub async fn other_than(&self, seen: u64) -> u64 {
        loop {
            // This is made first: it hears of a change from then on.
            let changed = self.changed.notified();
            let number = self.get();
            if number != seen {
                return number;
            }
            changed.await;
        }
    }
}
