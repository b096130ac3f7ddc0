//! Which addresses each node announces: nodes ask, and say what they announce.
//!
//! A node has one request under way at a time, numbers its requests, and uses an answer only for as long as it says. So
//! a request that says nothing of an address proves that the node does not announce it, unless a later request was
//! answered by the address: [`Announcer::sequence`] is the number of the last one that was, and is written before the
//! answer goes out.
//!
//! Addresses of L2 have one announcer at a time, whose answers count for seconds: see [`l2`].

mod granting;
pub mod l2;
mod passwords;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::body::to_bytes;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::http::header::{AUTHORIZATION, CONNECTION};
use axum::response::{AppendHeaders, IntoResponse, Response};
use axum::routing::post;
use axum::{Json, Router};
use cidrd::problem::Problem;
use futures::StreamExt;
use futures::future::join;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::jiff::Timestamp;
use kube::core::{Selector, SelectorExt};
use kube::runtime::reflector::{ObjectRef, Store};
use kube::{Client, ResourceExt};
use serde::de::DeserializeOwned;
use sha2::{Digest, Sha256};
use thuban_api::condition::find;
use thuban_api::routes::{
    Announced, Bfd, END_OF_SEQUENCES, LONGEST_ANSWER_SECONDS, Peer, Report, Route, Routes, Serving,
    TOKEN_AUDIENCE,
};
use thuban_api::{AnnounceBy, Announcer, BgpPeer, Vip, VipStatus};
use thuban_authority::identity::{self, Account, IdentityError};
use tokio::sync::{Semaphore, watch};
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tracing::{debug, info};

use self::granting::place;
use self::l2::NodeLeases;
use crate::events::Warnings;
use crate::leases::Leases;
use crate::metrics;
use crate::objects::change_status;
use crate::vip::ending::is_withdrawn;
use crate::vip::{announced, say, sum_up};

/// Who may ask.
const SPEAKER: Account = Account {
    name: "thuban-speaker",
    audience: TOKEN_AUDIENCE,
};
/// Reasons of a Vip that is not accepted because the Service of its name is not its own.
const NOT_ITS_SERVICE: [&str; 2] = ["NameTaken", "ServiceNotServed"];
/// How long an answer waits for something to tell.
const LONG_POLL: Duration = Duration::from_secs(LONGEST_ANSWER_SECONDS);
/// Bytes of the largest request: 10,000 routes.
const LARGEST_BODY: usize = 2 << 20;
/// How long a token's review is believed.
const REVIEWED: Duration = Duration::from_mins(1);
/// The most tokens whose review is remembered.
const MAX_TOKENS: usize = 10_000;
/// How many tokens are reviewed at once.
pub const REVIEWS: usize = 32;
/// How long a body may take.
const BODY_TIMEOUT: Duration = Duration::from_secs(5);
/// How long what a node says is written before it is answered. Of a node with addresses of L2, half a renewal at most.
const NOTING: Duration = Duration::from_secs(5);
/// How many Vips are written at once.
const AT_ONCE: usize = 8;
/// The longest pause before an answer that lacks routes, which is followed by the next request at once.
const PAUSE: Duration = Duration::from_secs(1);
/// How long changes are gathered before it is looked at what they mean for a node that waits for an answer.
const GATHERED: Duration = Duration::from_millis(20);
/// A node with addresses of L2 asks so many times while an answer counts.
const RENEWALS: u64 = 4;
/// A node with this label announces nothing.
const EXCLUDED: &str = "node.kubernetes.io/exclude-from-external-load-balancers";

pub struct Speakers {
    pub client: Client,
    pub leases: Arc<Leases>,
    pub l2: Arc<NodeLeases>,
    pub vips: Store<Vip>,
    pub nodes: Store<Node>,
    pub peers: Store<BgpPeer>,
    /// Is raised when any of these change.
    pub changes: watch::Receiver<u64>,
    pub warnings: Warnings,
    pub reviewed: Mutex<BTreeMap<[u8; 32], (String, Instant)>>,
    /// Room for reviews of tokens by the API server.
    pub reviews: Semaphore,
}

