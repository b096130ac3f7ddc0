//! Indexes for frequent lookups by reconcilers. The watches keep them, so that no lookup goes through all objects of a
//! kind.

use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};

use thuban_api::cidr::Cidr;

use crate::model::allocation::Family;
use crate::model::sorted_set::SortedSet;
use crate::model::world::{EndpointName, RoleKind};

#[derive(Debug, Default)]
struct Sets {
    /// Names of IPv4 claims by network.
    claims: HashMap<String, BTreeSet<String>>,
    /// Names of claims by UID of their owner.
    owned: HashMap<String, SortedSet<String>>,
    /// Names of roles by kind and parent.
    roles: HashMap<(RoleKind, String), BTreeSet<String>>,
    /// Names of roles without a droplet.
    unplaced: HashMap<RoleKind, BTreeSet<String>>,
    /// Names of VNI claims by VPC.
    vni_claims: HashMap<String, BTreeSet<String>>,
    /// Names of droplets by the address that they say they have.
    droplets: HashMap<String, BTreeSet<String>>,
    /// Names of networks by VPC.
    networks: HashMap<String, BTreeSet<String>>,
    /// The lowest address that may be free, with its range, by network and family: every address below has a claim.
    floors: HashMap<(String, Family), (Cidr, IpAddr)>,
    /// Endpoints without an address, by network.
    waiting: HashMap<String, BTreeSet<EndpointName>>,
    /// VNIs that this process has tried to claim, by UID of the VPC.
    vnis: HashMap<u32, String>,
    /// UIDs of endpoints whose rows are being removed, and whether this process has deleted their objects.
    leaving: HashMap<String, bool>,
    /// Ranges in force by VPC, of VPCs that have a number.
    ranges: HashMap<String, Vec<Cidr>>,
    /// Names of the pods that name an Endpoint made by a user.
    pods: HashMap<EndpointName, BTreeSet<String>>,
}

#[derive(Debug, Default)]
pub struct Index(Mutex<Sets>);

pub(super) fn set_member<K: Eq + std::hash::Hash, V: Ord>(
    sets: &mut HashMap<K, BTreeSet<V>>,
    key: K,
    value: V,
    is_in: bool,
) {
    if is_in {
        sets.entry(key).or_default().insert(value);
    } else if let Some(set) = sets.get_mut(&key) {
        set.remove(&value);
        if set.is_empty() {
            sets.remove(&key);
        }
    }
}

