//! Which answers with addresses of L2 still count: a Lease for each node, of the node's name.
//!
//! A node answers ARP for its addresses for some seconds after it sent the request that gave them. It asks again much
//! sooner. Before such an answer goes out, its number is in the node's Lease ([`Numbers::answered`]). Whoever sees that
//! number unchanged for longer than these seconds, by its own clock, writes that all answers up to it have expired
//! ([`Numbers::expired`]). No request up to that number is answered by addresses any more.
//!
//! Invariant: a Vip of L2 has one announcer at most. Another node's entry comes only after a later request of the node
//! said that it withdrew, or after the number of the node's entry has expired. So no two nodes answer for an address.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::StreamExt;
use k8s_openapi::api::coordination::v1::Lease;
use kube::api::{DeleteParams, PostParams, Preconditions};
use kube::runtime::reflector::{ObjectRef, Store};
use kube::{Api, Client, ResourceExt};
use thuban_api::{AnnounceBy, Announcer, Vip};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};
use tracing::{debug, info};

use super::AT_ONCE;
use crate::objects::change_status;
use crate::vip::ending::is_withdrawn;

/// The namespace of the Leases.
pub const NAMESPACE: &str = "thuban-l2";
/// The most seconds for which an answer counts.
pub const MAX_SECONDS: u32 = 300;
/// How often Leases are looked at.
const LOOK: Duration = Duration::from_millis(100);
/// How long one look may take. What it has not come to comes with the next one.
const LOOK_TIMEOUT: Duration = Duration::from_secs(2);
/// How long an entry of a Vip is remembered that was written: the watch of Vips may be late.
const ENTRY_MEMORY: Duration = Duration::from_secs(30);
/// How long the Lease of a node is kept that owns nothing and is silent.
const KEEP_UNUSED: Duration = Duration::from_hours(1);
/// How often a write begins anew because others changed the Lease meanwhile.
const TRIES: usize = 8;
/// Annotations with the numbers of requests.
const ANSWERED: &str = "thuban.dev/answered-request";
const EXPIRED: &str = "thuban.dev/expired-request";

/// What a node's Lease says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Numbers {
    /// The highest number of a request that was answered by addresses of L2.
    pub answered: u64,
    /// The answers to requests up to this one have expired.
    pub expired: u64,
    /// The seconds for which an answer counts.
    pub seconds: u32,
}

impl Numbers {
    fn read(lease: &Lease) -> Self {
        let number = |name: &str| {
            let text = lease.annotations().get(name);
            text.and_then(|text| text.parse().ok()).unwrap_or_default()
        };
        let spec = lease.spec.as_ref();
        let seconds = spec.and_then(|spec| u32::try_from(spec.lease_duration_seconds?).ok());
        Self {
            answered: number(ANSWERED),
            expired: number(EXPIRED),
            seconds: seconds.unwrap_or(MAX_SECONDS),
        }
    }

    /// Returns the numbers when a request is answered; `None` if it must not be.
    fn with_answer(self, sequence: u64, seconds: u32) -> Option<Self> {
        if sequence <= self.answered || sequence <= self.expired {
            return None;
        }
        // An answer that counts for longer may still be in use.
        Some(Self {
            answered: sequence,
            seconds: if self.is_expired() {
                seconds
            } else {
                seconds.max(self.seconds)
            },
            ..self
        })
    }

    /// How long a number stays unchanged before its answers have expired. Nodes count from when they sent the request.
    /// A daemon that sets a machine's clock may slow it down or speed it up by a twelfth (chrony's `maxslewrate`). So
    /// the clocks of two machines differ by a fifth at most.
    fn wait(self) -> Duration {
        Duration::from_millis(u64::from(self.seconds) * 1200 + 100)
    }

    /// Whether nothing counts any more of what the node was answered.
    fn is_expired(self) -> bool {
        self.expired >= self.answered
    }
}

/// What this process has seen of a node's Lease. It outlives the Lease as long as a Vip names the node.
struct Seen {
    /// The UID of the Lease. What a former one said of expired answers doesn't count.
    uid: Option<String>,
    numbers: Numbers,
    /// Since when the node's last answered request is this one.
    since: Instant,
    /// The expired number that others in this process were told of.
    told: u64,
}

