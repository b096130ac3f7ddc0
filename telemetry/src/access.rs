//! Who may read: the API server says whose a token is, by a TokenReview, and whether its owner has a right, by a
//! SubjectAccessReview.
//!
//! Invariant: without both answers nobody reads. Answers count for a short time, in bounded memory. Tokens are not
//! kept, only their digests. Tokens that somebody makes up cost the API server a bounded number of reviews, and don't
//! hold up readers who were let in before.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hyper::StatusCode;
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec};
use k8s_openapi::api::authorization::v1::{SubjectAccessReview, SubjectAccessReviewSpec};
use kube::api::PostParams;
use kube::{Api, Client};
use thiserror::Error;
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout_at};
use tracing::warn;

use crate::peers::PeerLimits;
use crate::rate_limit::RateLimit;
use crate::right::Digest256;
pub use crate::right::Right;

/// How long a reader is let in without another review.
const ADMITTED_FOR: Duration = Duration::from_mins(1);
/// How long a refusal is kept: less, because somebody may grant the right meanwhile.
const REFUSED_FOR: Duration = Duration::from_secs(10);
/// The most pairs of a token and a right whose answers are kept.
const MAX_KNOWN: usize = 256;
/// The most tokens that are reviewed at once: of readers who were let in before, and of strangers.
const REVIEWS: usize = 2;
/// How many strangers' tokens are reviewed at once after a rest, and then a second: of all peers, and of one.
const STRANGERS_AT_ONCE: u32 = 20;
const STRANGERS_A_SECOND: u32 = 5;
const OF_PEER_AT_ONCE: u32 = 10;
const OF_PEER_A_SECOND: u32 = 2;
/// How long both reviews may take, with the wait for their turn: less than a request may take.
const REVIEW_TIMEOUT: Duration = Duration::from_secs(3);
const NO_ANSWER: &str = "no answer in time";

/// The reason why a page is not shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Refusal {
    #[error("read this page by https, with a bearer token")]
    Plain,
    #[error("send a bearer token: only who may get /metrics can read this page")]
    NoToken,
    #[error("the API server does not know the token")]
    UnknownToken,
    #[error("the token's owner may not get /metrics: ClusterRole thuban-metrics-reader has the right")]
    Forbidden,
    #[error("too many tokens were sent that are not known here: try again in some seconds")]
    TooMany,
    #[error("the API server can't be asked about the token now")]
    Unasked,
}

impl Refusal {
    pub fn status(self) -> StatusCode {
        match self {
            Self::NoToken | Self::UnknownToken => StatusCode::UNAUTHORIZED,
            Self::Plain | Self::Forbidden => StatusCode::FORBIDDEN,
            Self::TooMany => StatusCode::TOO_MANY_REQUESTS,
            Self::Unasked => StatusCode::SERVICE_UNAVAILABLE,
        }
    }
}

type Verdict = Result<(), Refusal>;
/// Asks the API server about tokens, and keeps its answers.
pub struct Access {
    client: Option<Client>,
    /// The audience that tokens must be for; none: that of the API server itself.
    audience: Option<&'static str>,
    /// The last answers, and until when they count. Readers are remembered for longer.
    known: Mutex<HashMap<Digest256, (Verdict, Instant)>>,
    /// Turns of readers who were let in before.
    readers: Arc<Semaphore>,
    /// Turns of all others.
    strangers: Arc<Semaphore>,
    limit: RateLimit,
    of_peers: PeerLimits,
    /// Whether the last review failed, so that the log says it once.
    is_failing: AtomicBool,
}

impl Access {
    /// Without a client nobody can be asked, so nobody reads.
    pub fn new(client: Option<Client>, audience: Option<&'static str>) -> Arc<Self> {
        Arc::new(Self {
            client,
            audience,
            known: Mutex::default(),
            readers: Arc::new(Semaphore::new(REVIEWS)),
            strangers: Arc::new(Semaphore::new(REVIEWS)),
            limit: RateLimit::new(STRANGERS_A_SECOND, STRANGERS_AT_ONCE),
            of_peers: PeerLimits::new(OF_PEER_A_SECOND, OF_PEER_AT_ONCE),
            is_failing: AtomicBool::new(false),
        })
    }

