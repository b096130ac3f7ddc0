//! The droplets that have a stream, what their programs tell of, and which of their streams is the newest.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

use super::validation::Mode;

/// A droplet's stream.
struct Connected {
    id: u64,
    mode: Mode,
    /// The stream ends when this is dropped.
    _hold: oneshot::Sender<()>,
}

#[derive(Default)]
struct State {
    next_id: u64,
    connected: HashMap<String, Connected>,
}

/// All droplets with a stream. Their names are proven, so there are at most as many as nodes.
#[derive(Default)]
pub struct Droplets(Mutex<State>);

impl Droplets {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes a stream, in place of the one that the droplet had. Returns its number, and what ends when a newer one
    /// comes.
    pub fn open(&self, droplet: &str, mode: Mode) -> (u64, oneshot::Receiver<()>) {
        let (hold, end) = oneshot::channel();
        let mut state = self.lock();
        state.next_id += 1;
        let id = state.next_id;
        let connected = Connected {
            id,
            mode,
            _hold: hold,
        };
        state.connected.insert(droplet.to_owned(), connected);
        (id, end)
    }

    pub fn set_mode(&self, droplet: &str, id: u64, mode: Mode) {
        let mut state = self.lock();
        if let Some(connected) = state
            .connected
            .get_mut(droplet)
            .filter(|connected| connected.id == id)
        {
            connected.mode = mode;
        }
    }

    /// Notes the end of a stream, unless a newer one has come.
    pub fn close(&self, droplet: &str, id: u64) {
        let mut state = self.lock();
        if state
            .connected
            .get(droplet)
            .is_some_and(|connected| connected.id == id)
        {
            state.connected.remove(droplet);
        }
    }

    /// Returns what the droplet's programs tell of; none without a stream.
    pub fn mode(&self, droplet: &str) -> Option<Mode> {
        self.lock().connected.get(droplet).map(|connected| connected.mode)
    }

    /// Returns how many droplets have a stream.
    pub fn count(&self) -> usize {
        self.lock().connected.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_stream_of_a_droplet_wins() {
        let droplets = Droplets::default();
        let (first, mut first_end) = droplets.open("node-a", Mode::Drops);
        assert!(
            first_end
                .try_recv()
                .is_err_and(|error| error == oneshot::error::TryRecvError::Empty)
        );
        let (second, _second_end) = droplets.open("node-a", Mode::All);
        assert_eq!(first_end.try_recv(), Err(oneshot::error::TryRecvError::Closed));
        droplets.set_mode("node-a", first, Mode::Off);
        droplets.close("node-a", first);
        assert_eq!(
            droplets.mode("node-a"),
            Some(Mode::All),
            "the former stream counts no more"
        );
        droplets.set_mode("node-a", second, Mode::Drops);
        assert_eq!(droplets.mode("node-a"), Some(Mode::Drops));
        droplets.close("node-a", second);
        assert_eq!((droplets.mode("node-a"), droplets.count()), (None, 0));
    }
}
