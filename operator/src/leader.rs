//! Leadership by a Lease: it is taken by update under resourceVersion, its expiry is judged by this process's own
//! monotonic clock, and `leaseTransitions` is the epoch. Safety never depends on it. No crate is used:
//! `kube-leader-election` knows no epoch and compares the clocks of several machines.

use std::collections::BTreeMap;
use std::time::Duration;

use futures::{Stream, StreamExt};
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::api::{ObjectMeta, PostParams};
use kube::runtime::watcher::{self, watch_object};
use kube::{Api, Client, ResourceExt};
use thuban_api::{
    ADDRESS_ANNOTATION, CA_BUNDLE_ANNOTATION, OPERATOR_LEASE, VERSION_ANNOTATION, system_namespace,
};
use tokio::sync::watch;
use tokio::time::error::Elapsed;
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tracing::{debug, info, warn};

/// How long a holder may go without a renewal before it has lost the Lease.
const DURATION: Duration = Duration::from_secs(10);
const RENEW_EVERY: Duration = Duration::from_secs(2);
/// How long the leader itself goes without a renewal before it gives up: less than [`DURATION`].
const GIVE_UP_AFTER: Duration = Duration::from_secs(8);
/// How long the API server may take to answer before it counts as away.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(3);
/// How soon a request that failed is repeated.
const RETRY: Duration = Duration::from_millis(300);
/// How long a leader that gave the Lease up keeps its streams, so that the next leader can come.
const HANDOVER: Duration = Duration::from_secs(2);
/// The least time between two renewals as they are written, when the clock doesn't give more.
const LEAST_STEP: Duration = Duration::from_micros(1);

async fn within_timeout<T>(request: impl Future<Output = Result<T, kube::Error>>) -> Result<T, kube::Error> {
    let silent = || kube::Error::Service("the API server does not answer".into());
    timeout(REQUEST_TIMEOUT, request)
        .await
        .unwrap_or_else(|_| Err(silent()))
}

/// The holder's fields of the Lease.
#[derive(Clone, Debug)]
pub struct Candidate {
    pub identity: String,
    /// `host:port` of its stream server.
    pub address: String,
    /// The CAs by which droplets verify the server, as PEM. The next renewal publishes a change.
    pub ca_bundle: watch::Receiver<String>,
}

impl Candidate {
    fn annotations(&self) -> BTreeMap<String, String> {
        let ca_bundle = self.ca_bundle.borrow().clone();
        [
            (ADDRESS_ANNOTATION.to_owned(), self.address.clone()),
            (CA_BUNDLE_ANNOTATION.to_owned(), ca_bundle),
            (
                VERSION_ANNOTATION.to_owned(),
                env!("CARGO_PKG_VERSION").to_owned(),
            ),
        ]
        .into()
    }
}

pub struct Leadership {
    leases: Api<Lease>,
    candidate: Candidate,
    lease: Lease,
    vacancy: Duration,
}

/// The reason why a leadership is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// Another process has the Lease, or the API server is away.
    Lost,
    /// The Lease is ours, but lacks a renewal that was accepted: the API server's state is a restored one, and this
    /// process knows later states than it.
    Restored,
}

/// Waits until this process leads.
pub async fn acquire(client: Client, candidate: Candidate) -> Leadership {
    let leases: Api<Lease> = Api::namespaced(client, system_namespace());
    let mut news = watch_object(leases.clone(), OPERATOR_LEASE).boxed();
    let mut seen = None;
    loop {
        match attempt(&leases, &candidate, &mut seen).await {
            Ok(Some((lease, vacancy))) => {
                info!(identity = candidate.identity, epoch = epoch(&lease), "leading");
                return Leadership {
                    leases,
                    candidate,
                    lease,
                    vacancy,
                };
            }
            Ok(None) => {
                if wait_for_chance(&mut news, &mut seen).await.is_err() {
                    // The watch may be blind: of an API server that hangs, or of one that was restored.
                    news = watch_object(leases.clone(), OPERATOR_LEASE).boxed();
                }
            }
            Err(error) => {
                warn!(error = %error, "lease could not be read or taken; trying again");
                sleep(RETRY).await;
            }
        }
    }
}

/// The version of the Lease that was seen last, and when it was seen first.
type Seen = Option<(Option<String>, Instant)>;

