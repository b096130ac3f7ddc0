//! `why`: what keeps packets of a pod from a pod, a Service or an address. The operator answers; here the question is
//! read from the command line, and the answer is made of what the operator wrote.

use std::fmt;
use std::net::IpAddr;
use std::time::Duration;

use serde::Serialize;
use thuban_api::{
    PathHop, PathObject, PathProtocol, PathSource, PathStep, PathStepState, PathTarget, PathTraceSpec,
    PathTraceStatus, PathVerdict, reasons,
};

use crate::endpoints::Row;
use crate::error::CliError;
use crate::report::{Verdict, WHY};

/// The reason of an answer that did not come.
const NO_ANSWER: &str = "NoAnswer";
/// The reason of an answer about a target of another VPC, or of none.
const NOT_IN_VPC: &str = "NotInVpc";

/// The reason of a probe that the operator did not make.
const NOT_SENT: &str = "ProbeNotSent";
/// How long the operator may take to answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// How long it may take with a probe, which may wait for others.
const PROBE_TIMEOUT: Duration = Duration::from_secs(15);

/// What is asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Question {
    /// The namespace of the source, in which it is asked.
    pub namespace: String,
    pub source: String,
    pub target: Target,
    pub port: Option<u16>,
    pub protocol: PathProtocol,
    /// Whether the source is to send a packet.
    pub probe: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    Pod { namespace: String, name: String },
    Service { namespace: String, name: String },
    Address(IpAddr),
}

impl fmt::Display for Target {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pod { namespace, name } => write!(formatter, "{namespace}/{name}"),
            Self::Service { namespace, name } => write!(formatter, "svc/{namespace}/{name}"),
            Self::Address(IpAddr::V4(address)) => write!(formatter, "{address}"),
            Self::Address(IpAddr::V6(address)) => write!(formatter, "[{address}]"),
        }
    }
}

impl fmt::Display for Question {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}/{} > {}", self.namespace, self.source, self.target)?;
        match self.port {
            Some(port) => write!(formatter, ":{port}/{}", self.protocol.name().to_lowercase()),
            None => Ok(()),
        }
    }
}

impl Question {
    /// Reads a question. `namespace`: that of a source without one. A target without one is in the source's.
    pub fn read(source: &str, target: &str, namespace: &str) -> Result<Self, CliError> {
        let no_source = || CliError::NoSource(source.to_owned());
        let Some((Kind::Pod, own, pod)) = object(source, namespace) else {
            return Err(no_source());
        };
        if pod.contains(':') {
            return Err(no_source());
        }
        let no_target = || CliError::NoTarget(target.to_owned());
        let (host, port) = split(target).ok_or_else(no_target)?;
        let target = match (host.parse(), object(host, &own)) {
            (Ok(address), _) => Target::Address(address),
            (Err(_), Some((Kind::Pod, namespace, name))) => Target::Pod { namespace, name },
            (Err(_), Some((Kind::Service, namespace, name))) => Target::Service { namespace, name },
            (Err(_), None) => return Err(no_target()),
        };
        Ok(Self {
            namespace: own,
            source: pod,
            target,
            port: port.map(|(port, _)| port),
            protocol: port.map(|(_, protocol)| protocol).unwrap_or_default(),
            probe: false,
        })
    }

    /// Returns how long the operator may take to answer.
    pub const fn timeout(&self) -> Duration {
        if self.probe { PROBE_TIMEOUT } else { ANSWER_TIMEOUT }
    }

    pub fn spec(&self) -> PathTraceSpec {
        let object = |namespace: &String, name: &String| {
            Some(PathObject {
                namespace: Some(namespace.clone()),
                name: name.clone(),
            })
        };
        let mut target = PathTarget::default();
        match &self.target {
            Target::Pod { namespace, name } => target.pod = object(namespace, name),
            Target::Service { namespace, name } => target.service = object(namespace, name),
            Target::Address(address) => target.address = Some(address.to_string()),
        }
        PathTraceSpec {
            source: PathSource {
                pod: self.source.clone(),
            },
            target,
            port: self.port,
            protocol: self.protocol,
            probe: self.probe,
        }
    }
}