    /// Judges whether the token's owner has the right. The peer is who sent the token.
    pub async fn judge(self: &Arc<Self>, peer: IpAddr, token: &str, right: &Right) -> Verdict {
        let digest = right.digest(token);
        if let Some(verdict) = self.known(&digest) {
            return verdict;
        }
        let client = self.client.clone().ok_or(Refusal::Unasked)?;
        let turns = if self.was_admitted(&digest) {
            &self.readers
        } else if self.of_peers.take(peer) && self.limit.take() {
            &self.strangers
        } else {
            return Err(Refusal::TooMany);
        };
        let end = Instant::now() + REVIEW_TIMEOUT;
        let Ok(turn) = timeout_at(end, Arc::clone(turns).acquire_owned()).await else {
            return self.fail(NO_ANSWER);
        };
        // Another request may have come with the same token.
        if let Some(verdict) = self.known(&digest) {
            return verdict;
        }
        let access = Arc::clone(self);
        let (token, right) = (token.to_owned(), right.clone());
        // The connection may end at any time. The turn ends when the API server has answered.
        let reviewed = tokio::spawn(async move {
            let verdict = match timeout_at(end, review(&client, access.audience, &token, &right)).await {
                Ok(Ok(verdict)) => {
                    access.is_failing.store(false, Ordering::Relaxed);
                    access.keep(digest, verdict);
                    verdict
                }
                Ok(Err(error)) => access.fail(&error.to_string()),
                Err(_) => access.fail(NO_ANSWER),
            };
            drop(turn);
            verdict
        });
        reviewed.await.unwrap_or(Err(Refusal::Unasked))
    }

    /// Says in the log why nobody could be asked.
    fn fail(&self, error: &str) -> Verdict {
        if !self.is_failing.swap(true, Ordering::Relaxed) {
            warn!(
                error,
                "tokens can't be reviewed, so nobody reads: is the API server there, and may this process \
                 create tokenreviews and subjectaccessreviews?"
            );
        }
        Err(Refusal::Unasked)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Digest256, (Verdict, Instant)>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn known(&self, digest: &Digest256) -> Option<Verdict> {
        let (verdict, until) = self.lock().get(digest).copied()?;
        (until > Instant::now()).then_some(verdict)
    }

    /// Whether the last answer was yes, however long ago.
    fn was_admitted(&self, digest: &Digest256) -> bool {
        self.lock()
            .get(digest)
            .is_some_and(|(verdict, _)| verdict.is_ok())
    }

    fn keep(&self, digest: Digest256, verdict: Verdict) {
        let period = if verdict.is_ok() {
            ADMITTED_FOR
        } else {
            REFUSED_FOR
        };
        let mut known = self.lock();
        known.insert(digest, (verdict, Instant::now() + period));
        if known.len() <= MAX_KNOWN {
            return;
        }
        // Tokens that somebody makes up take no room from readers.
        let least = known
            .iter()
            .min_by_key(|(_, (verdict, until))| (verdict.is_ok(), *until))
            .map(|(digest, _)| *digest);
        if let Some(least) = least {
            known.remove(&least);
        }
    }
}

/// Asks the API server whose the token is, and what its owner may do.
async fn review(
    client: &Client,
    audience: Option<&'static str>,
    token: &str,
    right: &Right,
) -> Result<Verdict, kube::Error> {
    let parameters = PostParams::default();
    let asked = TokenReview {
        spec: TokenReviewSpec {
            token: token.to_owned(),
            // Scrapers have tokens for the API server's own audience.
            audiences: audience.map(|audience| vec![audience.to_owned()]),
        },
        ..TokenReview::default()
    };
    let tokens: Api<TokenReview> = Api::all(client.clone());
    let answer = tokens.create(&parameters, &asked).await?;
    let status = answer.status.unwrap_or_default();
    let is_for_us = audience.is_none_or(|audience| {
        // An API server that knows no audiences leaves them out.
        status.audiences.iter().flatten().any(|known| known == audience)
    });
    let is_authenticated = status.authenticated == Some(true) && is_for_us;
    let user = status.user.unwrap_or_default();
    if !is_authenticated || user.username.as_deref().is_none_or(str::is_empty) {
        return Ok(Err(Refusal::UnknownToken));
    }
    let mut spec = SubjectAccessReviewSpec {
        user: user.username,
        groups: user.groups,
        uid: user.uid,
        extra: user.extra,
        ..SubjectAccessReviewSpec::default()
    };
    right.fill(&mut spec);
    let asked = SubjectAccessReview {
        spec,
        ..SubjectAccessReview::default()
    };
    let rights: Api<SubjectAccessReview> = Api::all(client.clone());
    let answer = rights.create(&parameters, &asked).await?;
    let status = answer.status.unwrap_or_default();
    let is_allowed = status.allowed && status.denied != Some(true);
    Ok(if is_allowed {
        Ok(())
    } else {
        Err(Refusal::Forbidden)
    })
}

#[cfg(test)]
pub(crate) mod tests {
    #![allow(clippy::unwrap_used)]

