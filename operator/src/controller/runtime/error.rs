//! Errors of reconciling an object.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use kube::ResourceExt;
use kube::runtime::controller::Action;
use thiserror::Error;
use thuban_client::jitter;
use tracing::{debug, warn};

use crate::controller::runtime::objects::{Object, WriteError};
use crate::metrics::Category;

/// How long an object waits after an error, about.
const ERROR_RETRY: Duration = Duration::from_secs(2);
/// How long an object waits after another writer changed it, about.
const CONFLICT_RETRY: Duration = Duration::from_millis(100);
/// The longest wait that the API server can ask for: no answer puts an object aside for good.
const MAX_RETRY_AFTER: Duration = Duration::from_mins(5);

/// Why an endpoint has no address. The messages are for the person who made the pod or Service, who may not change the
/// network.
#[derive(Debug, Error)]
pub enum ClaimError {
    #[error(
        "network {network:?} has no free {family} address; ask the owner of the network to append an {family} range \
         to its spec.cidrs, or wait until addresses of deleted endpoints are free again"
    )]
    Full { network: String, family: &'static str },
    #[error(
        "other VPCs use all free {family} addresses of network {network:?} on node {node}; run the pod on another \
         node, or ask the owner of the network to append an {family} range to its spec.cidrs"
    )]
    UsedOnNode {
        network: String,
        family: &'static str,
        node: String,
    },
    #[error(
        "address {address}: network {network:?} has no allowStaticIPs; ask for no address, or ask the owner of the \
         network to set it"
    )]
    NotStatic { address: IpAddr, network: String },
    #[error("address {address}: not in a range of network {network:?}; ask for an address in {ranges}")]
    OutsideRanges {
        address: IpAddr,
        network: String,
        /// All of its ranges, with commas between them.
        ranges: String,
    },
    #[error("address {address}: {wrong}")]
    Unfit { address: IpAddr, wrong: &'static str },
    #[error(
        "address {address} is taken by another endpoint of the VPC; ask for another one or wait until it is free"
    )]
    Taken { address: IpAddr },
    #[error(
        "address {address} is taken by Endpoint {endpoint:?} of this namespace; ask for another one or wait until it \
         is free"
    )]
    TakenHere { address: IpAddr, endpoint: String },
    #[error("the claim of address {address} was released meanwhile")]
    Lost { address: IpAddr },
    #[error(transparent)]
    Write(#[from] WriteError),
}

impl ClaimError {
    /// Returns the reason for conditions and events; none for errors that pass by themselves.
    pub fn reason(&self) -> Option<&'static str> {
        match self {
            Self::Full { .. } => Some("NetworkFull"),
            Self::UsedOnNode { .. } => Some("AddressInUseOnNode"),
            Self::NotStatic { .. } | Self::OutsideRanges { .. } | Self::Unfit { .. } => Some("AddressUnfit"),
            Self::Taken { .. } | Self::TakenHere { .. } => Some("AddressTaken"),
            Self::Lost { .. } => None,
            Self::Write(error) => error.is_denied().then_some("ClaimDenied"),
        }
    }
}

#[derive(Debug, Error)]
pub enum ReconcileError {
    #[error(transparent)]
    Write(#[from] WriteError),
    #[error(transparent)]
    Claim(#[from] ClaimError),
}

impl ReconcileError {
    fn write(&self) -> Option<&WriteError> {
        match self {
            Self::Write(write) | Self::Claim(ClaimError::Write(write)) => Some(write),
            Self::Claim(_) => None,
        }
    }

    /// Whether another writer changed the object meanwhile.
    fn is_conflict(&self) -> bool {
        self.write().is_some_and(WriteError::is_conflict)
    }

    /// Returns how long the object waits before it is tried again: not less than the API server asks for, and spread,
    /// so that objects that failed together are not tried together.
    fn pause(&self) -> Duration {
        if self.is_conflict() {
            return jitter::around(CONFLICT_RETRY);
        }
        let asked = self.write().and_then(WriteError::retry_after).unwrap_or_default();
        jitter::around(ERROR_RETRY).max(jitter::at_least(asked.min(MAX_RETRY_AFTER)))
    }
}

impl Category for ReconcileError {
    fn category(&self) -> &'static str {
        match self {
            Self::Write(write) | Self::Claim(ClaimError::Write(write)) => write.category(),
            Self::Claim(ClaimError::Full { .. } | ClaimError::UsedOnNode { .. }) => "full",
            Self::Claim(
                ClaimError::NotStatic { .. }
                | ClaimError::OutsideRanges { .. }
                | ClaimError::Unfit { .. }
                | ClaimError::Taken { .. }
                | ClaimError::TakenHere { .. }
                | ClaimError::Lost { .. },
            ) => "address",
        }
    }
}

/// Returns when to try again: after a conflict almost at once, after any other error with a pause. A transient error of
/// the API server ends nothing. A change that concerns the object ends the pause.
#[allow(clippy::needless_pass_by_value)] // the signature of kube's error policies
pub fn retry<K: Object, C>(object: Arc<K>, error: &ReconcileError, _: Arc<C>) -> Action {
    if error.is_conflict() {
        debug!(object = object.name_any(), %error, "conflict, trying again");
        return Action::requeue(error.pause());
    }
    warn!(object = object.name_any(), %error, "reconcile failed, trying again");
    Action::requeue(error.pause())
}

#[cfg(test)]
mod tests {
    use kube::core::Status;
    use serde_json::json;

    use super::{ClaimError, Duration, ReconcileError};
    use crate::controller::runtime::objects::failed;

    /// Returns the range of pauses, in milliseconds, of many objects after such an answer.
    fn pauses(code: u16, retry_after: u32) -> (u128, u128) {
        let status: Status = serde_json::from_value(json!({
            "status": "Failure", "code": code, "details": {"retryAfterSeconds": retry_after},
        }))
        .unwrap();
        let error = failed("create", "x")(kube::Error::Api(Box::new(status)));
        let error = ReconcileError::Claim(ClaimError::Write(error));
        let pauses: Vec<Duration> = (0..200).map(|_| error.pause()).collect();
        let (first, last) = (pauses.iter().min().unwrap(), pauses.iter().max().unwrap());
        (first.as_millis(), last.as_millis())
    }

    #[test]
    fn objects_that_failed_together_come_back_apart() {
        let (first, last) = pauses(500, 0);
        assert!(
            first >= 1000 && last <= 3000 && last - first > 500,
            "{first} {last}"
        );
        let (first, last) = pauses(409, 0);
        assert!(first >= 50 && last <= 150 && last - first > 20, "{first} {last}");
    }

    #[test]
    fn no_object_comes_back_before_the_server_wants_it() {
        for code in [429, 503] {
            let (first, last) = pauses(code, 30);
            assert!(
                first >= 30_000 && last <= 37_500 && last - first > 1000,
                "{first} {last}"
            );
        }
        let (_, last) = pauses(429, u32::MAX);
        assert!(last <= 375_000, "it comes back: {last}");
    }
}
