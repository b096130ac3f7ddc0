//! Writes which addresses a node may announce, before it is told of them.
//!
//! Addresses of L2 lapse while their node waits for an answer. So a node with such addresses gets an answer within a
//! renewal, with what is written until then. What such a node announces already, and what can't be written in time,
//! stays until the end of a former answer, as it would without an answer.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;
use thuban_api::routes::{Report, Route, Routes};
use thuban_api::{AnnounceBy, Vip};
use tokio::time::{Instant, sleep, sleep_until, timeout_at};
use tracing::debug;

use super::{
    AT_ONCE, PAUSE, Speakers, addresses, announce, entry, holder, is_excluded, let_announce, may_have,
};
use crate::objects::change_status;
use crate::vip::ending::is_withdrawn;

/// How long routes are granted before an answer goes out with those that are. With addresses of L2, a renewal at most.
const GRANTING: Duration = Duration::from_secs(2);
/// The head start for an address of L2 of each node before the next one, and the most nodes that get one. So addresses
/// spread over nodes.
const HEAD_START: Duration = Duration::from_millis(50);
const MAX_HEAD_STARTS: usize = 5;

/// Returns the place of a Vip in the order in which a node's Vips are written. Each node has another order: nodes that
/// write many Vips at the same time seldom write the same one and refuse each other.
pub(super) fn place(uid: &str, node: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    (uid, node).hash(&mut hasher);
    hasher.finish()
}

impl Speakers {
    /// Writes which of the addresses are new to the node before they go out. What can't be written in time is left out,
    /// and the node's next request is answered at once.
    pub(super) async fn grant(&self, node: &str, report: &Report, mut answer: Routes) -> Routes {
        let vips = self.vips.state();
        let vips: BTreeMap<&str, &Arc<Vip>> = vips
            .iter()
            .filter_map(|vip| Some((vip.metadata.uid.as_deref()?, vip)))
            .collect();
        let vips = &vips;
        let said = report.announced.iter();
        let said: HashSet<(&str, IpAddr)> = said.map(|said| (said.uid.as_str(), said.address)).collect();
        let announces = |route: &Route| said.contains(&(route.uid.as_str(), route.address));
        let said_vips: HashSet<&str> = said.iter().map(|(uid, _)| *uid).collect();
        let has_l2 = answer.routes.iter().any(|route| route.l2);
        let begun = Instant::now();
        let end = begun + self.time_to_grant(has_l2);
        // The answers to the node that no longer count. `None`: this one must not have addresses of L2.
        let expired = if has_l2 {
            self.renew(node, report.sequence, end).await
        } else {
            None
        };
        let is_lost = |route: &Route| route.l2 && expired.is_none();
        // A node that announces an address without an entry gets one.
        let is_new = |route: &Route| {
            let known = vips.get(route.uid.as_str()).and_then(|vip| entry(vip, node));
            let known = if route.l2 {
                known.max(self.l2.written_entry(&route.uid, node))
            } else {
                known
            };
            let is_over = |known: u64| route.l2 && expired.is_none_or(|expired| known <= expired);
            !announces(route) || known.is_none_or(is_over)
        };
        let claim = |route: &Route| {
            let is_first = route.l2 && !announces(route);
            let head_start = is_first.then(|| self.head_start(&route.uid, node));
            let (is_added, place) = (!said_vips.contains(route.uid.as_str()), place(&route.uid, node));
            (head_start.unwrap_or_default(), is_added, place, route.uid.clone())
        };
        let new = answer.routes.iter();
        let new = new.filter(|route| !is_lost(route) && is_new(route));
        // Those first that wait for nobody's head start, and of these what the node announces: it withdraws what is not
        // written in time.
        let new: BTreeSet<(Duration, bool, u64, String)> = new.map(claim).collect();
        let granted: BTreeSet<String> = futures::stream::iter(new)
            .map(|(head_start, _, _, uid)| async move {
                let vip = vips.get(uid.as_str())?;
                let written = self.let_announce(vip, node, report, begun + head_start);
                let written = timeout_at(end, written).await;
                written.unwrap_or_default().then_some(uid)
            })
            .buffer_unordered(AT_ONCE)
            .filter_map(|granted| async { granted })
            .collect()
            .await;
        let is_first = |uid: &String| {
            let vip = vips.get(uid.as_str());
            vip.is_some_and(|vip| entry(vip, node).is_none())
        };
        let has_news = granted.iter().any(is_first);
        let is_granted =
            |route: &Route| !is_lost(route) && (!is_new(route) || granted.contains(route.uid.as_str()));
        let mut is_whole = true;
        answer.routes.retain_mut(|route| {
            if is_granted(route) {
                return true;
            }
            is_whole = false;
            // It counts as long as a former answer said.
            route.remaining_seconds = None;
            route.l2 && announces(route)
        });
        let has_l2 = answer.routes.iter().any(|route| route.l2);
        answer.renew_after_ms = has_l2.then(|| self.renew_after_ms());
        if !is_whole {
            answer.version = String::new();
            // A node begins with its first routes while others are still to be written.
            if !has_l2 && !has_news {
                sleep(PAUSE).await;
            }
        }
        answer
    }

