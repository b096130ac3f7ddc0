//! Reports the packets that the roles of this droplet pass on to the operator: while there are any, and once when they
//! end.
//!
//! Observes only: the programs count, and rows of the program make and remove the counters.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use thuban_common::tables::LoadKey;
use thuban_proto::transit::{Load, RoleLoad, droplet_message::Message};
use tokio::time::Instant;
use tracing::warn;

use crate::node::Node;

/// The counts at the last look, and whether the operator knows them. The first look finds counts of an earlier
/// transitd's time.
#[derive(Debug, Default)]
struct Meter {
    counted: Option<HashMap<LoadKey, u64>>,
    is_told: bool,
}

impl Meter {
    /// Returns the roles that passed packets on since the last look.
    fn look(&mut self, counted: Vec<(LoadKey, u64)>, since: Duration) -> Vec<RoleLoad> {
        let Some(last) = self.counted.replace(counted.iter().copied().collect()) else {
            return Vec::new();
        };
        let mut roles: Vec<RoleLoad> = counted
            .into_iter()
            .filter_map(|(key, packets)| {
                let before = last.get(&key).copied().unwrap_or_default();
                // The count is lower than before: the role went and came back between two looks.
                let new = packets.checked_sub(before).unwrap_or(packets);
                (new > 0).then(|| RoleLoad {
                    vni: key.vni,
                    network: key.network,
                    packets_per_second: rate(new, since),
                })
            })
            .collect();
        roles.sort_unstable_by_key(|role| (role.vni, role.network));
        roles
    }

    /// Whether to report the load: a load of nothing is reported once.
    fn is_news(&self, roles: &[RoleLoad]) -> bool {
        self.is_told || !roles.is_empty()
    }
}

/// Returns packets a second, rounded up: a role that passes any packet on isn't idle.
fn rate(packets: u64, since: Duration) -> u64 {
    let milliseconds = u64::try_from(since.as_millis()).unwrap_or(u64::MAX).max(1);
    packets.saturating_mul(1000).div_ceil(milliseconds)
}

/// Runs until the daemon ends.
pub async fn run(node: Arc<Node>) {
    let mut interval = tokio::time::interval(Duration::from_secs(node.settings.load_interval));
    interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut meter = Meter::default();
    let mut last = Instant::now();
    loop {
        let now = interval.tick().await;
        let state = node.state();
        let counted = match state.tables.loads() {
            Ok(counted) => counted,
            Err(error) => {
                warn!(
                    error = &error as &dyn std::error::Error,
                    "the load of roles could not be read"
                );
                continue;
            }
        };
        let roles = meter.look(counted, now.duration_since(last));
        last = now;
        if state.outbox.is_none() {
            // No load is known to the operator when a stream begins.
            meter.is_told = false;
        } else if meter.is_news(&roles) {
            meter.is_told = !roles.is_empty();
            state.send(Message::Load(Load { roles }));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);
    const KEY: LoadKey = LoadKey { vni: 7, network: 5 };

    fn look(meter: &mut Meter, packets: u64, since: Duration) -> Vec<u64> {
        let roles = meter.look(vec![(KEY, packets)], since);
        roles.iter().map(|role| role.packets_per_second).collect()
    }

    #[test]
    fn load_rate_spans_two_samples_and_never_rounds_to_zero() {
        let mut meter = Meter::default();
        assert!(
            look(&mut meter, 1_000_000, SECOND).is_empty(),
            "of an earlier transitd"
        );
        assert_eq!(look(&mut meter, 1_005_000, 10 * SECOND), [500]);
        assert_eq!(look(&mut meter, 1_005_001, 10 * SECOND), [1]);
        assert!(look(&mut meter, 1_005_001, 10 * SECOND).is_empty());
    }

    #[test]
    fn a_role_that_went_and_came_back_counts_from_nothing() {
        let mut meter = Meter::default();
        look(&mut meter, 500, SECOND);
        assert_eq!(look(&mut meter, 20, SECOND), [20]);
        assert!(meter.look(vec![], SECOND).is_empty());
        assert_eq!(look(&mut meter, 90, SECOND), [90]);
    }

    #[test]
    fn the_end_of_a_load_is_told_once() {
        let mut meter = Meter::default();
        assert!(!meter.is_news(&[]));
        assert!(meter.is_news(&[RoleLoad::default()]));
        meter.is_told = true;
        assert!(meter.is_news(&[]));
    }
}
