//! What the clients ask, and which answers are right. Pure.

use std::net::{IpAddr, SocketAddr};

use serde::Serialize;
use thuban_connectivity::{Outcome, Question, Request};

use super::manifests::SERVICE_PORT;
use super::plan::{ALONE, GUARDED, PORTS, Plan, SERVICE, Server, Side, TWINS};

/// How long somebody who must answer is asked, in milliseconds: rows and backends of new pods may be on their way.
const ANSWER_PATIENCE_MS: u64 = 15_000;
/// How long nobody may answer. Longer than it takes until a lost first packet is sent again.
const SILENCE_PATIENCE_MS: u64 = 4_000;

/// How many letters of an answer are shown.
const LONGEST_SHOWN: usize = 200;

/// What the clients need to know of the cluster.
#[derive(Clone, Debug)]
pub struct Facts {
    /// The Service `default/kubernetes`, which VPCs share; or why it is not known.
    pub kubernetes: Result<SocketAddr, String>,
    /// The API servers' own addresses, which are closed to tenants.
    pub api_servers: Vec<SocketAddr>,
    /// Cluster DNS; or why it is not asked.
    pub dns: Result<Dns, String>,
}

/// Cluster DNS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dns {
    pub server: SocketAddr,
    /// The domain of the cluster, such as `cluster.local`.
    pub domain: String,
}

/// Who may answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Expected {
    /// One of these.
    OneOf(Vec<String>),
    Nobody,
}

/// A question of a client, and the right answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Check {
    pub group: &'static str,
    pub side: Side,
    /// What is asked, for people.
    pub text: String,
    pub request: Request,
    pub expected: Expected,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    Ok,
    Fail,
    Skipped,
}

/// What a check found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    pub group: &'static str,
    /// What was asked.
    pub check: String,
    pub state: State,
    /// Who answered, what is wrong, or why it was not asked.
    pub message: String,
}

impl Finding {
    fn skipped(group: &'static str, check: &str, why: &str) -> Self {
        Self {
            group,
            check: check.to_owned(),
            state: State::Skipped,
            message: why.to_owned(),
        }
    }
}

/// Returns the checks of both clients, and what can't be checked in this cluster. `services` are the ClusterIPs of the
/// test's Services.
pub fn checks(plan: &Plan, facts: &Facts, services: [IpAddr; 2]) -> (Vec<Check>, Vec<Finding>) {
    let servers = plan.servers();
    let mut checks = Vec::new();
    let mut skipped = Vec::new();
    for side in Side::BOTH {
        let mut own = Asking {
            plan,
            side,
            services,
            checks: &mut checks,
        };
        own.ask_servers(&servers);
        own.ask_services();
        own.ask_dns(facts);
        own.ask_outside(facts);
    }
    if !plan.has_two_nodes() {
        let why = "needs two nodes";
        skipped.push(Finding::skipped("pairs", "pods of other nodes", why));
        skipped.push(Finding::skipped("isolation", "equal addresses", why));
    }
    if let Err(why) = &facts.dns {
        skipped.push(Finding::skipped("dns", "names of Services", why));
    }
    if let Err(why) = &facts.kubernetes {
        skipped.push(Finding::skipped("egress", "default/kubernetes", why));
    }
    if facts.api_servers.is_empty() {
        let why = "the addresses of the API servers are not known";
        skipped.push(Finding::skipped("egress", "API servers", why));
    }
    (checks, skipped)
}

/// Returns the questions of a VPC's client. The number of a question is the place of its check.
pub fn questions(checks: &[Check], side: Side) -> Vec<Question> {
    let own = checks.iter().enumerate().filter(|(_, check)| check.side == side);
    own.map(|(id, check)| Question {
        id,
        request: check.request.clone(),
        patience_ms: match check.expected {
            Expected::OneOf(_) => ANSWER_PATIENCE_MS,
            Expected::Nobody => SILENCE_PATIENCE_MS,
        },
    })
    .collect()
}

/// Says whether an answer is right.
pub fn judge(plan: &Plan, check: &Check, outcome: &Outcome) -> Finding {
    let other = format!("{}/", plan.namespace(check.side.other()));
    let (state, message) = match (&check.expected, outcome) {
        (Expected::OneOf(right), Outcome::Answered(name)) if right.contains(name) => {
            (State::Ok, answered(name))
        }
        (_, Outcome::Answered(name)) if name.starts_with(&other) => (
            State::Fail,
            format!("LEAK: {}, of the other VPC, answered", printable(name)),
        ),
        (Expected::OneOf(right), Outcome::Answered(name)) => (
            State::Fail,
            format!("{} in place of {}", answered(name), right.join(" or ")),
        ),
        (Expected::OneOf(_), Outcome::Failed(why)) => (State::Fail, printable(why)),
        (Expected::Nobody, Outcome::Answered(name)) => {
            (State::Fail, format!("{}, and nobody may", answered(name)))
        }
        (Expected::Nobody, Outcome::Failed(why)) => {
            (State::Ok, format!("nobody answers: {}", printable(why)))
        }
    };
    Finding {
        group: check.group,
        check: check.text.clone(),
        state,
        message,
    }
}

