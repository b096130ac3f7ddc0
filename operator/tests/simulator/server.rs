//! The fake API server behind kube's client: routes requests to the store, with the faults of the schedule.

mod watch;

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt;
use http::{Method, Request, Response};
use http_body::Frame;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use kube::client::Body;
use serde_json::{Value, json};
use thuban_api::SYSTEM_NAMESPACE;
use tokio::time::{Instant, sleep};

use crate::kind::Kind;
use crate::operators::Operator;
use crate::simulation::{Simulation, State};
use crate::store::{FORBIDDEN, Failure, GONE, INTERNAL, INVALID, NOT_FOUND, Preconditions, text};
use crate::workflow;
use watch::Watch;

/// How often a request that a test holds up looks whether it may go on.
const LOOK_AT_STALL: Duration = Duration::from_millis(100);

type Broken = Box<dyn std::error::Error + Send + Sync>;
type Reply = Response<UnsyncBoxBody<Bytes, Broken>>;

/// The connection of one operator to the API server.
#[derive(Clone)]
pub struct Connection {
    pub simulation: Arc<Simulation>,
    pub operator: Arc<Operator>,
}

impl tower::Service<Request<Body>> for Connection {
    type Response = Reply;
    type Error = Broken;
    type Future = Pin<Box<dyn Future<Output = Result<Reply, Broken>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Broken>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let connection = self.clone();
        // The span of the request's object is open here.
        let workflow = workflow::current();
        Box::pin(async move { connection.serve(request, workflow).await })
    }
}

/// The object or event that a request asks for.
#[derive(Debug)]
enum Target {
    Object {
        kind: Kind,
        namespace: String,
        /// The name of the object; empty: the collection.
        name: String,
        is_status: bool,
    },
    /// An event in this namespace.
    Event(String),
}

impl Target {
    /// Returns the kind of the object.
    fn kind(&self) -> Option<Kind> {
        match self {
            Self::Object { kind, .. } => Some(*kind),
            Self::Event(_) => None,
        }
    }
}

/// The fate of a request, besides being slow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Good,
    Touched,
    Refused,
    LostAnswer,
    TimedOut,
    LostAnswerTimedOut,
    DoneLater,
}

fn target(path: &str) -> Option<Target> {
    let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
    let (["api", "v1", rest @ ..]
    | [
        "apis",
        "thuban.dev"
        | "events.k8s.io"
        | "discovery.k8s.io"
        | "networking.k8s.io"
        | "policy.networking.k8s.io",
        _,
        rest @ ..,
    ]) = parts.as_slice()
    else {
        return None;
    };
    let (namespace, rest) = match rest {
        ["namespaces", namespace, rest @ ..] if !rest.is_empty() => (*namespace, rest),
        _ => ("", rest),
    };
    if let ["events", ..] = rest {
        return Some(Target::Event(namespace.to_owned()));
    }
    let (plural, name, is_status) = match rest {
        [plural] => (*plural, "", false),
        [plural, name, "status"] => (*plural, *name, true),
        // Who posts to an object evicts it.
        [plural, name] | [plural, name, "eviction"] => (*plural, *name, false),
        _ => return None,
    };
    Some(Target::Object {
        kind: Kind::of(plural)?,
        namespace: namespace.to_owned(),
        name: name.to_owned(),
        is_status,
    })
}

fn answer(code: u16, body: impl Into<Bytes>) -> Reply {
    let body: Bytes = body.into();
    Response::builder()
        .status(code)
        .header("content-type", "application/json")
        .body(Full::new(body).map_err(|never| match never {}).boxed_unsync())
        .unwrap()
}

fn refusal(failure: Failure) -> Reply {
    answer(failure.code, serde_json::to_vec(&failure.status()).unwrap())
}

fn parameter<'a>(query: &'a str, name: &str) -> Option<&'a str> {
    query
        .split('&')
        .find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='))
}

