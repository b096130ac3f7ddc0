//! The operator's metrics, as text for Prometheus.
//!
//! Invariant: no label holds the name of an object, a pod or a tenant, so that the number of series is bounded and a
//! scrape reveals nothing of tenants. Hooks are one call each; counts are of the process, states of its leadership.

mod policy;
pub mod serve;

use std::collections::{HashSet, VecDeque};
use std::fmt;
use std::sync::{Arc, LazyLock, Mutex, PoisonError, Weak};
use std::time::Duration;

use kube::Resource;
use kube::runtime::controller::Action;
use kube::runtime::reflector::ObjectRef;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;
use thuban_api::Phase;
use thuban_proto::transit::{DropletMessage, droplet_message};
use thuban_telemetry::process::register_ca_expiry;
use tokio::time::Instant;
use tracing::{Instrument, info_span};

use crate::hub::Outgoing;
use policy::PolicyMetrics;
pub use policy::{CONDITIONS, Told, policies_compiled, policy_provisioned};

/// The states that a leadership reports when it is asked.
pub trait Leadership: Send + Sync {
    /// Returns when the hub has answered: a hub that is stuck never answers.
    fn look(&self);
    fn epoch(&self) -> u64;
    /// Returns how many droplets have a stream, have lost it a moment ago, and are suspect.
    fn droplets(&self) -> DropletCounts;
    /// Returns the phases of all objects that have one, kind by kind; none: no status yet.
    fn phases(&self) -> Vec<(&'static str, Vec<Option<Phase>>)>;
    fn network_policies(&self) -> usize;
    /// Returns what is told of each NetworkPolicy and ClusterNetworkPolicy.
    fn policies(&self) -> Vec<Told>;
    /// Returns how many rows droplets have no room for.
    fn rows_without_room(&self) -> usize;
}

#[derive(Clone, Copy, Debug, Default)]
pub struct DropletCounts {
    pub connected: i64,
    pub missing: i64,
    pub suspect: i64,
}

/// An error that is counted by its category, which is one of few words.
pub trait Category {
    fn category(&self) -> &'static str;
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Reconciled {
    kind: &'static str,
    result: &'static str,
    reason: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfKind {
    kind: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct InPhase {
    kind: &'static str,
    phase: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct InState {
    state: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Sent {
    change: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Because {
    reason: &'static str,
}

type Histograms = Family<OfKind, Histogram, fn() -> Histogram>;

struct Metrics {
    registry: Registry,
    reconciles: Family<Reconciled, Counter>,
    seconds: Histograms,
    queue: Family<OfKind, Gauge>,
    rows: Family<Sent, Counter>,
    snapshots: Counter,
    acks: Histogram,
    lock: Histogram,
    nacks: Family<Because, Counter>,
    streams: Family<Because, Counter>,
    refusals: Family<Because, Counter>,
    subscriptions: Family<Because, Counter>,
    leader: Gauge,
    epoch: Gauge,
    droplets: Family<InState, Gauge>,
    objects: Family<InPhase, Gauge>,
    network_policies: Gauge,
    policies: PolicyMetrics,
    rows_without_room: Gauge,
}

static METRICS: LazyLock<Metrics> = LazyLock::new(Metrics::new);
/// The leadership that this process has.
static LEADERSHIP: Mutex<Option<Weak<dyn Leadership>>> = Mutex::new(None);

fn seconds() -> Histogram {
    Histogram::new(exponential_buckets(0.0005, 2.0, 17))
}

impl Metrics {
    fn new() -> Self {
        let mut metrics = Self {
            registry: Registry::with_prefix("thuban_operator"),
            reconciles: Family::default(),
            seconds: Family::new_with_constructor(seconds as fn() -> Histogram),
            queue: Family::default(),
            rows: Family::default(),
            snapshots: Counter::default(),
            acks: seconds(),
            lock: Histogram::new(exponential_buckets(0.000_01, 2.0, 18)),
            nacks: Family::default(),
            streams: Family::default(),
            refusals: Family::default(),
            subscriptions: Family::default(),
            leader: Gauge::default(),
            epoch: Gauge::default(),
            droplets: Family::default(),
            objects: Family::default(),
            network_policies: Gauge::default(),
            policies: PolicyMetrics::default(),
            rows_without_room: Gauge::default(),
        };
        let registry = &mut metrics.registry;
        registry.register(
            "reconciles",
            "Looks at objects, by kind and result",
            metrics.reconciles.clone(),
        );
        registry.register(
            "reconcile_duration_seconds",
            "How long they took",
            metrics.seconds.clone(),
        );
        registry.register(
            "queue_depth",
            "Objects that wait for a look",
            metrics.queue.clone(),
        );
        registry.register(
            "rows_sent",
            "Rows sent to droplets, by change",
            metrics.rows.clone(),
        );
        registry.register(
            "snapshots_sent",
            "Whole programs sent to droplets",
            metrics.snapshots.clone(),
        );
        registry.register(
            "ack_duration_seconds",
            "From sending rows to their ack",
            metrics.acks.clone(),
        );
        registry.register(
            "lock_held_seconds",
            "How long the rows of all droplets were locked, each time",
            metrics.lock.clone(),
        );
        registry.register("nacks", "Rows that droplets refused", metrics.nacks.clone());
        registry.register(
            "streams_ended",
            "Streams of droplets that ended or were refused",
            metrics.streams.clone(),
        );
        registry.register(
            "connections_refused",
            "Connections and tokens at the droplets' port that were refused or given up",
            metrics.refusals.clone(),
        );
        registry.register(
            "subscriptions_refused",
            "Questions of droplets for places of addresses that they may not know",
            metrics.subscriptions.clone(),
        );
        registry.register("leader", "1 while this process leads", metrics.leader.clone());
        registry.register("epoch", "Number of its leadership", metrics.epoch.clone());
        registry.register(
            "droplets",
            "Droplets by the state of their stream",
            metrics.droplets.clone(),
        );
        registry.register("objects", "Objects by kind and phase", metrics.objects.clone());
        registry.register(
            "network_policies_not_enforced",
            "NetworkPolicies that exist, none of which is enforced",
            metrics.network_policies.clone(),
        );
        registry.register(
            "rows_without_room",
            "Rows that droplets refuse because a table is full",
            metrics.rows_without_room.clone(),
        );
        register_ca_expiry(
            registry,
            "When the CA expires that has signed this process's certificate",
        );
        metrics.policies.register(registry);
        metrics
    }

    /// Looks up the states; called when somebody asks for metrics.
    fn refresh(&self) {
        let Some(leadership) = leadership() else {
            self.droplets.clear();
            self.objects.clear();
            self.network_policies.set(0);
            self.policies.clear();
            self.rows_without_room.set(0);
            return;
        };
        let DropletCounts {
            connected,
            missing,
            suspect,
        } = leadership.droplets();
        for (state, count) in [
            ("connected", connected),
            ("missing", missing),
            ("suspect", suspect),
        ] {
            self.droplets.get_or_create(&InState { state }).set(count);
        }
        let policies = leadership.network_policies();
        self.network_policies
            .set(i64::try_from(policies).unwrap_or(i64::MAX));
        self.policies.show(&leadership.policies());
        let rows = leadership.rows_without_room();
        self.rows_without_room
            .set(i64::try_from(rows).unwrap_or(i64::MAX));
        for (kind, phases) in leadership.phases() {
            self.phases(kind, phases);
        }
    }

    fn phases(&self, kind: &'static str, phases: Vec<Option<Phase>>) {
        let (mut init, mut provisioned) = (0, 0);
        for phase in phases {
            match phase {
                Some(Phase::Provisioned) => provisioned += 1,
                Some(Phase::Init) | None => init += 1,
            }
        }
        for (phase, count) in [("Init", init), ("Provisioned", provisioned)] {
            self.objects.get_or_create(&InPhase { kind, phase }).set(count);
        }
    }
}

fn leadership() -> Option<Arc<dyn Leadership>> {
    LEADERSHIP
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .as_ref()?
        .upgrade()
}

/// Notes that this process leads, until `leadership` is dropped.
pub fn leads(leadership: &Arc<impl Leadership + 'static>) {
    METRICS.leader.set(1);
    METRICS
        .epoch
        .set(i64::try_from(leadership.epoch()).unwrap_or(i64::MAX));
    let leadership = Arc::downgrade(leadership);
    let leadership: Weak<dyn Leadership> = leadership;
    *LEADERSHIP.lock().unwrap_or_else(PoisonError::into_inner) = Some(leadership);
}

/// Returns all metrics, as Prometheus reads them.
pub fn text() -> Result<String, fmt::Error> {
    METRICS.refresh();
    let mut text = String::new();
    encode(&mut text, &METRICS.registry)?;
    Ok(text)
}

/// Kinds of Kubernetes that are reconciled and read as small views: their types own their names.
const VIEWS: [&str; 3] = ["Pod", "Service", "NetworkPolicy"];

fn kind<K: Resource<DynamicType = ()>>() -> &'static str {
    match K::kind(&()) {
        std::borrow::Cow::Borrowed(kind) => kind,
        std::borrow::Cow::Owned(kind) => VIEWS.into_iter().find(|view| *view == kind).unwrap_or("other"),
    }
}

/// Objects of a kind that is reconciled.
pub trait Counted: Resource<DynamicType = ()> + Clone {}
impl<K: Resource<DynamicType = ()> + Clone> Counted for K {}

/// Objects of a kind that were triggered and have not been reconciled since.
pub struct Queue<K: Counted>(Arc<Mutex<HashSet<ObjectRef<K>>>>);

impl<K: Counted> Clone for Queue<K> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<K: Counted> Default for Queue<K> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

impl<K: Counted> Queue<K> {
    pub fn add(&self, object: &ObjectRef<K>) {
        self.change(|waiting| waiting.insert(object.clone()));
    }

    /// Notes that an object is gone before it was reconciled.
    pub fn gone(&self, name: &str, namespace: Option<&str>) {
        let mut object = ObjectRef::new(name);
        object.namespace = namespace.map(str::to_owned);
        self.remove(&object);
    }

    pub fn remove(&self, object: &ObjectRef<K>) {
        self.change(|waiting| waiting.remove(object));
    }

    fn change(&self, change: impl FnOnce(&mut HashSet<ObjectRef<K>>) -> bool) {
        let mut waiting = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if change(&mut waiting) {
            let depth = i64::try_from(waiting.len()).unwrap_or(i64::MAX);
            METRICS
                .queue
                .get_or_create(&OfKind { kind: kind::<K>() })
                .set(depth);
        }
    }
}

/// Reconciles in a span of its own, and counts and times it.
pub async fn observed<K: Counted, E: Category>(
    queue: Queue<K>,
    object: Arc<K>,
    reconcile: impl Future<Output = Result<Action, E>>,
) -> Result<Action, E> {
    let (kind, reference) = (kind::<K>(), ObjectRef::from_obj(&*object));
    queue.remove(&reference);
    let start = Instant::now();
    let span = info_span!(
        "reconcile",
        kind,
        namespace = reference.namespace,
        object = reference.name
    );
    let result = reconcile.instrument(span).await;
    METRICS
        .seconds
        .get_or_create(&OfKind { kind })
        .observe(start.elapsed().as_secs_f64());
    let (word, reason) = match &result {
        Ok(_) => ("ok", ""),
        Err(error) => ("error", error.category()),
    };
    let labels = Reconciled {
        kind,
        result: word,
        reason,
    };
    METRICS.reconciles.get_or_create(&labels).inc();
    result
}

/// Counts a connection or token that is refused at the droplets' port. `reason` is one of few words.
pub fn refuses(reason: &'static str) {
    METRICS.refusals.get_or_create(&Because { reason }).inc();
}

/// Notes for how long the hub was locked.
pub fn lock_was_held(time: Duration) {
    METRICS.lock.observe(time.as_secs_f64());
}

/// Counts a subscription that is not granted. `reason` is one of few words.
pub fn refuses_subscription(reason: &'static str) {
    METRICS.subscriptions.get_or_create(&Because { reason }).inc();
}

/// The metrics of one stream: its rows, and how long their acks take.
#[derive(Debug, Default)]
pub struct Stream {
    /// Sequences without an ack, and when they were sent.
    sent: VecDeque<(u64, Instant)>,
}

impl Stream {
    pub fn sends(&mut self, message: &Outgoing) {
        let Outgoing::Program(program) = message else {
            return;
        };
        for (change, rows) in [("upsert", program.upserts()), ("delete", program.deletes())] {
            METRICS.rows.get_or_create(&Sent { change }).inc_by(rows as u64);
        }
        if program.is_snapshot {
            METRICS.snapshots.inc();
        }
        self.sent.push_back((program.sequence, Instant::now()));
    }

    pub fn receives(&mut self, message: &DropletMessage) {
        match &message.message {
            Some(droplet_message::Message::Ack(ack)) => {
                while let Some((_, sent)) = self.sent.pop_front_if(|(sequence, _)| *sequence <= ack.sequence)
                {
                    METRICS.acks.observe(sent.elapsed().as_secs_f64());
                }
            }
            Some(droplet_message::Message::Nack(nack)) => {
                let reason = nack.reason().as_str_name();
                METRICS.nacks.get_or_create(&Because { reason }).inc();
            }
            _ => {}
        }
    }

    /// Counts the end of a stream. `reason` is one of few words.
    pub fn ends(reason: &'static str) {
        METRICS.streams.get_or_create(&Because { reason }).inc();
    }
}

#[cfg(test)]
mod tests {
    use crate::model::cached::{NetworkPolicy, Pod};
    use crate::model::service::Service;
    use thuban_api::Vpc;
    use thuban_proto::transit::Ack;
    use thuban_rows::builders;

    use super::*;
    use crate::hub::PackedProgram;
    use crate::model::rows::{Key, PackedRow};

    #[derive(Debug)]
    struct Failure;

    impl Category for Failure {
        fn category(&self) -> &'static str {
            "test"
        }
    }

    fn program(sequence: u64, rows: u32) -> Outgoing {
        let row = PackedRow::new(&builders::row(thuban_rows::Kind::Vpc));
        let rows = (1..=rows).map(|number| (Key::Vpc(builders::vni(number)), Some(row.clone())));
        PackedProgram::changes(1, sequence, rows.collect()).into()
    }

    /// Returns the value of the series whose line starts so.
    fn value(series: &str) -> f64 {
        let text = text().unwrap();
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix(series)?.trim().parse().ok());
        line.unwrap_or(0.0)
    }

    #[test]
    fn rows_and_acks_are_counted_once() {
        let mut stream = Stream::default();
        let (rows, acks) = (
            r#"thuban_operator_rows_sent_total{change="upsert"}"#,
            "thuban_operator_ack_duration_seconds_count",
        );
        let before = (value(rows), value(acks));
        stream.sends(&program(1, 3));
        stream.sends(&program(2, 1));
        let ack = |sequence| DropletMessage {
            message: Some(droplet_message::Message::Ack(Ack { epoch: 1, sequence })),
        };
        stream.receives(&ack(1));
        assert!(value(acks) >= before.1 + 1.0);
        stream.receives(&ack(2));
        stream.receives(&ack(2));
        assert!(stream.sent.is_empty());
        assert!(value(rows) >= before.0 + 4.0);
    }

    #[test]
    fn views_are_counted_under_their_kind() {
        let kinds = [
            kind::<Vpc>(),
            kind::<Pod>(),
            kind::<Service>(),
            kind::<NetworkPolicy>(),
        ];
        assert_eq!(kinds, ["Vpc", "Pod", "Service", "NetworkPolicy"]);
    }

    #[test]
    fn a_queue_counts_an_object_once_until_it_is_looked_at() {
        let queue = Queue::<Vpc>::default();
        let depth = r#"thuban_operator_queue_depth{kind="Vpc"}"#;
        queue.add(&ObjectRef::new("red"));
        queue.add(&ObjectRef::new("red"));
        queue.add(&ObjectRef::new("blue"));
        assert!((value(depth) - 2.0).abs() < 0.1, "{}", value(depth));
        queue.remove(&ObjectRef::new("red"));
        queue.remove(&ObjectRef::new("red"));
        assert!((value(depth) - 1.0).abs() < 0.1, "{}", value(depth));
    }

    #[tokio::test]
    async fn reconciles_are_counted_by_kind_and_result() {
        let series = r#"thuban_operator_reconciles_total{kind="Vpc",result="ok",reason=""}"#;
        let before = value(series);
        let vpc: Vpc = serde_json::from_value(serde_json::json!({
            "metadata": {"name": "red"}, "spec": {"cidrs": ["10.0.0.0/16"]}
        }))
        .unwrap();
        let done = async { Ok::<_, Failure>(Action::await_change()) };
        observed(Queue::default(), Arc::new(vpc), done).await.unwrap();
        assert!(value(series) >= before + 1.0);
    }
}
