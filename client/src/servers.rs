//! Which of several API servers gets a request.

use std::error::Error;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use http::{Request, Response};
use hyper_util::client::legacy;
use kube::Client;
use kube::client::Body;
use tracing::info;

use crate::failures::Failures;

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
            is_answered: false,
        };
        let server = &self.0.0[index];
        let answered = server.client.send(request).await;
        attempt.is_answered = answered.is_ok();
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

    /// Lets requests go to the next server, unless another request has done that.
    fn leave(&self, index: usize, reason: &'static str) {
        let (servers, current) = &*self.0;
        let next = self.after(index);
        let left = current.compare_exchange(index, next, Ordering::Relaxed, Ordering::Relaxed);
        if left.is_ok() {
            info!(
                server = servers[index].url,
                next = servers[next].url,
                reason,
                "an API server is left; requests go to the next one"
            );
        }
    }
}

/// A request on its way. If it ends without an answer, be it that the caller waits no longer, the server is left.
struct Attempt<'a> {
    servers: &'a Servers,
    index: usize,
    is_answered: bool,
}

impl Drop for Attempt<'_> {
    fn drop(&mut self) {
        if !self.is_answered {
            self.servers.leave(self.index, "it does not answer");
        }
    }
}

/// Returns the request once more; none if its body is a stream.
fn copy_of(request: &Request<Body>) -> Option<Request<Body>> {
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
