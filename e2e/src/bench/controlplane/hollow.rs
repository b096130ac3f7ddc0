//! A droplet without a data plane: transitd's client applies programs to it when there are no maps to write.
//!
//! It treats rows as a node does: validates them with transitd's own code, refuses an address that another VPC's
//! endpoint here has, holds the program, and reports attachments as CNI ADD and DEL would. It counts the rows that
//! come.

use std::{
    collections::{BTreeMap, HashSet},
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

use thuban_proto::transit::{
    Attachment, AttachmentChange, DropletMessage, Hello, Nack, NackReason, Program, Row as ProtoRow,
    droplet_message::Message, row::Row as Kind,
};
use thuban_rows::{Row, RowKey, proto_key};
use tokio::sync::Notify;
use transitd::{
    operator::peer::{Outbox, Peer},
    program,
    state::service_changes::Changes,
};

use super::{
    fleet::number_of,
    tally::{Count, Tally},
    track::{Step, Track, pod_number},
};

/// The record that all hollow droplets of a run write to.
#[derive(Debug)]
pub struct Book {
    pub track: Track,
    pub tally: Tally,
}

/// The snapshot that a droplet applied last.
#[derive(Clone, Copy, Debug)]
pub struct Synced {
    pub epoch: u64,
    pub at: Instant,
}

/// Known droplets, a bit for each. They are so many, and all alike, that the program's table rows would be most of this
/// process's memory.
#[derive(Debug, Default)]
struct KnownDroplets(Vec<u64>);

impl KnownDroplets {
    fn set(&mut self, number: usize, is_known: bool) {
        let (word, bit) = (number / 64, 1 << (number % 64));
        if self.0.len() <= word {
            self.0.resize(word + 1, 0);
        }
        if is_known {
            self.0[word] |= bit;
        } else {
            self.0[word] &= !bit;
        }
    }

    fn count(&self) -> usize {
        self.0.iter().map(|word| word.count_ones() as usize).sum()
    }
}

#[derive(Debug, Default)]
struct State {
    program: program::Program,
    droplets: KnownDroplets,
    attachments: BTreeMap<usize, Attachment>,
    outbox: Option<Outbox>,
    synced: Option<Synced>,
}

#[derive(Debug)]
pub struct Hollow {
    pub name: String,
    token_file: PathBuf,
    book: Arc<Book>,
    state: Mutex<State>,
    pub acks: AtomicU64,
    /// Notified when a stream has brought its snapshot.
    pub opened: Notify,
}

impl Hollow {
    pub fn new(name: String, token_file: PathBuf, book: Arc<Book>) -> Self {
        Self {
            name,
            token_file,
            book,
            state: Mutex::default(),
            acks: AtomicU64::new(0),
            opened: Notify::new(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn has_stream(&self) -> bool {
        self.state().outbox.is_some()
    }

    pub fn synced(&self) -> Option<Synced> {
        self.state().synced
    }

    /// Returns the number of endpoints that live here, and of their rows as a bouncer.
    pub fn endpoint_rows(&self) -> (usize, usize) {
        let state = self.state();
        let bouncer = |key: &&RowKey| matches!(key, RowKey::Bouncer(..));
        (
            state.program.locals().count(),
            state.program.keys().filter(bouncer).count(),
        )
    }

    /// Returns how many other droplets it knows.
    pub fn known_droplets(&self) -> usize {
        self.state().droplets.count()
    }

    /// Returns how many pods of these namespaces live here with sets of policy for both directions, and how many live
    /// here at all.
    pub fn judged(&self, spaces: &HashSet<String>) -> (usize, usize) {
        let state = self.state();
        let pods = state.program.locals();
        let pods = pods.filter(|pod| spaces.contains(&pod.pod_namespace));
        pods.fold((0, 0), |(judged, all), pod| {
            let is_judged = pod.ingress_set.is_some() && pod.egress_set.is_some();
            (judged + usize::from(is_judged), all + 1)
        })
    }

    /// Reports the detachment of a pod, as CNI DEL does.
    pub fn detach(&self, number: usize) {
        let mut state = self.state();
        if let Some(attachment) = state.attachments.remove(&number) {
            state.send(attachment, true);
        }
    }
}

impl State {
    fn send(&self, attachment: Attachment, removed: bool) {
        let Some(outbox) = &self.outbox else { return };
        // A stream that is gone shows in its session; the next Hello reports the rest.
        let _ = outbox.send(DropletMessage {
            message: Some(Message::Attachment(AttachmentChange {
                attachment: Some(attachment),
                removed,
            })),
        });
    }

    fn delete(&mut self, key: &RowKey) {
        match key {
            RowKey::Droplet(underlay) => {
                if let Some(number) = number_of(underlay.0) {
                    self.droplets.set(number, false);
                }
            }
            _ => drop(self.program.delete(key)),
        }
    }

    /// Holds the row; an error refuses it.
    fn upsert(&mut self, row: Row) -> Result<(), String> {
        match &row {
            Row::Droplet(known) => {
                let address = known.address.0;
                let number = number_of(address).ok_or_else(|| format!("{address} is no droplet"))?;
                self.droplets.set(number, true);
                return Ok(());
            }
            Row::Local(endpoint) => {
                if let Some(address) = self.program.address_taken(endpoint) {
                    return Err(format!("another VPC's endpoint on this droplet has {address}"));
                }
            }
            _ => {}
        }
        self.program.upsert(row);
        Ok(())
    }

    /// Returns how a row counts, before it is held.
    fn classify(&self, row: &Row) -> Count {
        let known = match row {
            Row::Droplet(_) => return Count::Droplet,
            Row::Vpc(_) => return Count::Vpc,
            Row::Network(_) => return Count::Network,
            Row::Direct(_) | Row::Forward(_) => return Count::Direct,
            Row::Refused(_) => return Count::Refused,
            Row::Class(_) | Row::PolicySet(_) => return Count::Policy,
            Row::Service(_) | Row::NodeService(_) | Row::Exposed(_) | Row::Front(_) => return Count::Service,
            Row::Local(_) | Row::Bouncer(_) => self.program.get(&row.key()),
        };
        match (row, known) {
            (Row::Local(_), None) => Count::Local,
            (Row::Local(new), Some(Row::Local(old))) if old.pod_uid != new.pod_uid => Count::Local,
            (Row::Local(new), Some(Row::Local(old))) if new.ready && !old.ready => Count::Ready,
            (Row::Bouncer(new), Some(Row::Bouncer(old))) if new.droplet != old.droplet => Count::Bouncer,
            (Row::Bouncer(_), None) => Count::Bouncer,
            _ => Count::Repeated,
        }
    }
}

impl Hollow {
    fn upsert(
        &self,
        state: &mut State,
        row: ProtoRow,
        is_snapshot: bool,
    ) -> Result<RowKey, (NackReason, String)> {
        // An ADD waits for this row.
        let attaching = match &row.row {
            Some(Kind::Local(local)) if local.ready => pod_number(&local.pod_name).map(|number| {
                let attachment = Attachment {
                    container_id: local.pod_uid.replace('-', "").repeat(2),
                    ifname: "eth0".into(),
                    pod_uid: local.pod_uid.clone(),
                    pod_namespace: local.pod_namespace.clone(),
                    pod_name: local.pod_name.clone(),
                    vni: local.vni,
                    address: local.address.clone(),
                    address6: local.address6.clone(),
                };
                (number, attachment)
            }),
            _ => None,
        };
        let row = Row::try_from(row).map_err(|error| (NackReason::Invalid, error.to_string()))?;
        let key = row.key();
        let count = if is_snapshot {
            Count::Snapshot
        } else {
            state.classify(&row)
        };
        self.book.tally.add(count, 1);
        state
            .upsert(row)
            .map_err(|message| (NackReason::AddressInUseOnNode, message))?;
        if let Some((number, attachment)) = attaching
            && !self.book.track.has(number, Step::Deleted)
        {
            self.book.track.note(number, Step::Ready);
            if state.attachments.insert(number, attachment.clone()).is_none() {
                state.send(attachment, false);
            }
        }
        Ok(key)
    }
}

impl Peer for Hollow {
    fn token_file(&self) -> &Path {
        &self.token_file
    }

    fn open(&self, hello: Hello, outbox: &Outbox) {
        let mut state = self.state();
        let hello = Hello {
            droplet: self.name.clone(),
            attachments: state.attachments.values().cloned().collect(),
            ..hello
        };
        // The receiver lives as long as the session.
        let _ = outbox.send(DropletMessage {
            message: Some(Message::Hello(hello)),
        });
        state.outbox = Some(outbox.clone());
        self.book.tally.add(Count::Hello, 1);
    }

    fn close(&self) {
        self.state().outbox = None;
    }

    /// Applies a program as transitd does: deletes first, then upserts; a snapshot leaves nothing else.
    fn apply(&self, program: Program) -> (Vec<Nack>, Changes) {
        let state = &mut *self.state();
        let (epoch, sequence, is_snapshot) = (program.epoch, program.sequence, program.snapshot);
        let mut nacks = Vec::new();
        let mut nack = |key, reason: NackReason, message| {
            nacks.push(Nack {
                epoch,
                sequence,
                key,
                reason: reason.into(),
                message,
            });
        };
        self.book.tally.add(Count::Program, 1);
        for key in &program.deletes {
            self.book.tally.add(Count::Delete, 1);
            match RowKey::try_from(key) {
                Ok(valid) => state.delete(&valid),
                Err(error) => nack(Some(key.clone()), NackReason::Invalid, error.to_string()),
            }
        }
        let mut wanted = HashSet::new();
        if is_snapshot {
            state.droplets = KnownDroplets::default();
        }
        for row in program.upserts {
            let key = proto_key(&row);
            match self.upsert(state, row, is_snapshot) {
                Ok(key) => {
                    if is_snapshot && !matches!(key, RowKey::Droplet(_)) {
                        wanted.insert(key);
                    }
                }
                Err((reason, message)) => nack(key, reason, message),
            }
        }
        if is_snapshot {
            let stale: Vec<RowKey> = state
                .program
                .keys()
                .filter(|key| !wanted.contains(*key))
                .cloned()
                .collect();
            for key in stale {
                state.delete(&key);
            }
            state.synced = Some(Synced {
                epoch,
                at: Instant::now(),
            });
            self.opened.notify_one();
        }
        self.book.tally.add(Count::Nack, nacks.len() as u64);
        self.acks.fetch_add(1, Ordering::Relaxed);
        (nacks, Changes::default())
    }

    fn finish(&self, _: Changes) -> Vec<Nack> {
        Vec::new()
    }
}
