//! Service: a Service with addresses of its own gets a scaled Endpoint in the VPC of its namespace (the seed's trigger
//! of the scaled endpoint's workflow). The API server allocated its addresses; the operator never writes a Service. The
//! Endpoint's workflow, `scaled`, handles slices and the Service itself.

pub mod observe;
pub mod outside_address;
pub mod own_address;
pub mod service_range;

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Namespace;
use kube::runtime::controller::Action;
use kube::runtime::reflector::ObjectRef;
use kube::{Api, ResourceExt};
use thuban_api::{DEFAULT_NAME, Endpoint, EndpointSpec, EndpointType, ServiceRef};
use tracing::info;

use crate::controller::admission::usable_network;
use crate::controller::context::Context;
use crate::controller::denial;
use crate::controller::runtime::clocks::Timed;
use crate::controller::runtime::error::ReconcileError;
use crate::controller::runtime::objects::create;
use crate::controller::service::own_address::asked_by;
use crate::model::admission::network_of;
use crate::model::endpoint;
use crate::model::service::Service;

/// How long the workflow waits for the caches of other kinds, which may lag behind that of Services.
const CACHE_RETRY: Duration = Duration::from_millis(500);
/// How long the workflow waits for a fix by a person.
const USER_RETRY: Duration = Duration::from_secs(10);

pub async fn reconcile(service: Arc<Service>, context: Arc<Context>) -> Result<Action, ReconcileError> {
    let (Some(namespace), Some(uid)) = (service.namespace(), service.uid()) else {
        return Ok(Action::await_change());
    };
    let addresses = service.cluster_ips();
    if addresses.is_empty() || service.metadata.deletion_timestamp.is_some() {
        // The Service also wakes the Endpoint that it may have had before.
        return Ok(Action::await_change());
    }
    let name = service.endpoint_name();
    let known = ObjectRef::<Endpoint>::new(&name).within(&namespace);
    if let Some(known) = context.stores.endpoints.get(&known) {
        let is_own = known.spec.service_ref.as_ref().is_some_and(|own| own.uid == uid);
        if is_own {
            return Ok(Action::await_change());
        }
        if context.clocks.known_for(Timed::ServiceNameTaken, &uid).is_zero() {
            let note = format!(
                "a user's Endpoint has the name {name:?}, which this Service's Endpoint needs; delete the user's"
            );
            context.events.event(&*service, true, "EndpointNameTaken", &note);
        }
        return Ok(Action::requeue(USER_RETRY));
    }
    let space = ObjectRef::<Namespace>::new(&namespace);
    let Some(space) = context.stores.namespaces.get(&space) else {
        return Ok(Action::requeue(CACHE_RETRY));
    };
    let network = network_of(service.annotations(), space.annotations());
    if network == DEFAULT_NAME && context.network(&network).is_none() {
        // The installation is new: this operator makes the network.
        return Ok(Action::requeue(CACHE_RETRY));
    }
    // The Endpoint reports any other obstacle.
    let usable = usable_network(&namespace, &network, &context).is_ok();
    let vpc = context
        .network(&network)
        .map(|network| network.spec.vpc.clone())
        .unwrap_or_default();
    let claimed = addresses.iter().filter(|_| usable).map(ToString::to_string);
    let asked = match asked_by(&service) {
        Ok(asked) => asked,
        Err(error) => {
            tell_once(&service, &error.to_string(), &context);
            // The Endpoint is made without the requested addresses.
            Vec::new()
        }
    };
    let spec = EndpointSpec {
        kind: EndpointType::Scaled,
        vpc,
        network,
        pod_ref: None,
        service_ref: Some(ServiceRef {
            name: service.name_any(),
            uid,
        }),
        droplet: String::new(),
        addresses: asked.iter().map(ToString::to_string).collect(),
        claimed: claimed.collect(),
        mac: None,
    };
    let endpoint = endpoint::new(&namespace, &name, spec);
    let endpoints: Api<Endpoint> = Api::namespaced(context.client.clone(), &namespace);
    match create(&endpoints, &endpoint).await {
        Ok(_) => {
            denial::forget(&*service, &context);
            info!(
                namespace,
                endpoint = name,
                network = endpoint.spec.network,
                addresses = endpoint.spec.claimed.join(", "),
                "scaled endpoint created"
            );
            // Another operator with an old cache may delete the Endpoint.
            Ok(Action::requeue(USER_RETRY))
        }
        // The watch will tell.
        Err(error) if error.is_conflict() => Ok(Action::requeue(USER_RETRY)),
        // A rule of the kind may deny it too, for a network name that is not valid.
        Err(error) if error.is_denied() => Ok(denial::tell(&*service, &namespace, &error, &context)),
        Err(error) => Err(error.into()),
    }
}

fn tell_once(service: &Service, note: &str, context: &Context) {
    let uid = service.uid().unwrap_or_default();
    if context.clocks.known_for(Timed::ServiceInvalid, &uid).is_zero() {
        context.events.event(service, true, "InvalidAnnotation", note);
    }
}