impl Connection {
    async fn serve(self, request: Request<Body>, workflow: Option<String>) -> Result<Reply, Broken> {
        let (head, body) = request.into_parts();
        let path = head.uri.path();
        let query = head.uri.query().unwrap_or_default();
        let target = target(path).ok_or_else(|| format!("the fake API server has no {path}"))?;
        if head.method == Method::GET && parameter(query, "watch").is_some() {
            let version = parameter(query, "resourceVersion").and_then(|version| version.parse().ok());
            return self.watch(target, version.unwrap_or_default()).await;
        }
        let body = body.collect_bytes().await?;
        let is_write = head.method != Method::GET;
        let _under_way = is_write.then(|| self.operator.begin(target.kind()));
        let (before, after, fate, late) = {
            let state = &mut *self.simulation.lock();
            let late = late_status(state, &target);
            let fate = late.map_or_else(|| fate(state, is_write), |_| Fate::DoneLater);
            let faults = state.faults.clone();
            (
                faults.latency(&mut state.random),
                faults.latency(&mut state.random),
                fate,
                late,
            )
        };
        sleep(before).await;
        self.wait_while_stalled(&head.method, target.kind()).await;
        if fate == Fate::TimedOut {
            sleep(Duration::from_secs(5)).await;
        }
        self.halt_if_dead().await;
        if matches!(fate, Fate::Refused | Fate::TimedOut) {
            self.simulation.lock().note(|| {
                format!(
                    "{} {} {}: {fate:?}",
                    self.operator.id,
                    head.method,
                    timeless(path)
                )
            });
            return if fate == Fate::Refused {
                Ok(refusal(INTERNAL))
            } else {
                Err("timed out".into())
            };
        }
        if fate == Fate::DoneLater {
            let (late, restores, connection) = {
                let state = &mut *self.simulation.lock();
                let late = late.unwrap_or_else(|| state.random.millis(500, 12_000));
                (late, state.store.restores, self.clone())
            };
            let (method, query) = (head.method.clone(), query.to_owned());
            tokio::spawn(async move {
                sleep(late).await;
                // Whether who asked for it lives or not, but not after the API server was stopped for a restore.
                if connection.simulation.lock().store.restores != restores {
                    return;
                }
                let _ = connection.carry_out(&method, &target, &query, &body, fate, workflow.as_deref());
            });
            sleep(Duration::from_secs(5)).await;
            self.halt_if_dead().await;
            return Err("timed out".into());
        }
        let result = self.carry_out(&head.method, &target, query, &body, fate, workflow.as_deref());
        if fate == Fate::LostAnswerTimedOut {
            sleep(Duration::from_secs(5)).await;
        }
        sleep(after).await;
        self.halt_if_dead().await;
        match fate {
            Fate::LostAnswer => return Ok(refusal(INTERNAL)),
            Fate::LostAnswerTimedOut => return Err("timed out".into()),
            _ => {}
        }
        Ok(match result {
            Ok((code, body)) => answer(code, body),
            Err(failure) => refusal(failure),
        })
    }

    /// Does at once what a request asks for.
    fn carry_out(
        &self,
        method: &Method,
        target: &Target,
        query: &str,
        body: &Bytes,
        fate: Fate,
        workflow: Option<&str>,
    ) -> Result<(u16, Bytes), Failure> {
        self.simulation.with(|state| {
            if let (
                Fate::Touched,
                Target::Object {
                    kind,
                    namespace,
                    name,
                    ..
                },
            ) = (fate, target)
            {
                touch(state, *kind, namespace, name);
            }
            state.writer = Some(self.operator.epoch);
            state.is_late = fate == Fate::DoneLater;
            let result = perform(state, method, target, query, body);
            if result.is_ok() {
                one_writer(state, workflow, target);
            }
            if method == Method::GET && matches!(target, Target::Object { name, .. } if !name.is_empty()) {
                self.operator.reads.lock().unwrap().push(target_name(target));
            }
            if method != Method::GET {
                let operator = &self.operator;
                state.note(|| {
                    let code = result
                        .as_ref()
                        .map_or_else(|failure| failure.code, |(code, _)| *code);
                    let sent = if state_is_verbose() {
                        String::from_utf8_lossy(body).into_owned()
                    } else {
                        String::new()
                    };
                    let name = target_name(target);
                    format!("{} {method} {name} -> {code} {fate:?} {sent}", operator.id)
                });
                operator.wrote(method, &target_name(target), state.elapsed(), result.is_ok());
            }
            result
        })
    }

    /// Waits while a test holds such requests up.
    async fn wait_while_stalled(&self, method: &Method, kind: Option<Kind>) {
        let is_stalled = || {
            let state = self.simulation.lock();
            let stalled = state.stalled.as_ref();
            stalled.is_some_and(|(of_method, of_kind)| of_method == method && kind == Some(*of_kind))
        };
        while is_stalled() {
            sleep(LOOK_AT_STALL).await;
        }
    }

    /// A process that died hears and says nothing.
    async fn halt_if_dead(&self) {
        if !self.operator.is_alive() {
            std::future::pending::<()>().await;
        }
    }