/// Notes that the Lease was seen. Returns how long it has not been renewed.
fn note(seen: &mut Seen, lease: &Lease) -> Duration {
    let version = &lease.metadata.resource_version;
    match seen {
        Some((known, since)) if known == version => since.elapsed(),
        _ => {
            *seen = Some((version.clone(), Instant::now()));
            Duration::ZERO
        }
    }
}

/// Waits until the Lease may be free: a watch shows that it was given up or is gone, or its holder has not renewed it
/// for [`DURATION`]. Whoever waits sends no requests meanwhile. A watch that fails proves nothing: the caller looks.
/// Returns an error if the watch showed nothing for that long.
async fn wait_for_chance(
    news: &mut (impl Stream<Item = Result<Option<Lease>, watcher::Error>> + Unpin),
    seen: &mut Seen,
) -> Result<(), Elapsed> {
    loop {
        let since = seen.as_ref().map_or_else(Instant::now, |(_, since)| *since);
        match timeout_at(since + DURATION, news.next()).await? {
            Some(Ok(Some(lease))) if !holder(&lease).is_empty() => {
                note(seen, &lease);
            }
            Some(Err(error)) => {
                debug!(error = %error, "watch of the lease broke");
                sleep(RETRY).await;
                return Ok(());
            }
            Some(Ok(_)) | None => return Ok(()),
        }
    }
}

async fn attempt(
    leases: &Api<Lease>,
    candidate: &Candidate,
    seen: &mut Seen,
) -> Result<Option<(Lease, Duration)>, kube::Error> {
    let parameters = PostParams::default();
    let Some(lease) = within_timeout(leases.get_opt(OPERATOR_LEASE)).await? else {
        let lease = taken(Lease::default(), candidate);
        return within_timeout(leases.create(&parameters, &lease))
            .await
            .map(|lease| Some((lease, Duration::ZERO)));
    };
    let is_expired = note(seen, &lease) >= DURATION;
    // An answer that was lost may have been to our own taking.
    let is_free = holder(&lease).is_empty() || holder(&lease) == candidate.identity;
    if !is_free && !is_expired {
        return Ok(None);
    }
    let vacancy = vacancy(&lease);
    let lease = taken(lease, candidate);
    within_timeout(leases.replace(OPERATOR_LEASE, &parameters, &lease))
        .await
        .map(|lease| Some((lease, vacancy)))
}

/// Returns how long nobody has renewed the Lease, by the clocks of two machines.
fn vacancy(lease: &Lease) -> Duration {
    let renewed = lease.spec.as_ref().and_then(|spec| spec.renew_time.as_ref());
    let since = renewed.map(|renewed| Timestamp::now().duration_since(renewed.0));
    since.and_then(|since| since.try_into().ok()).unwrap_or_default()
}

fn epoch(lease: &Lease) -> u64 {
    let transitions = lease.spec.as_ref().and_then(|spec| spec.lease_transitions);
    u64::try_from(transitions.unwrap_or_default()).unwrap_or_default()
}

/// Whether a Lease lacks a renewal that the other Lease has, by the clock of their common holder.
fn is_older(lease: &Lease, than: &Lease) -> bool {
    let renewed = |lease: &Lease| Some(lease.spec.as_ref()?.renew_time.as_ref()?.0);
    renewed(lease) < renewed(than)
}

/// Returns the time of a renewal: later than the last one even if the clock went back, because the Lease would look
/// restored otherwise.
fn renewal(last: Option<&MicroTime>, now: Timestamp) -> MicroTime {
    let least = last.and_then(|last| last.0.checked_add(LEAST_STEP).ok());
    MicroTime(least.map_or(now, |least| least.max(now)))
}

/// Returns the holder of a Lease; empty for a Lease that was given up.
fn holder(lease: &Lease) -> &str {
    let spec = lease.spec.as_ref();
    spec.and_then(|spec| spec.holder_identity.as_deref())
        .unwrap_or_default()
}

