//! Addresses of its own VPC that a Service has besides its ClusterIPs. Services of two tenants can have the same such
//! address. An annotation asks for them; they are claimed as those of pods are, and given back when no droplet knows
//! them any more.
//!
//! They are in ranges of the Service's network, or cidrd leased them from a private pool of the VPC to the Vip of the
//! Service's name.

use std::net::IpAddr;

use kube::runtime::reflector::ObjectRef;
use kube::{Api, ResourceExt};
use thuban_api::cidr::Cidr;
use thuban_api::condition::set;
use thuban_api::{Condition, Endpoint, EndpointStatus, IpLease, LeaseState, SERVICE_IP_ANNOTATION};

use crate::controller::address::{Claimant, release_each};
use crate::controller::admission::usable_network;
use crate::controller::cache::service_addresses::Asked;
use crate::controller::context::Context;
use crate::controller::runtime::error::ReconcileError;
use crate::controller::runtime::objects::{WriteError, condition, get};
use crate::hub::{Barrier, Waiter};
use crate::model::allocation::{Owner, addresses_of};
use crate::model::asked::{AskedError, asked_addresses};
use crate::model::endpoint::name_of;
use crate::model::ranges::in_force;
use crate::model::service::Service;
use crate::model::validation::parse;
use crate::model::world::{EndpointName, MAX_OWN_ADDRESSES};

/// The condition that says why a Service doesn't have the addresses that it asks for.
const CONDITION: &str = "ServiceAddress";

/// Returns the addresses that a Service asks for.
pub fn asked_by(service: &Service) -> Result<Vec<IpAddr>, AskedError> {
    asked_addresses(service.annotations(), SERVICE_IP_ANNOTATION)
}

/// Returns the addresses that a Service's Endpoint was made for.
pub fn asked_of(endpoint: &Endpoint) -> Vec<IpAddr> {
    let asked = endpoint.spec.addresses.iter();
    asked.filter_map(|text| text.parse().ok()).collect()
}

/// Returns the requested addresses that the Endpoint has.
pub fn held(endpoint: &Endpoint) -> Vec<IpAddr> {
    let mut asked = asked_of(endpoint);
    let status = endpoint.status.as_ref().map(|status| &status.addresses);
    asked.retain(|address| status.is_some_and(|held| held.contains(&address.to_string())));
    asked
}

/// The result of claiming the addresses that an Endpoint still lacks.
pub enum Claimed {
    /// There is nothing to claim.
    Nothing,
    /// The status names them now.
    All,
    /// The claim must be tried again. A condition of the status says why; it is here if it is news.
    Not(Option<Condition>),
}

pub async fn claim(
    endpoint: &Endpoint,
    status: &mut EndpointStatus,
    context: &Context,
) -> Result<Claimed, ReconcileError> {
    let asked = asked_of(endpoint);
    if held(endpoint).len() == asked.len() {
        return Ok(Claimed::Nothing);
    }
    let mut not = |reason: &str, message: &str| {
        let told = condition(CONDITION, false, reason, message, None);
        let is_news = set(&mut status.conditions, told.clone());
        Ok(Claimed::Not(is_news.then_some(told)))
    };
    let (name, network) = (name_of(endpoint), &endpoint.spec.network);
    let network = match usable_network(&name.0, network, context) {
        Ok(network) => network,
        Err(unusable) => {
            context.service_addresses.release(&name);
            let told = unusable.condition(network);
            return not(&told.reason, &told.message);
        }
    };
    let vpc = &network.spec.vpc;
    if !context.hub.is_whole() {
        return Ok(Claimed::Not(None));
    }
    if !reserve(endpoint, &asked, vpc, context) {
        let message = format!(
            "the Services of VPC {vpc:?} can have at most {MAX_OWN_ADDRESSES} addresses of the VPC; remove the \
             annotation {SERVICE_IP_ANNOTATION} from some of them"
        );
        return not("TooMany", &message);
    }
    let ranges = parse(in_force(&network)).unwrap_or_default();
    let leased = leased(endpoint, &asked, (vpc.as_str(), ranges.as_slice()), context).await?;
    let owner = Owner::of(endpoint);
    let Some(_guard) = context.claim_locks.try_lock(&owner.uid) else {
        return Ok(Claimed::Not(None));
    };
    let claimant = Claimant {
        owner: &owner,
        cni_uid: "",
        droplet: "",
        home: "",
        network: &network,
        ranges: &ranges,
        asked: &asked,
        refused: &[],
    };
    if let Err(error) = claimant.claim_asked_alone(&leased, context).await {
        return match error.reason() {
            Some(reason) => {
                context.service_addresses.release(&name);
                not(reason, &error.to_string())
            }
            // The next try goes on with what is reserved.
            None => Err(error.into()),
        };
    }
    status.conditions.retain(|condition| condition.kind != CONDITION);
    let mut addresses = addresses_of(endpoint);
    addresses.extend(
        asked
            .iter()
            .filter(|address| !addresses_of(endpoint).contains(address)),
    );
    status.addresses = addresses.iter().map(ToString::to_string).collect();
    Ok(Claimed::All)
}

