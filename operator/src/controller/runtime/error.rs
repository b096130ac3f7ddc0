//! Errors of reconciling an object.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use kube::ResourceExt;
use kube::runtime::controller::Action;
use thiserror::Error;
use tracing::{debug, warn};

use crate::controller::runtime::objects::{Object, WriteError};
use crate::metrics::Category;

#[derive(Debug, Error)]
pub enum ClaimError {
    #[error(
        "network {network:?} has no free {family} address; append an {family} range to its spec.cidrs, or wait \
         until addresses of deleted endpoints are free again"
    )]
    Full { network: String, family: &'static str },
    #[error(
        "other VPCs use all free {family} addresses of network {network:?} on node {node}; run the pod on another \
         node, or append an {family} range to the network's spec.cidrs"
    )]
    UsedOnNode {
        network: String,
        family: &'static str,
        node: String,
    },
    #[error("address {address}: {wrong}")]
    Unfit { address: IpAddr, wrong: &'static str },
    #[error(
        "address {address} is taken by another endpoint of the VPC; ask for another one or wait until it is free"
    )]
    Taken { address: IpAddr },
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
            Self::Unfit { .. } => Some("AddressUnfit"),
            Self::Taken { .. } => Some("AddressTaken"),
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
    /// Whether another writer changed the object meanwhile.
    fn is_conflict(&self) -> bool {
        match self {
            Self::Write(write) | Self::Claim(ClaimError::Write(write)) => write.is_conflict(),
            Self::Claim(_) => false,
        }
    }
}

impl Category for ReconcileError {
    fn category(&self) -> &'static str {
        match self {
            Self::Write(write) | Self::Claim(ClaimError::Write(write)) => write.category(),
            Self::Claim(ClaimError::Full { .. } | ClaimError::UsedOnNode { .. }) => "full",
            Self::Claim(ClaimError::Unfit { .. } | ClaimError::Taken { .. } | ClaimError::Lost { .. }) => {
                "address"
            }
        }
    }
}

/// Returns when to try again: after a conflict at once, after any other error with a pause. A transient error of the
/// API server ends nothing.
#[allow(clippy::needless_pass_by_value)] // the signature of kube's error policies
pub fn retry<K: Object, C>(object: Arc<K>, error: &ReconcileError, _: Arc<C>) -> Action {
    if error.is_conflict() {
        debug!(object = object.name_any(), %error, "conflict, trying again");
        return Action::requeue(Duration::from_millis(100));
    }
    warn!(object = object.name_any(), %error, "reconcile failed, trying again");
    Action::requeue(Duration::from_secs(2))
}
