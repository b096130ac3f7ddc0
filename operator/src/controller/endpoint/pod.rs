//! Pod: a pod that is bound to a node gets an Endpoint (the seed's first trigger of the endpoint workflow). Its
//! addresses are claimed before, so that the workflow costs three writes.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Namespace;
use kube::runtime::controller::Action;
use kube::runtime::reflector::ObjectRef;
use kube::{Api, ResourceExt};
use thuban_api::identifiers::MacAddr;
use thuban_api::{ENDPOINT_ANNOTATION, Endpoint, EndpointSpec, EndpointType, IP_ANNOTATION, MAC_ANNOTATION};
use tracing::info;

use crate::controller::address::{Claimant, Claimed};
use crate::controller::admission::usable_network;
use crate::controller::attach;
use crate::controller::context::Context;
use crate::controller::deletion::{self, until_detached};
use crate::controller::denial;
use crate::controller::endpoint::remove::remove;
use crate::controller::endpoint::sync::{begin_draft, end_unseen_draft, sync_endpoint};
use crate::controller::runtime::clocks::Timed;
use crate::controller::runtime::error::{ClaimError, ReconcileError};
use crate::controller::runtime::objects::{create, delete, has_finalizer};
use crate::model::admission::network_of;
use crate::model::allocation::Owner;
use crate::model::asked::{AskedError, asked_addresses, unicast};
use crate::model::cached::Pod;
use crate::model::endpoint::{self, EndpointKind, droplet_of, holder_uid, name_of};
use crate::model::ranges::in_force;
use crate::model::validation::parse;
use crate::traces;

/// How long a pod waits for a change that nothing wakes it for.
const POD_RETRY: Duration = Duration::from_secs(10);

pub async fn reconcile(pod: Arc<Pod>, context: Arc<Context>) -> Result<Action, ReconcileError> {
    let (Some(namespace), Some(reference)) = (pod.namespace(), pod.reference()) else {
        return Ok(Action::await_change());
    };
    let Some(node) = pod.node().filter(|_| pod.is_alive()) else {
        return Ok(Action::await_change());
    };
    if let Some(named) = pod.annotations().get(ENDPOINT_ANNOTATION) {
        return Ok(wait_for_named(&pod, &namespace, named, &reference.uid, &context));
    }
    let name = pod.endpoint_name();
    let known = ObjectRef::<Endpoint>::new(&name).within(&namespace);
    if context.stores.endpoints.get(&known).is_some() {
        return Ok(Action::await_change());
    }
    traces::binds(&reference.cni_uid);
    let space = ObjectRef::<Namespace>::new(&namespace);
    let Some(space) = context.stores.namespaces.get(&space) else {
        // The namespace's annotation counts, and the watch of namespaces may lag behind the watch of pods.
        return Ok(Action::requeue(Duration::from_millis(500)));
    };
    if !context.hub.is_whole() {
        return Ok(Action::requeue(Duration::from_millis(500)));
    }
    let network = network_of(pod.annotations(), space.annotations());
    let owner = Owner {
        namespace: namespace.clone(),
        endpoint: name.clone(),
        pod: reference.name.clone(),
        uid: reference.uid.clone(),
    };
    let asked = match Asked::of(&pod) {
        Ok(asked) => asked,
        Err(error) => {
            if context
                .clocks
                .known_for(Timed::AnnotationUnread, &reference.uid)
                .is_zero()
            {
                context
                    .events
                    .event(&*pod, true, "InvalidAnnotation", &error.to_string());
            }
            return Ok(Action::await_change());
        }
    };
    let Some(_guard) = context.claim_locks.try_lock(&owner.uid) else {
        return Ok(Action::requeue(Duration::from_millis(500)));
    };
    // No address is claimed for an Endpoint that may be denied again: nobody could use the address meanwhile.
    let claimed = if denial::is_told(&*pod, &context) {
        Vec::new()
    } else {
        claim(
            &owner,
            &reference.cni_uid,
            &node,
            &network,
            &asked.addresses,
            &context,
        )
        .await?
    };
    let are_new = claimed.iter().all(|claimed| claimed.is_new);
    let addresses: Vec<_> = claimed.iter().map(|claimed| claimed.address).collect();
    let vpc = context
        .network(&network)
        .map(|network| network.spec.vpc.clone())
        .unwrap_or_default();
    let spec = EndpointSpec {
        kind: EndpointType::Simple,
        vpc,
        network,
        pod_ref: Some(reference),
        service_ref: None,
        droplet: node,
        addresses: asked.addresses.iter().map(ToString::to_string).collect(),
        claimed: addresses.iter().map(|(address, _)| address.to_string()).collect(),
        mac: asked.mac.map(|mac| mac.to_string()),
    };
    let endpoint = endpoint::new(&namespace, &name, spec);
    let uid = holder_uid(&endpoint);
    // Its droplet may have rows of a pod that it reports: they stay until the object is there.
    let is_fresh = are_new && !context.hub.may_be_attached(&uid, droplet_of(&endpoint));
    if is_fresh && !addresses.is_empty() {
        begin_draft(&endpoint, &addresses, &context);
    }
    create_endpoint(&pod, &endpoint, &context).await
}

