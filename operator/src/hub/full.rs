//! Sends rows again that droplets had no room for, and says which they are.

use std::time::Duration;

use thuban_rows::Kind;
use tokio::time::sleep;

use super::{Hub, Missing, State};
use crate::model::rows::Key;
use crate::model::world::{Delta, World};

/// How often the hub looks for rows to be sent again, while there are any.
const LOOK: Duration = Duration::from_secs(1);

impl Hub {
    /// Notes that a droplet has no room for a row, which this sequence brought.
    pub(super) fn refuse(&self, state: &mut State, droplet: &str, key: &Key, sequence: u64) {
        let is_news = !state.full.lacks(droplet, key);
        state.full.refuse(droplet, key, sequence, self.now());
        self.without_room.notify_one();
        if is_news && key.kind() == Kind::PolicySet {
            self.note_full_set(state, key);
        }
        if let Key::Service(_, address) = key
            && let Some(name) = state.world.service_at(*address)
        {
            self.triggers.endpoint(name);
        }
    }

    /// Sends rows again for as long as the process leads.
    pub async fn send_again_when_due(&self) {
        loop {
            self.without_room.notified().await;
            while self.send_again() {
                sleep(LOOK).await;
            }
        }
    }

    /// Sends rows again whose pause is over, and wakes roles on droplets that refused something. Returns whether rows
    /// are left.
    pub(super) fn send_again(&self) -> bool {
        let state = &mut *self.lock();
        for droplet in state.full.take_news() {
            for (kind, role) in state.world.roles_on(&droplet) {
                self.triggers.role(kind, &role);
            }
        }
        for (droplet, keys) in state.full.due(self.now()) {
            let mut delta = Delta::new();
            for key in keys {
                match state.world.row(&droplet, &key) {
                    Some(row) => drop(delta.insert(key, Some(row))),
                    None => state.full.remove(&droplet, &key),
                }
            }
            if !delta.is_empty() {
                self.send_to(state, &droplet, delta);
            }
        }
        !state.full.is_empty()
    }

    /// Returns what droplets have no room for, of some rows.
    pub fn without_room(&self, rows: impl FnOnce(&World) -> Vec<(String, Key)>) -> Missing {
        let state = &*self.lock();
        if state.full.is_empty() {
            return Missing::default();
        }
        let rows = rows(&state.world);
        let refused = rows
            .iter()
            .filter(|(droplet, key)| state.full.lacks(droplet, key));
        state.full_tables(
            refused
                .map(|(droplet, key)| (droplet.clone(), key.kind()))
                .collect(),
        )
    }

    /// Whether a droplet has had no room for rows of one of these kinds lately; none: it has no stream on which it acks
    /// in time, or is no droplet.
    pub fn is_follower_full(&self, droplet: &str, kinds: &[Kind]) -> Option<bool> {
        let (state, now) = (self.lock(), self.now());
        let follows = state.world.is_droplet(droplet) && state.acks.lost_for(droplet, now).is_none();
        let is_full = |kind: &Kind| state.full.is_full(droplet, *kind, now);
        follows.then(|| kinds.iter().any(is_full))
    }

    /// Returns how many rows droplets have no room for.
    pub fn rows_without_room(&self) -> usize {
        self.lock().full.rows()
    }
}