/// What a node is to announce.
struct Wanted {
    answer: Routes,
    /// Whether that is all. This process may not know for how long an address may be announced.
    is_whole: bool,
    /// Whether there is a route that no earlier request was answered by. One that was, and that the node does not
    /// announce, is no reason to hurry: the node may not be able to.
    has_news: bool,
}

/// Returns the API that nodes ask.
pub fn router(speakers: Arc<Speakers>) -> Router {
    Router::new().route("/v1/routes", post(ask)).with_state(speakers)
}

async fn ask(State(speakers): State<Arc<Speakers>>, request: Request) -> Result<Response, Problem> {
    let (node, report): (String, Report) = speakers.read(request).await?;
    if report.sequence >= END_OF_SEQUENCES {
        return Err(invalid("sequence must be less than 2^62", "sequence"));
    }
    let (answer, is_whole) = speakers.answer(&node, &report).await;
    metrics::polled();
    // Another lbaasd may know more.
    let close = (!is_whole).then_some((CONNECTION, "close"));
    Ok((AppendHeaders(close), Json(answer)).into_response())
}

fn invalid(detail: &str, field: &str) -> Problem {
    let status = StatusCode::UNPROCESSABLE_ENTITY;
    Problem::new(status, "Invalid", detail.to_owned(), field)
}

impl Speakers {
    /// Returns which node asks, and what it says. Nobody else's body is read.
    pub async fn read<T: DeserializeOwned>(&self, request: Request) -> Result<(String, T), Problem> {
        let token = request
            .headers()
            .get(AUTHORIZATION)
            .and_then(|value| value.to_str().ok()?.strip_prefix("Bearer "))
            .unwrap_or_default();
        let node = self.identify(token).await.map_err(|error| {
            let status = match error {
                IdentityError::Review(_) | IdentityError::Busy => StatusCode::SERVICE_UNAVAILABLE,
                IdentityError::WrongUser(..) | IdentityError::NotBound => StatusCode::FORBIDDEN,
                _ => StatusCode::UNAUTHORIZED,
            };
            Problem::new(status, "Unidentified", error.to_string(), "")
        })?;
        let body = timeout(BODY_TIMEOUT, to_bytes(request.into_body(), LARGEST_BODY)).await;
        let body = body.ok().and_then(Result::ok);
        let body = body.ok_or_else(|| invalid("the body is too large, or late", ""))?;
        let said = serde_json::from_slice(&body).map_err(|error| invalid(&error.to_string(), ""))?;
        Ok((node, said))
    }

    /// Returns the node whose token it is.
    async fn identify(&self, token: &str) -> Result<String, IdentityError> {
        let digest: [u8; 32] = Sha256::digest(token).into();
        let known = |reviewed: &BTreeMap<[u8; 32], (String, Instant)>| {
            let (node, since) = reviewed.get(&digest)?;
            (since.elapsed() < REVIEWED).then(|| node.clone())
        };
        if let Some(node) = known(&self.reviewed.lock().unwrap_or_else(PoisonError::into_inner)) {
            return Ok(node);
        }
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default()
            .as_secs();
        identity::check_claims(SPEAKER, token, now)?;
        let _turn = self.reviews.try_acquire().map_err(|_| IdentityError::Busy)?;
        let identity = identity::review(self.client.clone(), SPEAKER, token, now).await?;
        let mut reviewed = self.reviewed.lock().unwrap_or_else(PoisonError::into_inner);
        reviewed.retain(|_, (_, since)| since.elapsed() < REVIEWED);
        if reviewed.len() < MAX_TOKENS {
            reviewed.insert(digest, (identity.node.clone(), Instant::now()));
        }
        Ok(identity.node)
    }

    /// Notes what a node says, and returns what it is to announce as soon as that differs from what it was told, and
    /// whether that is all: this process may not know for how long an address may be announced.
    pub async fn answer(&self, node: &str, report: &Report) -> (Routes, bool) {
        let end = Instant::now() + LONG_POLL;
        let mut changes = self.changes.clone();
        changes.mark_unchanged();
        let time = self.time_to_note(&self.concerned(node, report));
        let warned = timeout(time, self.warn(node, report));
        let _ = join(warned, self.note(node, report)).await;
        let pause = Instant::now() + PAUSE;
        loop {
            let Wanted {
                mut answer,
                is_whole,
                has_news,
            } = self.wanted(node, report);
            let has_l2 = answer.routes.iter().any(|route| route.l2);
            // What is lacking may come soon. Addresses of L2, and routes that are new to the node, don't wait for that.
            let (until, is_due) = if is_whole {
                (end, answer.version != report.version)
            } else {
                (pause, has_news)
            };
            if is_due || has_l2 || Instant::now() >= until {
                if !is_whole {
                    answer.version = String::new();
                }
                return (self.grant(node, report, answer).await, is_whole);
            }
            if let Ok(Ok(())) = timeout_at(until, changes.changed()).await {
                sleep(GATHERED).await;
            }
            changes.mark_unchanged();
            self.note(node, report).await;
        }
    }

