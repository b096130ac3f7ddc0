//! A number that others wait for. All that wait are woken in the order in which they came: tokio's `watch` wakes them in
//! an order by chance.

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

    /// Waits until it is another number than `seen`; answers that.
    pub async fn other_than(&self, seen: u64) -> u64 {
        loop {
            // Made first: it hears of a change from then on.
            let changed = self.changed.notified();
            let number = self.get();
            if number != seen {
                return number;
            }
            changed.await;
        }
    }
}
