//! A node's own endpoint, in the default VPC: by it the node reaches pods and services on all nodes. It is made for each
//! accepted droplet; what follows is the workflow of endpoints.

use kube::api::ObjectMeta;
use kube::runtime::reflector::ObjectRef;
use kube::{Api, ResourceExt};
use thuban_api::{DEFAULT_NAME, Droplet, Endpoint, EndpointSpec, EndpointType, FINALIZER, SYSTEM_NAMESPACE};
use tracing::info;

use crate::controller::admission::usable_network;
use crate::controller::context::Context;
use crate::controller::runtime::clocks::Timed;
use crate::controller::runtime::error::ReconcileError;
use crate::controller::runtime::objects::create;
use crate::model::endpoint::is_host;

/// Makes it if it is missing and can be. Whoever is woken by network or namespace asks again.
pub async fn ensure(droplet: &Droplet, context: &Context) -> Result<(), ReconcileError> {
    let name = droplet.name_any();
    let Ok(network) = usable_network(SYSTEM_NAMESPACE, DEFAULT_NAME, context) else {
        return Ok(());
    };
    let known = ObjectRef::<Endpoint>::new(&name).within(SYSTEM_NAMESPACE);
    if let Some(known) = context.stores.endpoints.get(&known) {
        if !is_host(&known) && context.clocks.known_for(Timed::HostNameTaken, &name).is_zero() {
            let note = format!(
                "an Endpoint of a user in namespace {SYSTEM_NAMESPACE} has the name {name:?}, which is this node's: delete it"
            );
            context.events.event(droplet, true, "EndpointNameTaken", &note);
        }
        return Ok(());
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
    let mut endpoint = Endpoint::new(&name, spec);
    endpoint.metadata = ObjectMeta {
        name: Some(name.clone()),
        namespace: Some(SYSTEM_NAMESPACE.to_owned()),
        finalizers: Some(vec![FINALIZER.to_owned()]),
        ..ObjectMeta::default()
    };
    let endpoints: Api<Endpoint> = Api::namespaced(context.client.clone(), SYSTEM_NAMESPACE);
    match create(&endpoints, &endpoint).await {
        Ok(_) => {
            info!(droplet = name, "the node gets an endpoint of its own");
            Ok(())
        }
        // The watch will tell, or Thuban is on its way out.
        Err(error) if error.is_conflict() || error.is_forbidden() => Ok(()),
        Err(error) => Err(error.into()),
    }
}
