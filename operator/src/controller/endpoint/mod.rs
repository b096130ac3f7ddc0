//! Endpoint of a pod or a node. It is admitted, gets its addresses, and is sent to its bouncers and its droplet; it is
//! Provisioned when they have acked. It is removed from all of them before its addresses are released. Each kind of
//! holder has a module that says whether the Endpoint goes on; a Service's Endpoint has a workflow of its own
//! (`scaled`).

mod allocate;
pub mod host;
pub mod pod;
mod provision;
mod remarks;
mod remove;
pub mod scaled;
pub mod status;
pub mod sync;
mod user;

use std::sync::Arc;

use kube::Api;
use kube::runtime::controller::Action;
use thuban_api::{Endpoint, Phase};

use crate::controller::attach;
use crate::controller::context::Context;
use crate::controller::runtime::error::ReconcileError;
use crate::model::endpoint::{EndpointKind, has_addresses, name_of};

use allocate::{allocate, give_back};
use provision::{keep, provision};
use remove::remove;
use sync::confirm_claims;

/// Whether an Endpoint is deleted, or is about to be because its pod is gone.
pub fn is_ending(endpoint: &Endpoint, context: &Context) -> bool {
    let is_pods = EndpointKind::of(endpoint) == EndpointKind::Pod;
    endpoint.metadata.deletion_timestamp.is_some() || is_pods && !attach::has_living_pod(endpoint, context)
}

pub async fn reconcile(endpoint: Arc<Endpoint>, context: Arc<Context>) -> Result<Action, ReconcileError> {
    let (endpoint, context) = (&*endpoint, &*context);
    let endpoints: Api<Endpoint> = Api::namespaced(context.client.clone(), &name_of(endpoint).0);
    let kind = EndpointKind::of(endpoint);
    if kind == EndpointKind::Service {
        return scaled::reconcile(endpoint, &endpoints, context).await;
    }
    if endpoint.metadata.deletion_timestamp.is_some() {
        return remove(endpoint, &endpoints, context).await;
    }
    let attended = match kind {
        EndpointKind::Pod => pod::attend(endpoint, &endpoints, context).await?,
        EndpointKind::User => user::attend(endpoint, &endpoints, context).await?,
        EndpointKind::Host => host::attend(endpoint, &endpoints, context).await?,
        EndpointKind::Service => None,
    };
    if let Some(action) = attended {
        return Ok(action);
    }
    if !has_addresses(endpoint) || !confirm_claims(endpoint, context).await? {
        return allocate(endpoint, &endpoints, context).await;
    }
    status::tell_too_many_rules(endpoint, context);
    remarks::tell(endpoint, context);
    let status = endpoint.status.clone().unwrap_or_default();
    let has_moved = status.previous_droplet.is_none();
    match status.phase {
        Phase::Init if context.hub.is_in_use(&name_of(endpoint)) => {
            give_back(endpoint, &endpoints, context).await
        }
        Phase::Init => provision(endpoint, &endpoints, status, context).await,
        Phase::Provisioned if !has_moved => provision(endpoint, &endpoints, status, context).await,
        Phase::Provisioned => keep(endpoint, &endpoints, status, context).await,
    }
}
