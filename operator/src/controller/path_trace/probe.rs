//! Probes: a packet is sent from the source of a PathTrace, and what came of it is added to the answer.
//!
//! Invariant: droplets tell numbers, and the words are this operator's. A probe never improves a verdict.

use std::net::Ipv4Addr;

use thuban_api::{PathHop, PathStep, PathStepState, PathTraceStatus, PathVerdict, reasons};
use thuban_common::counters::Counter;
use thuban_common::packet::ipv4::{SCTP, TCP, UDP};
use thuban_proto::transit::{ProbeAnswer, Sighting};

use crate::hub::{Heard, Hub};
use crate::model::world::path::{ProbePlan, Question};

const REFUSED: &str = "ProbeRefused";
const UNREACHABLE: &str = "ProbeUnreachable";
const SILENT: &str = "ProbeSilent";
const NOT_SENT: &str = "ProbeNotSent";

/// Adds what comes of a probe. Returns whether it could be made now: others may be under way.
pub async fn add(status: &mut PathTraceStatus, question: &Question, hub: &Hub) -> bool {
    let Some(plan) = hub.plan_probe(question) else {
        conclude(status, not_sent("an end of the path has no network, see above"));
        return true;
    };
    if let Some(answer) = unsendable(&plan) {
        conclude(status, answer);
        return true;
    }
    let Some(heard) = hub.probe(&plan).await else {
        return false;
    };
    let is_expected = status.verdict == Some(PathVerdict::Ok);
    status.hops = hops(&plan, &heard);
    conclude(status, answer(&plan, &heard, is_expected));
    true
}

/// Returns the answer to a packet that no droplet can send. The only port of a Service may have another protocol than
/// was asked for.
fn unsendable(plan: &ProbePlan) -> Option<PathStep> {
    (plan.protocol == SCTP).then(|| not_sent("a probe has no SCTP: ask with tcp or udp"))
}

/// Adds the answer, by which a path without a known fault is judged again.
fn conclude(status: &mut PathTraceStatus, answer: PathStep) {
    let verdict = match answer.state {
        PathStepState::Ok => PathVerdict::Ok,
        PathStepState::Fail => PathVerdict::No,
        PathStepState::Unknown => PathVerdict::Unknown,
    };
    if status.verdict == Some(PathVerdict::Ok) && verdict != PathVerdict::Ok {
        status.verdict = Some(verdict);
        status.reason.clone_from(&answer.reason);
    }
    status.answer = Some(answer);
}

fn step(state: PathStepState, reason: Option<&str>, message: impl Into<String>) -> PathStep {
    PathStep {
        name: "answer".to_owned(),
        state,
        message: message.into(),
        reason: reason.map(str::to_owned),
        remedy: reason.map_or_else(String::new, |reason| {
            reasons::remedy("PathTrace", reason).to_owned()
        }),
    }
}

fn not_sent(message: impl Into<String>) -> PathStep {
    step(PathStepState::Unknown, Some(NOT_SENT), message)
}

fn fail(reason: &str, message: impl Into<String>) -> PathStep {
    step(PathStepState::Fail, Some(reason), message)
}

/// Says what answered the packet. `is_expected`: nothing else is known to be wrong with the path.
fn answer(plan: &ProbePlan, heard: &Heard, is_expected: bool) -> PathStep {
    let (home, target) = (plan.home(), plan.target.as_str());
    let Some(answer) = heard.answer else {
        return not_sent(if heard.unable.contains(home) {
            format!("{home} can't probe: its transitd is older than the operator")
        } else {
            format!("{home} did not report in time, or has no stream")
        });
    };
    match answer {
        ProbeAnswer::Answered if plan.protocol == TCP => step(
            PathStepState::Ok,
            None,
            format!("{target} accepts the connection"),
        ),
        ProbeAnswer::Answered => step(PathStepState::Ok, None, format!("{target} answers")),
        ProbeAnswer::Refused => fail(REFUSED, refusal(plan, is_expected)),
        ProbeAnswer::Unreachable => fail(UNREACHABLE, "an ICMP error, or the pod has no route"),
        ProbeAnswer::Silent if plan.protocol == UDP => step(
            PathStepState::Unknown,
            Some(SILENT),
            "none within 2 s: programs need not answer an empty datagram",
        ),
        ProbeAnswer::Silent => fail(SILENT, format!("none within 2 s: {target} is silent")),
        ProbeAnswer::NoPod => not_sent(format!("{home} does not have the pod at this moment")),
        ProbeAnswer::TooOften => not_sent("the pod sent another probe within the last second"),
        ProbeAnswer::Busy => not_sent(format!("{home} has as many probes as it may have")),
        ProbeAnswer::Failed if plan.port.is_none() => not_sent(
            "the pod may not send pings: name a port, or turn on enable_unprivileged_icmp in containerd",
        ),
        ProbeAnswer::Failed => not_sent("the pod's namespace did not let the packet be sent"),
        ProbeAnswer::Unspecified => not_sent(format!("{home} did not send it")),
    }
}

