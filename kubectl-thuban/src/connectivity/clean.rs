//! Deletes what a run of the test has made, and nothing else: only objects with the label of the run.

use std::fmt::Debug;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Namespace, Pod, Service};
use kube::api::{DeleteParams, ListParams, Preconditions};
use kube::{Api, Client, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use thuban_api::{Network, Vpc};
use tokio::time::{Instant, sleep};

use super::manifests::{RUN_LABEL, selector};
use super::plan::{NETWORKS, Plan, Side};
use super::say;

const POLL: Duration = Duration::from_millis(500);
/// When objects are still there after this time, they are told.
const SAY_AFTER: Duration = Duration::from_secs(10);

/// Deletes all objects of a run and waits until they are gone. Returns those that are not, and why.
pub async fn clean(client: &Client, plan: &Plan, limit: Duration) -> Vec<String> {
    let began = Instant::now();
    let mut were_gone = false;
    let mut told = Vec::new();
    loop {
        let mut left = Vec::new();
        for side in Side::BOTH {
            left.extend(Box::pin(clean_side(client, plan, side)).await);
        }
        // Objects are looked for twice: a request to make one may have been on its way.
        let are_gone = left.is_empty();
        if (are_gone && were_gone) || began.elapsed() >= limit {
            return left;
        }
        if began.elapsed() >= SAY_AFTER && !are_gone && left != told {
            say(&format!("not yet: {}", left.join("; ")));
            told = left;
        }
        were_gone = are_gone;
        sleep(POLL).await;
    }
}

/// Deletes the next objects of a VPC: pods first, then networks, then the VPC. Returns what is left.
async fn clean_side(client: &Client, plan: &Plan, side: Side) -> Vec<String> {
    let namespace = plan.namespace(side);
    let namespaces: Api<Namespace> = Api::all(client.clone());
    let mut left = Vec::new();
    let removal = remove(&namespaces, &namespace, plan).await;
    if matches!(removal, Ok(Removal::Begun)) {
        empty(client, &namespace, plan).await;
    }
    left.extend(left_of(&removal, "namespace", &namespace));
    if left.is_empty() {
        let networks: Api<Network> = Api::all(client.clone());
        for place in 0..NETWORKS.len() {
            let name = plan.network(side, place);
            let removal = remove(&networks, &name, plan).await;
            left.extend(left_of(&removal, "network", &name));
        }
    }
    if left.is_empty() {
        let vpcs: Api<Vpc> = Api::all(client.clone());
        let removal = remove(&vpcs, &namespace, plan).await;
        left.extend(left_of(&removal, "VPC", &namespace));
    }
    left
}

/// Deletes pods and Services of a namespace that is being deleted: Kubernetes begins with them some seconds later.
async fn empty(client: &Client, namespace: &str, plan: &Plan) {
    let own = ListParams::default().labels(&selector(plan));
    let parameters = DeleteParams::default();
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let services: Api<Service> = Api::namespaced(client.clone(), namespace);
    // If that fails, they go with the namespace.
    let _ = Box::pin(pods.delete_collection(&parameters, &own)).await;
    let _ = Box::pin(services.delete_collection(&parameters, &own)).await;
}

/// How far the removal of an object is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Removal {
    /// It is not there, or it is not of this run.
    Gone,
    Begun,
    Waits,
}

/// Names an object that is still there.
fn left_of(removal: &Result<Removal, kube::Error>, kind: &str, name: &str) -> Option<String> {
    match removal {
        Ok(Removal::Gone) => None,
        Ok(Removal::Begun | Removal::Waits) => Some(format!("{kind} {name}: is being deleted")),
        Err(error) => Some(format!("{kind} {name}: {error}")),
    }
}

async fn remove<K>(api: &Api<K>, name: &str, plan: &Plan) -> Result<Removal, kube::Error>
where
    K: Clone + Debug + DeserializeOwned + Resource<DynamicType = ()>,
{
    let Some(object) = Box::pin(api.get_opt(name)).await? else {
        return Ok(Removal::Gone);
    };
    if object.labels().get(RUN_LABEL) != Some(&plan.run) {
        return Ok(Removal::Gone);
    }
    if object.meta().deletion_timestamp.is_some() {
        return Ok(Removal::Waits);
    }
    // Not one that somebody else has made in its place meanwhile.
    let parameters = DeleteParams {
        preconditions: Some(Preconditions {
            uid: object.uid(),
            ..Preconditions::default()
        }),
        ..DeleteParams::default()
    };
    Box::pin(api.delete(name, &parameters)).await?;
    Ok(Removal::Begun)
}
