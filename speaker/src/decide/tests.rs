#![allow(clippy::unwrap_used)]

use super::*;

fn ip(last: u8) -> IpAddr {
    IpAddr::from([192, 0, 2, last])
}

fn at(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn set(addresses: &[u8]) -> BTreeSet<IpAddr> {
    addresses.iter().map(|last| ip(*last)).collect()
}

fn route(last: u8, remaining_seconds: u64) -> Route {
    Route {
        uid: format!("uid-{last}"),
        address: ip(last),
        remaining_seconds: Some(remaining_seconds),
        l2: false,
    }
}

/// Carries out all steps, and returns them.
fn carry_out(state: &mut State, now: Duration) -> Vec<Step> {
    let steps = state.steps(now);
    for step in &steps {
        assert!(state.begin(step, now));
        state.done(step);
    }
    steps
}

/// Returns a state that has announced addresses until 160 s, at 100 s.
fn announcing(addresses: &[u8]) -> State {
    let mut state = State::new(BTreeMap::new(), at(100));
    state.adopt(BTreeSet::new());
    state.served(set(addresses), at(100));
    state.answered(addresses.iter().map(|last| route(*last, 60)).collect(), at(100));
    carry_out(&mut state, at(100));
    state
}

#[test]
fn a_granted_and_served_route_is_announced_once() {
    let mut state = State::new(BTreeMap::new(), at(100));
    state.adopt(BTreeSet::new());
    state.answered(vec![route(1, 60), route(2, 60)], at(100));
    assert_eq!(state.steps(at(100)), [], "transitd has not said anything");
    state.served(set(&[1, 3]), at(100));
    assert_eq!(carry_out(&mut state, at(101)), [Step::Add(ip(1), Form::Plain)]);
    assert_eq!(state.steps(at(101)), []);
    assert_eq!(state.report(at(200))[0].uid, "uid-1");
}

#[test]
fn a_route_is_withdrawn_at_its_deadline() {
    let mut state = announcing(&[1]);
    state.served(set(&[1]), at(159));
    assert_eq!(state.steps(at(159)), []);
    assert_eq!(state.next(at(159)), Some(at(160)));
    assert_eq!(carry_out(&mut state, at(160)), [Step::Delete(ip(1))]);
    assert_eq!(state.report(at(200)), []);
}

#[test]
fn time_counts_from_when_the_request_was_sent() {
    let mut state = announcing(&[1]);
    state.answered(vec![route(1, 60)], at(110));
    state.served(set(&[1]), at(169));
    assert!(state.wanted(ip(1), at(169)).is_some());
    assert!(state.wanted(ip(1), at(170)).is_none());
}

#[test]
fn an_address_of_another_balancer_is_reported_as_that() {
    let mut state = announcing(&[1]);
    let uid = "another".to_owned();
    state.answered(vec![Route { uid, ..route(1, 60) }], at(101));
    assert_eq!(carry_out(&mut state, at(101)), [Step::Add(ip(1), Form::Plain)]);
    assert_eq!(state.report(at(101))[0].uid, "another");
}

#[test]
fn what_an_answer_leaves_out_is_withdrawn() {
    let mut state = announcing(&[1, 2]);
    state.answered(vec![route(2, 60)], at(101));
    assert_eq!(carry_out(&mut state, at(101)), [Step::Delete(ip(1))]);
}

#[test]
fn what_transitd_leaves_out_is_withdrawn() {
    let mut state = announcing(&[1, 2]);
    state.served(set(&[2]), at(101));
    assert_eq!(carry_out(&mut state, at(101)), [Step::Delete(ip(1))]);
}

#[test]
fn a_silent_transitd_lengthens_and_withdraws_nothing() {
    let mut state = announcing(&[1]);
    assert_eq!(state.next(at(100)), Some(at(103)));
    assert_eq!(state.steps(at(102)), []);
    assert_eq!(
        carry_out(&mut state, at(103)),
        [Step::Add(ip(1), Form::Lengthened)]
    );
    assert_eq!(state.count(Form::Lengthened), 1);
    state.served(set(&[1]), at(110));
    assert_eq!(carry_out(&mut state, at(110)), [Step::Add(ip(1), Form::Plain)]);
}

#[test]
fn a_request_without_answer_is_reported_and_repeated() {
    let mut state = announcing(&[]);
    state.served(set(&[1]), at(101));
    state.answered(vec![route(1, 60)], at(101));
    let add = Step::Add(ip(1), Form::Plain);
    assert!(state.begin(&add, at(101)));
    assert_eq!(state.report(at(200)).len(), 1);
    assert_eq!(carry_out(&mut state, at(101)), [add]);
    state.answered(vec![], at(102));
    let delete = Step::Delete(ip(1));
    assert!(state.begin(&delete, at(102)));
    assert_eq!(state.report(at(200)).len(), 1);
    // Granted again: the lost request may have withdrawn the route.
    state.answered(vec![route(1, 60)], at(102));
    assert_eq!(state.steps(at(102)), [Step::Add(ip(1), Form::Plain)]);
    state.answered(vec![], at(102));
    assert_eq!(carry_out(&mut state, at(102)), [delete]);
    assert_eq!(state.report(at(200)), []);
}

#[test]
fn a_step_that_came_too_late_is_not_begun() {
    let mut state = announcing(&[]);
    state.served(set(&[1]), at(101));
    state.answered(vec![route(1, 1)], at(101));
    assert!(!state.begin(&state.steps(at(101))[0].clone(), at(102)));
    assert_eq!(state.report(at(200)), []);
}

#[test]
fn adopted_routes_stay_until_an_answer_or_30_seconds() {
    let adopting = |stored| {
        let mut state = State::new(stored, at(100));
        state.adopt(set(&[1, 2]));
        state
    };
    let mut state = adopting(BTreeMap::new());
    assert_eq!(state.report(at(200)).len(), 2);
    assert!(
        state
            .steps(at(102))
            .iter()
            .all(|step| matches!(step, Step::Add(_, Form::Plain)))
    );
    assert_eq!(
        carry_out(&mut state, at(130)),
        [Step::Delete(ip(1)), Step::Delete(ip(2))]
    );

    let mut state = adopting(BTreeMap::new());
    state.answered(vec![route(2, 60)], at(101));
    assert_eq!(
        carry_out(&mut state, at(101)),
        [Step::Delete(ip(1)), Step::Add(ip(2), Form::Plain)]
    );
    assert_eq!(state.report(at(200))[0].uid, "uid-2");

    let grant = |deadline| Grant {
        uid: "stored".to_owned(),
        deadline: at(deadline),
    };
    let mut state = adopting(BTreeMap::from([(ip(1), grant(90)), (ip(2), grant(140))]));
    assert_eq!(carry_out(&mut state, at(102))[0], Step::Delete(ip(1)));
    assert_eq!(state.report(at(200))[0].uid, "stored");
    assert!(state.wanted(ip(2), at(139)).is_some() && state.wanted(ip(2), at(140)).is_none());
}

#[test]
fn a_gobgpd_that_restarted_gets_its_routes_again() {
    let mut state = announcing(&[1, 2]);
    state.answered(vec![route(2, 60)], at(101));
    state.emptied(at(111));
    assert_eq!(state.report(at(110)).len(), 2, "routers may have them");
    assert_eq!(carry_out(&mut state, at(101)), [Step::Add(ip(2), Form::Plain)]);
    assert_eq!(state.report(at(110)).len(), 2);
    assert_eq!(state.report(at(111)).len(), 1);
}

#[test]
fn a_listed_route_that_is_not_granted_is_withdrawn() {
    let mut state = announcing(&[1]);
    state.listed(&set(&[7]));
    assert_eq!(state.report(at(200)).len(), 2);
    assert_eq!(
        carry_out(&mut state, at(101)),
        [Step::Delete(ip(7)), Step::Add(ip(1), Form::Plain)]
    );
}

#[test]
fn what_a_request_leaves_out_needs_another_answer() {
    let mut state = announcing(&[1, 2]);
    state.served(set(&[2]), at(101));
    carry_out(&mut state, at(101));
    let (report, renounced) = state.renounce(at(102));
    assert_eq!((report.len(), renounced.len()), (1, 1));
    state.served(set(&[1, 2]), at(103));
    assert_eq!(state.steps(at(103)), [], "1 was renounced");
    let mut unheard = announcing(&[1]);
    unheard.served(set(&[]), at(101));
    carry_out(&mut unheard, at(101));
    let (_, renounced) = unheard.renounce(at(102));
    unheard.take_back(renounced);
    unheard.served(set(&[1]), at(103));
    assert_eq!(
        unheard.steps(at(103)),
        [Step::Add(ip(1), Form::Plain)],
        "nobody heard it"
    );
    state.answered(vec![route(1, 60), route(2, 60)], at(104));
    assert_eq!(carry_out(&mut state, at(104)), [Step::Add(ip(1), Form::Plain)]);
}

#[test]
fn an_answer_without_a_time_leaves_the_deadline() {
    let mut state = announcing(&[1]);
    let kept = |last: u8, uid: &str| Route {
        uid: uid.to_owned(),
        address: ip(last),
        remaining_seconds: None,
        l2: false,
    };
    state.answered(vec![kept(1, "uid-1"), kept(2, "uid-2")], at(130));
    state.served(set(&[1, 2]), at(131));
    assert_eq!(state.steps(at(131)), [], "1 stays, and 2 was never granted");
    state.served(set(&[1]), at(160));
    assert_eq!(state.steps(at(160)), [Step::Delete(ip(1))]);
    let mut state = announcing(&[1]);
    state.answered(vec![kept(1, "another")], at(130));
    assert_eq!(state.steps(at(131)), [Step::Delete(ip(1))]);
}

/// What a test knows by itself, from the events alone.
struct Oracle {
    now: Duration,
    deadlines: BTreeMap<IpAddr, Duration>,
    served: BTreeSet<IpAddr>,
    heard: Duration,
    gobgpd: BTreeMap<IpAddr, Form>,
}

impl Oracle {
    fn apply(&mut self, step: &Step) {
        match *step {
            Step::Add(address, form) => drop(self.gobgpd.insert(address, form)),
            Step::Delete(address) => drop(self.gobgpd.remove(&address)),
        }
    }

    /// Carries out steps: some get lost, and some answers do. Returns whether all went well.
    fn carry_out(&mut self, state: &mut State, faults: &mut fastrand::Rng) -> bool {
        for step in state.steps(self.now) {
            if faults.u8(..10) == 0 {
                self.now += Duration::from_millis(faults.u64(..3000));
            }
            if !state.begin(&step, self.now) {
                return false;
            }
            match faults.u8(..8) {
                0 => return false,
                1 => {
                    self.apply(&step);
                    return false;
                }
                _ => self.apply(&step),
            }
            state.done(&step);
        }
        true
    }

    fn check(&self, state: &State, seed: u64) {
        for (address, form) in &self.gobgpd {
            let deadline = self.deadlines.get(address);
            assert!(
                deadline.is_some_and(|deadline| self.now < *deadline),
                "seed {seed}: {address} is not granted"
            );
            assert!(
                self.served.contains(address),
                "seed {seed}: {address} is not served"
            );
            let is_silent = self.now.saturating_sub(self.heard) >= SILENCE;
            assert_eq!(*form == Form::Lengthened, is_silent, "seed {seed}: {address}");
        }
        for (address, deadline) in &self.deadlines {
            let is_wanted = self.now < *deadline && self.served.contains(address);
            assert_eq!(
                self.gobgpd.contains_key(address),
                is_wanted,
                "seed {seed}: {address}"
            );
        }
        assert_eq!(state.report(self.now).len(), self.gobgpd.len(), "seed {seed}");
    }
}

#[test]
fn random_events_break_no_rule() {
    for seed in 0..2000 {
        let mut random = fastrand::Rng::with_seed(seed);
        let some = |random: &mut fastrand::Rng| (0..6).filter(|_| random.bool()).collect::<Vec<u8>>();
        let start = at(1000);
        let (first, mut state) = (some(&mut random), State::new(BTreeMap::new(), start));
        state.adopt(set(&first));
        let mut oracle = Oracle {
            now: start,
            deadlines: set(&first)
                .into_iter()
                .map(|address| (address, start + ADOPTED))
                .collect(),
            served: set(&first),
            heard: start,
            gobgpd: set(&first)
                .into_iter()
                .map(|address| (address, Form::Plain))
                .collect(),
        };
        for _ in 0..60 {
            match random.u8(..6) {
                0 => {
                    let sent = oracle.now.saturating_sub(at(random.u64(..5)));
                    let routes: Vec<_> = some(&mut random)
                        .into_iter()
                        .map(|last| route(last, random.u64(..20)))
                        .collect();
                    let deadline =
                        |route: &Route| (route.address, sent + at(route.remaining_seconds.unwrap()));
                    oracle.deadlines = routes.iter().map(deadline).collect();
                    state.answered(routes, sent);
                }
                1 => {
                    oracle.served = set(&some(&mut random));
                    oracle.heard = oracle.now;
                    state.served(oracle.served.clone(), oracle.now);
                }
                2 => {
                    oracle.gobgpd.clear();
                    state.emptied(oracle.now);
                }
                3 => state.listed(&oracle.gobgpd.keys().copied().collect()),
                _ => oracle.now += Duration::from_millis(random.u64(..4000)),
            }
            let is_done = oracle.carry_out(&mut state, &mut random);
            let report: BTreeSet<_> = state
                .report(oracle.now)
                .iter()
                .map(|announced| announced.address)
                .collect();
            assert!(
                oracle.gobgpd.keys().all(|address| report.contains(address)),
                "seed {seed}: not reported"
            );
            // Time may have passed during the steps.
            if is_done && state.steps(oracle.now).is_empty() {
                oracle.check(&state, seed);
            }
        }
    }
}

#[test]
fn what_is_granted_can_be_reported_too() {
    let mut state = announcing(&[1]);
    state.answered(vec![route(1, 60), route(2, 60)], at(101));
    let uids = |report: Vec<Announced>| -> Vec<String> { report.into_iter().map(|said| said.uid).collect() };
    assert_eq!(uids(state.report(at(101))), ["uid-1"]);
    assert_eq!(uids(state.report_granted(at(101))), ["uid-1", "uid-2"]);
}
