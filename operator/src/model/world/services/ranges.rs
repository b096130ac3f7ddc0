//! The ranges in which services have their addresses, and those outside of a VPC that stay closed to its pods.
//!
//! Invariant: a VPC's own ranges are its pods': a range of services that touches one of them is none for the VPC.

use std::collections::BTreeSet;
use std::net::IpAddr;

use thuban_api::cidr::Cidr;

use super::{Owner, Vpc, World};

impl World {
    /// Sets the ranges in which services have their addresses. Returns whether they are others than before.
    pub fn set_service_ranges(&mut self, ranges: Vec<String>) -> bool {
        let is_new = self.service_ranges != ranges;
        if is_new {
            self.service_ranges = ranges;
            self.dirty.extend(self.vpcs.keys().cloned().map(Owner::Vpc));
        }
        is_new
    }

    /// Yields the ranges of services for the pods of a VPC: without those that touch its own ranges, where its pods
    /// are.
    pub(in super::super) fn service_ranges_of<'a>(
        &'a self,
        vpc: &'a Vpc,
    ) -> impl Iterator<Item = &'a String> {
        let own: Vec<Cidr> = vpc.cidrs.iter().filter_map(|range| range.parse().ok()).collect();
        let is_free = move |range: &&String| {
            let range: Option<Cidr> = range.parse().ok();
            range.is_some_and(|range| !own.iter().any(|own| own.overlaps(range)))
        };
        self.service_ranges.iter().filter(is_free)
    }

    /// Whether pods of a network's VPC take an address for a service's.
    pub fn is_in_service_ranges(&self, network: &str, address: IpAddr) -> bool {
        let home = self.home_of(network);
        home.is_some_and(|vpc| self.service_ranges_of(vpc).any(|range| is_in(address, range)))
    }

    /// Sets the outside ranges that stay closed to VPCs whose pods reach outside. Called before there is any VPC.
    pub fn set_closed_ranges(&mut self, ranges: Vec<String>) {
        self.closed_ranges = ranges;
        self.dirty.extend(self.vpcs.keys().cloned().map(Owner::Vpc));
    }

    /// Sets the addresses of all nodes: they are closed too, in any range.
    pub fn set_nodes(&mut self, addresses: BTreeSet<IpAddr>) {
        let closed: Vec<Cidr> = self
            .closed_ranges
            .iter()
            .filter_map(|range| range.parse().ok())
            .collect();
        let is_open = |address: &IpAddr| !closed.iter().any(|range| range.contains_address(*address));
        let addresses: BTreeSet<IpAddr> = addresses.into_iter().filter(is_open).collect();
        if addresses != self.closed_nodes {
            self.closed_nodes = addresses;
            self.dirty.extend(self.vpcs.keys().cloned().map(Owner::Vpc));
        }
    }

    /// Whether nodes are members of a network's VPC: they reach all its endpoints.
    pub fn is_nodes_own(&self, network: &str) -> bool {
        self.home_of(network).is_some_and(|home| home.host_access)
    }

    fn home_of(&self, network: &str) -> Option<&Vpc> {
        let network = self.networks.get(network)?;
        self.vpcs.get(&network.vpc)
    }

    /// Whether services of a network may have a backend at an address because it is outside of their VPC: only a VPC
    /// with access to hosts reaches such addresses. Of pods only those on the host network have them.
    pub fn is_outside(&self, network: &str, address: IpAddr, is_pods: bool) -> bool {
        let Some(home) = self.home_of(network).filter(|home| home.host_access) else {
            return false;
        };
        let is_local = match address {
            IpAddr::V4(v4) => {
                v4.is_loopback() || v4.is_link_local() || v4.is_multicast() || v4.is_unspecified()
            }
            IpAddr::V6(v6) => {
                v6.is_loopback() || v6.is_unicast_link_local() || v6.is_multicast() || v6.is_unspecified()
            }
        };
        let mut ranges = home.cidrs.iter().chain(&self.service_ranges);
        if is_local || ranges.any(|range| is_in(address, range)) {
            return false;
        }
        !is_pods
            || self.closed_ranges.iter().any(|range| is_in(address, range))
            || self.closed_nodes.contains(&address)
            || self.is_droplets(address)
    }

    /// Whether an address is a droplet's on the underlay.
    pub fn is_droplets(&self, address: IpAddr) -> bool {
        self.droplets.values().any(|droplet| address == *droplet)
    }
}

fn is_in(address: IpAddr, range: &str) -> bool {
    range
        .parse()
        .is_ok_and(|range: Cidr| range.contains_address(address))
}
