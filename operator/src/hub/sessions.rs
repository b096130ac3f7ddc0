//! The beginning and the end of droplets' streams, and what a new leader waits for before it sends programs.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use thuban_api::identifiers::Vni;
use thuban_proto::transit::{Attachment, Hello};
use thuban_rows::Kinds;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::attachments::Report;
use super::{ADOPTION_TIMEOUT, Hub, Opened, Outgoing, PackedProgram, State, subscribe};

/// How long a new leader waits for streams before it sends programs, from when it knows all objects: droplets dial less
/// often the longer no leader answers (up to 7.5 s apart).
const DIAL_TIMEOUTS: [Duration; 2] = [Duration::from_secs(2), Duration::from_secs(9)];
/// How long a new leader waits for Endpoints of attachments, milliseconds: without them rows would be missing in the
/// programs.
const MENDING_TIMEOUT: u64 = ADOPTION_TIMEOUT + 3_000;

/// How many droplets get their programs while others wait for the lock.
const SERVED_AT_ONCE: usize = 32;

impl Hub {
    /// Opens the stream of a droplet that said Hello, and notes what the droplet can do. Its backends that fail are
    /// known before any program is made, so that a new leader leads no connection there.
    pub fn open_after(
        &self,
        hello: &Hello,
        droplet: &str,
        subscriptions: &[(Vni, IpAddr)],
        kinds: Kinds,
    ) -> (u64, UnboundedReceiver<Outgoing>) {
        self.note_checks(droplet, &hello.checks);
        self.note_can_probe(droplet, hello.can_probe);
        self.open(droplet, &hello.attachments, subscriptions, kinds)
    }

    /// Opens a droplet's stream. The droplet gets its whole program, and from then on deltas, with rows of the kinds
    /// that it understands. If programs are held back, this begins only with [`Self::serve_some`]. An older stream
    /// ends.
    pub fn open(
        &self,
        droplet: &str,
        attachments: &[Attachment],
        subscriptions: &[(Vni, IpAddr)],
        kinds: Kinds,
    ) -> (u64, UnboundedReceiver<Outgoing>) {
        let state = &mut *self.lock();
        let id = state.next_id;
        state.next_id += 1;
        let (messages, receiver) = unbounded_channel();
        state.attachments.replace(droplet, attachments);
        state.heard.entry(droplet.to_owned()).or_insert(self.now());
        let opened = Opened {
            id,
            subscriptions: subscriptions.to_vec(),
            kinds,
        };
        state.refused.remove(droplet);
        self.note_kinds(state, droplet, &opened.kinds);
        // The older stream's end shows in its receiver.
        state.senders.remove(droplet);
        match &mut state.held {
            Some(held) if !state.is_serving => {
                held.insert(droplet.to_owned(), opened);
                state.senders.insert(droplet.to_owned(), messages);
            }
            held => {
                if let Some(held) = held {
                    held.remove(droplet);
                }
                self.begin(state, droplet, &opened, messages);
            }
        }
        self.triggers.droplet(droplet);
        (id, receiver)
    }

    fn begin(&self, state: &mut State, droplet: &str, opened: &Opened, messages: UnboundedSender<Outgoing>) {
        for (vni, address) in state.world.subscriptions_of(droplet) {
            state.world.subscribe(droplet, vni, address, false);
        }
        for (vni, address) in &opened.subscriptions {
            subscribe(state, droplet, *vni, *address);
        }
        self.send(state);
        let mut snapshot = state.world.snapshot(droplet);
        snapshot.rows.retain(|key, _| opened.kinds.contains(key.kind()));
        let stream = (opened.id, opened.kinds.clone());
        let sequence = state.acks.open(droplet, stream, snapshot.rows.keys(), self.now());
        state.full.forget(droplet);
        self.denials().forget(droplet);
        let program = PackedProgram::snapshot(self.epoch, sequence, snapshot);
        let _ = messages.send(program.into());
        state.senders.insert(droplet.to_owned(), messages);
    }

