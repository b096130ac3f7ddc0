//! Checks of load balancers' backends: which of them this droplet makes, when a backend's state changes, and what the
//! operator is told.
//!
//! Invariant: a droplet checks only its own endpoints, and a VPC's checks leave room for those of the others. Each
//! check has at most one connection at a time. However often a backend's answers alternate, the operator is told of it
//! at most twice in [`PASS_DELAY`].

pub mod probe;

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use thuban_api::identifiers::{Vni, mapped};
use thuban_proto::MAX_CHECKS;
use thuban_proto::transit::{CheckFailure, CheckState, Checked};
use thuban_rows::HealthCheck;
use tokio::time::Instant;

use crate::program::Program;
use probe::Failure;

/// The most checks of one VPC's backends.
const MAX_CHECKS_OF_VPC: usize = MAX_CHECKS / 4;
/// How long the operator is told that a backend fails, at least. A failure is told at once.
const PASS_DELAY: Duration = Duration::from_secs(10);

/// A backend of a front, whose check counts for this front alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CheckKey {
    pub vni: Vni,
    pub front: IpAddr,
    pub backend: IpAddr,
}

/// What is known of a backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BackendState {
    Passing,
    /// With the failure by which it was judged.
    Failing(Failure),
}

/// Returns the checks that fronts ask of a droplet. `here`: its underlay address.
pub fn wanted(program: &Program, here: Ipv4Addr) -> Vec<(CheckKey, HealthCheck)> {
    let mut all = Vec::new();
    for front in program.fronts() {
        let Some(check) = &front.check else { continue };
        for (backend, droplet) in front.ports.iter().flat_map(|port| &port.backends) {
            if droplet.0 == here && program.has_local(front.vni, backend.address) {
                let key = CheckKey {
                    vni: front.vni,
                    front: front.address,
                    backend: backend.address,
                };
                all.push((key, check.clone()));
            }
        }
    }
    all
}

/// Returns the checks that are made, and how many are left out. The more checks a VPC has, the later come those beyond
/// the others' number.
pub fn choose(wanted: Vec<(CheckKey, HealthCheck)>) -> (BTreeMap<CheckKey, HealthCheck>, usize) {
    // A backend may be one of several ports.
    let wanted: BTreeMap<CheckKey, HealthCheck> = wanted.into_iter().collect();
    let all = wanted.len();
    let mut counts: BTreeMap<Vni, usize> = BTreeMap::new();
    let ranked = wanted.into_iter().map(|(key, check)| {
        let count = counts.entry(key.vni).or_default();
        *count += 1;
        (*count, key, check)
    });
    let mut ranked: Vec<_> = ranked.filter(|(rank, ..)| *rank <= MAX_CHECKS_OF_VPC).collect();
    ranked.sort_by_key(|(rank, key, _)| (*rank, *key));
    ranked.truncate(MAX_CHECKS);
    let left_out = all - ranked.len();
    let chosen = ranked.into_iter().map(|(_, key, check)| (key, check));
    (chosen.collect(), left_out)
}

/// The results of a backend's last checks.
#[derive(Debug, Default)]
pub struct Judge {
    passing: Option<bool>,
    passed: u32,
    failed: u32,
}

impl Judge {
    /// Notes a result. Returns the backend's state if it is another one than before. Until there were enough results in
    /// a row it has none.
    pub fn note(&mut self, result: Result<(), Failure>, check: &HealthCheck) -> Option<BackendState> {
        let (state, in_a_row, needed) = match result {
            Ok(()) => {
                self.failed = 0;
                self.passed = self.passed.saturating_add(1);
                (BackendState::Passing, self.passed, check.rise)
            }
            Err(failure) => {
                self.passed = 0;
                self.failed = self.failed.saturating_add(1);
                (BackendState::Failing(failure), self.failed, check.fall)
            }
        };
        let is_news = in_a_row >= needed && self.passing != Some(result.is_ok());
        is_news.then(|| {
            self.passing = Some(result.is_ok());
            state
        })
    }
}

/// A backend's state as the operator is told it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Told {
    pub state: BackendState,
    /// When it was this state for the first time.
    since: Instant,
}

