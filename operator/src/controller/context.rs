//! What every reconciler works with: client, stores, hub, events.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use k8s_openapi::api::core::v1::{Namespace, Node, ObjectReference};
use kube::runtime::controller::Action;
use kube::runtime::reflector::{ObjectRef, Store};
use kube::{Client, ResourceExt};
use thiserror::Error;
use thuban_api::cidr::Cidr;
use thuban_api::{Bouncer, Divider, Droplet, Endpoint, GROUP, IpClaim, Network, VniClaim, Vpc};
use tokio::time::Instant;
use tracing::{debug, warn};

use super::address::ClaimError;
use super::deletion::Waits;
use super::events::Events;
use super::heartbeat::Heartbeats;
use super::index::Index;
use super::network_policy::Told;
use super::objects::{Object, WriteError};
use super::pace::Pace;
use super::role::{Placements, Role};
use super::slices::Slices;
use super::trim::{NetworkPolicy, Pod};
use crate::hub::Hub;
use crate::model::allocation::Family;
use crate::model::service::{EndpointSlice, Service};
use crate::model::validation::RefusedRanges;

/// Caches of all kinds that reconcilers read.
pub struct Stores {
    pub pods: Store<Pod>,
    pub namespaces: Store<Namespace>,
    pub nodes: Store<Node>,
    pub vpcs: Store<Vpc>,
    pub networks: Store<Network>,
    pub endpoints: Store<Endpoint>,
    pub dividers: Store<Divider>,
    pub bouncers: Store<Bouncer>,
    pub droplets: Store<Droplet>,
    pub ip_claims: Store<IpClaim>,
    pub vni_claims: Store<VniClaim>,
    pub services: Store<Service>,
    pub slices: Store<EndpointSlice>,
    pub network_policies: Store<NetworkPolicy>,
}

/// Addresses that a reconciler is about to claim, by UID of the endpoint and family, so that two don't pick the same. Only
/// saves conflicts: the claim decides.
#[derive(Debug, Default)]
pub struct Reservations(Mutex<HashMap<(String, Family), Reservation>>);

#[derive(Debug)]
struct Reservation {
    vpc: String,
    droplet: String,
    address: IpAddr,
}

impl Reservations {
    /// Runs `pick` with what others reserved in the VPC or on the droplet, and keeps its result.
    pub fn reserve(
        &self,
        uid: &str,
        vpc: &str,
        droplet: &str,
        pick: impl FnOnce(&dyn Fn(IpAddr) -> bool) -> Option<(IpAddr, Cidr)>,
    ) -> Option<(IpAddr, Cidr)> {
        let mut reserved = self.0.lock().ok()?;
        let others: Vec<_> = reserved
            .iter()
            .filter(|((other, _), held)| other != uid && (held.vpc == vpc || held.droplet == droplet))
            .map(|(_, held)| held.address)
            .collect();
        let (address, range) = pick(&|address| others.contains(&address))?;
        reserved.insert(
            (uid.to_owned(), Family::of(address)),
            Reservation {
                vpc: vpc.to_owned(),
                droplet: droplet.to_owned(),
                address,
            },
        );
        Some((address, range))
    }

    pub fn forget(&self, uid: &str) {
        if let Ok(mut reserved) = self.0.lock() {
            for family in Family::ALL {
                reserved.remove(&(uid.to_owned(), family));
            }
        }
    }
}

/// Owners of claims whose claims somebody makes, counts or releases right now: one at a time, for what was asked of the API
/// server may be answered late.
#[derive(Debug, Default)]
pub struct Claiming(Mutex<HashSet<String>>);

/// Until it is dropped nobody else touches the owner's claims.
pub struct Turn<'a>(&'a Claiming, String);

