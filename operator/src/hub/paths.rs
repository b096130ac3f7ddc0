//! Judges paths of packets by the world and by what droplets have acked, for people who ask.

use thuban_rows::Kind;

use super::barrier::serves;
use super::{Health, Hub, State};
use crate::model::rows::Key;
use crate::model::world::path::{Delivery, DropletState, Judgement, ProbePlan, Question, RowState};

/// What is known of droplets at one moment.
struct Streams<'a> {
    state: &'a State,
    now: u64,
}

impl Delivery for Streams<'_> {
    fn droplet(&self, droplet: &str) -> DropletState {
        match self.state.health(droplet, self.now) {
            Health::Connected => DropletState::Connected,
            Health::Missing(_) => DropletState::Away,
            Health::Suspect => DropletState::Suspect,
        }
    }

    fn row(&self, droplet: &str, key: &Key) -> RowState {
        let acks = &self.state.acks;
        if self.state.full.lacks(droplet, key) {
            RowState::NoRoom
        } else if !acks.understands(droplet, key.kind()) {
            RowState::Outdated
        } else if key.kind() == Kind::PolicySet || acks.is_acked(droplet, key) {
            // Acks of single sets are not tracked. Endpoints that are ready have acked sets only.
            RowState::Acked
        } else {
            RowState::Unacked
        }
    }

    fn is_served(&self, rows: &[(String, Key)]) -> bool {
        serves(rows, self.state, self.now)
    }

    fn knows(&self, droplet: &str, other: &str) -> bool {
        let address = self.state.world.droplet_address(other);
        address.is_none_or(|address| {
            let key = Key::Droplet(address.into());
            !self.state.acks.unaware(&key).any(|unaware| unaware == droplet)
        })
    }
}

impl Hub {
    /// Says what is wrong first on the way of packets.
    pub fn judge_path(&self, question: &Question) -> Judgement {
        let state = &*self.lock();
        let now = self.now();
        state.world.judge_path(question, &Streams { state, now })
    }

    /// Returns the probe of a path; none if an end of the path is not there, or has no network.
    pub fn plan_probe(&self, question: &Question) -> Option<ProbePlan> {
        let state = &*self.lock();
        let now = self.now();
        state.world.plan_probe(question, &Streams { state, now })
    }
}