/// Reserves the addresses for the Endpoint. Returns false if the Services of the VPC have no room for them. Others that
/// claim addresses right now count too: the world shows theirs once their statuses name them.
fn reserve(endpoint: &Endpoint, asked: &[IpAddr], vpc: &str, context: &Context) -> bool {
    let asked = Asked {
        uid: endpoint.uid().unwrap_or_default(),
        vpc: vpc.to_owned(),
        addresses: asked.to_vec(),
    };
    context.hub.read(|world| {
        let is_under_way = |name: &EndpointName, asked: &Asked| {
            let other = ObjectRef::<Endpoint>::new(&name.1).within(&name.0);
            let other = context.stores.endpoints.get(&other);
            let shown = world
                .service(name)
                .map_or(&[][..], |service| service.own_addresses.as_slice());
            other.is_some_and(|other| other.uid().as_ref() == Some(&asked.uid))
                && !asked.addresses.iter().all(|address| shown.contains(address))
        };
        let held = world.service_addresses_of(vpc);
        let reserved = &context.service_addresses;
        reserved.reserve(&name_of(endpoint), asked, held, is_under_way)
    })
}

/// Returns the addresses outside of the network's ranges that are leased for the Service.
async fn leased(
    endpoint: &Endpoint,
    asked: &[IpAddr],
    (vpc, ranges): (&str, &[Cidr]),
    context: &Context,
) -> Result<Vec<IpAddr>, WriteError> {
    let leases: Api<IpLease> = Api::all(context.client.clone());
    let is_outside = |address: &IpAddr| !ranges.iter().any(|range| range.contains_address(*address));
    let outside: Vec<IpAddr> = asked.iter().copied().filter(is_outside).collect();
    let mut leased = Vec::new();
    for address in outside {
        let lease = match get(&leases, &IpLease::name_of(vpc, address)).await {
            // An operator that is newer than its manifest may not read leases.
            Err(error) if error.is_forbidden() => None,
            // Without load balancers there is no such kind.
            lease => lease?,
        };
        if lease.is_some_and(|lease| is_for(&lease, endpoint)) {
            leased.push(address);
        }
    }
    Ok(leased)
}

/// Whether the Vip that has a lease is that of the Service: lbaasd makes a Service of the Vip's name.
fn is_for(lease: &IpLease, endpoint: &Endpoint) -> bool {
    let (namespace, service) = (name_of(endpoint).0, endpoint.spec.service_ref.as_ref());
    let holder = &lease.spec.holder;
    lease.state() == LeaseState::Held
        && holder.namespace == namespace
        && service.is_some_and(|service| service.name == holder.name)
}

/// Gives the addresses back once no droplet takes them for a Service's. Returns false if it is too early.
pub async fn give_back(endpoint: &Endpoint, context: &Context) -> Result<bool, ReconcileError> {
    let asked = asked_of(endpoint);
    if asked.is_empty() {
        return Ok(true);
    }
    let vpc = context.vpc_name_of(endpoint);
    let rows = context.hub.read(|world| world.vpc_rows(&vpc));
    let barrier = Barrier::new(Waiter::Endpoint(name_of(endpoint))).has(rows);
    if !context.hub.missing(&barrier).unacked.is_empty() {
        return Ok(false);
    }
    release_each(endpoint, &asked, context).await?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use thuban_api::{Endpoint, IpLease};

    use super::is_for;

    fn read<T: serde::de::DeserializeOwned>(kind: &str, spec: &Value, status: &Value) -> T {
        let object = json!({"apiVersion": "thuban.dev/v1alpha1", "kind": kind, "spec": spec, "status": status,
            "metadata": {"name": "shop-1", "namespace": "red"}});
        serde_json::from_value(object).unwrap()
    }

    #[test]
    fn a_lease_is_for_the_service_of_its_holders_name() {
        let is_for = |service: &str, namespace: &str, state: &str| {
            let spec =
                json!({"type": "Scaled", "network": "red-web", "serviceRef": {"name": service, "uid": "s1"}});
            let endpoint: Endpoint = read("Endpoint", &spec, &json!({}));
            let holder = json!({"uid": "v1", "namespace": namespace, "name": "shop"});
            let spec = json!({"pool": "inside", "vpc": "red", "address": "10.7.0.9", "leaseSeconds": 600,
                "quarantineSeconds": 300, "holder": holder});
            let lease: IpLease = read("IpLease", &spec, &json!({"state": state}));
            is_for(&lease, &endpoint)
        };
        assert!(is_for("shop", "red", "Held"));
        assert!(!is_for("other", "red", "Held"));
        assert!(!is_for("shop", "blue", "Held"));
        assert!(!is_for("shop", "red", "Proposed"));
        assert!(!is_for("shop", "red", "Quarantined"));
    }
}