/// Waits for the user's Endpoint that the pod names.
fn wait_for_named(pod: &Pod, namespace: &str, named: &str, uid: &str, context: &Context) -> Action {
    let known = ObjectRef::<Endpoint>::new(named).within(namespace);
    let known = context.stores.endpoints.get(&known);
    if known.is_some_and(|endpoint| EndpointKind::of(&endpoint) == EndpointKind::User) {
        // The pod wakes the Endpoint's reconciler too.
        return Action::await_change();
    }
    if context.clocks.known_for(Timed::EndpointMissing, uid).is_zero() {
        let note = format!(
            "{ENDPOINT_ANNOTATION}: no user has created an Endpoint {named:?} in namespace {namespace}; create it, or \
             correct the annotation"
        );
        context.events.event(pod, true, "EndpointNotFound", &note);
    }
    Action::requeue(POD_RETRY)
}

/// Makes the Endpoint. Its draft ends if this did not make it, or if its pod is gone.
async fn create_endpoint(
    pod: &Pod,
    endpoint: &Endpoint,
    context: &Context,
) -> Result<Action, ReconcileError> {
    let namespace = endpoint.namespace().unwrap_or_default();
    let endpoints: Api<Endpoint> = Api::namespaced(context.client.clone(), &namespace);
    let span = traces::begin(|| holder_uid(endpoint), "create Endpoint");
    let created = create(&endpoints, endpoint).await;
    span.end_with(&created);
    if created.is_err() || !attach::has_living_pod(endpoint, context) {
        end_unseen_draft(&name_of(endpoint), context);
    }
    match created {
        Ok(_) => {
            denial::forget(pod, context);
            info!(
                namespace,
                endpoint = endpoint.name_any(),
                network = endpoint.spec.network,
                addresses = endpoint.spec.claimed.join(", "),
                "endpoint created"
            );
        }
        Err(error) if error.is_conflict() => {}
        // A rule of the kind that an annotation breaks denies it too: a name that is too long, or an address in an
        // unusual form.
        Err(error) if error.is_denied() => return Ok(denial::tell(pod, &namespace, &error, context)),
        Err(error) => return Err(error.into()),
    }
    // Another operator with an old cache may delete the Endpoint that this one made; this operator's cache may show
    // neither.
    Ok(Action::requeue(POD_RETRY))
}

