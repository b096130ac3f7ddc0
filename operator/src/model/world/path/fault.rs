//! What may be wrong with a path.

use thuban_api::PathStepState;

/// Why packets do not arrive, or why that is not known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    pub state: PathStepState,
    pub reason: String,
    pub message: String,
}

impl Fault {
    /// Returns what an Endpoint's condition says.
    pub fn told(reason: &str, message: &str) -> Self {
        Self {
            state: PathStepState::Fail,
            reason: reason.to_owned(),
            message: message.to_owned(),
        }
    }
}

/// Returns why packets do not arrive.
pub fn no(cause: Cause, message: impl Into<String>) -> Fault {
    Fault {
        state: PathStepState::Fail,
        reason: cause.reason().to_owned(),
        message: message.into(),
    }
}

/// Returns why it is not known whether packets arrive.
pub fn unknown(cause: Cause, message: impl Into<String>) -> Fault {
    Fault {
        state: PathStepState::Unknown,
        ..no(cause, message)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    PodNotFound,
    PodNotBound,
    PodEnded,
    HostNetwork,
    NoEndpoint,
    EndpointInUse,
    NotProvisioned,
    TargetNotReady,
    NotInVpc,
    AddressFree,
    NoSuchFamily,
    NoEgress,
    NetworkPrivate,
    RangeClosed,
    ServiceNotFound,
    ServiceNotReached,
    PortNotServed,
    PortNeeded,
    NoBackends,
    PolicyDenies,
    PolicyChanges,
    TooManyRules,
    DropletSuspect,
    DropletAway,
    RowsMissing,
    TableFull,
    WaitsForUpgrade,
    RolesNotServing,
}

impl Cause {
    pub const fn reason(self) -> &'static str {
        match self {
            Self::PodNotFound => "PodNotFound",
            Self::PodNotBound => "PodNotBound",
            Self::PodEnded => "PodEnded",
            Self::HostNetwork => "HostNetwork",
            Self::NoEndpoint => "NoEndpoint",
            Self::EndpointInUse => "EndpointInUse",
            Self::NotProvisioned => "NotProvisioned",
            Self::TargetNotReady => "TargetNotReady",
            Self::NotInVpc => "NotInVpc",
            Self::AddressFree => "AddressFree",
            Self::NoSuchFamily => "NoSuchFamily",
            Self::NoEgress => "NoEgress",
            Self::NetworkPrivate => "NetworkPrivate",
            Self::RangeClosed => "RangeClosed",
            Self::ServiceNotFound => "ServiceNotFound",
            Self::ServiceNotReached => "ServiceNotReached",
            Self::PortNotServed => "PortNotServed",
            Self::PortNeeded => "PortNeeded",
            Self::NoBackends => "NoBackends",
            Self::PolicyDenies => "PolicyDenies",
            Self::PolicyChanges => "PolicyChanges",
            Self::TooManyRules => "TooManyRules",
            Self::DropletSuspect => "DropletSuspect",
            Self::DropletAway => "DropletAway",
            Self::RowsMissing => "RowsMissing",
            Self::TableFull => "TableFull",
            Self::WaitsForUpgrade => "WaitsForUpgrade",
            Self::RolesNotServing => "RolesNotServing",
        }
    }
}
