//! Who may read a guarded page: the API server says whose a token is, by a TokenReview, and whether its owner may get
//! `/metrics`, by a SubjectAccessReview.
//!
//! Invariant: without both answers nobody reads. Answers are kept for a short time, in bounded memory. Tokens are not
//! kept, only their digests.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hyper::StatusCode;
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec};
use k8s_openapi::api::authorization::v1::{
    NonResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec,
};
use kube::api::PostParams;
use kube::{Api, Client};
use sha2::{Digest, Sha256};
use thiserror::Error;
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout};
use tracing::warn;

/// The path and the verb that a reader must have the right to, for each guarded page.
const PATH: &str = "/metrics";
const VERB: &str = "get";
/// How long a reader is let in without another review.
const ADMITTED_FOR: Duration = Duration::from_mins(1);
/// How long a refusal is kept: less, because somebody may grant the right meanwhile.
const REFUSED_FOR: Duration = Duration::from_secs(10);
/// The most tokens whose answers are kept.
const MAX_KNOWN: usize = 256;
/// The most tokens that are reviewed at once.
const REVIEWS: usize = 4;
/// How long both reviews may take, with the wait for their turn: less than a request may take.
const REVIEW_TIMEOUT: Duration = Duration::from_secs(3);

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
    #[error("the API server can't be asked about the token now")]
    Unasked,
}

impl Refusal {
    pub fn status(self) -> StatusCode {
        match self {
            Self::NoToken | Self::UnknownToken => StatusCode::UNAUTHORIZED,
            Self::Plain | Self::Forbidden => StatusCode::FORBIDDEN,
            Self::Unasked => StatusCode::SERVICE_UNAVAILABLE,
        }
    }
}

type Verdict = Result<(), Refusal>;

/// Asks the API server about tokens, and keeps its answers.
pub struct Access {
    client: Option<Client>,
    /// The answers by the digests of tokens, and until when they count.
    known: Mutex<HashMap<[u8; 32], (Verdict, Instant)>>,
    reviews: Semaphore,
    /// Whether the last review failed, so that the log says it once.
    is_failing: AtomicBool,
}

impl Access {
    /// Without a client nobody can be asked, so nobody reads.
    pub fn new(client: Option<Client>) -> Self {
        Self {
            client,
            known: Mutex::default(),
            reviews: Semaphore::new(REVIEWS),
            is_failing: AtomicBool::new(false),
        }
    }

    /// Judges whether the token's owner may read.
    pub async fn judge(&self, token: &str) -> Verdict {
        let digest: [u8; 32] = Sha256::digest(token).into();
        if let Some(verdict) = self.known(&digest) {
            return verdict;
        }
        let client = self.client.as_ref().ok_or(Refusal::Unasked)?;
        let asked = timeout(REVIEW_TIMEOUT, async {
            let _turn = self.reviews.acquire().await;
            // Another request may have come with the same token.
            match self.known(&digest) {
                Some(verdict) => Ok(verdict),
                None => review(client, token).await,
            }
        });
        let failure = match asked.await {
            Ok(Ok(verdict)) => {
                self.is_failing.store(false, Ordering::Relaxed);
                self.keep(digest, verdict);
                return verdict;
            }
            Ok(Err(error)) => error.to_string(),
            Err(_) => "no answer in time".to_owned(),
        };
        if !self.is_failing.swap(true, Ordering::Relaxed) {
            warn!(
                error = failure,
                "tokens can't be reviewed, so nobody reads metrics: is the API server there, and may this process \
                 create tokenreviews and subjectaccessreviews?"
            );
        }
        Err(Refusal::Unasked)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<[u8; 32], (Verdict, Instant)>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn known(&self, digest: &[u8; 32]) -> Option<Verdict> {
        let (verdict, until) = self.lock().get(digest).copied()?;
        (until > Instant::now()).then_some(verdict)
    }

    fn keep(&self, digest: [u8; 32], verdict: Verdict) {
        let now = Instant::now();
        let period = if verdict.is_ok() {
            ADMITTED_FOR
        } else {
            REFUSED_FOR
        };
        let mut known = self.lock();
        if known.len() >= MAX_KNOWN {
            known.retain(|_, (_, until)| *until > now);
        }
        if known.len() >= MAX_KNOWN {
            // Tokens that somebody makes up take no room from readers.
            known.retain(|_, (verdict, _)| verdict.is_ok());
        }
        if known.len() < MAX_KNOWN {
            known.insert(digest, (verdict, now + period));
        }
    }
}

/// Asks the API server whose the token is, and what its owner may do.
async fn review(client: &Client, token: &str) -> Result<Verdict, kube::Error> {
    let parameters = PostParams::default();
    let asked = TokenReview {
        spec: TokenReviewSpec {
            token: token.to_owned(),
            // The API server's own audience, for which scrapers have tokens.
            audiences: None,
        },
        ..TokenReview::default()
    };
    let tokens: Api<TokenReview> = Api::all(client.clone());
    let answer = tokens.create(&parameters, &asked).await?;
    let status = answer.status.unwrap_or_default();
    let is_authenticated = status.authenticated == Some(true);
    let user = status.user.unwrap_or_default();
    if !is_authenticated || user.username.as_deref().is_none_or(str::is_empty) {
        return Ok(Err(Refusal::UnknownToken));
    }
    let asked = SubjectAccessReview {
        spec: SubjectAccessReviewSpec {
            user: user.username,
            groups: user.groups,
            uid: user.uid,
            extra: user.extra,
            non_resource_attributes: Some(NonResourceAttributes {
                path: Some(PATH.to_owned()),
                verb: Some(VERB.to_owned()),
            }),
            resource_attributes: None,
        },
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

    use std::convert::Infallible;
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize;

    use http::{Request, Response};
    use http_body_util::BodyExt as _;
    use kube::client::Body;
    use serde_json::{Value, json};
    use tokio::time::advance;

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
            let serve = move |request: Request<Body>| {
                let server = server.clone();
                async move { Ok::<_, Infallible>(server.serve(request).await) }
            };
            Client::new(tower::service_fn(serve), "default")
        }

        async fn serve(&self, request: Request<Body>) -> Response<Body> {
            self.reviews.fetch_add(1, Ordering::Relaxed);
            let mode = *self.mode.lock().unwrap();
            let path = request.uri().path().to_owned();
            let body = request.into_body().collect().await.unwrap().to_bytes();
            let mut review: Value = serde_json::from_slice(&body).unwrap();
            match mode {
                Mode::Answers => {}
                Mode::Refuses => return forbidden(),
                Mode::Hangs => std::future::pending().await,
            }
            review["status"] = if path.ends_with("/tokenreviews") {
                let token = review["spec"]["token"].as_str().unwrap();
                let user =
                    json!({"username": token, "groups": ["scrapers"], "uid": "1", "extra": {"pod": ["p"]}});
                match token {
                    "reader" | "other" => json!({"authenticated": true, "user": user}),
                    // A user without `authenticated` proves nothing.
                    "half" => json!({"user": user}),
                    _ => json!({"authenticated": false, "error": "invalid bearer token"}),
                }
            } else {
                assert!(path.ends_with("/subjectaccessreviews"), "{path}");
                self.rights.lock().unwrap().push(review["spec"].clone());
                json!({"allowed": review["spec"]["user"] == "reader"})
            };
            Response::new(Body::from(review.to_string().into_bytes()))
        }
    }