/// Returns the Lease as its new holder writes it.
fn taken(mut lease: Lease, candidate: &Candidate) -> Lease {
    let transitions = i32::try_from(epoch(&lease)).unwrap_or(i32::MAX).saturating_add(1);
    let now = MicroTime(Timestamp::now());
    lease.metadata = ObjectMeta {
        name: Some(OPERATOR_LEASE.into()),
        namespace: Some(system_namespace().into()),
        resource_version: lease.metadata.resource_version,
        annotations: Some(candidate.annotations()),
        ..ObjectMeta::default()
    };
    lease.spec = Some(LeaseSpec {
        holder_identity: Some(candidate.identity.clone()),
        lease_duration_seconds: i32::try_from(DURATION.as_secs()).ok(),
        lease_transitions: Some(transitions),
        acquire_time: Some(now.clone()),
        renew_time: Some(now),
        ..LeaseSpec::default()
    });
    lease
}

impl Leadership {
    /// Returns the epoch of this leadership, which is higher than any before.
    pub fn epoch(&self) -> u64 {
        epoch(&self.lease)
    }

    /// Returns how long nobody led before, as far as clocks agree. After a restore the time is long, too.
    pub fn vacancy(&self) -> Duration {
        self.vacancy
    }

    /// Raises the epoch of the released Lease, because droplets have followed a higher one (the Lease was deleted, or
    /// restored from a backup): the next leadership begins above it.
    pub fn raise(&mut self, epoch: u64) {
        if let Some(spec) = &mut self.lease.spec {
            // Without a number the next leadership would be the first one of all.
            spec.lease_transitions = Some(i32::try_from(epoch).unwrap_or(i32::MAX));
        }
    }

    /// Renews until leadership is lost.
    pub async fn hold(&mut self) -> End {
        if is_deaf() {
            std::future::pending::<()>().await;
        }
        let mut renewed = Instant::now();
        loop {
            sleep(RENEW_EVERY).await;
            let asked = Instant::now();
            match timeout_at(renewed + GIVE_UP_AFTER, self.renew()).await {
                Ok(None) => renewed = asked,
                Ok(Some(end)) => return end,
                Err(_) => return End::Lost,
            }
        }
    }

    /// Tries until the Lease is renewed, or can no longer be renewed.
    async fn renew(&mut self) -> Option<End> {
        let parameters = PostParams::default();
        loop {
            let mut lease = self.lease.clone();
            lease.annotations_mut().extend(self.candidate.annotations());
            if let Some(spec) = &mut lease.spec {
                spec.renew_time = Some(renewal(spec.renew_time.as_ref(), Timestamp::now()));
            }
            let replaced = self.leases.replace(OPERATOR_LEASE, &parameters, &lease);
            match within_timeout(replaced).await {
                Ok(lease) => {
                    self.lease = lease;
                    return None;
                }
                Err(error) => warn!(error = %error, "lease could not be renewed"),
            }
            match within_timeout(self.leases.get_opt(OPERATOR_LEASE)).await {
                Ok(Some(lease)) if self.is_ours(&lease) => {
                    let is_older = is_older(&lease, &self.lease);
                    self.lease = lease;
                    if is_older {
                        return Some(End::Restored);
                    }
                }
                Ok(_) => return Some(End::Lost),
                Err(_) => {}
            }
            sleep(RETRY).await;
        }
    }

    fn is_ours(&self, lease: &Lease) -> bool {
        holder(lease) == self.candidate.identity && epoch(lease) == self.epoch()
    }

    /// Gives the Lease up, so that the next leader need not wait for its expiry, and waits a little for that leader:
    /// droplets whose streams end then find a leader when they dial again.
    pub async fn release(mut self) {
        // A renewal may have been under way: then the Lease has changed since we read it.
        if self.give_up().await.is_err()
            && let Ok(Some(lease)) = within_timeout(self.leases.get_opt(OPERATOR_LEASE)).await
            && self.is_ours(&lease)
        {
            self.lease.metadata = lease.metadata;
            if let Err(error) = self.give_up().await {
                warn!(error = %error, "lease could not be released");
                return;
            }
        }
        let succeeded = async {
            loop {
                sleep(RETRY / 3).await;
                match self.leases.get_opt(OPERATOR_LEASE).await {
                    Ok(Some(lease)) if holder(&lease).is_empty() => {}
                    _ => return,
                }
            }
        };
        if timeout(HANDOVER, succeeded).await.is_err() {
            info!("no other operator has come to lead");
        }
    }

