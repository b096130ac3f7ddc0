//! Finds the operator's address: in its Lease, which is read only while disconnected, or fixed by flags.

use std::path::PathBuf;
use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease;
use kube::Api;
use kube::api::GetParams;
use thiserror::Error;
use tokio::time::timeout;

/// Name of the operator's Lease.
const OPERATOR_LEASE: &str = "thuban-operator";
/// host:port of the leader.
const ADDRESS: &str = "thuban.dev/address";
/// PEM of the CA certificates that the leader's certificate may chain to.
const CA_BUNDLE: &str = "thuban.dev/ca-bundle";

#[derive(Debug, Error)]
pub enum LeaseError {
    #[error("cannot read the Lease {OPERATOR_LEASE}")]
    Read(#[source] kube::Error),
    #[error("the API server does not answer")]
    Silent,
    #[error("the Lease {OPERATOR_LEASE} has no annotation {0}; no operator leads yet")]
    Annotation(&'static str),
    #[error("cannot read the CA bundle {path}")]
    Bundle { path: PathBuf, source: std::io::Error },
}

/// How to find the operator.
#[derive(Clone, Debug)]
pub enum Locator {
    Lease(Box<Api<Lease>>),
    Fixed { address: String, bundle: PathBuf },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Location {
    /// host:port
    pub address: String,
    /// PEM
    pub ca_bundle: String,
}

impl Locator {
    /// Finds the operator within `patience`.
    pub async fn locate(&self, patience: Duration) -> Result<Location, LeaseError> {
        match self {
            Self::Fixed { address, bundle } => {
                let ca_bundle = std::fs::read_to_string(bundle).map_err(|source| LeaseError::Bundle {
                    path: bundle.clone(),
                    source,
                })?;
                Ok(Location {
                    address: address.clone(),
                    ca_bundle,
                })
            }
            Self::Lease(api) => {
                // The Lease comes from the API server's cache: all droplets ask at once when the operator is gone.
                let parameters = GetParams::any();
                let lease = timeout(patience, api.get_with(OPERATOR_LEASE, &parameters))
                    .await
                    .map_err(|_| LeaseError::Silent)?
                    .map_err(LeaseError::Read)?;
                let annotations = lease.metadata.annotations.unwrap_or_default();
                let value = |name| annotations.get(name).cloned().ok_or(LeaseError::Annotation(name));
                Ok(Location {
                    address: value(ADDRESS)?,
                    ca_bundle: value(CA_BUNDLE)?,
                })
            }
        }
    }
}