    async fn watch(self, target: Target, version: u64) -> Result<Reply, Broken> {
        let Target::Object { kind, .. } = target else {
            return Err("only objects are watched".into());
        };
        let latency = {
            let state = &mut *self.simulation.lock();
            let faults = state.faults.clone();
            faults.latency(&mut state.random)
        };
        sleep(latency).await;
        self.halt_if_dead().await;
        let (changed, is_stale) = {
            let state = &mut *self.simulation.lock();
            let chance = state.faults.stale_watch;
            (state.last_event(kind), state.random.permille(chance))
        };
        let watch = Watch {
            connection: self,
            kind,
            version,
            changed,
            is_stale,
            until: Instant::now() + Duration::from_secs(290),
            is_over: false,
        };
        let frames = futures::stream::unfold(watch, |mut watch| async move {
            let next = watch.next().await?;
            Some((next.map(Frame::data), watch))
        });
        let body = StreamBody::new(frames.boxed());
        Ok(Response::new(body.boxed_unsync()))
    }
}

/// Returns a path without the time of day, with which names of events end.
fn timeless(path: &str) -> &str {
    let is_event = path.contains("/events/");
    path.rsplit_once('.')
        .filter(|_| is_event)
        .map_or(path, |(name, _)| name)
}

fn state_is_verbose() -> bool {
    std::env::var_os("THUBAN_SIMULATOR_BODIES").is_some()
}

fn target_name(target: &Target) -> String {
    match target {
        Target::Object {
            kind,
            namespace,
            name,
            is_status,
        } => {
            let status = if *is_status { "/status" } else { "" };
            format!("{}/{namespace}/{name}{status}", kind.plural())
        }
        Target::Event(_) => "events".into(),
    }
}

/// Returns how late the request is to be done, if a test asked for it.
fn late_status(state: &mut State, target: &Target) -> Option<Duration> {
    let is_status = matches!(target, Target::Object { is_status: true, .. });
    let asked = state
        .late_status
        .filter(|(kind, _)| is_status && target.kind() == Some(*kind));
    asked.map(|(_, late)| {
        state.late_status = None;
        late
    })
}

fn fate(state: &mut State, is_write: bool) -> Fate {
    let faults = state.faults.clone();
    let random = &mut state.random;
    if random.permille(faults.refused) {
        return if random.permille(500) {
            Fate::Refused
        } else {
            Fate::TimedOut
        };
    }
    if !is_write {
        return Fate::Good;
    }
    if random.permille(faults.lost_answer) {
        return if random.permille(500) {
            Fate::LostAnswer
        } else {
            Fate::LostAnswerTimedOut
        };
    }
    if random.permille(faults.touched) {
        return Fate::Touched;
    }
    if random.permille(faults.done_later) {
        return Fate::DoneLater;
    }
    Fate::Good
}

/// Writes a meaningless change, as another writer.
fn touch(state: &mut State, kind: Kind, namespace: &str, name: &str) {
    let number = state.random.next();
    state.store.edit(kind, namespace, name, |value| {
        value["metadata"]["annotations"]["touched"] = number.to_string().into();
    });
}

/// Checks that the status of an object is written in the workflow of that object, and so by the controller of its kind,
/// in every state. A claim has no state.
fn one_writer(state: &mut State, workflow: Option<&str>, target: &Target) {
    let Target::Object {
        kind,
        namespace,
        name,
        is_status: true,
    } = target
    else {
        return;
    };
    if matches!(kind, Kind::IpClaim | Kind::VniClaim) {
        return;
    }
    // The workflow of a policy writes its state.
    let is_cluster_wide = *kind == Kind::PolicyState && namespace == SYSTEM_NAMESPACE;
    let namespace = if is_cluster_wide { "" } else { namespace.as_str() };
    let within = if namespace.is_empty() { "" } else { "." };
    let own = match kind {
        Kind::PolicyState if !is_cluster_wide => "NetworkPolicy.v1.networking.k8s.io".to_owned(),
        Kind::PolicyState | Kind::ClusterNetworkPolicy => {
            "ClusterNetworkPolicy.v1alpha2.policy.networking.k8s.io".to_owned()
        }
        kind => format!("{}.v1alpha1.thuban.dev", kind.name()),
    };
    let own = format!("{own}/{name}{within}{namespace}");
    if workflow != Some(own.as_str()) {
        let writer = workflow.unwrap_or("nobody");
        state.violation(format!(
            "the status of {own} is written by the workflow of {writer}"
        ));
    }
}