    fn forbidden() -> Response<Body> {
        let status = json!({
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": "no",
            "reason": "Forbidden", "code": 403,
        });
        let mut response = Response::new(Body::from(status.to_string().into_bytes()));
        *response.status_mut() = StatusCode::FORBIDDEN;
        response
    }

    fn server() -> (Server, Access) {
        let server = Server::new();
        let access = Access::new(Some(server.client()));
        (server, access)
    }

    #[tokio::test(start_paused = true)]
    async fn who_may_get_metrics_is_asked_once_a_minute() {
        let (server, access) = server();
        assert_eq!(access.judge("reader").await, Ok(()));
        assert_eq!(server.reviews(), 2);
        let expected = json!({
            "user": "reader", "groups": ["scrapers"], "uid": "1", "extra": {"pod": ["p"]},
            "nonResourceAttributes": {"path": "/metrics", "verb": "get"},
        });
        assert_eq!(*server.rights.lock().unwrap(), [expected]);
        advance(ADMITTED_FOR.saturating_sub(Duration::from_secs(1))).await;
        assert_eq!(access.judge("reader").await, Ok(()));
        assert_eq!(server.reviews(), 0);
        advance(Duration::from_secs(1)).await;
        server.set(Mode::Refuses);
        assert_eq!(
            access.judge("reader").await,
            Err(Refusal::Unasked),
            "it has ended"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_refusal_is_kept_for_seconds() {
        let (server, access) = server();
        for (token, refusal, reviews) in [
            ("stranger", Refusal::UnknownToken, 1),
            ("half", Refusal::UnknownToken, 1),
            ("other", Refusal::Forbidden, 2),
        ] {
            assert_eq!(access.judge(token).await, Err(refusal), "{token}");
            assert_eq!(access.judge(token).await, Err(refusal), "{token}");
            assert_eq!(server.reviews(), reviews, "{token}");
            advance(REFUSED_FOR).await;
            assert_eq!(access.judge(token).await, Err(refusal), "{token}");
            assert_eq!(server.reviews(), reviews, "{token}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn nobody_reads_while_nobody_can_be_asked() {
        let (server, access) = server();
        for mode in [Mode::Refuses, Mode::Hangs] {
            server.set(mode);
            assert_eq!(access.judge("reader").await, Err(Refusal::Unasked), "{mode:?}");
        }
        // Nothing of that is kept.
        server.set(Mode::Answers);
        assert_eq!(access.judge("reader").await, Ok(()));
        // A reader who is known reads on.
        server.set(Mode::Hangs);
        assert_eq!(access.judge("reader").await, Ok(()));
        assert_eq!(
            Access::new(None).judge("reader").await,
            Err(Refusal::Unasked),
            "no API server"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn tokens_of_strangers_take_bounded_memory() {
        let (server, access) = server();
        assert_eq!(access.judge("reader").await, Ok(()));
        for number in 0..2 * MAX_KNOWN {
            let token = format!("stranger-{number}");
            assert_eq!(access.judge(&token).await, Err(Refusal::UnknownToken));
            assert!(access.lock().len() <= MAX_KNOWN);
        }
        server.reviews();
        assert_eq!(access.judge("reader").await, Ok(()));
        assert_eq!(server.reviews(), 0, "the reader is still known");
    }
}
