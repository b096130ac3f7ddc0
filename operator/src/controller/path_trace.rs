//! PathTrace: answers once why packets of a pod do not arrive, and deletes the question later.
//!
//! Invariant: a PathTrace is answered once. A namespace costs the operator a bounded number of answers a second, and so
//! do all namespaces together, however many PathTraces there are.

mod probe;

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use kube::runtime::controller::Action;
use kube::runtime::reflector::ObjectRef;
use kube::{Api, ResourceExt};
use thuban_api::condition::find;
use thuban_api::{
    ConditionStatus, ENDPOINT_ANNOTATION, Endpoint, PathObject, PathStep, PathStepState, PathTrace,
    PathTraceStatus, PathVerdict, reasons,
};
use tracing::debug;

use crate::controller::cache::path_traces::{MAX_TRACES, Place};
use crate::controller::context::Context;
use crate::controller::runtime::error::ReconcileError;
use crate::controller::runtime::objects::{delete, update_status};
use crate::controller::runtime::watch::Change;
use crate::model::cached::Pod;
use crate::model::world::path::{AskedPod, PodState, Question, Target};

/// How long an answer stays.
const ANSWER_TTL: Duration = Duration::from_mins(10);
/// How long a PathTrace stays that was not looked at.
const REFUSAL_TTL: Duration = Duration::from_mins(1);
/// How long an answer waits for its turn, or for droplets that a new leader has not heard.
const ANSWER_RETRY: Duration = Duration::from_millis(500);
/// How many seconds an answer may be ahead of this machine's clock.
const MAX_AHEAD: i64 = 60;

const TOO_MANY: &str = "TooManyTraces";

pub fn on_change(context: &Context, change: &Change<PathTrace>) {
    match change {
        // A finalizer must not take the place of another question.
        Change::Applied(trace) if trace.metadata.deletion_timestamp.is_some() => {
            let namespace = trace.namespace().unwrap_or_default();
            context.path_traces.remove(&namespace, &place(trace));
        }
        Change::Applied(trace) => {
            let namespace = trace.namespace().unwrap_or_default();
            context.path_traces.add(&namespace, place(trace));
            context.hub.triggers.path_trace(&namespace, &trace.name_any());
        }
        Change::Gone(trace) => {
            let namespace = trace.namespace().unwrap_or_default();
            context.path_traces.remove(&namespace, &place(trace));
        }
    }
}

/// Returns the place of a PathTrace in its namespace: older ones are first.
fn place(trace: &PathTrace) -> Place {
    let created = trace.metadata.creation_timestamp.as_ref();
    (created.map_or(0, |time| time.0.as_second()), trace.name_any())
}

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    Nothing,
    Answer,
    Refuse,
    /// It is answered, and stays for so long.
    Wait(Duration),
    Delete,
}

/// Decides what is to be done with a PathTrace. `older`: how many there are in its namespace that are older.
fn decide(trace: &PathTrace, older: usize, now: Timestamp) -> Next {
    if trace.metadata.deletion_timestamp.is_some() {
        return Next::Nothing;
    }
    let answered = trace.status.as_ref().filter(|status| status.verdict.is_some());
    let Some(status) = answered else {
        return if older < MAX_TRACES {
            Next::Answer
        } else {
            Next::Refuse
        };
    };
    let ttl = if status.reason.as_deref() == Some(TOO_MANY) {
        REFUSAL_TTL
    } else {
        ANSWER_TTL
    };
    let at = status.evaluated_at.as_deref();
    let Some(at) = at.and_then(|at| at.parse::<Timestamp>().ok()) else {
        return Next::Delete;
    };
    let age = now.duration_since(at).as_secs();
    if age < -MAX_AHEAD {
        return Next::Delete;
    }
    // Clocks of operators may differ by some seconds.
    let age = Duration::from_secs(u64::try_from(age).unwrap_or(0));
    let left = ttl.saturating_sub(age);
    if left.is_zero() {
        Next::Delete
    } else {
        Next::Wait(left)
    }
}