impl Claiming {
    /// None while it is somebody else's turn.
    pub fn turn(&self, owner_uid: &str) -> Option<Turn<'_>> {
        let mut taken = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_free = taken.insert(owner_uid.to_owned());
        is_free.then(|| Turn(self, owner_uid.to_owned()))
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut taken = self.0.0.lock().unwrap_or_else(PoisonError::into_inner);
        taken.remove(&self.1);
    }
}

pub struct Context {
    pub client: Client,
    pub hub: Arc<Hub>,
    pub stores: Stores,
    pub events: Events,
    pub refused: RefusedRanges,
    /// Where Services have their addresses.
    pub service_ranges: Vec<Cidr>,
    /// Where Services may have `externalIPs`.
    pub external_ranges: Vec<Cidr>,
    /// The default VPC's first, whose packets nodes see: refused to all others.
    pub default_range: Cidr,
    /// How long a released address, and a VNI, rests before it may be given out again.
    pub claim_rest: Duration,
    /// Services of the default VPC, by namespace and name, that a VPC reaches if it says nothing about it.
    pub shared_by_default: Vec<(String, String)>,
    pub reservations: Reservations,
    pub waits: Waits,
    pub claiming: Claiming,
    pub placements: Placements,
    pub index: Index,
    pub slices: Slices,
    pub policies_told: Told,
    /// Of writes that only bring numbers in statuses up to date.
    pub counts: Pace,
    pub heartbeats: Heartbeats,
    /// Since when this leader has known something: see [`Context::known_for`].
    pub seen: Mutex<HashMap<String, Instant>>,
}

#[derive(Debug, Error)]
pub enum ReconcileError {
    #[error(transparent)]
    Write(#[from] WriteError),
    #[error(transparent)]
    Claim(#[from] ClaimError),
}

impl ReconcileError {
    /// For counting.
    pub fn category(&self) -> &'static str {
        match self {
            Self::Write(write) | Self::Claim(ClaimError::Write(write)) => write.category(),
            Self::Claim(ClaimError::Full { .. }) => "full",
            Self::Claim(ClaimError::Unfit { .. } | ClaimError::Taken { .. }) => "address",
        }
    }

    /// Somebody else wrote meanwhile.
    fn is_conflict(&self) -> bool {
        match self {
            Self::Write(write) | Self::Claim(ClaimError::Write(write)) => write.is_conflict(),
            Self::Claim(_) => false,
        }
    }
}

/// Conflicts are tried again at once, all else with a pause; a transient error of the API server ends nothing.
#[allow(clippy::needless_pass_by_value)] // the signature of kube's error policies
pub fn retry<K: Object>(object: Arc<K>, error: &ReconcileError, _: Arc<Context>) -> Action {
    if error.is_conflict() {
        debug!(object = object.name_any(), %error, "conflict, trying again");
        return Action::requeue(Duration::from_millis(100));
    }
    warn!(object = object.name_any(), %error, "reconcile failed, trying again");
    Action::requeue(Duration::from_secs(2))
}

impl Context {
    pub fn vpc(&self, name: &str) -> Option<Arc<Vpc>> {
        self.stores.vpcs.get(&ObjectRef::new(name))
    }

    pub fn network(&self, name: &str) -> Option<Arc<Network>> {
        self.stores.networks.get(&ObjectRef::new(name))
    }

    pub fn node(&self, name: &str) -> Option<Arc<Node>> {
        self.stores.nodes.get(&ObjectRef::new(name))
    }

    /// How long this leader has known about `key`: nothing at the first time of asking.
    pub fn known_for(&self, key: &str) -> Duration {
        let Ok(mut seen) = self.seen.lock() else {
            return Duration::ZERO;
        };
        if let Some(since) = seen.get(key) {
            return since.elapsed();
        }
        seen.insert(key.to_owned(), Instant::now());
        Duration::ZERO
    }

    /// Asked again, `key` is new.
    pub fn forget(&self, key: &str) {
        if let Ok(mut seen) = self.seen.lock() {
            seen.remove(key);
        }
    }

