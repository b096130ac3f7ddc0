//! PathTrace: a question, why a pod reaches another one or does not. The operator answers it once, in the status.

use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The question: from which pod, to whom. It never changes.
#[derive(CustomResource, Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "thuban.dev",
    version = "v1alpha1",
    kind = "PathTrace",
    doc = "A question: do packets of a pod reach a pod, a Service or an address? The operator writes the first thing that is wrong into the status, and deletes the object 10 minutes later.",
    plural = "pathtraces",
    shortname = "ptr",
    namespaced,
    status = "PathTraceStatus",
    printcolumn(name = "Source", type_ = "string", json_path = ".spec.source.pod"),
    printcolumn(name = "Port", type_ = "integer", json_path = ".spec.port"),
    printcolumn(name = "Protocol", type_ = "string", json_path = ".spec.protocol"),
    printcolumn(name = "Verdict", type_ = "string", json_path = ".status.verdict"),
    printcolumn(name = "Reason", type_ = "string", json_path = ".status.reason"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[kube(
    validation = Rule::new("self.spec == oldSelf.spec")
        .message("spec is immutable: make another PathTrace"),
    validation = Rule::new("[has(self.spec.target.pod), has(self.spec.target.service), has(self.spec.target.address)].filter(given, given).size() == 1")
        .message("spec.target must have exactly one of pod, service and address")
)]
#[serde(rename_all = "camelCase")]
pub struct PathTraceSpec {
    /// Who sends.
    pub source: PathSource,
    /// Who is to receive: exactly one of `pod`, `service` and `address`.
    pub target: PathTarget,
    /// The port of the target, 1 to 65535. Default: the only port of a Service. Without a port, the operator says of
    /// policies with ports only that the answer depends on the port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 65_535))]
    pub port: Option<u16>,
    /// The protocol: `TCP`, `UDP` or `SCTP`. Default: `TCP`.
    #[serde(default)]
    pub protocol: PathProtocol,
    /// Whether the source's droplet sends one packet from the pod, and droplets on the way report what they do with it.
    /// The packet is a connection that is closed at once (TCP), an empty datagram (UDP), or, without a port, an echo of
    /// ICMP. A pod sends one a second at most. Default: false.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub probe: bool,
}

/// The pod that sends.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PathSource {
    /// The name of a pod in the namespace of the PathTrace.
    #[schemars(
        length(min = 1, max = 253),
        regex(pattern = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")
    )]
    pub pod: String,
}

/// The target of the packets.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct PathTarget {
    /// A pod. Packets to its IPv4 address are judged. To ask about its IPv6 address, give that as `address`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<PathObject>,
    /// A Service.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service: Option<PathObject>,
    /// An address, such as 10.0.2.4 or fd00:2::4: one of the source's VPC, of a Service, or outside. It is none of
    /// loopback, link-local or multicast.
    #[x_kube(
        validation = Rule::new("isIP(self) && ip(self).isGlobalUnicast()")
            .message("spec.target.address must be an address such as 10.0.2.4 or fd00:2::4, without prefix length, \
                      and none of loopback, link-local or multicast")
    )]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 39))]
    pub address: Option<String>,
}

/// A pod or a Service.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PathObject {
    /// The namespace. Default: that of the PathTrace. Of another namespace's pods the status says only whether packets
    /// reach them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(
        length(min = 1, max = 63),
        regex(pattern = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")
    )]
    pub namespace: Option<String>,
    /// The name.
    #[schemars(
        length(min = 1, max = 253),
        regex(pattern = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")
    )]
    pub name: String,
}

/// A protocol with ports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "UPPERCASE")]
pub enum PathProtocol {
    #[default]
    Tcp,
    Udp,
    Sctp,
}

impl PathProtocol {
    /// Returns the IP protocol's number.
    pub const fn number(self) -> u8 {
        match self {
            Self::Tcp => 6,
            Self::Udp => 17,
            Self::Sctp => 132,
        }
    }

    /// Returns the name in Kubernetes.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Tcp => "TCP",
            Self::Udp => "UDP",
            Self::Sctp => "SCTP",
        }
    }
}

/// The answer. Only the operator writes it, once.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct PathTraceStatus {
    /// `OK`: nothing is wrong. `NO`: the last step, or the answer to the probe, says what is wrong. `UNKNOWN`: it says
    /// what can't be known. Absent until the operator has looked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub verdict: Option<PathVerdict>,
    /// The reason of the last step, or of the answer to the probe, if the verdict is not `OK`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The steps of the path, as far as they were looked at.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub steps: Vec<PathStep>,
    /// What programs of droplets did with the packet of a probe, as far as they reported it. Empty if the target is, or
    /// has, a pod of another namespace.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub hops: Vec<PathHop>,
    /// The answer to the packet of a probe. Absent without a probe.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub answer: Option<PathStep>,
    /// The `metadata.generation` that the status is about.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// The time at which the operator looked, in RFC 3339 format.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub evaluated_at: Option<String>,
}

/// Whether packets arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "UPPERCASE")]
pub enum PathVerdict {
    Ok,
    No,
    Unknown,
}

impl PathVerdict {
    /// Returns the verdict as the status has it.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Ok => "OK",
            Self::No => "NO",
            Self::Unknown => "UNKNOWN",
        }
    }
}

/// A part of the path.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PathStep {
    /// The part: `source`, `target`, `backends`, `egress`, `droplets`, `rows`, `policies`, `service` or `answer`.
    pub name: String,
    /// `ok`, `fail` or `unknown`.
    pub state: PathStepState,
    /// What was found.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub message: String,
    /// One word in CamelCase, if the state is not `ok`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// What to do, if the state is not `ok`.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub remedy: String,
}

/// What a program did with the packet of a probe.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PathHop {
    /// The droplet.
    pub node: String,
    /// The program: `agent` at a pod's interface, `transit` at the node's.
    pub program: String,
    /// The verdict, as `transitd trace` has it: the name of a counter.
    pub verdict: String,
    /// The droplet that the packet was sent to, or the pod that it was delivered to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
    /// Microseconds since this droplet first saw the packet. Droplets have no common clock.
    pub microseconds: u32,
}

/// How a part of the path stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum PathStepState {
    Ok,
    Fail,
    Unknown,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{PathStepState, PathTrace, PathVerdict};

    #[test]
    fn a_question_and_its_answer_are_read_as_documented() {
        let trace: PathTrace = serde_json::from_value(json!({
            "apiVersion": "thuban.dev/v1alpha1", "kind": "PathTrace",
            "metadata": {"name": "why-1", "namespace": "red"},
            "spec": {"source": {"pod": "web-0"}, "target": {"pod": {"name": "db-0"}}, "port": 5432},
            "status": {"verdict": "NO", "reason": "PolicyDenies", "steps": [
                {"name": "policies", "state": "fail", "message": "denied", "reason": "PolicyDenies"}]},
        }))
        .unwrap();
        assert_eq!(
            (trace.spec.protocol.number(), trace.spec.protocol.name()),
            (6, "TCP")
        );
        let status = trace.status.unwrap();
        assert_eq!(status.verdict, Some(PathVerdict::No));
        assert_eq!(status.steps[0].state, PathStepState::Fail);
        let written = serde_json::to_value(&status).unwrap();
        assert_eq!(written["verdict"], PathVerdict::No.word());
        assert!(written.get("evaluatedAt").is_none(), "{written}");
        let spec = serde_json::to_value(&trace.spec).unwrap();
        assert_eq!(spec["protocol"], "TCP");
        assert!(spec.get("probe").is_none(), "{spec}");
        assert!(spec["target"].get("address").is_none(), "{spec}");
    }
}
