//! Where leases are kept: the API server, or what a test has in its place.
//!
//! Every write is made under the version that was read. So any number of cidrds may work at once, and a decision that
//! was made on old facts fails instead of taking effect.

use kube::api::{DeleteParams, ListParams, PostParams, Preconditions};
use kube::{Api, Client, ResourceExt};
use thiserror::Error;
use thuban_api::ip_lease::{IpLease, IpLeaseStatus};

/// How many leases one answer of the API server has.
const PAGE: u32 = 500;

#[derive(Debug, Error)]
pub enum StoreError {
    /// The address has a lease.
    #[error("the address has a lease already")]
    Exists,
    /// The lease was changed or deleted since it was read.
    #[error("the lease was changed meanwhile")]
    Conflict,
    /// Whether a write took effect is not known.
    #[error("the API server is away: {0}")]
    Away(#[source] kube::Error),
}

impl StoreError {
    fn of_write(error: kube::Error) -> Self {
        match &error {
            kube::Error::Api(status) if status.reason == "AlreadyExists" => Self::Exists,
            kube::Error::Api(status) if matches!(status.code, 404 | 409) => Self::Conflict,
            _ => Self::Away(error),
        }
    }
}

/// What leases need of a store. Reads return what was last written by anybody.
pub trait Store: Send + Sync + 'static {
    fn of_holder(&self, uid: &str) -> impl Future<Output = Result<Vec<IpLease>, StoreError>> + Send;
    fn all(&self) -> impl Future<Output = Result<Vec<IpLease>, StoreError>> + Send;
    /// Creates a lease, without a status.
    fn create(&self, lease: &IpLease) -> impl Future<Output = Result<(), StoreError>> + Send;
    /// Writes the status of a lease, if the lease is as it was read.
    fn set_status(
        &self,
        lease: &IpLease,
        status: IpLeaseStatus,
    ) -> impl Future<Output = Result<IpLease, StoreError>> + Send;
    /// Deletes a lease, if it is as it was read.
    fn delete(&self, lease: &IpLease) -> impl Future<Output = Result<(), StoreError>> + Send;
}

/// The API server.
#[derive(Clone)]
pub struct ApiServer(Api<IpLease>);

impl ApiServer {
    pub fn new(client: Client) -> Self {
        Self(Api::all(client))
    }

    /// Lists without a resourceVersion: the API server then answers with its latest state.
    async fn list(&self, mut parameters: ListParams) -> Result<Vec<IpLease>, StoreError> {
        let mut leases = Vec::new();
        loop {
            let page = self.0.list(&parameters).await.map_err(StoreError::Away)?;
            leases.extend(page.items);
            match page.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => parameters = parameters.continue_token(&token),
                None => return Ok(leases),
            }
        }
    }
}

impl Store for ApiServer {
    async fn of_holder(&self, uid: &str) -> Result<Vec<IpLease>, StoreError> {
        self.list(ListParams::default().fields(&format!("spec.holder.uid={uid}")))
            .await
    }

    async fn all(&self) -> Result<Vec<IpLease>, StoreError> {
        self.list(ListParams::default().limit(PAGE)).await
    }

    async fn create(&self, lease: &IpLease) -> Result<(), StoreError> {
        let created = self.0.create(&PostParams::default(), lease).await;
        created.map(drop).map_err(StoreError::of_write)
    }

    async fn set_status(&self, lease: &IpLease, status: IpLeaseStatus) -> Result<IpLease, StoreError> {
        let mut changed = lease.clone();
        changed.status = Some(status);
        let replaced = self
            .0
            .replace_status(&lease.name_any(), &PostParams::default(), &changed)
            .await;
        replaced.map_err(StoreError::of_write)
    }

    async fn delete(&self, lease: &IpLease) -> Result<(), StoreError> {
        let parameters = DeleteParams {
            preconditions: Some(Preconditions {
                uid: lease.uid(),
                resource_version: lease.resource_version(),
            }),
            ..DeleteParams::default()
        };
        let deleted = self.0.delete(&lease.name_any(), &parameters).await;
        deleted.map(drop).map_err(StoreError::of_write)
    }
}