    /// The VPC of an endpoint's network; of one that is gone, what the endpoint was made with.
    pub fn vpc_name_of(&self, endpoint: &Endpoint) -> String {
        let network = self.network(&endpoint.spec.network);
        network.map_or_else(|| endpoint.spec.vpc.clone(), |network| network.spec.vpc.clone())
    }

    /// Claims of an owner.
    pub fn claims_of(&self, owner: &str) -> Vec<Arc<IpClaim>> {
        found(&self.stores.ip_claims, &self.index.owned_by(owner))
    }

    /// Roles of a parent.
    pub fn team<R: Role>(&self, parent: &str) -> Vec<Arc<R>> {
        found(R::all(self), &self.index.team(R::KIND, parent))
    }

    /// Networks of a VPC.
    pub fn networks_of(&self, vpc: &str) -> Vec<Arc<Network>> {
        found(&self.stores.networks, &self.index.networks_of(vpc))
    }

    /// Addresses of all nodes, with their names.
    pub fn node_addresses(&self) -> Vec<(String, IpAddr)> {
        let nodes = self.stores.nodes.state();
        let addresses = |node: &Arc<Node>| {
            let name = node.name_any();
            internal_ips(node)
                .into_iter()
                .map(move |address| (name.clone(), address))
                .collect::<Vec<_>>()
        };
        nodes.iter().flat_map(addresses).collect()
    }
}

/// A cluster's object of ours, to be named in an event.
pub fn related(kind: &str, name: &str) -> ObjectReference {
    ObjectReference {
        api_version: Some(format!("{GROUP}/v1alpha1")),
        kind: Some(kind.to_owned()),
        name: Some(name.to_owned()),
        ..ObjectReference::default()
    }
}

/// InternalIPs of a node, of both families.
pub fn internal_ips(node: &Node) -> Vec<IpAddr> {
    let addresses = node
        .status
        .as_ref()
        .and_then(|status| status.addresses.as_ref())
        .into_iter()
        .flatten();
    let internal = addresses.filter(|address| address.type_ == "InternalIP");
    internal
        .filter_map(|address| address.address.parse().ok())
        .collect()
}

/// Those of the names that the store has.
fn found<K: Object>(store: &Store<K>, names: &[String]) -> Vec<Arc<K>> {
    names
        .iter()
        .filter_map(|name| store.get(&ObjectRef::new(name)))
        .collect()
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use thuban_api::cidr::Cidr;

    use super::Reservations;
    use crate::model::allocation::propose;

    #[test]
    fn an_endpoint_reserves_an_address_of_each_family_until_it_is_forgotten() {
        let reservations = Reservations::default();
        let reserve = |uid: &str, vpc: &str, droplet: &str, range: &str| -> IpAddr {
            let range: [Cidr; 1] = [range.parse().unwrap()];
            let pick = reservations.reserve(uid, vpc, droplet, |is_reserved| {
                propose(&range, None, is_reserved)
            });
            pick.unwrap().0
        };
        let both = |uid: &str, vpc: &str, droplet: &str| {
            ["10.0.1.0/24", "fd00:1::/64"].map(|range| reserve(uid, vpc, droplet, range).to_string())
        };
        assert_eq!(both("a", "red", "d1"), ["10.0.1.2", "fd00:1::2"]);
        assert_eq!(both("a", "red", "d1"), ["10.0.1.2", "fd00:1::2"], "its own");
        assert_eq!(both("b", "red", "d2"), ["10.0.1.3", "fd00:1::3"], "same VPC");
        assert_eq!(both("c", "blue", "d1"), ["10.0.1.3", "fd00:1::3"], "same droplet");
        assert_eq!(both("d", "blue", "d3"), ["10.0.1.2", "fd00:1::2"]);
        reservations.forget("a");
        assert_eq!(both("e", "red", "d1"), ["10.0.1.2", "fd00:1::2"]);
    }
}