/// Returns the states as they are to be told, from those that were to be told before and those that checks have.
pub fn settle(
    before: &BTreeMap<CheckKey, Told>,
    found: &BTreeMap<CheckKey, BackendState>,
    now: Instant,
) -> BTreeMap<CheckKey, Told> {
    let settled = found.iter().map(|(key, state)| {
        let told = match (before.get(key), state) {
            (Some(told), BackendState::Failing(_)) if told.state != BackendState::Passing => *told,
            (Some(told), BackendState::Passing)
                if told.state == BackendState::Passing || now.duration_since(told.since) < PASS_DELAY =>
            {
                *told
            }
            _ => Told {
                state: *state,
                since: now,
            },
        };
        (*key, told)
    });
    settled.collect()
}

/// Returns what is to be said of backends: all of them, or what is news since `said`. A backend that is no longer
/// checked has no state.
pub fn news(
    said: &BTreeMap<CheckKey, Told>,
    now: &BTreeMap<CheckKey, Told>,
    all: bool,
) -> Vec<(CheckKey, Option<BackendState>)> {
    let gone = said.keys().filter(|key| !now.contains_key(*key));
    let gone = gone.map(|key| (*key, None));
    let is_news = |(key, told): &(&CheckKey, &Told)| {
        let before = said.get(*key).map(|before| before.state);
        all || before != Some(told.state)
    };
    let known = now.iter().filter(is_news);
    gone.chain(known.map(|(key, told)| (*key, Some(told.state))))
        .collect()
}

/// Returns a backend's state in the operator's words.
pub fn checked(key: CheckKey, state: Option<BackendState>) -> Checked {
    let (state, failure) = match state {
        None => (CheckState::Unspecified, None),
        Some(BackendState::Passing) => (CheckState::Passing, None),
        Some(BackendState::Failing(failure)) => (CheckState::Failing, Some(failure)),
    };
    let (failure, status) = match failure {
        None => (CheckFailure::Unspecified, 0),
        Some(Failure::Refused) => (CheckFailure::Refused, 0),
        Some(Failure::Timeout) => (CheckFailure::Timeout, 0),
        Some(Failure::Unreachable) => (CheckFailure::Unreachable, 0),
        Some(Failure::NoHttp) => (CheckFailure::NoHttp, 0),
        Some(Failure::Status(status)) => (CheckFailure::Status, status),
    };
    Checked {
        vni: key.vni.get(),
        front: mapped(key.front).to_vec(),
        backend: mapped(key.backend).to_vec(),
        state: state.into(),
        failure: failure.into(),
        status: status.into(),
    }
}

#[cfg(test)]
mod tests {
    use thuban_rows::{Row, builders};

    use super::*;

    fn key(vni: u32, last: u16) -> CheckKey {
        let [high, low] = last.to_be_bytes();
        CheckKey {
            vni: builders::vni(vni),
            front: Ipv4Addr::new(203, 0, 113, 1).into(),
            backend: Ipv4Addr::new(10, 0, high, low).into(),
        }
    }

    #[test]
    fn own_endpoints_that_are_backends_are_checked() {
        let mut program = Program::default();
        let front = builders::front();
        let (backend, droplet) = front.ports[0].backends.first_key_value().unwrap();
        let (backend, here) = (backend.address, droplet.0);
        program.upsert(Row::Front(front.clone()));
        assert!(wanted(&program, here).is_empty(), "no endpoint has the address");
        let local = builders::local();
        assert_eq!(IpAddr::from(local.address), backend);
        program.upsert(Row::Local(local));
        let expected = CheckKey {
            vni: front.vni,
            front: front.address,
            backend,
        };
        assert_eq!(wanted(&program, here), [(expected, builders::health_check())]);
        assert!(wanted(&program, Ipv4Addr::new(172, 16, 9, 9)).is_empty());
        program.upsert(Row::Front(thuban_rows::Front { check: None, ..front }));
        assert!(wanted(&program, here).is_empty());
    }