/// Reads the namespace and the name of a pod. `namespace`: that of a pod without one.
pub fn pod(text: &str, namespace: &str) -> Result<(String, String), CliError> {
    match object(text, namespace) {
        Some((Kind::Pod, namespace, name)) => Ok((namespace, name)),
        _ => Err(CliError::NoPod(text.to_owned())),
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Pod,
    Service,
}

/// Reads `[KIND/][NAMESPACE/]NAME`.
fn object(text: &str, namespace: &str) -> Option<(Kind, String, String)> {
    let kind = |text: &str| match text {
        "pod" | "pods" | "po" => Some(Kind::Pod),
        "service" | "services" | "svc" => Some(Kind::Service),
        _ => None,
    };
    let parts: Vec<&str> = text.split('/').collect();
    let (kind, namespace, name) = match parts[..] {
        [name] => (Kind::Pod, namespace, name),
        [first, name] => match kind(first) {
            Some(kind) => (kind, namespace, name),
            None => (Kind::Pod, first, name),
        },
        [first, namespace, name] => (kind(first)?, namespace, name),
        _ => return None,
    };
    let is_given = !namespace.is_empty() && !name.is_empty();
    is_given.then(|| (kind, namespace.to_owned(), name.to_owned()))
}

/// Splits `HOST[:PORT[/PROTOCOL]]`. An IPv6 address with a port is in brackets.
fn split(text: &str) -> Option<(&str, Option<(u16, PathProtocol)>)> {
    if let Some(rest) = text.strip_prefix('[') {
        let (host, rest) = rest.split_once(']')?;
        let port = match rest.strip_prefix(':') {
            Some(text) => Some(port(text)?),
            None if rest.is_empty() => None,
            None => return None,
        };
        return Some((host, port));
    }
    if text.parse::<IpAddr>().is_ok() {
        return Some((text, None));
    }
    match text.split_once(':') {
        Some((host, text)) => Some((host, Some(port(text)?))),
        None => Some((text, None)),
    }
}

/// Reads `PORT[/PROTOCOL]`.
fn port(text: &str) -> Option<(u16, PathProtocol)> {
    let (number, protocol) = text.split_once('/').unwrap_or((text, "tcp"));
    let protocol = match protocol.to_lowercase().as_str() {
        "tcp" => PathProtocol::Tcp,
        "udp" => PathProtocol::Udp,
        "sctp" => PathProtocol::Sctp,
        _ => return None,
    };
    let number: u16 = number.parse().ok()?;
    (number != 0).then_some((number, protocol))
}

/// What `why` says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Answer {
    pub verdict: PathVerdict,
    /// The question, for people.
    pub path: String,
    /// The reason of the last step, unless the verdict is `OK`.
    pub reason: Option<String>,
    pub steps: Vec<PathStep>,
    /// What droplets did with the packet of a probe.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub hops: Vec<PathHop>,
    /// The answer to the packet of a probe.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub answer: Option<PathStep>,
    /// When the operator looked.
    pub evaluated_at: Option<String>,
}

impl Answer {
    /// Makes an answer of what the operator wrote. None: it wrote nothing in time.
    pub fn new(question: &Question, status: Option<PathTraceStatus>) -> Self {
        let mut status = status.unwrap_or_else(|| no_answer(question.timeout()));
        let is_answered = status.reason.as_deref() != Some(NO_ANSWER);
        if question.probe && is_answered && status.answer.is_none() {
            status.answer = Some(no_probe());
            if status.verdict == Some(PathVerdict::Ok) {
                status.verdict = Some(PathVerdict::Unknown);
                status.reason = Some(NOT_SENT.to_owned());
            }
        }
        Self {
            verdict: status.verdict.unwrap_or(PathVerdict::Unknown),
            path: question.to_string(),
            reason: status.reason,
            steps: status.steps,
            hops: status.hops,
            answer: status.answer,
            evaluated_at: status.evaluated_at,
        }
    }

    /// Returns namespace and name of the target, if it is a pod of which the operator says only that it is elsewhere.
    pub fn withheld<'a>(&self, question: &'a Question) -> Option<(&'a str, &'a str)> {
        let is_elsewhere = self.reason.as_deref() == Some(NOT_IN_VPC);
        match &question.target {
            Target::Pod { namespace, name } if is_elsewhere && *namespace != question.namespace => {
                Some((namespace.as_str(), name.as_str()))
            }
            _ => None,
        }
    }

    /// Adds what the user may see of the target.
    pub fn add_place(&mut self, target: &Row) {
        if let Some(last) = self.steps.last_mut().filter(|_| !target.vpc.is_empty()) {
            last.message = format!(
                "{}. You may see that it is in VPC {}, network {}, {}",
                last.message,
                target.vpc,
                target.network,
                target.addresses.join(", ")
            );
        }
    }

    pub fn outcome(&self) -> Verdict {
        match self.verdict {
            PathVerdict::Ok => Verdict::Good,
            PathVerdict::No => Verdict::Found,
            PathVerdict::Unknown => Verdict::Unseen,
        }
    }
}

/// Returns the answer to a probe that an older operator does not know.
fn no_probe() -> PathStep {
    PathStep {
        name: "answer".to_owned(),
        state: PathStepState::Unknown,
        message: "the operator made no probe: it is older than the plugin".to_owned(),
        reason: Some(NOT_SENT.to_owned()),
        remedy: reasons::remedy("PathTrace", NOT_SENT).to_owned(),
    }
}

