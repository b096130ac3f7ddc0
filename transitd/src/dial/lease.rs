//! Finds a server's address: in its Lease, which is read only while disconnected, or fixed by flags.

use std::path::PathBuf;
use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease;
use kube::Api;
use kube::api::GetParams;
use thiserror::Error;
use tokio::time::timeout;

/// host:port of the leader.
const ADDRESS: &str = "thuban.dev/address";
/// PEM of the CA certificates that the leader's certificate may chain to.
const CA_BUNDLE: &str = "thuban.dev/ca-bundle";

#[derive(Debug, Error)]
pub enum LeaseError {
    #[error("cannot read the Lease {name}")]
    Read { name: &'static str, source: kube::Error },
    #[error("the API server does not answer")]
    Silent,
    #[error("the Lease {name} has no annotation {annotation}; nobody leads yet")]
    Annotation {
        name: &'static str,
        annotation: &'static str,
    },
    #[error("cannot read the CA bundle {path}")]
    Bundle { path: PathBuf, source: std::io::Error },
}

/// How to find a server.
#[derive(Clone, Debug)]
pub enum Locator {
    Lease {
        leases: Box<Api<Lease>>,
        name: &'static str,
    },
    Fixed {
        address: String,
        bundle: PathBuf,
    },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Location {
    /// host:port
    pub address: String,
    /// PEM
    pub ca_bundle: String,
}

impl Locator {
    /// Returns the way by the Lease of that name.
    pub fn by_lease(client: kube::Client, namespace: &str, name: &'static str) -> Self {
        Self::Lease {
            leases: Box::new(Api::namespaced(client, namespace)),
            name,
        }
    }

    /// Finds the server within `patience`.
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
            Self::Lease { leases, name } => {
                let name = *name;
                // The Lease comes from the API server's cache: all droplets ask at once when the server is gone.
                let parameters = GetParams::any();
                let lease = timeout(patience, leases.get_with(name, &parameters))
                    .await
                    .map_err(|_| LeaseError::Silent)?
                    .map_err(|source| LeaseError::Read { name, source })?;
                let annotations = lease.metadata.annotations.unwrap_or_default();
                let value = |annotation: &'static str| {
                    let found = annotations.get(annotation).cloned();
                    found.ok_or(LeaseError::Annotation { name, annotation })
                };
                Ok(Location {
                    address: value(ADDRESS)?,
                    ca_bundle: value(CA_BUNDLE)?,
                })
            }
        }
    }
}
