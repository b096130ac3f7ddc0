//! Answers in parts: flows, as they were and as they come, and graphs as they change.
//!
//! Invariant: a reader who loses the right is cut off within two minutes, and one whose token expires, too. Lines are
//! made when the reader takes them: a slow reader holds flows back, not their text.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use futures::{Stream, StreamExt, stream};
use tokio::time::{Instant, sleep, sleep_until};

use super::Shared;
use super::reader::Reader;
use crate::flow::Flow;
use crate::graph::Graph;
use crate::places::Place;
use crate::relay::now;
use crate::store::{Following, Told};
use crate::view::{Scope, lost_line, write_line};

/// How often a quiet answer says that it still goes on.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// How often the reader's right is looked at again.
const JUDGE_EVERY: Duration = Duration::from_mins(1);
/// How often a graph may come.
const GRAPH_EVERY: Duration = Duration::from_secs(1);
/// How many flows a part of an answer has at most.
const FLOWS_OF_PART: usize = 128;

/// Flows that are there already.
pub struct Past {
    pub scope: Scope,
    pub flows: VecDeque<Arc<Flow>>,
}

impl Past {
    /// Returns the answer: a line for each flow. The place ends with the answer.
    pub fn body(self, place: Place) -> Body {
        Body::from_stream(parts((self, place), |(mut past, place)| async move {
            let text = past.next()?;
            Some((text, (past, place)))
        }))
    }

    fn next(&mut self) -> Option<Vec<u8>> {
        let count = self.flows.len().min(FLOWS_OF_PART);
        let mut text = Vec::new();
        for flow in self.flows.drain(..count) {
            write_line(&mut text, &flow, &self.scope);
        }
        (count > 0).then_some(text)
    }
}

/// The flows of a reader that follows.
pub struct Flows {
    pub reader: Reader,
    pub past: Past,
    pub following: Following,
    /// The place ends with the answer.
    pub _place: Place,
}

impl Flows {
    /// Returns the answer: a line for each flow, and empty lines while there is none.
    pub fn body(self) -> Body {
        let judge_at = Instant::now() + JUDGE_EVERY;
        Body::from_stream(parts((self, judge_at), |(mut flows, judge_at)| async move {
            let (text, judge_at) = flows.next(judge_at).await?;
            Some((text, (flows, judge_at)))
        }))
    }

    async fn next(&mut self, mut judge_at: Instant) -> Option<(Vec<u8>, Instant)> {
        if let Some(text) = self.past.next() {
            return Some((text, judge_at));
        }
        let keep_alive_at = Instant::now() + KEEP_ALIVE;
        loop {
            tokio::select! {
                biased;
                () = sleep_until(judge_at) => {
                    self.reader.judge().await.ok()?;
                    judge_at = Instant::now() + JUDGE_EVERY;
                }
                told = self.following.next() => {
                    let mut text = Vec::new();
                    match told? {
                        Told::Flow(flow) => write_line(&mut text, &flow, &self.past.scope),
                        Told::Lost(droplet, lost) => {
                            text = lost_line(droplet.as_deref().unwrap_or_default(), &lost).into_bytes();
                        }
                    }
                    return Some((text, judge_at));
                }
                () = sleep_until(keep_alive_at) => return Some((b"\n".to_vec(), judge_at)),
            }
        }
    }
}

/// The graphs of a reader that follows.
pub struct Graphs {
    pub shared: Arc<Shared>,
    pub scope: Scope,
    pub reader: Reader,
    /// The place ends with the answer.
    pub _place: Place,
}

/// What was told last.
#[derive(Default)]
struct Last {
    /// Stands for the graph without its time: graphs may be large.
    graph: Option<u64>,
    told_at: Option<Instant>,
    judged_at: Option<Instant>,
}

impl Graphs {
    /// Returns the answer: server-sent events `graph`, and comments while nothing changes.
    pub fn body(self) -> Body {
        let last = Last {
            judged_at: Some(Instant::now()),
            ..Last::default()
        };
        Body::from_stream(parts((self, last), |(graphs, mut last)| async move {
            let text = graphs.next(&mut last).await?;
            Some((text, (graphs, last)))
        }))
    }

    async fn next(&self, last: &mut Last) -> Option<Vec<u8>> {
        loop {
            if last.graph.is_some() {
                sleep(GRAPH_EVERY).await;
            }
            if last.judged_at.is_none_or(|at| at.elapsed() >= JUDGE_EVERY) {
                self.reader.judge().await.ok()?;
                last.judged_at = Some(Instant::now());
            }
            let scope = self.scope.clone();
            let graph = self.shared.make(move |relay| relay.graph(&scope)).await.ok()?;
            let digest = digest(&graph);
            if last.graph != Some(digest) {
                let told = Graph {
                    generated_unix_ms: now(),
                    ..graph
                };
                last.graph = Some(digest);
                last.told_at = Some(Instant::now());
                let json = serde_json::to_string(&told).ok()?;
                return Some(format!("event: graph\ndata: {json}\n\n").into_bytes());
            }
            if last.told_at.is_none_or(|at| at.elapsed() >= KEEP_ALIVE) {
                last.told_at = Some(Instant::now());
                return Some(b": keep-alive\n\n".to_vec());
            }
        }
    }
}

/// Returns a number that another graph does not have.
fn digest(graph: &Graph) -> u64 {
    let mut hasher = DefaultHasher::new();
    graph.hash(&mut hasher);
    hasher.finish()
}

/// Yields the parts of an answer until there is none.
fn parts<T, F>(state: T, next: impl FnMut(T) -> F) -> impl Stream<Item = Result<Vec<u8>, Infallible>>
where
    F: Future<Output = Option<(Vec<u8>, T)>>,
{
    stream::unfold(state, next).map(Ok)
}