    #[test]
    fn a_vpc_with_many_backends_leaves_room_for_the_others() {
        let check = builders::health_check();
        let of = |vni, count: u16| (0..count).map(move |last| key(vni, last));
        let with = |keys: Vec<CheckKey>| {
            let keys = keys.into_iter();
            keys.map(|key| (key, check.clone())).collect::<Vec<_>>()
        };
        let (chosen, left_out) = choose(with(of(1, 1000).chain(of(2, 3)).collect()));
        assert_eq!(
            (chosen.len(), left_out),
            (MAX_CHECKS_OF_VPC + 3, 1000 - MAX_CHECKS_OF_VPC)
        );
        let crowd = (1..=8).flat_map(|vni| of(vni, 1000)).chain(of(9, 5));
        let (chosen, left_out) = choose(with(crowd.collect()));
        assert_eq!((chosen.len(), left_out), (MAX_CHECKS, 8005 - MAX_CHECKS));
        let number = |vni| chosen.keys().filter(|key| key.vni == builders::vni(vni)).count();
        assert_eq!(number(9), 5);
        assert!(
            (1..=8).all(|vni| number(vni) >= 63),
            "{:?}",
            (1..=8).map(number).collect::<Vec<_>>()
        );
        let (chosen, left_out) = choose(with(vec![key(1, 1), key(1, 1)]));
        assert_eq!((chosen.len(), left_out), (1, 0), "two ports of one backend");
    }

    #[test]
    fn a_state_changes_after_so_many_results_in_a_row() {
        let check = HealthCheck {
            rise: 2,
            fall: 3,
            ..builders::health_check()
        };
        let mut judge = Judge::default();
        let mut note = |results: &[bool]| {
            let results = results
                .iter()
                .map(|passed| passed.then_some(()).ok_or(Failure::Timeout));
            results
                .filter_map(|result| judge.note(result, &check))
                .collect::<Vec<_>>()
        };
        let failing = BackendState::Failing(Failure::Timeout);
        assert_eq!(note(&[true]), [], "it may be just starting");
        assert_eq!(note(&[true]), [BackendState::Passing]);
        assert_eq!(note(&[true, false, false, true, false, false]), []);
        assert_eq!(note(&[false]), [failing]);
        assert_eq!(note(&[false, true, false, false, false, true]), []);
        assert_eq!(note(&[true]), [BackendState::Passing]);
        let mut judge = Judge::default();
        let results = [
            Failure::Timeout,
            Failure::Timeout,
            Failure::Refused,
            Failure::Timeout,
        ];
        let states: Vec<_> = results
            .iter()
            .filter_map(|failure| judge.note(Err(*failure), &check))
            .collect();
        assert_eq!(
            states,
            [BackendState::Failing(Failure::Refused)],
            "it never passed"
        );
    }

    #[test]
    fn news_are_what_changed_and_what_is_no_longer_checked() {
        let failing = BackendState::Failing(Failure::Status(503));
        let passing = BackendState::Passing;
        let told = |states: &[(CheckKey, BackendState)]| {
            let found = states.iter().copied().collect();
            settle(&BTreeMap::new(), &found, Instant::now())
        };
        let said = told(&[(key(1, 1), passing), (key(1, 2), passing), (key(1, 3), failing)]);
        let now = told(&[(key(1, 1), passing), (key(1, 2), failing), (key(1, 4), passing)]);
        let changed = [
            (key(1, 3), None),
            (key(1, 2), Some(failing)),
            (key(1, 4), Some(passing)),
        ];
        assert_eq!(news(&said, &now, false), changed);
        assert_eq!(news(&said, &now, true).len(), 4);
        assert_eq!(news(&now, &now, false), []);
        let told = checked(key(1, 2), Some(failing));
        assert_eq!(
            (told.state(), told.failure(), told.status),
            (CheckState::Failing, CheckFailure::Status, 503)
        );
        assert_eq!(checked(key(1, 2), None).state(), CheckState::Unspecified);
    }

    #[test]
    fn a_backend_that_alternates_is_told_twice_in_a_while() {
        let start = Instant::now();
        let mut said = BTreeMap::new();
        let mut told = Vec::new();
        for second in 0..30 {
            let failing = BackendState::Failing(Failure::Status(500 + second % 7));
            let passing = BackendState::Passing;
            let found = [(key(1, 1), if second % 2 == 1 { failing } else { passing })].into();
            let at = start + Duration::from_secs(u64::from(second));
            let now = settle(&said, &found, at);
            let changed = news(&said, &now, false).into_iter();
            told.extend(changed.map(|(_, state)| (second, state == Some(passing))));
            said = now;
        }
        let expected = [
            (0, true),
            (1, false),
            (12, true),
            (13, false),
            (24, true),
            (25, false),
        ];
        assert_eq!(told, expected, "a failure at once, and what passes later");
        let found = [(key(1, 1), BackendState::Passing)].into();
        let end = settle(&said, &found, start + Duration::from_secs(36));
        assert_eq!(
            news(&said, &end, false),
            [(key(1, 1), Some(BackendState::Passing))]
        );
    }
}
