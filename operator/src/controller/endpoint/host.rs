//! A node's own endpoint, in the default VPC: the node reaches pods and services on all nodes by it. It is made for
//! each accepted droplet; the workflow of endpoints does the rest.

use kube::runtime::controller::Action;
use kube::runtime::reflector::ObjectRef;
use kube::{Api, ResourceExt};
use thuban_api::{DEFAULT_NAME, Droplet, Endpoint, EndpointSpec, EndpointType, system_namespace};
use tracing::info;

use crate::controller::admission::usable_network;
use crate::controller::context::Context;
use crate::controller::denial;
use crate::controller::runtime::clocks::Timed;
use crate::controller::runtime::error::ReconcileError;
use crate::controller::runtime::objects::{create, delete};
use crate::model::endpoint::{self, EndpointKind, name_of};

/// Makes the node's endpoint if it is missing and can be made. A change of the network or the namespace wakes the
/// droplet, whose reconciler asks again. Returns when to ask again if the endpoint was denied.
pub async fn ensure(droplet: &Droplet, context: &Context) -> Result<Option<Action>, ReconcileError> {
    let name = droplet.name_any();
    let Ok(network) = usable_network(system_namespace(), DEFAULT_NAME, context) else {
        return Ok(None);
    };
    let known = ObjectRef::<Endpoint>::new(&name).within(system_namespace());
    if let Some(known) = context.stores.endpoints.get(&known) {
        if EndpointKind::of(&known) != EndpointKind::Host
            && context.clocks.known_for(Timed::HostNameTaken, &name).is_zero()
        {
            let note = format!(
                "a user's Endpoint in namespace {} has the name {name:?}, which this node's Endpoint \
                 needs; delete the user's Endpoint",
                system_namespace()
            );
            context.events.event(droplet, true, "EndpointNameTaken", &note);
        }
        return Ok(None);
    }
    let spec = EndpointSpec {
        kind: EndpointType::Host,
        vpc: network.spec.vpc.clone(),
        network: DEFAULT_NAME.to_owned(),
        pod_ref: None,
        service_ref: None,
        droplet: name.clone(),
        addresses: Vec::new(),
        claimed: Vec::new(),
        mac: None,
    };
    let endpoint = endpoint::new(system_namespace(), &name, spec);
    let endpoints: Api<Endpoint> = Api::namespaced(context.client.clone(), system_namespace());
    match create(&endpoints, &endpoint).await {
        Ok(_) => {
            denial::forget(droplet, context);
            info!(droplet = name, "the node gets an endpoint of its own");
            Ok(None)
        }
        // The watch will tell.
        Err(error) if error.is_conflict() => Ok(None),
        Err(error) if error.is_denied() => {
            Ok(Some(denial::tell(droplet, system_namespace(), &error, context)))
        }
        Err(error) => Err(error.into()),
    }
}

/// Whether the node wants the endpoint: an accepted droplet is there, and the network stays.
pub fn is_wanted_by_node(endpoint: &Endpoint, context: &Context) -> bool {
    let spec = &endpoint.spec;
    let is_right = name_of(endpoint) == (system_namespace().to_owned(), spec.droplet.clone())
        && spec.network == DEFAULT_NAME;
    let network = context.network(&spec.network);
    let stays = network.is_some_and(|network| {
        network.metadata.deletion_timestamp.is_none() && (spec.vpc.is_empty() || network.spec.vpc == spec.vpc)
    });
    let droplet = ObjectRef::<Droplet>::new(&spec.droplet);
    let is_there = context.stores.droplets.get(&droplet).is_some() && context.node(&spec.droplet).is_some();
    is_right && stays && is_there
}

/// Deletes the endpoint if its node doesn't want it; none: its workflow goes on.
pub async fn attend(
    endpoint: &Endpoint,
    endpoints: &Api<Endpoint>,
    context: &Context,
) -> Result<Option<Action>, ReconcileError> {
    if is_wanted_by_node(endpoint, context) {
        return Ok(None);
    }
    delete(endpoints, endpoint).await?;
    Ok(Some(Action::await_change()))
}
