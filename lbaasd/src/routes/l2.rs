//! Which answers with addresses of L2 still count: a Lease for each node, of the node's name.
//!
//! A node answers ARP for its addresses for some seconds after it sent the request that gave them. It asks again much
//! sooner. Before such an answer goes out, its number is in the node's Lease ([`Numbers::answered`]). Whoever sees that
//! number unchanged for longer than these seconds, by its own clock, writes that all answers up to it have expired
//! ([`Numbers::expired`]). No request up to that number is answered by addresses any more.
//!
//! Invariant: a Vip of L2 has one announcer at most. Another node's entry comes only after a later request of the node
//! said that it withdrew, or after the number of the node's entry has expired. So no two nodes answer for an address.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use futures::StreamExt;
use k8s_openapi::api::coordination::v1::Lease;
use kube::api::PostParams;
use kube::runtime::reflector::{ObjectRef, Store};
use kube::{Api, Client, ResourceExt};
use thuban_api::{AnnounceBy, Announcer, Vip};
use tokio::sync::watch;
use tokio::time::{Instant, sleep};
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
        let is_over = self.expired >= self.answered;
        Some(Self {
            answered: sequence,
            seconds: if is_over {
                seconds
            } else {
                seconds.max(self.seconds)
            },
            ..self
        })
    }

    /// How long a number stays unchanged before its answers have expired. Nodes count from when they sent the request.
    /// The clocks of two machines differ by 1/1000 at most.
    fn wait(self) -> Duration {
        Duration::from_millis(u64::from(self.seconds) * 1010 + 100)
    }
}

/// What this process has seen of a node's Lease.
struct Seen {
    answered: u64,
    /// Since when.
    since: Instant,
    expired: u64,
}

pub struct NodeLeases {
    client: Client,
    api: Api<Lease>,
    known: Store<Lease>,
    /// The seconds for which answers count.
    pub seconds: u32,
    seen: Mutex<HashMap<String, Seen>>,
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
            changes,
        }
    }

    fn numbers(&self, node: &str) -> Option<Numbers> {
        let lease = self.known.get(&ObjectRef::new(node).within(NAMESPACE))?;
        Some(Numbers::read(&lease))
    }

    /// Returns the highest number of a node's request that is known to be answered.
    pub fn answered(&self, node: &str) -> u64 {
        self.numbers(node).map_or(0, |numbers| numbers.answered)
    }

    fn is_expired(&self, announcer: &Announcer) -> bool {
        let numbers = self.numbers(&announcer.node);
        numbers.is_some_and(|numbers| announcer.sequence <= numbers.expired)
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
    pub async fn renew(&self, node: &str, sequence: u64) -> Option<u64> {
        for _ in 0..TRIES {
            match self.try_to_renew(node, sequence).await {
                Err(kube::Error::Api(status)) if status.code == 409 => {}
                Err(error) => {
                    debug!(node, %error, "the node's Lease can't be renewed");
                    return None;
                }
                Ok(expired) => return expired,
            }
        }
        None
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
    async fn write(&self, node: &str, read: Option<Lease>, numbers: Numbers) -> Result<(), kube::Error> {
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
            self.api.create(&parameters, &lease).await?;
        } else {
            self.api.replace(node, &parameters, &lease).await?;
        }
        Ok(())
    }

    /// Looks at the Leases for ever.
    pub async fn watch(&self, vips: &Store<Vip>) {
        loop {
            sleep(LOOK).await;
            self.look(vips).await;
        }
    }

    /// Writes which answers have expired, and what follows for Vips.
    pub async fn look(&self, vips: &Store<Vip>) {
        let leases = self.known.state();
        let over = leases.iter().filter_map(|lease| {
            let (node, numbers) = (lease.name_any(), Numbers::read(lease));
            self.is_over(&node, numbers).then_some((node, numbers))
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
        for vip in vips.state() {
            if vip
                .status
                .as_ref()
                .is_some_and(|status| status.announce == AnnounceBy::L2)
            {
                self.tidy(&vip).await;
            }
        }
    }

    /// Whether a node's last answer has expired. Tells others if that has been written since.
    fn is_over(&self, node: &str, numbers: Numbers) -> bool {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let new = || Seen {
            answered: numbers.answered,
            since: Instant::now(),
            expired: 0,
        };
        let seen = seen.entry(node.to_owned()).or_insert_with(new);
        if seen.answered != numbers.answered {
            (seen.answered, seen.since) = (numbers.answered, Instant::now());
        }
        if seen.expired != numbers.expired {
            seen.expired = numbers.expired;
            self.changes.send_modify(|number| *number += 1);
        }
        numbers.expired < numbers.answered && seen.since.elapsed() >= numbers.wait()
    }

    /// Writes that a node's answers have expired, if its Lease is still as it was seen. Returns whether it did.
    async fn expire(&self, node: &str, seen: Numbers) -> Result<bool, kube::Error> {
        let Some(current) = self.api.get_opt(node).await? else {
            return Ok(false);
        };
        if Numbers::read(&current) != seen {
            return Ok(false);
        }
        let expired = seen.answered;
        self.write(node, Some(current), Numbers { expired, ..seen })
            .await?;
        Ok(true)
    }

    /// Makes Leases that somebody deleted: without one, a silent node would keep its addresses. Removes silent nodes
    /// from a Vip that ends.
    async fn tidy(&self, vip: &Vip) {
        for announcer in announcers(vip) {
            if self.numbers(&announcer.node).is_none() {
                let numbers = Numbers {
                    answered: announcer.sequence,
                    expired: 0,
                    seconds: MAX_SECONDS,
                };
                // If the store is late, there is one.
                if let Err(error) = self.write(&announcer.node, None, numbers).await {
                    debug!(node = announcer.node, %error, "no Lease was made");
                }
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
mod tests {
    use super::*;

    #[test]
    fn a_request_is_answered_only_above_all_earlier_ones() {
        let first = Numbers::default().with_answer(5, 2).unwrap();
        assert_eq!((first.answered, first.expired, first.seconds), (5, 0, 2));
        assert_eq!(first.with_answer(5, 2), None, "another process answers it");
        assert_eq!(first.with_answer(4, 2), None, "given up");
        let over = Numbers { expired: 5, ..first };
        assert_eq!(over.with_answer(5, 2), None);
        assert_eq!(over.with_answer(6, 2).unwrap().expired, 5);
    }

    #[test]
    fn a_longer_answer_counts_until_it_has_expired() {
        let long = Numbers::default().with_answer(5, 60).unwrap();
        let shorter = long.with_answer(6, 2).unwrap();
        assert_eq!(shorter.seconds, 60, "the node may use the former answer");
        let over = Numbers {
            expired: 6,
            ..shorter
        };
        assert_eq!(over.with_answer(7, 2).unwrap().seconds, 2);
        assert!(long.wait() > Duration::from_mins(1));
    }
}
