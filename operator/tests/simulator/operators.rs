//! Operators: started, crashed between any two of their writes, two at a time.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use http::Method;
use kube::Client;
use thuban_api::cluster_dns::{ClusterDns, USUAL_DNS_SERVICE};
use thuban_api::refused_ranges::RefusedRanges;
use thuban_operator::controller::{defaults, run};
use thuban_operator::hub::Hub;
use tokio::task::JoinSet;

use crate::kind::Kind;
use crate::server::Connection;
use crate::services::CLUSTER_DNS;
use crate::signal::Signal;
use crate::simulation::Simulation;

pub const DEFAULT_RANGE: &str = "10.244.0.0/24";
/// How often an operator that hears nothing asks whether it hears again.
const LOOK: Duration = Duration::from_millis(100);

pub struct Operator {
    pub id: String,
    pub epoch: u64,
    /// The signal of the operator's death: 0 while it lives.
    deaths: Signal,
    /// Number of writes after which the operator dies; negative: never.
    left: AtomicI64,
    hub: OnceLock<Arc<Hub>>,
    /// Kinds whose watches bring the operator nothing for now.
    deaf: Mutex<BTreeSet<Kind>>,
    /// Whether no more droplets reach the operator; streams that it has go on.
    pub is_full: AtomicBool,
    /// Whether the ends of streams don't reach the operator for now.
    pub misses_ends: AtomicBool,
    /// How often and when the operator last wrote, by the request.
    pub writes: Mutex<BTreeMap<String, (u64, Duration)>>,
    /// The single objects that the operator read, one entry for each request.
    pub reads: Mutex<Vec<String>>,
    /// The number of writes under way, and the most so far, by kind.
    under_way: Mutex<BTreeMap<Kind, (usize, usize)>>,
}

/// A write that is under way.
pub struct UnderWay {
    operator: Arc<Operator>,
    kind: Option<Kind>,
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        let mut under_way = self.operator.under_way.lock().unwrap();
        if let Some((now, _)) = self.kind.and_then(|kind| under_way.get_mut(&kind)) {
            *now -= 1;
        }
    }
}

impl Operator {
    pub fn is_alive(&self) -> bool {
        self.deaths.get() == 0
    }

    pub fn hub(&self) -> Option<Arc<Hub>> {
        self.hub.get().cloned()
    }

    pub fn crash(&self) {
        self.deaths.set(1);
    }

    /// Waits for the operator's death.
    pub async fn died(&self) {
        self.deaths.other_than(0).await;
    }

    /// Makes the operator die right after its `writes`th write from now.
    pub fn crash_after(&self, writes: i64) {
        self.left.store(writes, Ordering::Relaxed);
    }

    pub fn wrote(&self, method: &Method, what: &str, now: Duration, is_done: bool) {
        let mut writes = self.writes.lock().unwrap();
        let entry = writes.entry(format!("{method} {what}")).or_default();
        entry.0 += 1;
        entry.1 = now;
        drop(writes);
        if is_done && self.left.load(Ordering::Relaxed) > 0 && self.left.fetch_sub(1, Ordering::Relaxed) == 1
        {
            self.crash();
        }
    }

    /// Begins a write of an object of the kind; the write is under way until the returned value is dropped.
    pub fn begin(self: &Arc<Self>, kind: Option<Kind>) -> UnderWay {
        if let Some(kind) = kind {
            let mut under_way = self.under_way.lock().unwrap();
            let (now, most) = under_way.entry(kind).or_default();
            *now += 1;
            *most = (*most).max(*now);
        }
        UnderWay {
            operator: self.clone(),
            kind,
        }
    }

    /// Returns how many writes of a kind were under way at the same time, at most.
    pub fn most_under_way(&self, kind: Kind) -> usize {
        let under_way = self.under_way.lock().unwrap();
        under_way.get(&kind).map_or(0, |(_, most)| *most)
    }

