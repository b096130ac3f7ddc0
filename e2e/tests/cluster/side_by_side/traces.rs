//! Traces: the OpenTelemetry collector's receiver understands what operator and transitd send, and a pod's trace goes
//! from its binding to ADD.

use std::collections::BTreeSet;
use std::io::{BufRead as _, BufReader};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::Value;

use crate::support::{apply, delete, get, netexec_manifest, running};
use crate::tenants::tenants;

const NODE: &str = "node-a";
const POD: &str = "traced";
/// The port that `cargo xtask test` names to operator and transitd.
const PORT: u16 = 4318;
/// The spans of a pod's trace (docs/guide/operations.md), without those of rows: how many there are differs.
const OPERATOR: [&str; 5] = [
    "connect pod",
    "claim addresses",
    "create Endpoint",
    "wait for acks",
    "write Provisioned",
];
const TRANSITD: [&str; 3] = ["ADD", "wait for endpoint", "wire"];
const ROOT: &str = "connect pod";

/// A collector that runs, and the requests that it has understood.
struct Collector {
    child: Child,
    requests: Arc<Mutex<Vec<Value>>>,
}

impl Drop for Collector {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A span, and the process that sent it.
#[derive(Clone, Debug)]
struct Span {
    service: String,
    span: Value,
}

impl Span {
    fn text(&self, field: &str) -> &str {
        self.span[field].as_str().unwrap_or_default()
    }

    fn nanoseconds(&self, field: &str) -> u64 {
        self.text(field).parse().unwrap()
    }
}

impl Collector {
    fn start(address: SocketAddr) -> Result<Self> {
        let program = concat!(env!("CARGO_MANIFEST_DIR"), "/../target/otlp/otlp");
        let mut child = Command::new(program)
            .arg(address.to_string())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("starting {program}, which `cargo xtask test` builds"))?;
        let output = child.stdout.take().context("no pipe")?;
        let requests = Arc::<Mutex<Vec<Value>>>::default();
        let heard = Arc::clone(&requests);
        thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                heard.lock().unwrap().extend(serde_json::from_str::<Value>(&line));
            }
        });
        Ok(Self { child, requests })
    }

    /// Returns the spans of a trace.
    fn trace(&self, id: &str) -> Vec<Span> {
        let requests = self.requests.lock().unwrap();
        let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
        let mut spans = Vec::new();
        for resource in requests
            .iter()
            .flat_map(|request| list(&request["resourceSpans"]))
        {
            let attributes = list(&resource["resource"]["attributes"]);
            let service = attributes
                .iter()
                .find(|attribute| attribute["key"] == "service.name");
            let service = service.and_then(|service| service["value"]["stringValue"].as_str());
            let service = service.unwrap_or_default().to_owned();
            let scopes = list(&resource["scopeSpans"]);
            for span in scopes.iter().flat_map(|scope| list(&scope["spans"])) {
                if span["traceId"] == id {
                    let service = service.clone();
                    spans.push(Span { service, span });
                }
            }
        }
        spans
    }
}

#[test]
fn a_collector_has_a_pods_trace_from_binding_to_add() {
    let cluster = &tenants().cluster;
    let address = SocketAddr::new(cluster.instance().gateway().into(), PORT);
    let collector = Collector::start(address).unwrap();
    cluster
        .wait_for("the collector", Duration::from_secs(10), || {
            Ok(TcpStream::connect(address).is_ok())
        })
        .unwrap();
    delete(cluster, &["pod", "-n", "red", POD]).unwrap();
    apply(cluster, &[netexec_manifest("red", POD, NODE, None)]).unwrap();
    let pod = running(cluster, "red", POD).unwrap();
    let object = get(cluster, &["pod", "-n", "red", POD]).unwrap();
    let id = object["metadata"]["uid"].as_str().unwrap().replace('-', "");
    let wanted: BTreeSet<&str> = OPERATOR.into_iter().chain(TRANSITD).collect();
    let is_whole = || {
        let spans = collector.trace(&id);
        let names: BTreeSet<&str> = spans.iter().map(|span| span.text("name")).collect();
        Ok(names.is_superset(&wanted) && names.iter().any(|name| name.starts_with("apply")))
    };
    let waited = cluster.wait_for("the whole trace", Duration::from_secs(20), is_whole);
    let spans = collector.trace(&id);
    assert!(waited.is_ok(), "{spans:#?}");

    let root = spans.iter().find(|span| span.text("name") == ROOT).unwrap();
    let (start, end) = ("startTimeUnixNano", "endTimeUnixNano");
    for span in &spans {
        let name = span.text("name");
        let service = if OPERATOR.contains(&name) {
            "thuban-operator"
        } else {
            "transitd"
        };
        assert_eq!(span.service, service, "{name}");
        let parent = if name == ROOT { "" } else { root.text("spanId") };
        assert_eq!(span.text("parentSpanId"), parent, "{name}");
        assert!(span.nanoseconds(start) <= span.nanoseconds(end), "{span:#?}");
        // The clocks of all nodes are one.
        assert!(
            span.nanoseconds(end) >= root.nanoseconds(start),
            "{name} ended before the binding"
        );
        let told = span.span.to_string();
        assert!(!told.contains(&pod.address.to_string()), "an address: {told}");
    }
    delete(cluster, &["pod", "-n", "red", POD]).unwrap();
}
