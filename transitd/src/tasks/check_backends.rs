//! Checks this droplet's backends of load balancers, and tells the operator which of them fail.
//!
//! The node reaches its pods as kubelet does for its probes. Nobody else could check them: pods of several VPCs may
//! have one address. While the operator is away, the checks go on. It is told all by the Hello of its next stream, and
//! once more behind it, because an operator of an earlier version does not know that field of Hello.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use thuban_proto::MAX_CHECKS;
use thuban_proto::transit::{Checks, droplet_message::Message};
use thuban_rows::HealthCheck;
use tokio::task::JoinHandle;
use tokio::time::{Instant, MissedTickBehavior, interval, interval_at};
use tracing::{debug, warn};

use crate::checks::probe::probe;
use crate::checks::{BackendState, CheckKey, Judge, Told, checked, choose, news, settle, wanted};
use crate::node::Node;

/// How often is looked what is to be checked, and what is to be told.
const LOOK: Duration = Duration::from_secs(1);
/// How often all states are told, because the operator forgets those of backends that were away for a moment.
const TELL_ALL: Duration = Duration::from_secs(30);
/// The longest time of a check with a long interval.
const MAX_TIME: Duration = Duration::from_secs(5);

/// The states of the backends that have one.
type States = Arc<Mutex<BTreeMap<CheckKey, BackendState>>>;

fn lock(states: &States) -> MutexGuard<'_, BTreeMap<CheckKey, BackendState>> {
    states.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A check that is made again and again, until this is dropped.
#[derive(Debug)]
struct Running {
    check: HealthCheck,
    task: JoinHandle<()>,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// What the operator was told last, and on which stream.
#[derive(Debug)]
struct Report {
    states: BTreeMap<CheckKey, Told>,
    stream: u64,
    all: Instant,
}

/// Runs until the daemon ends.
pub async fn run(node: Arc<Node>) {
    let mut programs = node.watch();
    programs.mark_changed();
    let mut look = interval(LOOK);
    look.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut running = BTreeMap::new();
    let states = States::default();
    let mut left_out = 0;
    let mut told = Report {
        states: BTreeMap::new(),
        stream: 0,
        all: Instant::now(),
    };
    loop {
        look.tick().await;
        if programs.has_changed().unwrap_or_default() {
            programs.mark_unchanged();
            let before = std::mem::replace(&mut left_out, follow(&node, &mut running, &states));
            if before == 0 && left_out > 0 {
                warn!(
                    left_out,
                    "too many backends are to be checked: some count as passing"
                );
            }
        }
        tell(&node, &states, &mut told);
    }
}

/// Makes the running checks those that the program asks for. Returns how many are left out.
fn follow(node: &Arc<Node>, running: &mut BTreeMap<CheckKey, Running>, states: &States) -> usize {
    let wanted = wanted(&node.state().program, node.uplink.address);
    let (chosen, left_out) = choose(wanted);
    running.retain(|key, running| chosen.get(key) == Some(&running.check));
    for (key, check) in chosen {
        running.entry(key).or_insert_with(|| Running {
            task: tokio::spawn(keep_checking(
                Arc::clone(node),
                key,
                check.clone(),
                Arc::clone(states),
            )),
            check,
        });
    }
    // A check that has changed keeps the state until it has another one.
    lock(states).retain(|key, _| running.contains_key(key));
    left_out
}

async fn keep_checking(node: Arc<Node>, key: CheckKey, check: HealthCheck, states: States) {
    let period = Duration::from_millis(check.interval_ms.into());
    let backend = SocketAddr::new(key.backend, check.port);
    // Checks that come with one row are spread over the period.
    let phase = RandomState::new().hash_one(key) % u64::from(check.interval_ms.max(1));
    let mut rounds = interval_at(Instant::now() + Duration::from_millis(phase), period);
    rounds.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut judge = Judge::default();
    loop {
        rounds.tick().await;
        let interface = node.state().interface_to(key.vni, key.backend).map(str::to_owned);
        let Some(interface) = interface else {
            continue;
        };
        let result = probe(backend, Some(&interface), &check.path, period.min(MAX_TIME)).await;
        if let Some(state) = judge.note(result, &check) {
            // Tenants decide how often that is.
            debug!(vni = key.vni.get(), front = %key.front, %backend, ?state, "a backend's check");
            lock(&states).insert(key, state);
        }
    }
}

/// Tells the operator what is news to it. Without a stream it waits: the next Hello tells all.
fn tell(node: &Node, states: &States, told: &mut Report) {
    let found = lock(states).clone();
    let mut state = node.state();
    let now = settle(&state.checks, &found, Instant::now());
    state.checks.clone_from(&now);
    if state.outbox.is_none() {
        return;
    }
    let all = told.stream != state.streams || told.all.elapsed() >= TELL_ALL;
    if all {
        (told.stream, told.all) = (state.streams, Instant::now());
    }
    let entries: Vec<_> = news(&told.states, &now, all)
        .into_iter()
        .map(|(key, state)| checked(key, state))
        .collect();
    for entries in entries.chunks(MAX_CHECKS) {
        let checked = entries.to_vec();
        state.send(Message::Checks(Checks { checked }));
    }
    told.states = now;
}
