//! The lock of the hub's state, with a metric of how long it is held.

use std::ops::{Deref, DerefMut};
use std::sync::MutexGuard;
use std::time::Instant;

use super::State;
use crate::metrics;

/// The state, locked. Everything that droplets and objects do waits meanwhile.
pub(super) struct Held<'a> {
    state: MutexGuard<'a, State>,
    since: Instant,
}

impl<'a> Held<'a> {
    pub fn new(state: MutexGuard<'a, State>) -> Self {
        let since = Instant::now();
        Self { state, since }
    }
}

impl Deref for Held<'_> {
    type Target = State;

    fn deref(&self) -> &State {
        &self.state
    }
}

impl DerefMut for Held<'_> {
    fn deref_mut(&mut self) -> &mut State {
        &mut self.state
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        metrics::lock_was_held(self.since.elapsed());
    }
}
