//! The API for readers, and the page.
//!
//! Invariant: `/v1` answers only who may get `flows.thuban.dev` in the namespace that is asked for, and only what
//! [`crate::view`] shows of it. Questions are read before tokens are reviewed: what makes no sense costs the API server
//! nothing.

mod parameters;
mod problem;
mod reader;
mod streams;

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Path, RawQuery, Request, State};
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::http::{HeaderMap, HeaderValue};
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Extension, Json, Router};
use futures::{StreamExt, stream};
use thuban_telemetry::access::Access;
use tokio::sync::Semaphore;

use crate::graph::Graph;
use crate::places::{Place, Places};
use crate::relay::{Relay, now};
use crate::server::Peer;
use crate::store::CAPACITY;
use crate::view::Scope;
use crate::{metrics, page};
use parameters::{FlowsQuestion, read_scope, read_top};
use problem::Problem;
use reader::Reader;
use streams::{Flows, Graphs, Past};

/// How many answers are made at once. One takes up to 50 ms of a core with a full ring.
const MADE_AT_ONCE: usize = 2;
const LINES: &str = "application/x-ndjson";
const EVENTS: &str = "text/event-stream";
const SERIES: &str = "text/plain; version=0.0.4; charset=utf-8";

/// What all requests share.
pub struct Shared {
    relay: Arc<Relay>,
    access: Arc<Access>,
    makes: Semaphore,
    /// Answers that are made, or not taken yet.
    answers: Arc<Places>,
}

/// What a request says of its reader and of what the reader wants to know.
type Asked = (Extension<Peer>, HeaderMap, RawQuery);

/// Returns the parameters of a request, as they were sent.
fn query_of((_, _, RawQuery(query)): &Asked) -> &str {
    query.as_deref().unwrap_or_default()
}

impl Shared {
    /// Lets in a reader who may read the scope.
    async fn admit(&self, (Extension(peer), headers, _): &Asked, scope: &Scope) -> Result<Reader, Problem> {
        Reader::admit(&self.access, *peer, headers, scope).await
    }

    /// Answers a reader of the scope once. The answer keeps its place.
    async fn answer(
        &self,
        asked: &Asked,
        scope: Scope,
        answer: impl FnOnce(&Relay, &Scope) -> Response + Send + 'static,
    ) -> Result<Response, Problem> {
        self.admit(asked, &scope).await?;
        let place = self.answers.take(&scope).ok_or(Problem::TooManyAnswers)?;
        let response = self.make(move |relay| answer(relay, &scope)).await?;
        Ok(hold(place, response))
    }

    /// Makes an answer beside the threads that serve connections.
    async fn make<T: Send + 'static>(
        &self,
        answer: impl FnOnce(&Relay) -> T + Send + 'static,
    ) -> Result<T, Problem> {
        let _turn = self.makes.acquire().await.map_err(|_| Problem::Failed)?;
        let relay = self.relay.clone();
        let made = tokio::task::spawn_blocking(move || answer(&relay));
        made.await.map_err(|_| Problem::Failed)
    }
}

/// Returns the routes of readers.
pub fn router(relay: Arc<Relay>, access: Arc<Access>) -> Router {
    let shared = Shared {
        relay,
        access,
        makes: Semaphore::new(MADE_AT_ONCE),
        answers: Places::new(|_| {}),
    };
    Router::new()
        .route("/v1/flows", get(flows))
        .route("/v1/graph", get(graph))
        .route("/v1/graph/events", get(graph_events))
        .route("/v1/top", get(top))
        .route("/v1/series", get(series))
        .route("/", get(index))
        .route("/assets/{*path}", get(asset))
        .fallback(unknown)
        .layer(from_fn(finish))
        .with_state(Arc::new(shared))
}

/// Counts an answer. No answer is kept by a cache, or taken for another type than it has.
async fn finish(request: Request, next: Next) -> Response {
    let mut response = next.run(request).await;
    metrics::answered(response.status().as_u16());
    let headers = response.headers_mut();
    headers
        .entry(CACHE_CONTROL)
        .or_insert(HeaderValue::from_static("no-store"));
    headers.insert("x-content-type-options", HeaderValue::from_static("nosniff"));
    response
}

