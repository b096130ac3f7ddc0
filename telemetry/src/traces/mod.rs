//! Traces: what each process does for a pod, sent to a collector by OTLP over HTTP, as JSON. Off without
//! `THUBAN_OTLP_ENDPOINT`.
//!
//! A pod's trace has the pod's UID as its identifier, so that no process has to tell another one about the trace. All
//! spans of a trace have one parent, whose identifier follows from the UID too.
//!
//! Invariant: a span never waits, and takes bounded memory. A span that the queue has no room for, or that the
//! collector does not take, is lost and counted. A span has names of objects, and nothing else of tenants.

mod collector;

use std::env;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{LazyLock, OnceLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::time::sleep;
use tracing::{info, warn};

use collector::Collector;

/// The setting of the collector's address.
const SETTING: &str = "THUBAN_OTLP_ENDPOINT";
/// The most spans that wait for the collector.
const QUEUE: usize = 4096;
/// The most spans of one request.
const BATCH: usize = 512;
/// How long spans are gathered before a request.
const GATHERED: Duration = Duration::from_secs(1);
/// `SPAN_KIND_INTERNAL` and `STATUS_CODE_ERROR` of OTLP.
const KIND_INTERNAL: u8 = 1;
const STATUS_ERROR: u8 = 2;

static EXPORTER: OnceLock<Exporter> = OnceLock::new();
static COUNTS: Counts = Counts {
    sent: AtomicU64::new(0),
    lost: AtomicU64::new(0),
};

/// How many spans the collector has taken, and how many are lost.
#[derive(Debug, Default)]
struct Counts {
    sent: AtomicU64,
    lost: AtomicU64,
}

#[derive(Debug)]
struct Exporter {
    queue: mpsc::Sender<Ended>,
    counts: &'static Counts,
}

impl Exporter {
    fn put(&self, span: Ended) {
        if self.queue.try_send(span).is_err() {
            self.counts.lost.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Begins to send spans, if the environment names a collector. Must be called in a runtime. The instance is the pod or
/// the node of this process.
pub fn begin(service: &'static str, instance: &str) {
    let Some(endpoint) = env::var(SETTING).ok().filter(|text| !text.is_empty()) else {
        return;
    };
    let collector = match Collector::parse(&endpoint) {
        Ok(collector) => collector,
        Err(error) => {
            warn!(setting = SETTING, %error, "no traces are sent");
            return;
        }
    };
    let (queue, spans) = mpsc::channel(QUEUE);
    let counts = &COUNTS;
    if EXPORTER.set(Exporter { queue, counts }).is_ok() {
        info!(setting = SETTING, endpoint, "traces of pods are sent");
        tokio::spawn(export(collector, resource(service, instance), spans, counts));
    }
}

/// Whether spans are sent.
pub fn is_on() -> bool {
    EXPORTER.get().is_some()
}

/// Returns how many spans the collector has taken, and how many are lost; none while no spans are sent.
pub(crate) fn counts() -> Option<(u64, u64)> {
    let counts = EXPORTER.get()?.counts;
    Some((
        counts.sent.load(Ordering::Relaxed),
        counts.lost.load(Ordering::Relaxed),
    ))
}

/// Returns a trace's identifier: the 32 hexadecimal digits of the pod's UID, as kubelet tells the CNI plugin. None: the
/// UID is none of a pod.
fn trace_of(pod_uid: &str) -> Option<u128> {
    let digits = pod_uid.replace('-', "");
    let is_uid = digits.len() == 32 && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    let trace = u128::from_str_radix(&digits, 16).ok()?;
    (is_uid && trace != 0).then_some(trace)
}

/// Returns the identifier of the span that all spans of a trace belong to.
fn root_of(trace: u128) -> u64 {
    ((trace >> 64) as u64).max(1)
}

fn random() -> u64 {
    static STATE: LazyLock<RandomState> = LazyLock::new(RandomState::new);
    static NEXT: AtomicU64 = AtomicU64::new(0);
    STATE.hash_one(NEXT.fetch_add(1, Ordering::Relaxed)).max(1)
}

/// A span that has begun. A span that is dropped is not sent.
#[derive(Debug)]
#[must_use = "a span that is dropped is not sent"]
pub struct Span(Option<Box<Begun>>);

#[derive(Debug)]
struct Begun {
    trace: u128,
    id: u64,
    parent: Option<u64>,
    name: &'static str,
    start: SystemTime,
    attributes: Vec<(&'static str, String)>,
}

#[derive(Debug)]
struct Ended {
    span: Box<Begun>,
    end: SystemTime,
    is_failed: bool,
}

impl Span {
    /// Begins a span of a pod's trace. It does nothing while no spans are sent.
    pub fn begin(pod_uid: &str, name: &'static str) -> Self {
        if is_on() {
            Self::new(pod_uid, name)
        } else {
            Self::none()
        }
    }

    /// A span that does nothing.
    pub fn none() -> Self {
        Self(None)
    }

    fn new(pod_uid: &str, name: &'static str) -> Self {
        Self(trace_of(pod_uid).map(|trace| {
            Box::new(Begun {
                trace,
                id: random(),
                parent: Some(root_of(trace)),
                name,
                start: SystemTime::now(),
                attributes: Vec::new(),
            })
        }))
    }

    /// Makes it the span that all others of the trace belong to.
    pub fn root(mut self) -> Self {
        if let Some(span) = &mut self.0 {
            (span.id, span.parent) = (root_of(span.trace), None);
        }
        self
    }

    /// Says that the span began earlier.
    pub fn since(mut self, start: SystemTime) -> Self {
        if let Some(span) = &mut self.0 {
            span.start = start;
        }
        self
    }

    /// Adds an attribute, the name of an object. Nobody who reads traces may learn more about tenants.
    pub fn with(mut self, key: &'static str, value: &str) -> Self {
        if let Some(span) = &mut self.0 {
            span.attributes.push((key, value.to_owned()));
        }
        self
    }

    pub fn end(self) {
        self.finish(false);
    }

    /// Ends the span; it has failed if the result is an error. What the error says is not sent.
    pub fn end_with<T, E>(self, result: &Result<T, E>) {
        self.finish(result.is_err());
    }

    fn finish(self, is_failed: bool) {
        if let (Some(exporter), Some(ended)) = (EXPORTER.get(), self.ended(is_failed)) {
            exporter.put(ended);
        }
    }

    fn ended(self, is_failed: bool) -> Option<Ended> {
        Some(Ended {
            span: self.0?,
            end: SystemTime::now(),
            is_failed,
        })
    }
}

impl Ended {
    fn to_json(&self) -> Value {
        let span = &self.span;
        let attributes = span.attributes.iter();
        let attributes: Vec<Value> = attributes.map(|(key, value)| attribute(key, value)).collect();
        let mut json = json!({
            "traceId": format!("{:032x}", span.trace),
            "spanId": format!("{:016x}", span.id),
            "name": span.name,
            "kind": KIND_INTERNAL,
            "startTimeUnixNano": nanoseconds(span.start),
            "endTimeUnixNano": nanoseconds(self.end),
            "attributes": attributes,
        });
        if let Some(parent) = span.parent {
            json["parentSpanId"] = format!("{parent:016x}").into();
        }
        if self.is_failed {
            json["status"] = json!({"code": STATUS_ERROR});
        }
        json
    }
}

/// Returns a time as OTLP has it in JSON: numbers of 64 bits are texts.
fn nanoseconds(time: SystemTime) -> String {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    since.as_nanos().to_string()
}

fn attribute(key: &str, value: &str) -> Value {
    json!({"key": key, "value": {"stringValue": value}})
}

fn resource(service: &str, instance: &str) -> Value {
    json!({"attributes": [
        attribute("service.name", service),
        attribute("service.version", env!("CARGO_PKG_VERSION")),
        attribute("service.instance.id", instance),
    ]})
}

/// Sends the spans for ever. Spans that the collector does not take are lost: there are newer ones.
async fn export(
    collector: Collector,
    resource: Value,
    mut spans: mpsc::Receiver<Ended>,
    counts: &'static Counts,
) {
    let mut batch = Vec::new();
    let mut is_failing = false;
    while spans.recv_many(&mut batch, BATCH).await > 0 {
        if batch.len() < BATCH {
            sleep(GATHERED).await;
            while batch.len() < BATCH
                && let Ok(span) = spans.try_recv()
            {
                batch.push(span);
            }
        }
        let sent: Vec<Value> = batch.iter().map(Ended::to_json).collect();
        let count = sent.len() as u64;
        batch.clear();
        let body = json!({"resourceSpans": [{
            "resource": resource,
            "scopeSpans": [{"scope": {"name": "thuban"}, "spans": sent}],
        }]});
        match collector.post(body.to_string()).await {
            Ok(()) => {
                counts.sent.fetch_add(count, Ordering::Relaxed);
                is_failing = false;
            }
            Err(error) => {
                counts.lost.fetch_add(count, Ordering::Relaxed);
                if !is_failing {
                    warn!(
                        error = &error as &dyn std::error::Error,
                        "spans are lost, and counted"
                    );
                }
                is_failing = true;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::{TcpListener, TcpStream};
    use tokio::time::timeout;

    use super::*;

    const UID: &str = "0f8fad5b-d9cb-469f-a165-70867728950e";
    const WAIT: Duration = Duration::from_secs(10);

    fn exporter(room: usize) -> (Exporter, mpsc::Receiver<Ended>) {
        let (queue, spans) = mpsc::channel(room);
        let counts: &'static Counts = Box::leak(Box::new(Counts::default()));
        (Exporter { queue, counts }, spans)
    }

    fn collector(address: std::net::SocketAddr) -> Collector {
        Collector::parse(&format!("http://{address}/otlp/")).unwrap()
    }

    async fn until(is_true: impl Fn() -> bool) {
        let looking = async {
            while !is_true() {
                sleep(Duration::from_millis(10)).await;
            }
        };
        timeout(WAIT, looking).await.unwrap();
    }

    /// Reads a request, and answers. Returns its head and its body.
    async fn take(stream: &mut TcpStream, status: &str) -> (String, Value) {
        let mut request = Vec::new();
        loop {
            stream.read_buf(&mut request).await.unwrap();
            let text = String::from_utf8_lossy(&request);
            let Some((head, body)) = text.split_once("\r\n\r\n") else {
                continue;
            };
            if let Ok(body) = serde_json::from_str(body) {
                let answer = format!("HTTP/1.1 {status}\r\ncontent-length: 2\r\n\r\n{{}}");
                stream.write_all(answer.as_bytes()).await.unwrap();
                return (head.to_owned(), body);
            }
        }
    }

    #[test]
    fn a_pods_uid_is_the_identifier_of_its_trace() {
        let trace = trace_of(UID).unwrap();
        assert_eq!(format!("{trace:032x}"), UID.replace('-', ""));
        assert_eq!(format!("{:016x}", root_of(trace)), "0f8fad5bd9cb469f");
        // A static pod's.
        assert_eq!(trace_of(&UID.replace('-', "")), Some(trace));
        for other in [
            "",
            "node/a",
            "+f8fad5b-d9cb-469f-a165-70867728950e",
            &"0".repeat(32),
        ] {
            assert_eq!(trace_of(other), None, "{other}");
        }
        assert!(Span::begin(UID, "ADD").0.is_none(), "no collector is set");
    }

    #[tokio::test]
    async fn spans_of_a_pod_reach_the_collector_as_one_trace() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (exporter, spans) = exporter(QUEUE);
        let resource = resource("transitd", "node-1");
        let task = tokio::spawn(export(
            collector(listener.local_addr().unwrap()),
            resource,
            spans,
            exporter.counts,
        ));
        let start = UNIX_EPOCH + Duration::from_nanos(1_700_000_000_000_000_001);
        let root = Span::new(UID, "pod").since(start).root();
        exporter.put(root.with("k8s.pod.name", "a").ended(false).unwrap());
        exporter.put(Span::new(UID, "ADD").ended(true).unwrap());
        let (mut stream, _) = timeout(WAIT, listener.accept()).await.unwrap().unwrap();
        let (head, body) = timeout(WAIT, take(&mut stream, "200 OK")).await.unwrap();
        assert!(head.starts_with("POST /otlp/v1/traces HTTP/1.1\r\n"), "{head}");
        assert!(head.contains("content-type: application/json"), "{head}");
        let sent = &body["resourceSpans"][0];
        let service = &sent["resource"]["attributes"][0];
        assert_eq!(service["value"]["stringValue"], "transitd");
        let [root, add] = [0_usize, 1].map(|number| &sent["scopeSpans"][0]["spans"][number]);
        assert_eq!(root["traceId"], UID.replace('-', ""));
        assert_eq!(root["startTimeUnixNano"], "1700000000000000001");
        assert_eq!(root["attributes"][0]["value"]["stringValue"], "a");
        assert_eq!(
            (&root["parentSpanId"], &root["status"]),
            (&Value::Null, &Value::Null)
        );
        assert_eq!(add["traceId"], root["traceId"]);
        assert_eq!(add["parentSpanId"], root["spanId"]);
        assert_ne!(add["spanId"], root["spanId"]);
        assert_eq!(add["status"]["code"], 2);
        until(|| exporter.counts.sent.load(Ordering::Relaxed) == 2).await;
        assert_eq!(exporter.counts.lost.load(Ordering::Relaxed), 0);
        task.abort();
    }

    #[tokio::test]
    async fn spans_that_nobody_takes_are_counted() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (exporter, spans) = exporter(4);
        let lost = || exporter.counts.lost.load(Ordering::Relaxed);
        for _ in 0..10 {
            exporter.put(Span::new(UID, "ADD").ended(false).unwrap());
        }
        assert_eq!(lost(), 6, "the queue has room for 4");
        let task = tokio::spawn(export(collector(address), Value::Null, spans, exporter.counts));
        let (mut stream, _) = timeout(WAIT, listener.accept()).await.unwrap().unwrap();
        timeout(WAIT, take(&mut stream, "503 Service Unavailable"))
            .await
            .unwrap();
        until(|| lost() == 10).await;
        drop((stream, listener));
        exporter.put(Span::new(UID, "ADD").ended(false).unwrap());
        until(|| lost() == 11).await;
        assert_eq!(exporter.counts.sent.load(Ordering::Relaxed), 0);
        task.abort();
    }
}