fn no_answer(limit: Duration) -> PathTraceStatus {
    let step = PathStep {
        name: "operator".to_owned(),
        state: PathStepState::Unknown,
        message: format!("it did not answer within {} s", limit.as_secs()),
        reason: Some(NO_ANSWER.to_owned()),
        remedy: reasons::remedy(WHY, NO_ANSWER).to_owned(),
    };
    PathTraceStatus {
        verdict: Some(PathVerdict::Unknown),
        reason: Some(NO_ANSWER.to_owned()),
        steps: vec![step],
        ..PathTraceStatus::default()
    }
}

#[cfg(test)]
mod tests {
    use thuban_api::{PathProtocol, PathTraceStatus, PathVerdict};

    use super::{Answer, Question, Row, Target};
    use crate::testing;

    fn read(source: &str, target: &str) -> Option<Question> {
        Question::read(source, target, "red").ok()
    }

    #[test]
    fn questions_are_read_in_all_forms() {
        for (source, target, expected) in [
            ("web-0", "db-0", "red/web-0 > red/db-0"),
            ("shop/web-0", "db-0:5432", "shop/web-0 > shop/db-0:5432/tcp"),
            ("pod/web-0", "blue/db-0:53/UDP", "red/web-0 > blue/db-0:53/udp"),
            ("web-0", "svc/shop:80", "red/web-0 > svc/red/shop:80/tcp"),
            ("web-0", "service/blue/shop", "red/web-0 > svc/blue/shop"),
            ("web-0", "10.0.2.4:5432", "red/web-0 > 10.0.2.4:5432/tcp"),
            ("web-0", "fd00::4", "red/web-0 > [fd00::4]"),
            ("web-0", "[fd00::4]:9/sctp", "red/web-0 > [fd00::4]:9/sctp"),
        ] {
            let question = read(source, target).unwrap();
            assert_eq!(question.to_string(), expected);
        }
        for (source, target) in [
            ("", "db-0"),
            ("svc/shop", "db-0"),
            ("web-0:80", "db-0"),
            ("web-0", ""),
            ("web-0", "db-0:"),
            ("web-0", "db-0:0"),
            ("web-0", "db-0:http"),
            ("web-0", "db-0:53/icmp"),
            ("web-0", "[fd00::4]80"),
            ("web-0", "deploy/blue/db"),
            ("web-0", "blue/"),
        ] {
            assert_eq!(read(source, target), None, "{source} {target}");
        }
    }

    #[test]
    fn a_question_becomes_the_spec_of_an_object() {
        let spec = read("web-0", "svc/shop:53/udp").unwrap().spec();
        assert_eq!((spec.source.pod.as_str(), spec.port), ("web-0", Some(53)));
        assert_eq!(spec.protocol, PathProtocol::Udp);
        let target = spec.target;
        assert_eq!(target.service.unwrap().namespace.as_deref(), Some("red"));
        assert!(target.pod.is_none() && target.address.is_none());
        let spec = read("web-0", "[fd00::4]:1").unwrap().spec();
        assert_eq!(spec.target.address.as_deref(), Some("fd00::4"));
    }

    #[test]
    fn no_answer_is_unknown_and_has_a_remedy() {
        let answer = Answer::new(&read("web-0", "db-0").unwrap(), None);
        assert_eq!(answer.outcome().exit_status(), 2);
        assert!(answer.steps[0].remedy.contains("status"), "{answer:?}");
        let empty = Answer::new(&read("web-0", "db-0").unwrap(), Some(PathTraceStatus::default()));
        assert_eq!(empty.verdict, PathVerdict::Unknown);
    }

    #[test]
    fn an_operator_that_makes_no_probe_is_named() {
        let mut question = read("web-0", "db-0:5432").unwrap();
        assert!(!question.spec().probe);
        let status = || Some(PathTraceStatus::default());
        assert_eq!(Answer::new(&question, status()).answer, None);
        question.probe = true;
        assert!(question.spec().probe);
        let said = Answer::new(&question, status()).answer.unwrap();
        assert!(said.message.contains("older than the plugin"), "{said:?}");
        let silent = Answer::new(&question, None);
        assert!(silent.steps[0].message.contains("15 s"), "{silent:?}");
        assert_eq!(silent.answer, None);
    }

    #[test]
    fn who_may_see_the_target_is_told_where_it_is() {
        let question = read("web-0", "blue/db-0").unwrap();
        let mut answer = testing::answer("NO", "NotInVpc");
        assert_eq!(answer.withheld(&question), Some(("blue", "db-0")));
        assert_eq!(answer.withheld(&read("web-0", "db-0").unwrap()), None);
        assert_eq!(testing::answer("NO", "PolicyDenies").withheld(&question), None);
        let endpoints = testing::status().tenancy.endpoints.list.unwrap();
        answer.add_place(&Row::of(&endpoints[0]));
        let last = answer.steps.last().unwrap();
        assert!(
            last.message
                .ends_with("it is in VPC red, network red-web, 10.0.1.2"),
            "{last:?}"
        );
        assert!(matches!(question.target, Target::Pod { .. }));
    }
}