    /// The milliseconds after which a node with addresses of L2 asks again.
    fn renew_after_ms(&self) -> u64 {
        u64::from(self.l2.seconds) * 1000 / RENEWALS
    }

    /// Returns what a node is to announce, before it is granted.
    fn wanted(&self, node: &str, report: &Report) -> Wanted {
        let peers = self.peers_of(node);
        let mut serves: HashMap<IpAddr, Vec<&Serving>> = HashMap::new();
        for serving in &report.serves {
            serves.entry(serving.address).or_default().push(serving);
        }
        let said = report.announced.iter();
        let said: HashSet<(&str, IpAddr)> = said.map(|said| (said.uid.as_str(), said.address)).collect();
        let mut routes = Vec::new();
        let (mut is_whole, mut has_news) = (true, false);
        let mut sequence = self.l2.answered(node);
        for vip in self.vips.state() {
            let uid = vip.uid().unwrap_or_default();
            let entry = entry(&vip, node);
            sequence = sequence.max(entry.unwrap_or_default());
            for address in addresses(&vip) {
                let servings = serves.get(&address).map(Vec::as_slice).unwrap_or_default();
                if !may_have_by(&vip, node, servings) || !self.is_candidate(&vip, node, &peers) {
                    continue;
                }
                let l2 = announce(&vip) == AnnounceBy::L2;
                let limit = if l2 { self.l2.seconds.into() } else { u64::MAX };
                let remaining = self.leases.remaining(&uid, address);
                let route = Route {
                    uid: uid.clone(),
                    address,
                    remaining_seconds: remaining.map(|remaining| remaining.as_secs().min(limit)),
                    l2,
                };
                // A process that has just started does not know for how long.
                let (is_known, is_announced) = (remaining.is_some(), said.contains(&(uid.as_str(), address)));
                is_whole &= is_known || (is_announced && !l2);
                has_news |= is_known && !is_announced && entry.is_none();
                if is_known || is_announced {
                    routes.push(route);
                }
            }
        }
        routes.sort_unstable_by_key(|route| route.address);
        let mut hasher = DefaultHasher::new();
        peers.hash(&mut hasher);
        for route in &routes {
            (&route.uid, route.address).hash(&mut hasher);
        }
        let answer = Routes {
            version: format!("{:016x}", hasher.finish()),
            sequence,
            routes,
            peers,
            renew_after_ms: None,
        };
        Wanted {
            answer,
            is_whole,
            has_news,
        }
    }

    /// Whether a Vip's addresses may be announced by a node with these routers, if the node serves them.
    fn is_candidate(&self, vip: &Vip, node: &str, peers: &[Peer]) -> bool {
        match announce(vip) {
            AnnounceBy::Bgp => !peers.is_empty(),
            AnnounceBy::L2 => {
                let known = self.nodes.get(&ObjectRef::new(node));
                known.is_some_and(|known| !is_excluded(&known)) && self.l2.is_free_for(vip, node)
            }
        }
    }