fn refusal(plan: &ProbePlan, is_expected: bool) -> String {
    let how = if plan.protocol == TCP {
        "TCP reset"
    } else {
        "ICMP port unreachable"
    };
    match plan.port {
        // A policy may reject the packet in the target's name.
        Some(port) if is_expected => {
            format!("{how} by {}: nothing listens on {port} in the pod", plan.target)
        }
        Some(_) | None => format!("{how}, in the name of {}", plan.target),
    }
}

/// Returns what droplets did with the packet, in the order of its way, if the asker may hear it.
fn hops(plan: &ProbePlan, heard: &Heard) -> Vec<PathHop> {
    if !plan.is_told {
        return Vec::new();
    }
    let mut hops = Vec::new();
    for (droplet, _) in &plan.droplets {
        if heard.unable.contains(droplet) {
            hops.push(PathHop {
                node: droplet.clone(),
                program: "transitd".to_owned(),
                verdict: "can't report: it is older than the operator".to_owned(),
                next: None,
                microseconds: 0,
            });
        }
        let sightings = heard.sightings.get(droplet).into_iter().flatten();
        hops.extend(sightings.map(|sighting| hop(plan, droplet, sighting)));
    }
    hops
}

fn hop(plan: &ProbePlan, droplet: &str, sighting: &Sighting) -> PathHop {
    let counter = Counter::of(sighting.counter);
    let verdict = match counter {
        Some(counter) if counter.is_drop() => format!("dropped, {}", counter.name()),
        Some(counter) => counter.name().to_owned(),
        None => "passed to the next hook".to_owned(),
    };
    let address = <[u8; 4]>::try_from(&sighting.next[..]).ok().map(Ipv4Addr::from);
    let next = if matches!(counter, Some(Counter::Delivered | Counter::DeliveredLocal)) {
        Some(plan.target.clone())
    } else {
        address.map(|address| plan.droplet_at(address).unwrap_or("another droplet").to_owned())
    };
    let program = match sighting.point {
        0 | 1 => "agent",
        2 | 3 => "transit",
        _ => "unknown",
    };
    PathHop {
        node: droplet.to_owned(),
        program: program.to_owned(),
        verdict,
        next,
        microseconds: u32::try_from(sighting.after_ns / 1000).unwrap_or(u32::MAX),
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use thuban_api::identifiers::Vni;

    use super::*;

    fn plan() -> ProbePlan {
        let droplets = [("node-b", 2), ("node-a", 1), ("node-c", 3)];
        let address = |last| Ipv4Addr::new(192, 0, 2, last);
        ProbePlan {
            namespace: "red".to_owned(),
            vni: Vni::new(7).unwrap(),
            source: [10, 0, 1, 3].into(),
            destination: [10, 0, 2, 4].into(),
            protocol: TCP,
            port: Some(5432),
            droplets: droplets
                .map(|(name, last)| (name.to_owned(), address(last)))
                .to_vec(),
            is_told: true,
            target: "db-0".to_owned(),
        }
    }

    fn sighting(point: u32, counter: Counter, next: &[u8], after_ns: u64) -> Sighting {
        Sighting {
            point,
            counter: counter as u32,
            next: next.to_vec(),
            after_ns,
        }
    }

    fn heard(answer: Option<ProbeAnswer>) -> Heard {
        Heard {
            answer,
            ..Heard::default()
        }
    }

    #[test]
    fn no_droplet_is_asked_to_send_sctp() {
        assert_eq!(unsendable(&plan()), None);
        let sctp = ProbePlan {
            protocol: SCTP,
            ..plan()
        };
        let said = unsendable(&sctp).unwrap();
        assert_eq!(said.state, PathStepState::Unknown);
        assert!(said.message.contains("SCTP"), "{said:?}");
    }

    #[test]
    fn hops_stand_in_the_order_of_the_way() {
        let mut heard = heard(Some(ProbeAnswer::Answered));
        heard.sightings = [
            ("node-c", sighting(2, Counter::Delivered, &[], 0)),
            ("node-b", sighting(0, Counter::SentDirect, &[192, 0, 2, 1], 0)),
            ("node-a", sighting(3, Counter::PolicyIngress, &[], 388_900)),
        ]
        .map(|(droplet, sighting)| (droplet.to_owned(), vec![sighting]))
        .into();
        let told: Vec<String> = hops(&plan(), &heard)
            .iter()
            .map(|hop| {
                let (node, program, verdict) = (&hop.node, &hop.program, &hop.verdict);
                format!("{} {node} {program} {verdict} {:?}", hop.microseconds, hop.next)
            })
            .collect();
        assert_eq!(
            told,
            [
                "0 node-b agent sent_direct Some(\"node-a\")",
                "388 node-a transit dropped, policy_ingress None",
                "0 node-c transit delivered Some(\"db-0\")",
            ]
        );
        let others = ProbePlan {
            is_told: false,
            ..plan()
        };
        assert_eq!(hops(&others, &heard), []);
    }

    #[test]
    fn an_older_droplet_is_named() {
        let mut heard = heard(None);
        heard.unable = ["node-a".to_owned()].into();
        assert!(hops(&plan(), &heard)[0].verdict.contains("older"));
        assert!(
            answer(&plan(), &heard, true)
                .message
                .contains("node-b did not report")
        );
        heard.unable = ["node-b".to_owned()].into();
        let said = answer(&plan(), &heard, true);
        assert!(said.message.starts_with("node-b can't probe"), "{said:?}");
        assert_eq!(said.state, PathStepState::Unknown);
    }

    #[test]
    fn a_probe_turns_a_verdict_only_for_the_worse() {
        let judged = |verdict: PathVerdict, answered: ProbeAnswer| {
            let mut status = PathTraceStatus {
                verdict: Some(verdict),
                ..PathTraceStatus::default()
            };
            conclude(&mut status, answer(&plan(), &heard(Some(answered)), true));
            (status.verdict.unwrap(), status.reason)
        };
        let (ok, no) = (PathVerdict::Ok, PathVerdict::No);
        assert_eq!(judged(ok, ProbeAnswer::Answered), (ok, None));
        let refused = Some(REFUSED.to_owned());
        assert_eq!(judged(ok, ProbeAnswer::Refused), (no, refused));
        assert_eq!(judged(no, ProbeAnswer::Answered), (no, None));
        let not_sent = Some(NOT_SENT.to_owned());
        assert_eq!(judged(ok, ProbeAnswer::Busy), (PathVerdict::Unknown, not_sent));
    }

    #[test]
    fn each_answer_has_words_and_each_fault_a_remedy() {
        let refused = answer(&plan(), &heard(Some(ProbeAnswer::Refused)), true);
        assert_eq!(
            refused.message,
            "TCP reset by db-0: nothing listens on 5432 in the pod"
        );
        for number in 0..=8 {
            let answered = ProbeAnswer::try_from(number).unwrap();
            let said = answer(&plan(), &heard(Some(answered)), false);
            assert!(!said.message.is_empty(), "{said:?}");
            assert_eq!(
                said.remedy.is_empty(),
                said.state == PathStepState::Ok,
                "{said:?}"
            );
        }
        let by_udp = ProbePlan {
            protocol: UDP,
            ..plan()
        };
        let silent = answer(&by_udp, &heard(Some(ProbeAnswer::Silent)), true);
        assert_eq!(silent.state, PathStepState::Unknown, "{silent:?}");
    }
}