fn answered(name: &str) -> String {
    if name.is_empty() {
        "a connection was accepted".to_owned()
    } else {
        format!("{} answered", printable(name))
    }
}

/// Returns a text without what would move the cursor of a terminal. Whoever answers may be a stranger.
fn printable(text: &str) -> String {
    text.chars()
        .filter(|letter| !letter.is_control())
        .take(LONGEST_SHOWN)
        .collect()
}

/// Collects the checks of one client.
struct Asking<'a> {
    plan: &'a Plan,
    side: Side,
    services: [IpAddr; 2],
    checks: &'a mut Vec<Check>,
}

impl Asking<'_> {
    fn add(&mut self, group: &'static str, what: &str, request: Request, expected: Expected) {
        let by = match request {
            Request::Tcp(_) | Request::Connect(_) => " (TCP)",
            Request::Udp(_) => " (UDP)",
            Request::Dns { .. } => "",
        };
        self.checks.push(Check {
            group,
            side: self.side,
            text: format!("{} > {what}{by}", self.plan.namespace(self.side)),
            request,
            expected,
        });
    }

    /// Asks by TCP and by UDP.
    fn add_both(&mut self, group: &'static str, what: &str, server: SocketAddr, expected: &Expected) {
        self.add(group, what, Request::Tcp(server), expected.clone());
        self.add(group, what, Request::Udp(server), expected.clone());
    }

    /// Asks each server of the VPC for its name, at an address that the other VPC has as well if it is a twin. Nobody
    /// has the address of the other VPC's `alone` here.
    fn ask_servers(&mut self, servers: &[Server]) {
        let [port, closed] = PORTS;
        for server in servers {
            let place = SocketAddr::new(server.address, port);
            let (name, address) = (server.name, server.address);
            if server.side != self.side {
                if name == ALONE {
                    let what = format!("{address}, which only {} has", self.plan.namespace(server.side));
                    self.add_both("isolation", &what, place, &Expected::Nobody);
                }
                continue;
            }
            let right = Expected::OneOf(vec![self.plan.answer(self.side, name)]);
            if name == GUARDED {
                let what = format!("{name} {address}:{port}, which a policy allows");
                self.add("policy", &what, Request::Tcp(place), right);
                let what = format!("{name} {address}:{closed}, which no policy allows");
                let place = SocketAddr::new(address, closed);
                self.add("policy", &what, Request::Tcp(place), Expected::Nobody);
                continue;
            }
            let network = if server.network == 0 { "same" } else { "other" };
            let is_near = server.node == self.plan.node(self.side, false);
            let node = if is_near { "same" } else { "other" };
            let what = format!("{name} {address}, {network} network, {node} node");
            self.add_both("pairs", &what, place, &right);
        }
    }

    fn ask_services(&mut self) {
        let [own, other] = [self.side, self.side.other()];
        let services = self.services;
        let at = |side: Side| services.get(side.place()).copied();
        let present: Vec<&str> = {
            let servers = self.plan.servers().into_iter();
            let own = servers.filter(|server| server.side == own);
            own.map(|server| server.name)
                .filter(|name| TWINS.contains(name))
                .collect()
        };
        let backends = present.iter().map(|name| self.plan.answer(own, name));
        let right = Expected::OneOf(backends.collect());
        if let Some(address) = at(own) {
            let what = format!("Service {SERVICE} {address}");
            self.add_both("services", &what, SocketAddr::new(address, SERVICE_PORT), &right);
        }
        if let Some(address) = at(other) {
            let what = format!("Service {SERVICE} {address} of {}", self.plan.namespace(other));
            let place = SocketAddr::new(address, SERVICE_PORT);
            self.add_both("isolation", &what, place, &Expected::Nobody);
        }
    }

    fn ask_dns(&mut self, facts: &Facts) {
        let Ok(Dns { server, domain }) = &facts.dns else {
            return;
        };
        for side in [self.side, self.side.other()] {
            let name = format!("{SERVICE}.{}.svc.{domain}", self.plan.namespace(side));
            let address = self.services.get(side.place());
            let (group, expected) = if side == self.side {
                let address = address.map(ToString::to_string);
                ("dns", Expected::OneOf(address.into_iter().collect()))
            } else {
                ("isolation", Expected::Nobody)
            };
            let what = format!("name {name}");
            let request = Request::Dns {
                server: *server,
                name,
            };
            self.add(group, &what, request, expected);
        }
    }

    /// Asks the API server by the Service that VPCs share, and at its own addresses, which are closed to tenants.
    fn ask_outside(&mut self, facts: &Facts) {
        if let Ok(service) = facts.kubernetes {
            let what = format!("default/kubernetes {service}, which VPCs share");
            let right = Expected::OneOf(vec![String::new()]);
            self.add("egress", &what, Request::Connect(service), right);
        }
        for server in &facts.api_servers {
            let what = format!("{server}, the API server's own address");
            self.add("egress", &what, Request::Connect(*server), Expected::Nobody);
        }
    }
}