impl Seen {
    fn new(lease: &Lease) -> Self {
        Self {
            uid: lease.uid(),
            numbers: Numbers::read(lease),
            since: Instant::now(),
            told: 0,
        }
    }

    /// Takes a Lease as the API server has it.
    fn read(&mut self, lease: &Lease) {
        let (uid, numbers) = (lease.uid(), Numbers::read(lease));
        if self.uid != uid || self.numbers.answered != numbers.answered {
            self.since = Instant::now();
        }
        (self.uid, self.numbers) = (uid, numbers);
    }

    /// Takes a Lease as a watch has it, which may be late.
    fn heard(&mut self, lease: &Lease) {
        if self.uid != lease.metadata.uid || is_later(&Numbers::read(lease), &self.numbers) {
            self.read(lease);
        }
    }
}

/// Whether numbers of one Lease are later ones.
fn is_later(one: &Numbers, other: &Numbers) -> bool {
    (one.answered, one.expired) > (other.answered, other.expired)
}

/// An entry of a Vip of L2 that this process has written.
struct Written {
    node: String,
    sequence: u64,
    at: Instant,
}

pub struct NodeLeases {
    client: Client,
    api: Api<Lease>,
    known: Store<Lease>,
    /// The seconds for which answers count.
    pub seconds: u32,
    /// By nodes.
    seen: Mutex<HashMap<String, Seen>>,
    /// By the UIDs of Vips.
    written: Mutex<HashMap<String, Written>>,
    changes: watch::Sender<u64>,
}

impl NodeLeases {
    /// `known`: the Leases of [`NAMESPACE`]. `changes`: a number that is raised when answers have expired.
    pub fn new(client: Client, known: Store<Lease>, seconds: u32, changes: watch::Sender<u64>) -> Self {
        Self {
            api: Api::namespaced(client.clone(), NAMESPACE),
            client,
            known,
            seconds,
            seen: Mutex::default(),
            written: Mutex::default(),
            changes,
        }
    }