fn respond(content_type: &'static str, body: impl Into<Body>) -> Response {
    let mut response = Response::new(body.into());
    let content_type = HeaderValue::from_static(content_type);
    response.headers_mut().insert(CONTENT_TYPE, content_type);
    response
}

/// Returns an answer that keeps its place until the reader has taken the answer, or has gone.
fn hold(place: Place, response: Response) -> Response {
    response.map(|body| {
        let state = (body.into_data_stream(), place);
        Body::from_stream(stream::unfold(state, |(mut parts, place)| async move {
            let part = parts.next().await?;
            Some((part, (parts, place)))
        }))
    })
}

async fn flows(asked: Asked, State(shared): State<Arc<Shared>>) -> Result<Response, Problem> {
    let question = FlowsQuestion::read(query_of(&asked))?;
    let scope = question.query.scope.clone();
    let reader = shared.admit(&asked, &scope).await?;
    let from = question.since.map_or(0, |since| {
        let back = Duration::from_secs(since).as_millis();
        now().saturating_sub(u64::try_from(back).unwrap_or(u64::MAX))
    });
    let (query, last) = (question.query, question.last.min(CAPACITY));
    if question.follow {
        let place = shared
            .relay
            .followers
            .take(&scope)
            .ok_or(Problem::TooManyReaders)?;
        let (past, following) = shared
            .make(move |relay| relay.store.follow(query, from, last))
            .await?;
        let flows = Flows {
            reader,
            past: Past {
                scope,
                flows: past.into(),
            },
            following,
            _place: place,
        };
        return Ok(respond(LINES, flows.body()));
    }
    let place = shared.answers.take(&scope).ok_or(Problem::TooManyAnswers)?;
    let flows = shared
        .make(move |relay| relay.store.last(&query, from, last))
        .await?;
    let past = Past {
        scope,
        flows: flows.into(),
    };
    Ok(respond(LINES, past.body(place)))
}

async fn graph(asked: Asked, State(shared): State<Arc<Shared>>) -> Result<Response, Problem> {
    let scope = read_scope(query_of(&asked))?;
    let answer = |relay: &Relay, scope: &Scope| {
        let graph = Graph {
            generated_unix_ms: now(),
            ..relay.graph(scope)
        };
        Json(graph).into_response()
    };
    shared.answer(&asked, scope, answer).await
}

async fn graph_events(asked: Asked, State(shared): State<Arc<Shared>>) -> Result<Response, Problem> {
    let scope = read_scope(query_of(&asked))?;
    let reader = shared.admit(&asked, &scope).await?;
    let place = shared
        .relay
        .followers
        .take(&scope)
        .ok_or(Problem::TooManyReaders)?;
    let graphs = Graphs {
        shared,
        scope,
        reader,
        _place: place,
    };
    Ok(respond(EVENTS, graphs.body()))
}

async fn top(asked: Asked, State(shared): State<Arc<Shared>>) -> Result<Response, Problem> {
    let (scope, by) = read_top(query_of(&asked))?;
    let answer = move |relay: &Relay, scope: &Scope| Json(relay.top(scope, by)).into_response();
    shared.answer(&asked, scope, answer).await
}

async fn series(asked: Asked, State(shared): State<Arc<Shared>>) -> Result<Response, Problem> {
    let scope = read_scope(query_of(&asked))?;
    let answer = |relay: &Relay, scope: &Scope| respond(SERIES, relay.series(scope));
    shared.answer(&asked, scope, answer).await
}

async fn index() -> Result<Response, Problem> {
    page::file("index.html").ok_or(Problem::NotFound)
}

async fn asset(Path(path): Path<String>) -> Result<Response, Problem> {
    page::file(&format!("assets/{path}")).ok_or(Problem::NotFound)
}

async fn unknown() -> Problem {
    Problem::NotFound
}

#[cfg(test)]
mod tests;