    use std::net::Ipv4Addr;
    use std::sync::atomic::AtomicUsize;

    use serde_json::{Value, json};
    use sha2::{Digest, Sha256};
    use thuban_client::played::{self, Answer, Request};
    use tokio::time::{advance, timeout};

    use super::*;

    /// What the API server does with reviews.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Mode {
        Answers,
        /// Each review is refused: the process has no right to make one.
        Refuses,
        Hangs,
    }

    /// An API server that knows the tokens `reader` and `other`. Only the owner of the first may read metrics.
    #[derive(Clone)]
    pub struct Server {
        mode: Arc<Mutex<Mode>>,
        reviews: Arc<AtomicUsize>,
        rights: Arc<Mutex<Vec<Value>>>,
    }

    impl Server {
        pub fn new() -> Self {
            Self {
                mode: Arc::new(Mutex::new(Mode::Answers)),
                reviews: Arc::default(),
                rights: Arc::default(),
            }
        }

        pub fn set(&self, mode: Mode) {
            *self.mode.lock().unwrap() = mode;
        }

        /// Returns how many reviews were asked for since the last call.
        fn reviews(&self) -> usize {
            self.reviews.swap(0, Ordering::Relaxed)
        }

        pub fn client(&self) -> Client {
            let server = self.clone();
            played::client(move |request| {
                let server = server.clone();
                async move { server.serve(&request).await }
            })
        }

        async fn serve(&self, request: &Request) -> Answer {
            self.reviews.fetch_add(1, Ordering::Relaxed);
            let mode = *self.mode.lock().unwrap();
            let path = &request.path;
            let mut review: Value = serde_json::from_slice(&request.body).unwrap();
            match mode {
                Mode::Answers => {}
                Mode::Refuses => return played::status(403, "Forbidden", "no"),
                Mode::Hangs => std::future::pending().await,
            }
            review["status"] = if path.ends_with("/tokenreviews") {
                let token = review["spec"]["token"].as_str().unwrap();
                let audiences = review["spec"]["audiences"].clone();
                let user =
                    json!({"username": token, "groups": ["scrapers"], "uid": "1", "extra": {"pod": ["p"]}});
                match token {
                    "reader" | "other" => {
                        json!({"authenticated": true, "user": user, "audiences": audiences})
                    }
                    "of-another" => {
                        json!({"authenticated": true, "user": user, "audiences": ["another"]})
                    }
                    // A user without `authenticated` proves nothing.
                    "half" => json!({"user": user}),
                    _ => json!({"authenticated": false, "error": "invalid bearer token"}),
                }
            } else {
                assert!(path.ends_with("/subjectaccessreviews"), "{path}");
                self.rights.lock().unwrap().push(review["spec"].clone());
                json!({"allowed": review["spec"]["user"] == "reader"})
            };
            (200, review.to_string())
        }
    }

    const PEER: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

    fn peer(number: u8) -> IpAddr {
        IpAddr::from([192, 0, 2, number])
    }

    fn server() -> (Server, Arc<Access>) {
        let server = Server::new();
        let access = Access::new(Some(server.client()), None);
        (server, access)
    }