fn perform(
    state: &mut State,
    method: &Method,
    target: &Target,
    query: &str,
    body: &Bytes,
) -> Result<(u16, Bytes), Failure> {
    let (kind, namespace, name, is_status) = match target {
        Target::Event(namespace) => return event(state, method, namespace, body),
        Target::Object {
            kind,
            namespace,
            name,
            is_status,
        } => (*kind, namespace, name, *is_status),
    };
    let read = || serde_json::from_slice::<Value>(body).map_err(|_| INVALID);
    match method.as_str() {
        "GET" if name.is_empty() => list(state, kind, query).map(|body| (200, body)),
        "GET" => {
            let object = state.store.get(kind, namespace, name).ok_or(NOT_FOUND)?;
            Ok((200, object.bytes.clone()))
        }
        "POST" if !name.is_empty() => {
            let preconditions = preconditions(&read()?["deleteOptions"]);
            let deleted = state.store.delete(kind, namespace, name, &preconditions, false)?;
            Ok((201, deleted))
        }
        "POST" => {
            let value = read()?;
            let name = text(&value, "/metadata/name").to_owned();
            if kind == Kind::Endpoint && state.full.contains(namespace) {
                return Err(FORBIDDEN);
            }
            let created = state.store.create(kind, namespace, &name, value)?;
            Ok((201, created))
        }
        "PATCH" => {
            let patched = state.store.patch(kind, namespace, name, &read()?, is_status)?;
            Ok((200, patched))
        }
        "DELETE" => {
            let options = if body.is_empty() { Value::Null } else { read()? };
            let foreground = text(&options, "/propagationPolicy") == "Foreground";
            let deleted = state
                .store
                .delete(kind, namespace, name, &preconditions(&options), foreground)?;
            Ok((200, deleted))
        }
        _ => Err(INVALID),
    }
}

/// Returns the preconditions of options of a deletion.
fn preconditions(options: &Value) -> Preconditions {
    let precondition = |path: &str| {
        let value = options.pointer(path).and_then(Value::as_str);
        value.map(str::to_owned)
    };
    Preconditions {
        uid: precondition("/preconditions/uid"),
        version: precondition("/preconditions/resourceVersion"),
    }
}

/// Stores an event: events of policies under their names; of all other events, the subjects of warnings.
fn event(state: &mut State, method: &Method, namespace: &str, body: &Bytes) -> Result<(u16, Bytes), Failure> {
    if method != Method::POST {
        return Ok((200, body.clone()));
    }
    let event: Value = serde_json::from_slice(body).map_err(|_| INVALID)?;
    if text(&event, "/regarding/kind") == Kind::NetworkPolicy.name() {
        let name = text(&event, "/metadata/name").to_owned();
        state.store.create(Kind::Event, namespace, &name, event)?;
    } else if text(&event, "/type") == "Warning" {
        let [kind, name, reason] =
            ["/regarding/kind", "/regarding/name", "/reason"].map(|path| text(&event, path).to_owned());
        state.told.insert((kind, name, reason));
    }
    Ok((201, body.clone()))
}

fn list(state: &mut State, kind: Kind, query: &str) -> Result<Bytes, Failure> {
    if state.unserved.contains(&kind) {
        return Err(NOT_FOUND);
    }
    // A client that names no limit gets everything at once.
    let limit = match parameter(query, "limit") {
        Some(_) if state.faults.small_pages => 2,
        Some(_) => 500,
        None => usize::MAX,
    };
    let (mut items, version) = if let Some(token) = parameter(query, "continue") {
        let version = token.split('-').next().unwrap_or_default().to_owned();
        (state.pages.remove(token).ok_or(GONE)?, version)
    } else {
        let selected = parameter(query, "fieldSelector").map(|selector| {
            let (field, value) = selector.split_once("%3D").unwrap_or_default();
            (format!("/{}", field.replace('.', "/")), value.to_owned())
        });
        // The API server knows the fields that the CRDs name, and the name.
        let is_known = |field: &str| match kind {
            Kind::Endpoint => field == "/spec/network",
            Kind::Network => field == "/spec/vpc",
            _ => false,
        };
        if let Some((field, _)) = &selected
            && field != "/metadata/name"
            && !is_known(field)
        {
            return Err(INVALID);
        }
        let is_selected = |object: &Value| {
            let wanted = selected.as_ref();
            wanted.is_none_or(|(field, value)| text(object, field) == value)
        };
        let all = state.store.all(kind);
        let items = all.filter(|(_, object)| is_selected(&object.value));
        let items = items.map(|(_, object)| object.bytes.clone());
        (items.collect(), state.store.version().to_string())
    };
    let rest = items.split_off(items.len().min(limit));
    let mut token = String::new();
    if !rest.is_empty() {
        state.next_page += 1;
        token = format!("{version}-{}", state.next_page);
        state.pages.insert(token.clone(), rest);
    }
    let head = json!({"resourceVersion": version, "continue": token});
    let mut body = format!(
        r#"{{"kind":"{}List","apiVersion":"{}","metadata":{head},"items":["#,
        kind.name(),
        kind.api_version()
    )
    .into_bytes();
    for (number, item) in items.iter().enumerate() {
        if number > 0 {
            body.push(b',');
        }
        body.extend_from_slice(item);
    }
    body.extend_from_slice(b"]}");
    Ok(body.into())
}