pub async fn reconcile(trace: Arc<PathTrace>, context: Arc<Context>) -> Result<Action, ReconcileError> {
    let namespace = trace.namespace().unwrap_or_default();
    let traces: Api<PathTrace> = Api::namespaced(context.client.clone(), &namespace);
    let older = context.path_traces.older(&namespace, &place(&trace));
    let status = match decide(&trace, older, Timestamp::now()) {
        Next::Nothing => return Ok(Action::await_change()),
        Next::Wait(left) => return Ok(Action::requeue(left)),
        Next::Answer if must_wait(&trace, &namespace, &context) => {
            return Ok(Action::requeue(ANSWER_RETRY));
        }
        // The rules of the kind allow no question without a target.
        Next::Answer => match question(&trace, &namespace, &context) {
            Some(question) => {
                let mut status = answer(&question, &context);
                if trace.spec.probe && !probe::add(&mut status, &question, &context.hub).await {
                    return Ok(Action::requeue(ANSWER_RETRY));
                }
                Some(status)
            }
            None => None,
        },
        // Questions do not pile up until there is time to refuse them.
        Next::Refuse => context.path_traces.may_answer(&namespace).then(refusal),
        Next::Delete => None,
    };
    let Some(status) = status else {
        delete(&traces, &*trace).await?;
        return Ok(Action::await_change());
    };
    let mut changed = (*trace).clone();
    changed.status = Some(PathTraceStatus {
        observed_generation: trace.metadata.generation,
        evaluated_at: Some(format!("{:.0}", Timestamp::now())),
        ..status
    });
    match update_status(&traces, &*trace, &changed).await {
        Ok(_) => Ok(Action::requeue(ANSWER_TTL)),
        // The asker did not wait.
        Err(error) if error.is_not_found() => Ok(Action::await_change()),
        Err(error) => Err(error.into()),
    }
}

/// Whether a question is answered later. One that waits for other probes takes no answer of other questions.
fn must_wait(trace: &PathTrace, namespace: &str, context: &Context) -> bool {
    let hub = &context.hub;
    let waits_for_probes = trace.spec.probe && !hub.has_room_for_probe(namespace);
    !hub.is_whole() || waits_for_probes || !context.path_traces.may_answer(namespace)
}

fn answer(question: &Question, context: &Context) -> PathTraceStatus {
    let judgement = context.hub.judge_path(question);
    debug!(
        verdict = judgement.verdict.word(),
        reason = judgement.reason.as_deref(),
        "path judged"
    );
    PathTraceStatus {
        verdict: Some(judgement.verdict),
        reason: judgement.reason,
        steps: judgement.steps,
        ..PathTraceStatus::default()
    }
}

fn refusal() -> PathTraceStatus {
    let step = PathStep {
        name: "source".to_owned(),
        state: PathStepState::Unknown,
        message: format!("the namespace has {MAX_TRACES} older PathTraces, and more are not looked at"),
        reason: Some(TOO_MANY.to_owned()),
        remedy: reasons::remedy("PathTrace", TOO_MANY).to_owned(),
    };
    PathTraceStatus {
        verdict: Some(PathVerdict::Unknown),
        reason: Some(TOO_MANY.to_owned()),
        steps: vec![step],
        ..PathTraceStatus::default()
    }
}

/// Returns the question with what objects tell of its pods; none: it has no target.
fn question(trace: &PathTrace, namespace: &str, context: &Context) -> Option<Question> {
    let spec = &trace.spec;
    let space = |object: &PathObject| object.namespace.clone().unwrap_or_else(|| namespace.to_owned());
    let target = if let Some(pod) = &spec.target.pod {
        Target::Pod(asked(space(pod), &pod.name, context))
    } else if let Some(service) = &spec.target.service {
        Target::Service {
            namespace: space(service),
            name: service.name.clone(),
        }
    } else {
        Target::Address(spec.target.address.as_ref()?.parse().ok()?)
    };
    Some(Question {
        source: asked(namespace.to_owned(), &spec.source.pod, context),
        target,
        protocol: spec.protocol.number(),
        port: spec.port,
    })
}

fn asked(namespace: String, name: &str, context: &Context) -> AskedPod {
    let pod = ObjectRef::<Pod>::new(name).within(&namespace);
    let pod = context.stores.pods.get(&pod);
    AskedPod {
        state: pod.map_or(PodState::Missing, |pod| state_of(&pod, &namespace, context)),
        name: name.to_owned(),
        namespace,
    }
}

