//! The bytes that all pods of a node have sent, though their interfaces come and go.
//!
//! Invariant: the sum never falls, so that it is a counter. Pure: the caller reads the interfaces.

use std::collections::HashMap;

/// The sum since the first look.
#[derive(Debug, Default)]
pub struct PodTraffic {
    /// Bytes of each interface at the last look; `None`: there was none.
    seen: Option<HashMap<u32, u64>>,
    sent: u64,
}

impl PodTraffic {
    /// Adds what the interfaces, by ifindex, have sent since the last look, and returns the sum. What was sent by an
    /// interface after its last look is lost when the interface goes.
    pub fn look(&mut self, now: HashMap<u32, u64>) -> u64 {
        if let Some(seen) = &self.seen {
            for (interface, bytes) in &now {
                let before = seen.get(interface).copied().unwrap_or_default();
                self.sent = self.sent.saturating_add(bytes.saturating_sub(before));
            }
        }
        self.seen = Some(now);
        self.sent
    }
}

#[cfg(test)]
mod tests {
    use super::PodTraffic;

    #[test]
    fn the_sum_never_falls_when_interfaces_come_and_go() {
        let mut traffic = PodTraffic::default();
        assert_eq!(traffic.look([(1, 500), (2, 70)].into()), 0, "sent before");
        assert_eq!(traffic.look([(1, 600), (2, 70)].into()), 100);
        assert_eq!(traffic.look([(2, 75)].into()), 105, "the first one is gone");
        assert_eq!(traffic.look([(2, 75), (3, 20)].into()), 125, "a new one");
        assert_eq!(traffic.look([].into()), 125);
    }
}