    fn seen(&self) -> MutexGuard<'_, HashMap<String, Seen>> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn written(&self) -> MutexGuard<'_, HashMap<String, Written>> {
        self.written.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns what is known of a node's Lease: by the watch of Leases, or by what was read since.
    fn numbers(&self, node: &str) -> Option<Numbers> {
        let lease = self.known.get(&ObjectRef::new(node).within(NAMESPACE))?;
        let known = Numbers::read(&lease);
        let all = self.seen();
        let seen = all.get(node).filter(|seen| seen.uid == lease.metadata.uid);
        let later = seen.filter(|seen| is_later(&seen.numbers, &known));
        Some(later.map_or(known, |seen| seen.numbers))
    }

    /// Returns the highest number of a node's request that is known to be answered.
    pub fn answered(&self, node: &str) -> u64 {
        self.numbers(node).map_or(0, |numbers| numbers.answered)
    }

    fn is_expired(&self, announcer: &Announcer) -> bool {
        let numbers = self.numbers(&announcer.node);
        numbers.is_some_and(|numbers| announcer.sequence <= numbers.expired)
    }

    /// Remembers that a Vip's entry of a node was written.
    pub fn note_entry(&self, uid: &str, node: &str, sequence: u64) {
        let written = Written {
            node: node.to_owned(),
            sequence,
            at: Instant::now(),
        };
        self.written().insert(uid.to_owned(), written);
    }

    /// Returns the number of a Vip's entry of a node, if this process wrote it not long ago.
    pub fn written_entry(&self, uid: &str, node: &str) -> Option<u64> {
        let written = self.written();
        let entry = written.get(uid).filter(|entry| entry.node == node)?;
        (entry.at.elapsed() < ENTRY_MEMORY).then_some(entry.sequence)
    }

    /// Whether no other node may answer for a Vip's addresses.
    pub fn is_free_for(&self, vip: &Vip, node: &str) -> bool {
        let mut others = announcers(vip).iter().filter(|announcer| announcer.node != node);
        others.all(|other| self.is_expired(other))
    }

    /// Removes the nodes whose answers have expired. Returns whether no other node is left.
    pub fn claim(&self, vip: &mut Vip, node: &str) -> bool {
        let is_free = self.is_free_for(vip, node);
        if let Some(status) = &mut vip.status
            && is_free
        {
            let nodes = status.announcers.iter().map(|announcer| announcer.node.clone());
            let gone: BTreeSet<String> = nodes.filter(|known| known != node).collect();
            status.announced_by.retain(|known| !gone.contains(known));
            status
                .announcers
                .retain(|announcer| !gone.contains(&announcer.node));
        }
        is_free
    }

    /// Writes that a node's request is answered. Returns the number up to which the node's answers have expired.
    /// `None`: the request must not be answered by addresses.
    pub async fn renew(&self, node: &str, sequence: u64) -> Result<Option<u64>, kube::Error> {
        let mut tries = 0;
        loop {
            tries += 1;
            match self.try_to_renew(node, sequence).await {
                Err(kube::Error::Api(status)) if status.code == 409 && tries < TRIES => {}
                renewed => return renewed,
            }
        }
    }

    async fn try_to_renew(&self, node: &str, sequence: u64) -> Result<Option<u64>, kube::Error> {
        let current = self.api.get_opt(node).await?;
        let numbers = current.as_ref().map(Numbers::read).unwrap_or_default();
        let Some(renewed) = numbers.with_answer(sequence, self.seconds) else {
            return Ok(None);
        };
        self.write(node, current, renewed).await?;
        Ok(Some(renewed.expired))
    }

    /// Writes a Lease in place of the one that was read. `None`: there was none.
    async fn write(&self, node: &str, read: Option<Lease>, numbers: Numbers) -> Result<Lease, kube::Error> {
        let is_new = read.is_none();
        let mut lease = read.unwrap_or_default();
        lease.metadata.name = Some(node.to_owned());
        let annotations = lease.annotations_mut();
        annotations.insert(ANSWERED.to_owned(), numbers.answered.to_string());
        annotations.insert(EXPIRED.to_owned(), numbers.expired.to_string());
        let spec = lease.spec.get_or_insert_default();
        spec.holder_identity = Some(node.to_owned());
        spec.lease_duration_seconds = i32::try_from(numbers.seconds).ok();
        let parameters = PostParams::default();
        if is_new {
            self.api.create(&parameters, &lease).await
        } else {
            self.api.replace(node, &parameters, &lease).await
        }
    }

    /// Looks at the Leases for ever.
    pub async fn watch(&self, vips: &Store<Vip>) {
        loop {
            sleep(LOOK).await;
            // A request that hangs holds up nobody's takeover for longer.
            let _ = timeout(LOOK_TIMEOUT, self.look(vips)).await;
        }
    }

    /// Writes which answers have expired, and what follows for Vips.
    pub async fn look(&self, vips: &Store<Vip>) {
        let mut vips = vips.state();
        vips.retain(|vip| {
            let status = vip.status.as_ref();
            status.is_some_and(|status| status.announce == AnnounceBy::L2)
        });
        let leases = self.known.state();
        let over = leases.iter().filter_map(|lease| {
            let node = lease.name_any();
            let numbers = self.over(&node, lease)?;
            Some((node, numbers))
        });
        let over: Vec<(String, Numbers)> = over.collect();
        let expired =
            futures::stream::iter(over).for_each_concurrent(AT_ONCE, |(node, numbers)| async move {
                match self.expire(&node, numbers).await {
                    Ok(true) => info!(node, "the node is silent: its addresses of L2 are free"),
                    Ok(false) => {}
                    Err(error) => debug!(node, %error, "the end of the node's Lease is not written yet"),
                }
            });
        expired.await;
        let owners: HashSet<String> = vips
            .iter()
            .flat_map(|vip| announcers(vip))
            .map(|announcer| announcer.node.clone())
            .collect();
        futures::stream::iter(vips)
            .for_each_concurrent(AT_ONCE, |vip| async move { self.tidy(&vip).await })
            .await;
        self.forget(&leases, &owners).await;
    }

    /// Takes what the watch says of a node's Lease. Returns what is known of it if the node's last answer has expired
    /// and nobody has written that yet. Tells others if that has been written since.
    fn over(&self, node: &str, known: &Lease) -> Option<Numbers> {
        let mut all = self.seen();
        let seen = all.entry(node.to_owned()).or_insert_with(|| Seen::new(known));
        seen.heard(known);
        if seen.told != seen.numbers.expired {
            seen.told = seen.numbers.expired;
            self.changes.send_modify(|number| *number += 1);
        }
        let is_over = !seen.numbers.is_expired() && seen.since.elapsed() >= seen.numbers.wait();
        is_over.then_some(seen.numbers)
    }

    /// Writes that a node's answers have expired, if its Lease is still as it was seen. Returns whether it did.
    async fn expire(&self, node: &str, known: Numbers) -> Result<bool, kube::Error> {
        let Some(current) = self.api.get_opt(node).await? else {
            return Ok(false);
        };
        if !self.is_seen(node, &current, known) {
            // The watch may be late for long: the node's time counts from here.
            self.note(node, &current);
            return Ok(false);
        }
        let expired = known.answered;
        let written = self
            .write(node, Some(current), Numbers { expired, ..known })
            .await?;
        self.note(node, &written);
        Ok(true)
    }

    /// Whether a node's Lease is the one that was seen with these numbers.
    fn is_seen(&self, node: &str, lease: &Lease, known: Numbers) -> bool {
        let all = self.seen();
        let seen = all.get(node).filter(|seen| seen.uid == lease.metadata.uid);
        seen.is_some() && Numbers::read(lease) == known
    }

    /// Notes a node's Lease as the API server has it.
    fn note(&self, node: &str, lease: &Lease) {
        let mut all = self.seen();
        let seen = all.entry(node.to_owned()).or_insert_with(|| Seen::new(lease));
        seen.read(lease);
    }

    /// Forgets nodes without addresses that have been silent for long, and deletes their Leases.
    async fn forget(&self, leases: &[Arc<Lease>], owners: &HashSet<String>) {
        let with_lease: HashSet<String> = leases.iter().map(|lease| lease.name_any()).collect();
        let is_there = |node: &String| owners.contains(node) || with_lease.contains(node);
        self.seen().retain(|node, _| is_there(node));
        self.written()
            .retain(|_, entry| entry.at.elapsed() < ENTRY_MEMORY);
        for lease in leases {
            let node = lease.name_any();
            let is_silent = self.seen().get(&node).is_some_and(|seen| {
                seen.numbers.is_expired()
                    && seen.numbers == Numbers::read(lease)
                    && seen.since.elapsed() >= KEEP_UNUSED
            });
            if !is_silent || owners.contains(&node) {
                continue;
            }
            // If the node asks meanwhile, the Lease stays.
            let preconditions = Preconditions {
                uid: lease.uid(),
                resource_version: lease.resource_version(),
            };
            let parameters = DeleteParams::default().preconditions(preconditions);
            match self.api.delete(&node, &parameters).await {
                Ok(_) => info!(node, "the Lease of a node without addresses of L2 is deleted"),
                Err(error) => debug!(node, %error, "a Lease is not deleted yet"),
            }
        }
    }

    /// Makes Leases that somebody deleted: without one, a silent node would keep its addresses. Removes silent nodes
    /// from a Vip that ends.
    async fn tidy(&self, vip: &Vip) {
        for announcer in announcers(vip) {
            let node = &announcer.node;
            if self.known.get(&ObjectRef::new(node).within(NAMESPACE)).is_some() {
                continue;
            }
            // Answers counted for as long as the former Lease said.
            let seconds = self.seen().get(node).map(|seen| seen.numbers.seconds);
            let numbers = Numbers {
                answered: announcer.sequence,
                expired: 0,
                seconds: seconds.map_or(MAX_SECONDS, |seconds| seconds.max(self.seconds)),
            };
            // If the store is late, there is one.
            if let Err(error) = self.write(node, None, numbers).await {
                debug!(node, %error, "no Lease was made");
            }
        }
        if !is_withdrawn(vip) || !announcers(vip).iter().any(|announcer| self.is_expired(announcer)) {
            return;
        }
        let removed = change_status(&self.client, vip, |vip| {
            let Some(status) = &mut vip.status else {
                return false;
            };
            let before = status.announcers.len();
            status.announcers.retain(|announcer| !self.is_expired(announcer));
            status.announcers.len() != before
        });
        if let Err(error) = removed.await {
            debug!(name = vip.name_any(), %error, "silent nodes are not removed yet");
        }
    }
}

fn announcers(vip: &Vip) -> &[Announcer] {
    let status = vip.status.as_ref();
    status
        .map(|status| status.announcers.as_slice())
        .unwrap_or_default()
}

#[cfg(test)]
mod tests;