/// Ends the Endpoint of a pod when the pod is gone and nothing of it is attached; none: its workflow goes on.
pub async fn attend(
    endpoint: &Endpoint,
    endpoints: &Api<Endpoint>,
    context: &Context,
) -> Result<Option<Action>, ReconcileError> {
    if attach::has_living_pod(endpoint, context) {
        let uid = endpoint.uid().unwrap_or_default();
        if context.index.is_leaving(&uid) {
            // Its pod was seen after it: its rows come back.
            context.index.forget_leaving(&uid);
            sync_endpoint(endpoint, context);
        }
        return Ok(None);
    }
    // CNI DEL ends the attachment; only then is the address out of use.
    if attach::is_needed(endpoint, context) {
        let message = until_detached(droplet_of(endpoint));
        deletion::wait_long(endpoint, endpoints, ("WaitsForNode", &message), context).await?;
        return Ok(Some(Action::requeue(Duration::from_secs(5))));
    }
    if has_finalizer(endpoint) {
        // An earlier version of the operator made it: its rows go once it is deleted.
        delete(endpoints, endpoint).await?;
        return Ok(Some(Action::await_change()));
    }
    remove(endpoint, endpoints, context).await.map(Some)
}

/// Claims addresses ahead, if the pod may have them. The Endpoint reports any obstacle.
async fn claim(
    owner: &Owner,
    cni_uid: &str,
    node: &str,
    network: &str,
    asked: &[IpAddr],
    context: &Context,
) -> Result<Vec<Claimed>, ReconcileError> {
    let Ok(network) = usable_network(&owner.namespace, network, context) else {
        return Ok(Vec::new());
    };
    let claimant = Claimant {
        owner,
        cni_uid,
        droplet: node,
        home: node,
        network: &network,
        ranges: &parse(in_force(&network)).unwrap_or_default(),
        asked,
        refused: &[],
    };
    let span = traces::begin(|| cni_uid, "claim addresses");
    let claimed = claimant.claim_all(context).await;
    span.end_with(&claimed);
    match claimed {
        Ok(claimed) => Ok(claimed),
        Err(ClaimError::Write(error)) if !error.is_denied() => Err(error.into()),
        Err(_) => Ok(Vec::new()),
    }
}

/// The values that a pod asks for by annotations.
struct Asked {
    /// The requested addresses, at most one of each family.
    addresses: Vec<IpAddr>,
    mac: Option<MacAddr>,
}

impl Asked {
    fn of(pod: &Pod) -> Result<Self, AskedError> {
        let addresses = asked_addresses(pod.annotations(), IP_ANNOTATION)?;
        let mac = pod.annotations().get(MAC_ANNOTATION);
        let mac = mac.map(|text| unicast(text).ok_or_else(|| AskedError::Mac(text.clone())));
        Ok(Self {
            addresses,
            mac: mac.transpose()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{Asked, Pod};

    #[test]
    fn annotations_allow_one_ip_per_family_and_a_unicast_mac() {
        let asked = |ip: &str, mac: &str| {
            let annotations = json!({"thuban.dev/ip": ip, "thuban.dev/mac": mac});
            let pod: Pod = serde_json::from_value(json!({"metadata": {"annotations": annotations}})).unwrap();
            Asked::of(&pod).map(|asked| (asked.addresses, asked.mac.map(|mac| mac.to_string())))
        };
        let (addresses, mac) = asked("fd00:1::5 , 10.0.1.5", "02:00:00:00:00:0a").unwrap();
        assert_eq!(
            addresses.iter().map(ToString::to_string).collect::<Vec<_>>(),
            ["10.0.1.5", "fd00:1::5"]
        );
        assert_eq!(mac.as_deref(), Some("02:00:00:00:00:0a"));
        for (ip, mac, wrong) in [
            ("10.0.1", "02:00:00:00:00:0a", "thuban.dev/ip: \"10.0.1\""),
            (
                "10.0.1.5,10.0.1.6",
                "02:00:00:00:00:0a",
                "one IPv4 and one IPv6 address",
            ),
            ("10.0.1.5", "01:00:00:00:00:0a", "unicast"),
            ("10.0.1.5", "02-00", "unicast"),
        ] {
            let error = asked(ip, mac).unwrap_err().to_string();
            assert!(error.contains(wrong), "{error}");
        }
    }
}