    /// Returns the routers that a node announces to, the first of each address.
    fn peers_of(&self, node: &str) -> Vec<Peer> {
        let Some(node) = self.nodes.get(&ObjectRef::new(node)) else {
            return Vec::new();
        };
        if is_excluded(&node) {
            return Vec::new();
        }
        let mut peers: Vec<Peer> = self
            .peers
            .state()
            .iter()
            .filter(|peer| selects(peer, node.labels()))
            .filter_map(|peer| {
                let spec = &peer.spec;
                Some(Peer {
                    name: peer.name_any(),
                    address: spec.address.parse().ok()?,
                    port: spec.port,
                    asn: spec.asn,
                    local_asn: spec.local_asn,
                    bfd: spec.bfd.map(|bfd| Bfd {
                        interval_ms: bfd.interval_ms,
                        multiplier: bfd.multiplier,
                    }),
                    graceful_restart_seconds: spec.graceful_restart_seconds,
                    hold_seconds: spec.hold_seconds,
                    password_secret: spec.password_secret.clone(),
                    multihop_ttl: spec.ebgp_multihop,
                })
            })
            .collect();
        peers.sort_unstable();
        let mut seen = BTreeSet::new();
        peers.retain(|peer| seen.insert(peer.address));
        peers
    }

    /// Returns the Vips that a node may have to do with.
    fn concerned(&self, node: &str, report: &Report) -> Vec<Arc<Vip>> {
        let said = report.announced.iter();
        let said: HashSet<&str> = said.map(|announced| announced.uid.as_str()).collect();
        let mut vips = self.vips.state();
        vips.retain(|vip| concerns(vip, node, &said));
        vips
    }

    /// How long what a node says may be written. Meanwhile its addresses of L2 are not renewed.
    fn time_to_note(&self, concerned: &[Arc<Vip>]) -> Duration {
        let has_l2 = concerned.iter().any(|vip| announce(vip) == AnnounceBy::L2);
        let most = Duration::from_millis(self.renew_after_ms() / 2);
        if has_l2 { NOTING.min(most) } else { NOTING }
    }

    /// Writes what a node says into the status of the Vips concerned. What is not written in time is written with the
    /// next request.
    async fn note(&self, node: &str, report: &Report) {
        let peers = self.peers_of(node);
        let change = |vip: &mut Vip| {
            let is_candidate = self.is_candidate(vip, node, &peers);
            note(vip, node, report, is_candidate, Timestamp::now())
        };
        let mut concerned = self.concerned(node, report);
        let time = self.time_to_note(&concerned);
        concerned.retain(|vip| change(&mut Vip::clone(vip)));
        concerned.sort_by_cached_key(|vip| place(vip.metadata.uid.as_deref().unwrap_or_default(), node));
        let noted = futures::stream::iter(concerned).for_each_concurrent(AT_ONCE, |vip| async move {
            match change_status(&self.client, &*vip, change).await {
                Ok(_) => info!(
                    node,
                    namespace = vip.namespace(),
                    name = vip.name_any(),
                    "announcers noted"
                ),
                Err(error) => debug!(node, %error, "announcers not noted yet"),
            }
        });
        let _ = timeout(time, noted).await;
    }
}

/// Whether a node may have to do with a Vip.
/// `said`: the UIDs of which the node announces something; empty if it does not know whose an address is.
fn concerns(vip: &Vip, node: &str, said: &HashSet<&str>) -> bool {
    let uid = vip.metadata.uid.as_deref().unwrap_or_default();
    let is_known = vip.status.as_ref().is_some_and(|status| {
        status.announced_by.iter().any(|known| known == node) || entry(vip, node).is_some()
    });
    is_known || said.contains(uid) || said.contains("")
}

/// Whether a node announces nothing.
fn is_excluded(node: &Node) -> bool {
    node.labels().contains_key(EXCLUDED)
}

/// How a Vip's addresses are announced.
fn announce(vip: &Vip) -> AnnounceBy {
    vip.status
        .as_ref()
        .map(|status| status.announce)
        .unwrap_or_default()
}

/// Returns the only node that may announce a Vip's addresses.
fn holder(vip: &Vip) -> Option<&str> {
    match vip.status.as_ref()?.announcers.as_slice() {
        [announcer] => Some(&announcer.node),
        _ => None,
    }
}

fn selects(peer: &BgpPeer, labels: &BTreeMap<String, String>) -> bool {
    let selector = Selector::try_from(peer.spec.node_selector.clone());
    selector.is_ok_and(|selector| selector.matches(labels))
}

fn addresses(vip: &Vip) -> impl Iterator<Item = IpAddr> {
    let status = vip.status.as_ref();
    let addresses = status
        .map(|status| status.addresses.as_slice())
        .unwrap_or_default();
    addresses.iter().filter_map(|address| address.parse().ok())
}