    /// Makes no rows until [`Self::end_filling`]. The objects that exist are listed in any order, and many change the
    /// rows of others: each droplet's own endpoint those of all droplets.
    pub fn begin_filling(&self) {
        self.lock().is_filling = true;
    }

    /// Whether objects are still being listed: what depends on all of them is looked at once, at the end.
    pub fn is_filling(&self) -> bool {
        self.lock().is_filling
    }

    /// Makes the rows of all objects.
    pub fn end_filling(&self) {
        let state = &mut *self.lock();
        state.is_filling = false;
        state.filled = self.now();
        self.send(state);
    }

    /// Holds programs back from now on, because a snapshot removes from a droplet every row that it lacks. `vacancy`:
    /// how long nobody has led.
    pub fn hold_back(&self, vacancy: Duration) {
        let state = &mut *self.lock();
        state.held.get_or_insert_default();
        let [least, most] = DIAL_TIMEOUTS;
        state.dialling = (vacancy / 4).clamp(least, most);
    }

    /// Whether all expected droplets have dialled, and all pods that are attached and bound there have their Endpoints;
    /// or that took too long.
    pub fn is_adopted(&self, is_expected: impl Fn(&str) -> bool, is_bound: impl Fn(&Report) -> bool) -> bool {
        let state = &*self.lock();
        let open_for = self.open_for(state);
        let mut expected = state.world.droplets().filter(|(name, _)| is_expected(name));
        let is_patient = Duration::from_millis(open_for) < state.dialling;
        if is_patient && !expected.all(|(name, _)| state.has_dialled(name)) {
            return false;
        }
        let is_orphan = |(vni, address)| {
            state.world.has_vni(vni)
                && state.world.holder(vni, address).is_none()
                && state.attachments.at(vni, address).any(|report| is_bound(&report))
        };
        open_for >= MENDING_TIMEOUT || !state.attachments.live().any(is_orphan)
    }

    /// Sends the next of the programs that were held back. Returns whether there are more: between two calls, others
    /// get the lock.
    pub fn serve_some(&self) -> bool {
        let state = &mut *self.lock();
        if !std::mem::replace(&mut state.is_serving, true) {
            let waiting = state.world.stage_policies(self.now());
            state.steps.wait(waiting, &state.acks);
            // Droplets have said what fails with their Hello.
            state.world.adopt_checks();
        }
        for _ in 0..SERVED_AT_ONCE {
            let Some((droplet, opened)) = state.held.as_mut().and_then(BTreeMap::pop_first) else {
                state.held = None;
                return false;
            };
            if let Some(messages) = state.senders.remove(&droplet) {
                self.begin(state, &droplet, &opened, messages);
            }
            self.triggers.droplet(&droplet);
        }
        true
    }

    pub fn close(&self, droplet: &str, id: u64) {
        let state = &mut *self.lock();
        if let Some(held) = &mut state.held
            && held.get(droplet).is_some_and(|opened| opened.id == id)
        {
            held.remove(droplet);
            state.senders.remove(droplet);
        }
        if state.acks.close(droplet, id, self.now()) {
            state.loads.forget(droplet);
            state.full.forget(droplet);
            state.senders.remove(droplet);
            self.triggers.droplet(droplet);
        }
    }

    /// Ends a droplet's stream, whoever holds it: the droplet dials again.
    pub fn end_stream(&self, droplet: &str) {
        self.lock().senders.remove(droplet);
    }

    /// Ends a droplet's stream, whoever holds it, and forgets the droplet's reports: nothing lives there any more.
    pub fn forget(&self, droplet: &str) {
        let state = &mut *self.lock();
        state.senders.remove(droplet);
        state.attachments.replace(droplet, &[]);
        state.heard.remove(droplet);
        self.note_can_probe(droplet, false);
    }
}