    #[tokio::test(start_paused = true)]
    async fn who_may_get_metrics_is_asked_once_a_minute() {
        let (server, access) = server();
        assert_eq!(access.judge(PEER, "reader", &Right::METRICS).await, Ok(()));
        assert_eq!(server.reviews(), 2);
        let expected = json!({
            "user": "reader", "groups": ["scrapers"], "uid": "1", "extra": {"pod": ["p"]},
            "nonResourceAttributes": {"path": "/metrics", "verb": "get"},
        });
        assert_eq!(*server.rights.lock().unwrap(), [expected]);
        advance(ADMITTED_FOR.saturating_sub(Duration::from_secs(1))).await;
        assert_eq!(access.judge(PEER, "reader", &Right::METRICS).await, Ok(()));
        assert_eq!(server.reviews(), 0);
        advance(Duration::from_secs(1)).await;
        server.set(Mode::Refuses);
        assert_eq!(
            access.judge(PEER, "reader", &Right::METRICS).await,
            Err(Refusal::Unasked),
            "it has ended"
        );
    }

    fn flows(namespace: Option<&str>) -> Right {
        Right::Resource {
            group: "thuban.dev",
            resource: "flows",
            namespace: namespace.map(str::to_owned),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn each_right_of_a_token_is_asked_about() {
        let server = Server::new();
        let access = Access::new(Some(server.client()), Some("here"));
        for right in [flows(Some("red")), flows(Some("blue")), flows(None)] {
            assert_eq!(access.judge(PEER, "reader", &right).await, Ok(()));
            assert_eq!(server.reviews(), 2, "{right:?}");
            assert_eq!(access.judge(PEER, "reader", &right).await, Ok(()));
            assert_eq!(server.reviews(), 0, "{right:?}");
        }
        let asked: Vec<Value> = server.rights.lock().unwrap().drain(..).collect();
        let asked: Vec<&Value> = asked.iter().map(|spec| &spec["resourceAttributes"]).collect();
        let expected = json!({
            "group": "thuban.dev", "resource": "flows", "namespace": "red", "verb": "get",
        });
        assert_eq!(*asked[0], expected);
        assert_eq!(asked[1]["namespace"], "blue");
        assert!(asked[2]["namespace"].is_null(), "all namespaces");
        assert_eq!(
            access.judge(PEER, "other", &flows(Some("red"))).await,
            Err(Refusal::Forbidden)
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_token_for_another_audience_proves_nothing() {
        let server = Server::new();
        let access = Access::new(Some(server.client()), Some("here"));
        let verdict = access.judge(PEER, "of-another", &flows(Some("red"))).await;
        assert_eq!(verdict, Err(Refusal::UnknownToken));
    }

    #[tokio::test(start_paused = true)]
    async fn a_refusal_is_kept_for_seconds() {
        let (server, access) = server();
        for (token, refusal, reviews) in [
            ("stranger", Refusal::UnknownToken, 1),
            ("half", Refusal::UnknownToken, 1),
            ("other", Refusal::Forbidden, 2),
        ] {
            assert_eq!(
                access.judge(PEER, token, &Right::METRICS).await,
                Err(refusal),
                "{token}"
            );
            assert_eq!(
                access.judge(PEER, token, &Right::METRICS).await,
                Err(refusal),
                "{token}"
            );
            assert_eq!(server.reviews(), reviews, "{token}");
            advance(REFUSED_FOR).await;
            assert_eq!(
                access.judge(PEER, token, &Right::METRICS).await,
                Err(refusal),
                "{token}"
            );
            assert_eq!(server.reviews(), reviews, "{token}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn nobody_reads_while_nobody_can_be_asked() {
        let (server, access) = server();
        for mode in [Mode::Refuses, Mode::Hangs] {
            server.set(mode);
            assert_eq!(
                access.judge(PEER, "reader", &Right::METRICS).await,
                Err(Refusal::Unasked),
                "{mode:?}"
            );
        }
        // Nothing of that is kept.
        server.set(Mode::Answers);
        assert_eq!(access.judge(PEER, "reader", &Right::METRICS).await, Ok(()));
        // A reader who is known reads on.
        server.set(Mode::Hangs);
        assert_eq!(access.judge(PEER, "reader", &Right::METRICS).await, Ok(()));
        assert_eq!(
            Access::new(None, None)
                .judge(PEER, "reader", &Right::METRICS)
                .await,
            Err(Refusal::Unasked),
            "no API server"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn tokens_of_strangers_take_bounded_memory() {
        let (server, access) = server();
        assert_eq!(access.judge(PEER, "reader", &Right::METRICS).await, Ok(()));
        for number in 0..2 * MAX_KNOWN {
            let digest = Sha256::digest(format!("stranger-{number}"));
            access.keep(digest.into(), Err(Refusal::UnknownToken));
            assert!(access.lock().len() <= MAX_KNOWN);
        }
        server.reviews();
        assert_eq!(access.judge(PEER, "reader", &Right::METRICS).await, Ok(()));
        assert_eq!(server.reviews(), 0, "the reader is still known");
    }

    #[tokio::test(start_paused = true)]
    async fn tokens_of_strangers_are_reviewed_a_few_a_second() {
        let (server, access) = server();
        assert_eq!(access.judge(PEER, "reader", &Right::METRICS).await, Ok(()));
        advance(ADMITTED_FOR).await;
        server.reviews();
        // One peer has a share of its own.
        for number in 0..30 {
            let expected = if number < OF_PEER_AT_ONCE {
                Refusal::UnknownToken
            } else {
                Refusal::TooMany
            };
            let token = format!("stranger-{number}");
            assert_eq!(
                access.judge(peer(1), &token, &Right::METRICS).await,
                Err(expected),
                "{number}"
            );
        }
        assert_eq!(server.reviews(), OF_PEER_AT_ONCE as usize);
        for number in 2..100 {
            let token = format!("stranger-of-{number}");
            assert!(access.judge(peer(number), &token, &Right::METRICS).await.is_err());
        }
        assert_eq!(server.reviews(), (STRANGERS_AT_ONCE - OF_PEER_AT_ONCE) as usize);
        assert_eq!(
            access.judge(peer(200), "other", &Right::METRICS).await,
            Err(Refusal::TooMany)
        );
        // Who was let in before waits for no stranger.
        assert_eq!(access.judge(peer(1), "reader", &Right::METRICS).await, Ok(()));
        assert_eq!(server.reviews(), 2);
        advance(Duration::from_secs(1)).await;
        assert_eq!(
            access.judge(peer(200), "other", &Right::METRICS).await,
            Err(Refusal::Forbidden)
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_reader_who_lost_the_right_is_a_stranger() {
        let (server, access) = server();
        let digest = Right::METRICS.digest("other");
        access.keep(digest, Ok(()));
        advance(ADMITTED_FOR).await;
        assert!(access.was_admitted(&digest));
        assert_eq!(
            access.judge(PEER, "other", &Right::METRICS).await,
            Err(Refusal::Forbidden)
        );
        assert!(!access.was_admitted(&digest));
        // A failure of the API server takes nothing from a reader.
        access.keep(digest, Ok(()));
        advance(ADMITTED_FOR).await;
        server.set(Mode::Refuses);
        assert_eq!(
            access.judge(PEER, "other", &Right::METRICS).await,
            Err(Refusal::Unasked)
        );
        assert!(access.was_admitted(&digest));
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_that_ends_frees_no_turn_of_a_review() {
        let (server, access) = server();
        server.set(Mode::Hangs);
        let moment = Duration::from_millis(10);
        for number in 0..3 * REVIEWS {
            let token = format!("stranger-{number}");
            // The connection ends while its token is reviewed, or waits for its turn.
            let judged = timeout(moment, access.judge(peer(number as u8), &token, &Right::METRICS)).await;
            assert!(judged.is_err(), "{number}");
        }
        assert_eq!(server.reviews(), REVIEWS, "the others have waited");
        server.set(Mode::Answers);
        assert_eq!(
            access.judge(PEER, "reader", &Right::METRICS).await,
            Ok(()),
            "the turns have ended"
        );
    }
}