/// Whether a node that says this may announce an address of a Vip. The node must serve the address for the Vip's
/// Service and no other: one that was cut off from the operator may still serve it for the Service that had it before.
/// A change of the Vip that is refused takes nothing from what is served. But a Service of the Vip's name that is not
/// its own gets nothing.
fn may_have(vip: &Vip, node: &str, address: IpAddr, report: &Report) -> bool {
    let servings = report.serves.iter();
    let servings: Vec<&Serving> = servings.filter(|serving| serving.address == address).collect();
    may_have_by(vip, node, &servings)
}

/// Whether a node that serves an address of a Vip in these ways may announce the address.
fn may_have_by(vip: &Vip, node: &str, servings: &[&Serving]) -> bool {
    let service = format!("{}/{}", vip.namespace().unwrap_or_default(), vip.name_any());
    let is_its = |serving: &Serving| {
        serving.service == service || serving.service.is_empty() && entry(vip, node).is_some()
    };
    let conditions = vip.status.as_ref().map(|status| status.conditions.as_slice());
    let accepted = find(conditions.unwrap_or_default(), "Accepted");
    let is_l2 = announce(vip) == AnnounceBy::L2;
    !is_withdrawn(vip)
        && !vip.status.as_ref().is_some_and(VipStatus::is_private)
        && accepted.is_some_and(|accepted| !NOT_ITS_SERVICE.contains(&accepted.reason.as_str()))
        && !servings.is_empty()
        && servings
            .iter()
            .all(|serving| is_its(serving) && (serving.on_link || !is_l2))
}

/// Returns the number of the last request by which a node was let announce a Vip's addresses.
fn entry(vip: &Vip, node: &str) -> Option<u64> {
    let announcers = &vip.status.as_ref()?.announcers;
    let entry = announcers.iter().find(|announcer| announcer.node == node)?;
    Some(entry.sequence)
}

/// Notes that the request is answered by the Vip's addresses. Returns whether anything changed; a later request of the
/// node that was answered stays.
fn let_announce(vip: &mut Vip, node: &str, sequence: u64) -> bool {
    let announcers = &mut vip.status.get_or_insert_with(VipStatus::default).announcers;
    match announcers.iter_mut().find(|announcer| announcer.node == node) {
        Some(entry) if entry.sequence >= sequence => return false,
        Some(entry) => entry.sequence = sequence,
        None => {
            announcers.push(Announcer {
                node: node.to_owned(),
                sequence,
            });
            announcers.sort_unstable_by(|one, other| one.node.cmp(&other.node));
        }
    }
    true
}

/// Notes what a node says of a Vip. Returns whether anything changed. `is_candidate`: the node may announce the Vip's
/// addresses if it serves them.
pub fn note(vip: &mut Vip, node: &str, report: &Report, is_candidate: bool, now: Timestamp) -> bool {
    let own: Vec<IpAddr> = addresses(vip).collect();
    let uid = vip.metadata.uid.as_deref().unwrap_or_default();
    let is_own = |announced: &Announced| {
        announced.uid == uid || (announced.uid.is_empty() && own.contains(&announced.address))
    };
    let announces = report.announced.iter().any(is_own);
    let is_wanted = is_candidate && own.iter().any(|address| may_have(vip, node, *address, report));
    let answered = entry(vip, node);
    let is_over = !announces && !is_wanted && answered.is_some_and(|sequence| sequence < report.sequence);
    let is_latest = answered.is_none_or(|sequence| sequence <= report.sequence);
    let generation = vip.metadata.generation;
    let Some(status) = &mut vip.status else {
        return false;
    };
    let mut is_changed = false;
    if is_over {
        status.announcers.retain(|announcer| announcer.node != node);
        is_changed = true;
    }
    if is_latest && announces != status.announced_by.iter().any(|known| known == node) {
        if announces {
            status.announced_by.push(node.to_owned());
            status.announced_by.sort_unstable();
        } else {
            status.announced_by.retain(|known| known != node);
        }
        let said = announced(&status.announced_by, status.announce);
        say(&mut status.conditions, "Announced", said, generation, now);
        sum_up(vip, now);
        is_changed = true;
    }
    is_changed
}

#[cfg(test)]
mod played;
#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod waits;
