//! The reasons of answers against the table of reasons.

use thuban_api::reasons;

use crate::model::world::path::{Cause, KIND};

/// All causes. The tests of paths plant each.
const CAUSES: [Cause; 28] = [
    Cause::PodNotFound,
    Cause::PodNotBound,
    Cause::PodEnded,
    Cause::HostNetwork,
    Cause::NoEndpoint,
    Cause::EndpointInUse,
    Cause::NotProvisioned,
    Cause::TargetNotReady,
    Cause::NotInVpc,
    Cause::AddressFree,
    Cause::NoSuchFamily,
    Cause::NoEgress,
    Cause::NetworkPrivate,
    Cause::RangeClosed,
    Cause::ServiceNotFound,
    Cause::ServiceNotReached,
    Cause::PortNotServed,
    Cause::PortNeeded,
    Cause::NoBackends,
    Cause::PolicyDenies,
    Cause::PolicyChanges,
    Cause::TooManyRules,
    Cause::DropletSuspect,
    Cause::DropletAway,
    Cause::RowsMissing,
    Cause::TableFull,
    Cause::WaitsForUpgrade,
    Cause::RolesNotServing,
];
/// The reasons that the controller gives: it refuses questions, and hears of probes.
const OF_CONTROLLER: [&str; 5] = [
    "TooManyTraces",
    "ProbeRefused",
    "ProbeUnreachable",
    "ProbeSilent",
    "ProbeNotSent",
];

#[test]
fn every_cause_has_a_remedy_and_every_reason_a_cause() {
    for cause in CAUSES {
        assert!(!reasons::remedy(KIND, cause.reason()).is_empty(), "{cause:?}");
    }
    let table = reasons::all().filter(|reason| reason.is_of(KIND));
    let is_made =
        |name: &str| CAUSES.iter().any(|cause| cause.reason() == name) || OF_CONTROLLER.contains(&name);
    let never: Vec<&str> = table
        .map(|reason| reason.name)
        .filter(|name| !is_made(name))
        .collect();
    assert!(never.is_empty(), "no answer has the reasons {never:?}");
}