impl Index {
    fn sets<T>(&self, work: impl FnOnce(&mut Sets) -> T) -> T {
        // No code under the lock panics half-way through a change.
        work(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Sets the ranges in force of a VPC; none if it has no number, or is gone.
    pub fn ranges(&self, vpc: &str, ranges: Vec<Cidr>) {
        self.sets(|sets| {
            if ranges.is_empty() {
                sets.ranges.remove(vpc);
            } else {
                sets.ranges.insert(vpc.to_owned(), ranges);
            }
        });
    }

    /// Returns a VPC that has one of the addresses in a range in force, with the address and the range.
    pub fn vpc_within(&self, addresses: &[IpAddr]) -> Option<(String, IpAddr, Cidr)> {
        self.sets(|sets| {
            let mut all = sets
                .ranges
                .iter()
                .flat_map(|(vpc, ranges)| ranges.iter().map(move |range| (vpc, range)));
            all.find_map(|(vpc, range)| {
                let within = addresses
                    .iter()
                    .find(|address| range.contains_address(**address))?;
                Some((vpc.clone(), *within, *range))
            })
        })
    }

    pub fn claim(&self, network: &str, name: &str, is_there: bool) {
        self.sets(|sets| set_member(&mut sets.claims, network.to_owned(), name.to_owned(), is_there));
    }

    pub fn owned(&self, owner: &str, claim: &str, is_there: bool) {
        self.sets(|sets| {
            let claims = sets.owned.entry(owner.to_owned()).or_default();
            if is_there {
                claims.insert(&claim.to_owned());
            } else {
                claims.remove(&claim.to_owned());
            }
            if claims.is_empty() {
                sets.owned.remove(owner);
            }
        });
    }

    /// Returns the names of the claims of an owner.
    pub fn owned_by(&self, owner: &str) -> Vec<String> {
        self.sets(|sets| sets.owned.get(owner).into_iter().flatten().cloned().collect())
    }

    pub fn role(&self, kind: RoleKind, parent: &str, name: &str, is_there: bool) {
        let key = (kind, parent.to_owned());
        self.sets(|sets| set_member(&mut sets.roles, key, name.to_owned(), is_there));
    }

    /// Returns the names of the roles of a parent.
    pub fn roles_of(&self, kind: RoleKind, parent: &str) -> Vec<String> {
        let key = (kind, parent.to_owned());
        self.sets(|sets| sets.roles.get(&key).into_iter().flatten().cloned().collect())
    }

    pub fn unplaced(&self, kind: RoleKind, name: &str, is_unplaced: bool) {
        self.sets(|sets| set_member(&mut sets.unplaced, kind, name.to_owned(), is_unplaced));
    }

    /// Returns the names of all roles of a kind that have no droplet.
    pub fn all_unplaced(&self, kind: RoleKind) -> Vec<String> {
        self.sets(|sets| sets.unplaced.get(&kind).into_iter().flatten().cloned().collect())
    }

    pub fn vni_claim(&self, vpc: &str, name: &str, is_there: bool) {
        self.sets(|sets| set_member(&mut sets.vni_claims, vpc.to_owned(), name.to_owned(), is_there));
    }

    /// Returns the names of the VNI claims of a VPC.
    pub fn vni_claims_of(&self, vpc: &str) -> Vec<String> {
        self.sets(|sets| sets.vni_claims.get(vpc).into_iter().flatten().cloned().collect())
    }

    pub fn droplet(&self, address: &str, name: &str, is_there: bool) {
        self.sets(|sets| set_member(&mut sets.droplets, address.to_owned(), name.to_owned(), is_there));
    }

    /// Returns the names of the droplets that say that they have an address.
    pub fn droplets_at(&self, address: &str) -> Vec<String> {
        self.sets(|sets| {
            sets.droplets
                .get(address)
                .into_iter()
                .flatten()
                .cloned()
                .collect()
        })
    }

    pub fn network(&self, vpc: &str, name: &str, is_there: bool) {
        self.sets(|sets| set_member(&mut sets.networks, vpc.to_owned(), name.to_owned(), is_there));
    }

    /// Returns the names of the networks of a VPC.
    pub fn networks_of(&self, vpc: &str) -> Vec<String> {
        self.sets(|sets| sets.networks.get(vpc).into_iter().flatten().cloned().collect())
    }

    /// Returns how many IPv4 addresses of a network are claimed.
    pub fn claimed(&self, network: &str) -> u64 {
        self.sets(|sets| sets.claims.get(network).map_or(0, |names| names.len() as u64))
    }

    /// Returns the address below which all of the network's addresses are claimed.
    pub fn floor(&self, network: &str, family: Family) -> Option<IpAddr> {
        let key = (network.to_owned(), family);
        self.sets(|sets| sets.floors.get(&key).map(|(_, floor)| *floor))
    }

    /// Notes that all addresses below this one are claimed, those of earlier ranges included.
    pub fn raise_floor(&self, network: &str, range: Cidr, address: IpAddr) {
        let key = (network.to_owned(), Family::of(address));
        self.sets(|sets| sets.floors.insert(key, (range, address)));
    }

    /// Notes that the address may be free again. If it is in another range than the floor, the next search starts from
    /// the beginning.
    pub fn drop_floor(&self, network: &str, address: IpAddr) {
        let key = (network.to_owned(), Family::of(address));
        self.sets(|sets| match sets.floors.get_mut(&key) {
            Some((range, floor)) if range.contains_address(address) => *floor = address.min(*floor),
            _ => drop(sets.floors.remove(&key)),
        });
    }

    pub fn waiting(&self, network: &str, name: &EndpointName, is_waiting: bool) {
        self.sets(|sets| set_member(&mut sets.waiting, network.to_owned(), name.clone(), is_waiting));
    }

    /// Returns the endpoints of a network that wait for an address.
    pub fn waiting_of(&self, network: &str) -> Vec<EndpointName> {
        self.sets(|sets| sets.waiting.get(network).into_iter().flatten().cloned().collect())
    }

    /// Returns all endpoints that wait for an address.
    pub fn all_waiting(&self) -> Vec<EndpointName> {
        self.sets(|sets| sets.waiting.values().flatten().cloned().collect())
    }

    /// Picks a VNI that no other VPC in this process picked. This only avoids conflicts: the claim decides.
    pub fn pick_vni(&self, vpc_uid: &str, pick: impl FnOnce(&dyn Fn(u32) -> bool) -> u32) -> u32 {
        self.sets(|sets| {
            let is_others = |vni| sets.vnis.get(&vni).is_some_and(|uid| uid != vpc_uid);
            let vni = pick(&is_others);
            sets.vnis.insert(vni, vpc_uid.to_owned());
            vni
        })
    }

    /// Forgets the VNIs that the VPC tried: it has one, or is gone.
    pub fn forget_vnis(&self, vpc_uid: &str) {
        self.sets(|sets| sets.vnis.retain(|_, uid| uid != vpc_uid));
    }

    /// Notes that the endpoint's rows are being removed and must not come back.
    pub fn leave(&self, uid: &str) {
        self.sets(|sets| {
            sets.leaving.entry(uid.to_owned()).or_default();
        });
    }

    pub fn is_leaving(&self, uid: &str) -> bool {
        self.sets(|sets| sets.leaving.contains_key(uid))
    }

    /// Notes that the object of a leaving endpoint is deleted. The watch may have brought that already.
    pub fn note_deleted(&self, uid: &str) {
        self.sets(|sets| {
            if let Some(is_deleted) = sets.leaving.get_mut(uid) {
                *is_deleted = true;
            }
        });
    }

    /// Whether the object is deleted, though the watch has not brought that yet.
    pub fn is_deleted(&self, uid: &str) -> bool {
        self.sets(|sets| sets.leaving.get(uid).copied().unwrap_or_default())
    }

    /// Forgets an endpoint whose object is gone.
    pub fn forget_leaving(&self, uid: &str) {
        self.sets(|sets| sets.leaving.remove(uid));
    }

    pub fn pod(&self, endpoint: EndpointName, pod: &str, is_naming: bool) {
        self.sets(|sets| set_member(&mut sets.pods, endpoint, pod.to_owned(), is_naming));
    }

    /// Returns the names of the pods that name an endpoint.
    pub fn pods_of(&self, endpoint: &EndpointName) -> Vec<String> {
        self.sets(|sets| sets.pods.get(endpoint).into_iter().flatten().cloned().collect())
    }
}
