//! Where endpoints with addresses are: by network, by droplet, by address.
//!
//! Invariant: but for [`World::droplets_using`], no look-up goes through the networks of other VPCs or droplets.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use thuban_api::identifiers::Vni;

use super::{Endpoint, EndpointName, Membership, Owner, World, remove_name};
use crate::model::sorted_set::SortedSet;

impl World {
    /// Whether an endpoint of any VPC on this droplet has the address.
    pub fn is_used_on(&self, droplet: &str, address: IpAddr) -> bool {
        let networks = self.networks_on.get(droplet).into_iter().flatten();
        let names = networks.flat_map(|network| self.holders_in(network, address));
        let mut endpoints = names.filter_map(|name| self.endpoints.get(name));
        endpoints.any(|endpoint| endpoint.droplet == droplet)
    }

    /// Returns the droplets on which an endpoint of any VPC has the address. Looks at all networks: for few addresses
    /// at once.
    pub fn droplets_using(&self, address: IpAddr) -> BTreeSet<&str> {
        let names = self.by_address.values().filter_map(|names| names.get(&address));
        let endpoints = names.flatten().filter_map(|name| self.endpoints.get(name));
        let droplets = endpoints.map(|endpoint| endpoint.droplet.as_str());
        droplets.filter(|droplet| !droplet.is_empty()).collect()
    }

    /// Returns how many endpoints with an address live on the droplet that has the most.
    pub fn most_on_a_droplet(&self) -> usize {
        let droplets = self.populations.iter().filter(|(droplet, _)| !droplet.is_empty());
        droplets
            .map(|(_, population)| *population)
            .max()
            .unwrap_or_default()
    }

    /// Returns the endpoint that has an address, by VNI.
    pub fn holder(&self, vni: Vni, address: IpAddr) -> Option<&EndpointName> {
        let networks = self.vpcs_with(vni).flat_map(|vpc| self.networks_of(vpc));
        networks
            .flat_map(|network| self.holders_in(network, address))
            .min()
    }

    /// Yields the endpoints of a network that have an address.
    fn holders_in(&self, network: &str, address: IpAddr) -> impl Iterator<Item = &EndpointName> + use<'_> {
        let names = self.by_address.get(network).and_then(|names| names.get(&address));
        names.into_iter().flatten()
    }

    /// Returns how many endpoints of a network live on a droplet.
    pub fn population(&self, network: &str) -> usize {
        let droplets = self.members.get(network).into_iter().flat_map(BTreeMap::values);
        droplets.map(SortedSet::len).sum()
    }

    /// Yields the endpoints of a VPC that have an address.
    pub(super) fn endpoints_of_vpc(&self, vpc: &str) -> impl Iterator<Item = &EndpointName> {
        let networks = self
            .networks_of(vpc)
            .filter_map(|network| self.members.get(network));
        networks.flat_map(BTreeMap::values).flatten()
    }

    /// Returns the endpoints that live on a droplet.
    pub fn residents(&self, droplet: &str) -> Vec<EndpointName> {
        let networks = self.networks_on.get(droplet).into_iter().flatten();
        let here = networks.filter_map(|network| self.members.get(network)?.get(droplet));
        here.flatten().cloned().collect()
    }

    /// Touches the endpoints that live, or lived, on a droplet.
    pub(super) fn touch_residents(&mut self, droplet: &str) {
        let here = self.residents(droplet);
        let moved = self.moving.iter().filter(|name| {
            let endpoint = self.endpoints.get(*name);
            endpoint.is_some_and(|endpoint| endpoint.previous.as_deref() == Some(droplet))
        });
        let moved: Vec<EndpointName> = moved.cloned().collect();
        self.dirty
            .extend(here.into_iter().chain(moved).map(Owner::Endpoint));
    }

    pub(super) fn note_member(&mut self, name: &EndpointName, endpoint: &Endpoint) {
        let Membership::Member(address) = &endpoint.membership else {
            return;
        };
        let (network, droplet) = (&endpoint.network, &endpoint.droplet);
        let addresses = self.by_address.entry(network.clone()).or_default();
        for address in address.all() {
            addresses.entry(address).or_default().insert(name);
        }
        if endpoint.previous.is_some() {
            self.moving.insert(name.clone());
        }
        *self.populations.entry(droplet.clone()).or_default() += 1;
        let droplets = self.members.entry(network.clone()).or_default();
        let here = droplets.entry(droplet.clone()).or_default();
        here.insert(name);
        if here.len() == 1 {
            let networks = self.networks_on.entry(droplet.clone()).or_default();
            networks.insert(network.clone());
            self.touch_participation(network);
        }
    }

    pub(super) fn forget_member(&mut self, name: &EndpointName, endpoint: &Endpoint) {
        let Membership::Member(address) = &endpoint.membership else {
            return;
        };
        let (network, droplet) = (&endpoint.network, &endpoint.droplet);
        if let Some(addresses) = self.by_address.get_mut(network) {
            for address in address.all() {
                if let Some(names) = addresses.get_mut(&address) {
                    names.remove(name);
                    if names.is_empty() {
                        addresses.remove(&address);
                    }
                }
            }
            if addresses.is_empty() {
                self.by_address.remove(network);
            }
        }
        self.moving.remove(name);
        if let Some(population) = self.populations.get_mut(droplet) {
            *population -= 1;
            if *population == 0 {
                self.populations.remove(droplet);
            }
        }
        let Some(droplets) = self.members.get_mut(network) else {
            return;
        };
        if let Some(here) = droplets.get_mut(droplet) {
            here.remove(name);
            if here.is_empty() {
                droplets.remove(droplet);
                remove_name(&mut self.networks_on, droplet, network);
                self.touch_participation(network);
            }
        }
    }
}