#[cfg(test)]
mod tests {
    use thuban_connectivity::{Outcome, Request};

    use super::{Check, Expected, State, checks, judge, questions};
    use crate::connectivity::plan::Side;
    use crate::connectivity::testing::{SERVICES, facts, plan, plan_of};

    fn find<'a>(checks: &'a [Check], side: Side, words: &str) -> &'a Check {
        let mut found = checks
            .iter()
            .filter(|check| check.side == side && check.text.contains(words));
        found
            .next()
            .unwrap_or_else(|| panic!("no {words} in {checks:#?}"))
    }

    #[test]
    fn both_clients_ask_the_same_addresses_for_their_own_pods() {
        let (checks, skipped) = checks(&plan(), &facts(), SERVICES);
        assert!(skipped.is_empty(), "{skipped:?}");
        let [a, b] = Side::BOTH.map(|side| find(&checks, side, "db-1"));
        assert_eq!(a.request, b.request);
        assert_eq!(a.expected, Expected::OneOf(vec!["test-a/db-1".to_owned()]));
        assert_eq!(b.expected, Expected::OneOf(vec!["test-b/db-1".to_owned()]));
        assert!(a.text.contains("other network, other node"), "{a:?}");
        for group in ["pairs", "isolation", "services", "dns", "egress", "policy"] {
            for side in Side::BOTH {
                let own = checks
                    .iter()
                    .filter(|check| check.group == group && check.side == side);
                assert!(own.count() > 0, "{group}");
            }
        }
    }

    #[test]
    fn what_a_cluster_does_not_have_is_skipped_and_said() {
        let mut facts = facts();
        facts.dns = Err("no cluster DNS".to_owned());
        facts.api_servers.clear();
        let (checks, skipped) = checks(&plan_of(&["node-a"]), &facts, SERVICES);
        assert!(!checks.iter().any(|check| check.group == "dns"));
        assert!(!checks.iter().any(|check| check.text.contains("other node")));
        let said: Vec<_> = skipped.iter().map(|finding| finding.check.as_str()).collect();
        assert_eq!(
            said,
            [
                "pods of other nodes",
                "equal addresses",
                "names of Services",
                "API servers"
            ]
        );
        assert!(skipped.iter().all(|finding| finding.state == State::Skipped));
    }

    #[test]
    fn a_question_has_the_number_of_its_check() {
        let (checks, _) = checks(&plan(), &facts(), SERVICES);
        let mut all = Vec::new();
        for side in Side::BOTH {
            for question in questions(&checks, side) {
                let check = &checks[question.id];
                assert_eq!((check.side, &check.request), (side, &question.request));
                let is_long = question.patience_ms > 10_000;
                assert_eq!(is_long, check.expected != Expected::Nobody);
                all.push(question.id);
            }
        }
        all.sort_unstable();
        assert_eq!(all, (0..checks.len()).collect::<Vec<_>>());
    }

    #[test]
    fn only_the_right_answer_is_good() {
        let plan = plan();
        let (checks, _) = checks(&plan, &facts(), SERVICES);
        let pair = find(&checks, Side::A, "web-1");
        let silent = find(&checks, Side::A, "which only test-b has");
        let said = |name: &str| Outcome::Answered(name.to_owned());
        let nothing = Outcome::Failed("no answer in time".to_owned());
        for (check, outcome, state, message) in [
            (pair, said("test-a/web-1"), State::Ok, "test-a/web-1 answered"),
            (
                pair,
                said("test-a/web-0"),
                State::Fail,
                "test-a/web-0 answered in place of test-a/web-1",
            ),
            (pair, said("test-b/web-1"), State::Fail, "LEAK: test-b/web-1"),
            (pair, nothing.clone(), State::Fail, "no answer in time"),
            (silent, nothing, State::Ok, "nobody answers"),
            (silent, said("test-b/alone"), State::Fail, "LEAK: test-b/alone"),
            (silent, said("x"), State::Fail, "nobody may"),
            (
                silent,
                said("\x1b[2Jx\n"),
                State::Fail,
                "[2Jx answered, and nobody may",
            ),
        ] {
            let finding = judge(&plan, check, &outcome);
            assert_eq!(finding.state, state, "{finding:?}");
            assert!(finding.message.contains(message), "{finding:?}");
            assert!(!finding.message.contains(char::is_control), "{finding:?}");
        }
    }

    #[test]
    fn a_service_is_answered_by_any_of_its_backends() {
        let plan = plan();
        let (checks, _) = checks(&plan, &facts(), SERVICES);
        let own = find(&checks, Side::B, "Service server 10.96.0.8");
        assert!(matches!(own.request, Request::Tcp(server) if server.port() == 80));
        for name in ["web-0", "db-1"] {
            let outcome = Outcome::Answered(format!("test-b/{name}"));
            assert_eq!(judge(&plan, own, &outcome).state, State::Ok);
        }
        let guarded = Outcome::Answered("test-b/guarded".to_owned());
        assert_eq!(judge(&plan, own, &guarded).state, State::Fail);
    }
}