    async fn give_up(&self) -> Result<(), kube::Error> {
        let mut lease = self.lease.clone();
        if let Some(spec) = &mut lease.spec {
            spec.holder_identity = Some(String::new());
        }
        let parameters = PostParams::default();
        let given_up = self.leases.replace(OPERATOR_LEASE, &parameters, &lease);
        within_timeout(given_up).await.map(|_| ())
    }
}

/// Whether the process neither renews nor gives up, for tests with two leaders: `THUBAN_DEAF=1`.
#[cfg(feature = "failpoints")]
fn is_deaf() -> bool {
    std::env::var_os("THUBAN_DEAF").is_some()
}

#[cfg(not(feature = "failpoints"))]
fn is_deaf() -> bool {
    false
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::sync::{Arc, Mutex};
    use std::time::Duration;

    use http::{Method, Request, Response};
    use kube::client::Body;
    use kube::{Api, Client, ResourceExt};
    use serde_json::json;
    use thuban_api::{CA_BUNDLE_ANNOTATION, VERSION_ANNOTATION};
    use tokio::sync::watch;
    use tokio::time::Instant;

    use super::{
        Candidate, DURATION, End, Leadership, Lease, Timestamp, acquire, epoch, holder, is_older, renewal,
        taken,
    };

    fn candidate() -> Candidate {
        Candidate {
            identity: "a".into(),
            address: "1.2.3.4:6082".into(),
            ca_bundle: watch::channel("pem".into()).1,
        }
    }

    #[test]
    fn every_taking_raises_the_epoch() {
        let first = taken(Lease::default(), &candidate());
        assert_eq!(epoch(&first), 1);
        assert_eq!(first.annotations()[VERSION_ANNOTATION], env!("CARGO_PKG_VERSION"));
        assert_eq!(epoch(&taken(first, &candidate())), 2);
    }

    /// Returns the Lease of another process.
    fn others(version: u32, holder: &str) -> Lease {
        let mut lease = taken(Lease::default(), &candidate());
        lease.metadata.resource_version = Some(version.to_string());
        if let Some(spec) = &mut lease.spec {
            spec.holder_identity = Some(holder.into());
        }
        lease
    }

    /// Has a process wait for the Lease. A watch shows it `shown` after the first look, and then nothing; whoever looks
    /// then sees the last of these. Returns the time until it leads, and the requests by their kind.
    async fn waited(shown: &[Lease]) -> (Duration, HashMap<&'static str, usize>) {
        let lines = shown
            .iter()
            .map(|lease| json!({"type": "MODIFIED", "object": lease}).to_string() + "\n");
        let (lines, last) = (lines.collect::<String>(), shown.last().cloned().unwrap());
        let asked = Arc::new(Mutex::new(HashMap::<&str, usize>::new()));
        let counts = asked.clone();
        let serve = move |request: Request<Body>| {
            let query = request.uri().query().unwrap_or_default();
            let kind = match *request.method() {
                Method::PUT => "put",
                _ if query.contains("watch=") => "watch",
                _ if query.contains("fieldSelector=") => "list",
                _ => "get",
            };
            let number = {
                let mut counts = counts.lock().unwrap();
                let number = counts.entry(kind).or_default();
                *number += 1;
                *number
            };
            let (lines, last) = (lines.clone(), last.clone());
            async move {
                let first = others(1, "b");
                let body = match (kind, number) {
                    ("put", _) => request.into_body().collect_bytes().await.unwrap().to_vec(),
                    ("watch", 1) => lines.into_bytes(),
                    ("watch", _) => std::future::pending().await,
                    ("list", _) => json!({"metadata": {"resourceVersion": "1"}, "items": [first]})
                        .to_string()
                        .into_bytes(),
                    ("get", 1) => serde_json::to_vec(&first).unwrap(),
                    _ => serde_json::to_vec(&last).unwrap(),
                };
                Ok::<_, kube::Error>(Response::new(Body::from(body)))
            }
        };
        let since = Instant::now();
        let leadership = acquire(Client::new(tower::service_fn(serve), "default"), candidate()).await;
        assert_eq!(holder(&leadership.lease), "a");
        let asked = asked.lock().unwrap().clone();
        (since.elapsed(), asked)
    }

    #[tokio::test(start_paused = true)]
    async fn a_lease_that_is_given_up_is_taken_at_once() {
        let (time, asked) = waited(&[others(2, "b"), others(3, "")]).await;
        assert_eq!(time, Duration::ZERO);
        assert_eq!(asked["get"], 2, "{asked:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_leader_is_replaced_and_read_once_more() {
        let renewals: Vec<Lease> = (2..40).map(|version| others(version, "b")).collect();
        let (time, asked) = waited(&renewals).await;
        assert!(time >= DURATION && time < DURATION * 2, "{time:?}");
        assert_eq!(asked["get"], 2, "{asked:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_leader_that_is_cut_off_gives_up_before_another_leads() {
        let silent = |_: Request<Body>| std::future::pending::<Result<Response<Body>, kube::Error>>();
        let client = Client::new(tower::service_fn(silent), "default");
        let mut leadership = Leadership {
            leases: Api::namespaced(client, "default"),
            candidate: candidate(),
            lease: taken(Lease::default(), &candidate()),
            vacancy: Duration::ZERO,
        };
        let since = Instant::now();
        assert_eq!(leadership.hold().await, End::Lost);
        assert!(since.elapsed() < DURATION, "{:?}", since.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn a_leader_that_was_outranked_is_followed_above_that() {
        let (sender, written) = std::sync::mpsc::channel();
        let keeps = move |request: Request<Body>| {
            let sender = sender.clone();
            async move {
                let body = request.into_body().collect_bytes().await.unwrap();
                if !body.is_empty() {
                    let _ = sender.send(serde_json::from_slice::<Lease>(&body).unwrap());
                }
                // The next look shows that another process leads.
                let lease = serde_json::to_vec(&taken(Lease::default(), &candidate())).unwrap();
                Ok::<_, kube::Error>(Response::new(Body::from(lease)))
            }
        };
        let client = Client::new(tower::service_fn(keeps), "default");
        let mut leadership = Leadership {
            leases: Api::namespaced(client, "default"),
            candidate: candidate(),
            lease: taken(Lease::default(), &candidate()),
            vacancy: Duration::ZERO,
        };
        leadership.raise(900);
        leadership.release().await;
        let released = written.recv().expect("a written Lease");
        assert_eq!(epoch(&taken(released, &candidate())), 901);
    }

    #[tokio::test(start_paused = true)]
    async fn a_new_bundle_is_published_with_the_next_renewal() {
        let (sender, mut written) = tokio::sync::mpsc::unbounded_channel();
        let keeps = move |request: Request<Body>| {
            let sender = sender.clone();
            async move {
                let body = request.into_body().collect_bytes().await.unwrap();
                let lease: Lease = serde_json::from_slice(&body).unwrap();
                let _ = sender.send(lease.annotations()[CA_BUNDLE_ANNOTATION].clone());
                Ok::<_, kube::Error>(Response::new(Body::from(body.to_vec())))
            }
        };
        let (publish, ca_bundle) = watch::channel("old".to_owned());
        let candidate = Candidate {
            ca_bundle,
            ..candidate()
        };
        let client = Client::new(tower::service_fn(keeps), "default");
        let mut leadership = Leadership {
            leases: Api::namespaced(client, "default"),
            lease: taken(Lease::default(), &candidate),
            candidate,
            vacancy: Duration::ZERO,
        };
        tokio::spawn(async move { leadership.hold().await });
        assert_eq!(written.recv().await.as_deref(), Some("old"));
        publish.send("old, new".to_owned()).unwrap();
        assert_eq!(written.recv().await.as_deref(), Some("old, new"));
    }

    #[test]
    fn lease_without_renewal_is_older_but_touched_one_is_not() {
        let first = taken(Lease::default(), &candidate());
        let second = taken(first.clone(), &candidate());
        assert!(is_older(&first, &second) && !is_older(&second, &first));
        let mut annotated = first.clone();
        annotated.metadata.resource_version = Some("7".into());
        assert!(!is_older(&annotated, &first));
    }

    #[test]
    fn a_clock_that_goes_back_does_not_make_a_renewal_look_restored() {
        let now = Timestamp::now();
        let first = renewal(None, now);
        assert_eq!(first.0, now);
        let back = renewal(Some(&first), now - Duration::from_hours(1));
        assert!(back.0 > first.0);
        let forth = now + Duration::from_secs(2);
        assert_eq!(renewal(Some(&first), forth).0, forth);
    }
}
