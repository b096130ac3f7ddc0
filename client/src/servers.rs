//! Which of several API servers gets a request.

use std::error::Error;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use http::{Request, Response};
use hyper_util::client::legacy;
use kube::Client;
use kube::client::Body;
use tracing::info;

use crate::failures::Failures;

/// How long a request must have waited so that its end by the caller is a reason to leave the server. Callers end
/// requests for reasons of their own, too: a client of theirs hangs up.
const PATIENCE: Duration = Duration::from_millis(400);

struct Server {
    url: String,
    client: Client,
    failures: Mutex<Failures>,
}

impl Server {
    /// Notes an answer. Returns whether the server is to be left.
    fn note(&self, answer: &Response<Body>) -> bool {
        let mut failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
        failures.note(answer.status().is_server_error(), Instant::now())
    }

    /// Forgets the errors of an earlier time, those too that came late after the server had been left.
    fn forget(&self) {
        *self.failures.lock().unwrap_or_else(PoisonError::into_inner) = Failures::default();
    }
}

/// The servers, and which of them gets requests now.
#[derive(Clone)]
pub struct Servers(Arc<(Vec<Server>, AtomicUsize)>);

impl Servers {
    /// Takes each server's URL and client, at least one.
    pub fn new(servers: Vec<(String, Client)>) -> Self {
        let server = |(url, client)| Server {
            url,
            client,
            failures: Mutex::default(),
        };
        let servers = servers.into_iter().map(server).collect();
        Self(Arc::new((servers, AtomicUsize::new(0))))
    }

    /// Sends a request to the servers in turn until one has a connection for it.
    pub async fn send(&self, request: Request<Body>) -> Result<Response<Body>, kube::Error> {
        let (servers, current) = &*self.0;
        let mut index = current.load(Ordering::Relaxed);
        for _ in 1..servers.len() {
            let Some(copy) = copy_of(&request) else { break };
            match self.ask(index, copy).await {
                Err(error) if is_unsent(&error) => index = self.after(index),
                answered => return answered,
            }
        }
        self.ask(index, request).await
    }

    /// Sends a request to one server.
    async fn ask(&self, index: usize, request: Request<Body>) -> Result<Response<Body>, kube::Error> {
        let mut attempt = Attempt {
            servers: self,
            index,
            since: Instant::now(),
            end: End::GivenUp,
        };
        let server = &self.0.0[index];
        let answered = server.client.send(request).await;
        attempt.end = if answered.is_ok() {
            End::Answered
        } else {
            End::Failed
        };
        if let Ok(answer) = &answered
            && server.note(answer)
        {
            self.leave(index, "it answers nothing but errors");
        }
        answered
    }

    fn after(&self, index: usize) -> usize {
        (index + 1) % self.0.0.len()
    }

    /// Lets requests go to the next server, if there is one, unless another request has done that.
    fn leave(&self, index: usize, reason: &'static str) {
        let (servers, current) = &*self.0;
        let next = self.after(index);
        if next == index {
            return;
        }
        let left = current.compare_exchange(index, next, Ordering::Relaxed, Ordering::Relaxed);
        if left.is_ok() {
            info!(
                server = servers[index].url,
                next = servers[next].url,
                reason,
                "an API server is left; requests go to the next one"
            );
            servers[next].forget();
        }
    }
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Answered,
    Failed,
    /// The caller waits no longer.
    GivenUp,
}

/// A request on its way. If it fails, or the caller has waited in vain for a while, the server is left.
struct Attempt<'a> {
    servers: &'a Servers,
    index: usize,
    since: Instant,
    end: End,
}

impl Drop for Attempt<'_> {
    fn drop(&mut self) {
        let is_silent = match self.end {
            End::Answered => false,
            End::Failed => true,
            End::GivenUp => self.since.elapsed() >= PATIENCE,
        };
        if is_silent {
            self.servers.leave(self.index, "it does not answer");
        }
    }
}

/// Returns the request once more; none if its body is a stream.
pub fn copy_of(request: &Request<Body>) -> Option<Request<Body>> {
    let mut copy = Request::new(request.body().try_clone()?);
    request.method().clone_into(copy.method_mut());
    request.uri().clone_into(copy.uri_mut());
    *copy.version_mut() = request.version();
    request.headers().clone_into(copy.headers_mut());
    request.extensions().clone_into(copy.extensions_mut());
    Some(copy)
}

/// Whether there was no connection, so that nothing was sent.
fn is_unsent(error: &kube::Error) -> bool {
    let mut cause: Option<&(dyn Error + 'static)> = Some(error);
    while let Some(error) = cause {
        if let Some(error) = error.downcast_ref::<legacy::Error>() {
            return error.is_connect();
        }
        cause = error.source();
    }
    false
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use http::StatusCode;
    use tower::service_fn;

    use super::*;

    #[tokio::test]
    async fn a_server_is_asked_again_without_its_former_errors() {
        let client = |url: &str| {
            let service =
                service_fn(|_: Request<Body>| async { Ok::<_, Infallible>(Response::new(Body::empty())) });
            (url.to_owned(), Client::new(service, "default"))
        };
        let all = Servers::new(vec![client("https://one"), client("https://two")]);
        all.leave(0, "it is a test");
        let mut late = Response::new(Body::empty());
        *late.status_mut() = StatusCode::INTERNAL_SERVER_ERROR;
        let one = &all.0.0[0];
        assert!(!one.note(&late));
        assert_ne!(*one.failures.lock().unwrap(), Failures::default());
        all.leave(1, "it is a test");
        assert_eq!(*one.failures.lock().unwrap(), Failures::default());
    }
}
