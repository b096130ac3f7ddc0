//! Whether a request is sent again after an answer that asks for that (429, 503, 504), and when: not before the
//! answer's `Retry-After`, and spread. Kube's own policy spreads nothing after a `Retry-After`, and waits however long
//! it is.
//!
//! Invariant: a caller waits at most [`MAX_WAIT`] here. If the server asks for more, the caller gets the answer, whose
//! `details.retryAfterSeconds` say how long to wait: the caller can do something else meanwhile.

use std::time::Duration;

use http::header::{CONTENT_LENGTH, CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use http::{Request, Response, StatusCode};
use kube::client::Body;
use serde_json::{Value, json};
use tokio::time::{Sleep, sleep};
use tower::BoxError;
use tower::retry::Policy;

use crate::jitter;
use crate::servers::copy_of;

/// How long all pauses of a request may be together. The operator gives a request 15 s.
const MAX_WAIT: Duration = Duration::from_secs(10);
/// How often a request is sent again.
const MAX_RETRIES: u32 = 15;
/// The first pause where the server asks for none. It doubles each time.
const FIRST_PAUSE: Duration = Duration::from_millis(5);
const MAX_PAUSE: Duration = Duration::from_secs(1);

/// The policy for one request.
#[derive(Clone, Debug, Default)]
pub struct Retry {
    retries: u32,
    waited: Duration,
}

impl Retry {
    /// Returns how long to wait after an answer; none: the caller gets the answer.
    fn pause(&mut self, status: StatusCode, asked: Option<Duration>) -> Option<Duration> {
        let is_retried = matches!(
            status,
            StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE | StatusCode::GATEWAY_TIMEOUT
        );
        let asked = asked.unwrap_or_default();
        if !is_retried || self.retries >= MAX_RETRIES || asked > MAX_WAIT {
            return None;
        }
        let own = FIRST_PAUSE.saturating_mul(1 << self.retries).min(MAX_PAUSE);
        let pause = jitter::at_least(asked).max(jitter::around(own));
        if self.waited + pause > MAX_WAIT {
            return None;
        }
        self.retries += 1;
        self.waited += pause;
        Some(pause)
    }
}

impl Policy<Request<Body>, Response<Body>, BoxError> for Retry {
    type Future = Sleep;

    fn retry(
        &mut self,
        _: &mut Request<Body>,
        result: &mut Result<Response<Body>, BoxError>,
    ) -> Option<Sleep> {
        let answer = result.as_ref().ok()?;
        let asked = retry_after(answer).map(|seconds| Duration::from_secs(seconds.into()));
        self.pause(answer.status(), asked).map(sleep)
    }

    fn clone_request(&mut self, request: &Request<Body>) -> Option<Request<Body>> {
        copy_of(request)
    }
}

/// Returns the seconds that the answer asks the client to wait. Dates are not understood: no API server sends them.
fn retry_after(answer: &Response<Body>) -> Option<u32> {
    answer.headers().get(RETRY_AFTER)?.to_str().ok()?.parse().ok()
}

/// Writes the header `Retry-After` of an error into its body, where kube's errors have it: kube reads no header. The
/// API server answers plain text when it has no room for a request.
pub async fn told(answer: Response<Body>) -> Result<Response<Body>, kube::Error> {
    let is_error = answer.status().is_client_error() || answer.status().is_server_error();
    let Some(seconds) = retry_after(&answer).filter(|_| is_error) else {
        return Ok(answer);
    };
    let (mut head, body) = answer.into_parts();
    let body = body.collect_bytes().await?;
    let status = with_retry_after(head.status, &body, seconds);
    head.headers.remove(CONTENT_LENGTH);
    head.headers
        .insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    Ok(Response::from_parts(
        head,
        Body::from(status.to_string().into_bytes()),
    ))
}

/// Returns the body as a Status that says how long to wait.
fn with_retry_after(code: StatusCode, body: &[u8], seconds: u32) -> Value {
    let known: Option<Value> = serde_json::from_slice(body).ok();
    let known = known.filter(|status| status["kind"] == "Status");
    let mut status = known.unwrap_or_else(|| {
        let message = String::from_utf8_lossy(body);
        json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message.trim(),
            "code": code.as_u16()})
    });
    if !status["details"].is_object() {
        status["details"] = json!({});
    }
    status["details"]["retryAfterSeconds"] = seconds.into();
    status
}

#[cfg(test)]
mod tests {
    use super::*;

    const BUSY: StatusCode = StatusCode::TOO_MANY_REQUESTS;

    #[test]
    fn nothing_is_sent_again_before_the_server_wants_it() {
        for _ in 0..100 {
            let mut retry = Retry::default();
            let asked = Duration::from_secs(3);
            let pause = retry.pause(BUSY, Some(asked)).unwrap();
            assert!((asked..=asked * 5 / 4).contains(&pause), "{pause:?}");
        }
    }

    #[test]
    fn a_caller_waits_for_a_bounded_time() {
        let after = |seconds| Retry::default().pause(BUSY, Some(Duration::from_secs(seconds)));
        assert_eq!(after(11), None);
        assert_eq!(after(u64::MAX), None);
        for asked in [None, Some(Duration::ZERO), Some(Duration::from_secs(1))] {
            let mut retry = Retry::default();
            let pauses: Vec<Duration> = std::iter::from_fn(|| retry.pause(BUSY, asked)).collect();
            let all: Duration = pauses.iter().sum();
            assert!(pauses.len() > 5 && all <= MAX_WAIT, "{pauses:?}");
        }
    }

    #[test]
    fn only_answers_that_ask_for_it_are_followed_by_a_request() {
        let is_retried = |code: u16| {
            let code = StatusCode::from_u16(code).unwrap();
            Retry::default().pause(code, None).is_some()
        };
        assert_eq!([429, 503, 504].map(is_retried), [true; 3]);
        assert_eq!([200, 400, 404, 409, 422, 500].map(is_retried), [false; 6]);
    }

    #[test]
    fn what_the_server_asks_for_reaches_the_caller() {
        let text = with_retry_after(BUSY, b"Too many requests, please try again later.\n", 30);
        assert_eq!(text["details"]["retryAfterSeconds"], 30);
        assert_eq!(text["message"], "Too many requests, please try again later.");
        assert_eq!(text["code"], 429);
        let known = json!({"kind": "Status", "code": 503, "message": "etcd", "details": {"kind": "vpcs"}});
        let told = with_retry_after(StatusCode::SERVICE_UNAVAILABLE, known.to_string().as_bytes(), 2);
        assert_eq!(told["details"], json!({"kind": "vpcs", "retryAfterSeconds": 2}));
        assert_eq!(told["message"], "etcd");
    }
}