    /// Returns how many writes of a kind are under way.
    pub fn under_way(&self, kind: Kind) -> usize {
        let under_way = self.under_way.lock().unwrap();
        under_way.get(&kind).map_or(0, |(now, _)| *now)
    }

    /// Makes the watches of exactly these kinds bring nothing from now on.
    pub fn deafen(&self, kinds: impl IntoIterator<Item = Kind>) {
        *self.deaf.lock().unwrap() = kinds.into_iter().collect();
    }

    /// Waits until the watches of this kind bring everything that happened.
    pub async fn hears(&self, kind: Kind) {
        while self.deaf.lock().unwrap().contains(&kind) {
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Waits until ends of streams reach the operator.
    pub async fn hears_ends(&self) {
        while self.misses_ends.load(Ordering::Relaxed) {
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Returns the operator's writes after a point in time.
    pub fn writes_since(&self, since: Duration) -> Vec<String> {
        let writes = self.writes.lock().unwrap();
        let late = writes.iter().filter(|(_, (_, last))| *last > since);
        late.map(|(what, (times, last))| format!("{what} ({times} times, last at {:.1})", last.as_secs_f64()))
            .collect()
    }
}

/// Starts an operator with the next epoch.
pub fn start(simulation: &Arc<Simulation>) -> Arc<Operator> {
    let operator = {
        let state = &mut *simulation.lock();
        state.epoch += 1;
        let operator = Arc::new(Operator {
            id: format!("operator{}", state.epoch),
            epoch: state.epoch,
            deaths: Signal::default(),
            left: AtomicI64::new(-1),
            hub: OnceLock::new(),
            deaf: Mutex::default(),
            is_full: AtomicBool::new(false),
            misses_ends: AtomicBool::new(false),
            writes: Mutex::default(),
            reads: Mutex::default(),
            under_way: Mutex::default(),
        });
        state.operators.push(operator.clone());
        state.note(|| format!("{} starts", operator.id));
        operator
    };
    tokio::spawn(life(simulation.clone(), operator.clone()));
    operator
}

async fn life(simulation: Arc<Simulation>, operator: Arc<Operator>) {
    let connection = Connection {
        simulation: simulation.clone(),
        operator: operator.clone(),
    };
    let client = Client::new(connection, "default");
    let options = run::Options {
        epoch: operator.epoch,
        vacancy: Duration::ZERO,
        refused: RefusedRanges::new(
            &["10.96.0.0/12".parse().unwrap()],
            &["192.168.0.0/16".parse().unwrap()],
        )
        .unwrap(),
        external_ranges: Vec::new(),
        service_ranges: vec!["10.96.0.0/12".parse().unwrap()],
        underlay_ranges: vec!["192.168.0.0/16".parse().unwrap()],
        default_range: DEFAULT_RANGE.parse().unwrap(),
        claim_rest: Duration::from_secs(30),
        node_port_lease: Duration::from_mins(10),
        cluster_dns: Some(ClusterDns::new(CLUSTER_DNS.into())),
        cluster_dns_service: USUAL_DNS_SERVICE.parse().unwrap(),
    };
    let work = async {
        let mut tasks = JoinSet::new();
        let hub = run::start(client.clone(), options, &mut tasks).await;
        let _ = operator.hub.set(hub);
        simulation.lock().note(|| format!("{} leads", operator.id));
        let has_default = simulation.lock().faults.has_default;
        while has_default && defaults::ensure(&client, DEFAULT_RANGE).await.is_err() {
            tokio::time::sleep(Duration::from_secs(2)).await;
        }
        if tasks.join_next().await.is_some() {
            simulation.lock().violation("a watch or controller ended".into());
        }
    };
    tokio::select! {
        biased;
        () = operator.died() => {}
        () = work => {}
    }
    operator.crash();
    let state = &mut *simulation.lock();
    state.note(|| format!("{} is dead", operator.id));
}