    /// How long routes may be written before an answer goes out.
    fn time_to_grant(&self, has_l2: bool) -> Duration {
        let renewal = Duration::from_millis(self.renew_after_ms());
        if has_l2 { GRANTING.min(renewal) } else { GRANTING }
    }

    /// Notes in a node's Lease that the request is answered. `None`: it must not be answered by addresses of L2.
    async fn renew(&self, node: &str, sequence: u64, end: Instant) -> Option<u64> {
        match timeout_at(end, self.l2.renew(node, sequence)).await {
            Ok(Ok(expired)) => return expired,
            Ok(Err(error)) => debug!(node, %error, "the node's Lease can't be renewed"),
            Err(_) => debug!(node, "the node's Lease is not renewed in time"),
        }
        None
    }

    /// Returns how long a node waits before it claims a Vip's addresses. Of each Vip, another node is the first one.
    fn head_start(&self, uid: &str, node: &str) -> Duration {
        let (nodes, own) = (self.nodes.state(), place(uid, node));
        let is_before = |other: &&Arc<Node>| !is_excluded(other) && place(uid, &other.name_any()) > own;
        let before = nodes.iter().filter(is_before).take(MAX_HEAD_STARTS).count();
        HEAD_START * u32::try_from(before).unwrap_or_default()
    }

    /// Returns whether the API server's copy of a Vip says that this request is answered by its addresses. Claims
    /// nothing earlier than `after`.
    async fn let_announce(&self, vip: &Vip, node: &str, report: &Report, after: Instant) -> bool {
        let is_l2 = announce(vip) == AnnounceBy::L2;
        if is_l2 && entry(vip, node).is_none() {
            sleep_until(after).await;
        }
        let written = change_status(&self.client, vip, |vip| {
            let is_wanted = addresses(vip).any(|address| may_have(vip, node, address, report));
            let is_free = announce(vip) == AnnounceBy::Bgp || self.l2.claim(vip, node);
            is_wanted && is_free && let_announce(vip, node, report.sequence)
        });
        let written = written.await.unwrap_or_else(|error| {
            debug!(node, %error, "a route can't be granted yet");
            None
        });
        let is_written = written.is_some_and(|vip| {
            entry(&vip, node) == Some(report.sequence)
                && !is_withdrawn(&vip)
                && (announce(&vip) == AnnounceBy::L2) == is_l2
                && (!is_l2 || holder(&vip) == Some(node))
        });
        if is_l2
            && is_written
            && let Some(uid) = &vip.metadata.uid
        {
            self.l2.note_entry(uid, node, report.sequence);
        }
        is_written
    }
}

#[cfg(test)]
mod tests;