fn state_of(pod: &Pod, namespace: &str, context: &Context) -> PodState {
    if !pod.is_alive() {
        return PodState::Ended;
    }
    let spec = pod.spec.as_ref();
    if spec.is_some_and(|spec| spec.host_network == Some(true)) {
        return PodState::OnHostNetwork;
    }
    if pod.node().is_none() {
        return PodState::Unbound;
    }
    let named = pod.annotations().get(ENDPOINT_ANNOTATION).cloned();
    let name = named.unwrap_or_else(|| pod.endpoint_name());
    let endpoint = ObjectRef::<Endpoint>::new(&name).within(namespace);
    let endpoint = context.stores.endpoints.get(&endpoint);
    PodState::Bound {
        told: endpoint.and_then(|endpoint| lacking(&endpoint)),
        endpoint: (namespace.to_owned(), name),
    }
}

/// Returns reason and message of the condition that stands in an Endpoint's way.
fn lacking(endpoint: &Endpoint) -> Option<(String, String)> {
    let conditions = &endpoint.status.as_ref()?.conditions;
    let told = ["Accepted", "Ready"].into_iter();
    let mut told = told.filter_map(|kind| find(conditions, kind));
    let told = told.find(|told| told.status == ConditionStatus::False)?;
    Some((told.reason.clone(), told.message.clone()))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::{Value, json};
    use thuban_api::PathTrace;

    use super::{ANSWER_TTL, MAX_TRACES, Next, REFUSAL_TTL, decide, refusal};

    fn trace(metadata: &Value, status: &Value) -> PathTrace {
        serde_json::from_value(json!({
            "apiVersion": "thuban.dev/v1alpha1", "kind": "PathTrace", "metadata": metadata,
            "spec": {"source": {"pod": "a"}, "target": {"pod": {"name": "b"}}}, "status": status,
        }))
        .unwrap()
    }

    fn next(status: &Value, older: usize, now: &str) -> Next {
        let trace = trace(&json!({"name": "why"}), status);
        decide(&trace, older, now.parse().unwrap())
    }

    #[test]
    fn a_question_is_answered_once_and_deleted_later() {
        let now = "2026-11-28T12:00:00Z";
        assert_eq!(next(&Value::Null, 0, now), Next::Answer);
        assert_eq!(next(&json!({}), MAX_TRACES - 1, now), Next::Answer);
        assert_eq!(next(&json!({}), MAX_TRACES, now), Next::Refuse);
        let answered = json!({"verdict": "OK", "evaluatedAt": now});
        assert_eq!(next(&answered, MAX_TRACES, now), Next::Wait(ANSWER_TTL));
        let wait = Next::Wait(Duration::from_secs(1));
        assert_eq!(next(&answered, 0, "2026-11-28T12:09:59Z"), wait);
        assert_eq!(next(&answered, 0, "2026-11-28T12:10:00Z"), Next::Delete);
        // Clocks differ a little. An answer from far ahead would stay for long.
        assert_eq!(next(&answered, 0, "2026-11-28T11:59:00Z"), Next::Wait(ANSWER_TTL));
        assert_eq!(next(&answered, 0, "2026-11-28T11:58:59Z"), Next::Delete);
        assert_eq!(next(&json!({"verdict": "OK"}), 0, now), Next::Delete);
        let metadata = json!({"name": "why", "deletionTimestamp": now});
        let ending = decide(&trace(&metadata, &Value::Null), 0, now.parse().unwrap());
        assert_eq!(ending, Next::Nothing);
    }

    #[test]
    fn a_refusal_goes_earlier_and_has_a_remedy() {
        let now = "2026-11-28T12:00:00Z";
        let mut status = refusal();
        assert_eq!(status.reason.as_deref(), Some("TooManyTraces"));
        assert!(status.steps[0].remedy.contains("delete"), "{status:?}");
        status.evaluated_at = Some(now.to_owned());
        let status = serde_json::to_value(status).unwrap();
        assert_eq!(next(&status, 0, now), Next::Wait(REFUSAL_TTL));
        assert_eq!(next(&status, 0, "2026-11-28T12:01:00Z"), Next::Delete);
    }
}
