//! Everything of one schedule under one lock: objects, droplets, operators, faults, what went wrong.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use bytes::Bytes;
use http::Method;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::droplet::Droplet;
use crate::faults::Faults;
use crate::invariants;
use crate::kind::Kind;
use crate::operators::Operator;
use crate::random::Random;
use crate::signal::Signal;
use crate::store::{Backup, Store};

pub struct State {
    pub random: Random,
    pub faults: Faults,
    pub store: Store,
    pub droplets: BTreeMap<String, Droplet>,
    pub operators: Vec<Arc<Operator>>,
    pub epoch: u64,
    /// The time when more than one operator was last alive.
    pub crowded: Option<Duration>,
    /// The operator that makes the current write.
    pub writer: Option<u64>,
    /// The current write is done long after its client gave it up.
    pub is_late: bool,
    /// The holders whose Endpoints have ever been Provisioned: UIDs of pods, and names of nodes.
    pub served: BTreeSet<String>,
    /// The pods whose endpoints each droplet has been told are ready, with their addresses.
    pub told_ready: BTreeMap<String, BTreeSet<(String, IpAddr)>>,
    pub violations: Vec<String>,
    /// Pages of lists that are still to be fetched.
    pub pages: BTreeMap<String, Vec<Bytes>>,
    pub next_page: u64,
    /// Namespaces whose quota has no room for another Endpoint of the operator's.
    pub full: BTreeSet<String>,
    /// Warnings that people were told of: kind, name, reason.
    pub told: BTreeSet<(String, String, String)>,
    /// Endpoints whose finalizer was removed by somebody who must not: their end says nothing about the operator.
    pub stripped: BTreeSet<String>,
    /// The times when Endpoints were gone, by the owner of their claims and address.
    pub ends: BTreeMap<[String; 2], Duration>,
    /// The kinds that the API server does not have.
    pub unserved: BTreeSet<Kind>,
    /// The garbage collector does nothing.
    pub is_collector_away: bool,
    /// The next write of a status of this kind is done so much later, long after its client gave it up.
    pub late_status: Option<(Kind, Duration)>,
    /// Writes of this method and kind get no answer for now.
    pub stalled: Option<(Method, Kind)>,
    /// The last backup of the objects.
    pub backup: Option<Backup>,
    /// Faults have stopped.
    pub is_fair: bool,
    pub trace: Vec<String>,
    started: Instant,
    /// The last event of each kind.
    kinds: BTreeMap<Kind, Arc<Signal>>,
}

pub struct Simulation {
    state: Mutex<State>,
    /// The signal that something happened that kubelets may wait for.
    pub stirred: Signal,
    /// The signal that something happened that may concern the garbage collector.
    pub collect: Notify,
}

impl Simulation {
    pub fn new(seed: u64) -> Arc<Self> {
        let mut random = Random::new(seed);
        let faults = Faults::random(&mut random);
        let kinds = Kind::ALL.into_iter().map(|kind| (kind, Arc::default()));
        let state = State {
            random,
            faults,
            store: Store::default(),
            droplets: BTreeMap::new(),
            operators: Vec::new(),
            epoch: 0,
            crowded: None,
            writer: None,
            is_late: false,
            served: BTreeSet::new(),
            told_ready: BTreeMap::new(),
            violations: Vec::new(),
            pages: BTreeMap::new(),
            next_page: 0,
            full: BTreeSet::new(),
            told: BTreeSet::new(),
            stripped: BTreeSet::new(),
            ends: BTreeMap::new(),
            unserved: [Kind::ClusterNetworkPolicy].into(),
            is_collector_away: false,
            late_status: None,
            stalled: None,
            backup: None,
            is_fair: false,
            trace: Vec::new(),
            started: Instant::now(),
            kinds: kinds.collect(),
        };
        Arc::new(Self {
            state: Mutex::new(state),
            stirred: Signal::default(),
            collect: Notify::new(),
        })
    }

    /// Changes the state. The consequences of a change of objects are done before anybody else sees the change.
    pub fn with<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let mut state = self.lock();
        state.store.seconds = state.started.elapsed().as_secs();
        if state.alive() > 1 {
            state.crowded = Some(state.elapsed());
        }
        let result = change(&mut state);
        let changes = state.store.take_changes();
        if !changes.is_empty() {
            for change in &changes {
                invariants::after_write(&mut state, change);
                let kind = change.name.0;
                let last = state.store.last_event(kind);
                state.kinds[&kind].set(last);
            }
            self.stir();
            self.collect.notify_one();
        }
        state.writer = None;
        state.is_late = false;
        result
    }

    pub fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    pub fn stir(&self) {
        self.stirred.set(self.stirred.get() + 1);
    }

    pub fn is_broken(&self) -> bool {
        !self.lock().violations.is_empty()
    }

    pub async fn pause(&self, from: u64, to: u64) {
        let time = self.lock().random.millis(from, to);
        tokio::time::sleep(time).await;
    }
}

impl State {
    pub fn last_event(&self, kind: Kind) -> Arc<Signal> {
        self.kinds[&kind].clone()
    }

    pub fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }

    pub fn note(&mut self, line: impl FnOnce() -> String) {
        let now = self.started.elapsed();
        self.trace.push(format!("{:>9.3} {}", now.as_secs_f64(), line()));
    }

    pub fn violation(&mut self, what: String) {
        self.note(|| format!("VIOLATION {what}"));
        if self.violations.len() < 5 {
            let now = self.elapsed().as_secs_f64();
            self.violations.push(format!("{now:.3} {what}"));
        }
    }

    pub fn take_trace(&mut self) -> Vec<String> {
        std::mem::take(&mut self.trace)
    }

    /// Yields the operators that are alive and have filled their caches.
    pub fn leaders(&self) -> impl Iterator<Item = &Arc<Operator>> {
        self.operators
            .iter()
            .filter(|operator| operator.is_alive() && operator.hub().is_some())
    }

    pub fn living(&self) -> impl Iterator<Item = &Arc<Operator>> {
        self.operators.iter().filter(|operator| operator.is_alive())
    }

    pub fn alive(&self) -> usize {
        self.living().count()
    }
}
