//! The names of services that a VPC's pods find, and the cluster's DNS, which tells them.
//!
//! Invariant: pods of a VPC without access to hosts reach the cluster's DNS only by a view of it.

use std::collections::BTreeSet;
use std::net::IpAddr;

use thuban_rows::{ServiceName, Visible};

use super::super::remove_name;
use super::{EndpointName, Owner, Service, Vpc, World};

impl World {
    /// Sets the ClusterIPs of the cluster's DNS, of which droplets have views. Called before there is any VPC.
    pub fn set_cluster_dns(&mut self, addresses: Vec<IpAddr>) {
        self.services.cluster_dns = addresses;
    }

    /// Yields the addresses of the cluster's DNS that pods of a VPC don't reach: their packets are refused at once.
    pub(in super::super) fn refused_dns<'a>(
        &'a self,
        vpc: &'a str,
        known: &'a Vpc,
    ) -> impl Iterator<Item = IpAddr> + 'a {
        let addresses = self.services.cluster_dns.iter().copied();
        addresses.filter(move |address| {
            let service = self.service_at(*address).and_then(|name| self.service(name));
            let home = service.and_then(|service| self.networks.get(&service.network));
            let mut reached = self.node_services_of(vpc, known);
            !known.host_access
                && home.is_some_and(|home| home.vpc != vpc)
                && !reached.any(|(_, service)| service.address == *address)
        })
    }

    /// Whether a service tells the names of all VPCs, except by a view of it.
    pub(super) fn has_names(&self, name: &EndpointName, service: &Service) -> bool {
        let is_usual = name.0 == "kube-system" && service.name == "kube-dns";
        let mut addresses = service.tables.iter().map(|(address, _)| *address);
        is_usual || addresses.any(|address| self.services.cluster_dns.contains(&address))
    }

    /// Sets the network of a namespace's pods and Services that name no other network.
    pub fn set_namespace(&mut self, namespace: &str, network: Option<&str>) {
        let namespaces = &mut self.services.namespaces;
        let old = match network {
            Some(network) => namespaces.insert(namespace.to_owned(), network.to_owned()),
            None => namespaces.remove(namespace),
        };
        if old.as_deref() == network {
            return;
        }
        if let Some(old) = &old {
            remove_name(&mut self.services.namespaces_of, old, namespace);
        }
        if let Some(network) = network {
            let names = self.services.namespaces_of.entry(network.to_owned()).or_default();
            names.insert(namespace.to_owned());
        }
        let networks = old.as_deref().into_iter().chain(network);
        let mut vpcs: BTreeSet<String> = networks
            .filter_map(|network| Some(self.networks.get(network)?.vpc.clone()))
            .collect();
        // Services that another network's annotation put elsewhere may be in their namespace's network now, or no
        // longer be.
        let services = self.services_of_namespace(namespace);
        let homes = services.filter_map(|(_, name)| {
            let service = self.service(name)?;
            Some(self.networks.get(&service.network)?.vpc.clone())
        });
        vpcs.extend(homes.collect::<Vec<_>>());
        self.dirty.extend(vpcs.into_iter().map(Owner::Vpc));
    }

    /// Yields the scaled Endpoints of the Service of a name: several for a moment, if it was made again.
    pub(in super::super) fn services_named(
        &self,
        namespace: &str,
        service: &str,
    ) -> impl Iterator<Item = &EndpointName> {
        let key = (namespace.to_owned(), service.to_owned());
        self.services.by_name.get(&key).into_iter().flatten()
    }

    /// Yields (name of the Service, its scaled Endpoint).
    fn services_of_namespace(&self, namespace: &str) -> impl Iterator<Item = (&str, &EndpointName)> {
        let from = (namespace.to_owned(), String::new());
        let all = self.services.by_name.range(from..);
        let own = all.take_while(move |((of, _), _)| *of == namespace);
        own.flat_map(|((_, service), names)| names.into_iter().map(|name| (service.as_str(), name)))
    }

    /// Returns the names that a VPC's pods find. Pods that share a VPC with nodes find all.
    pub(in super::super) fn visible_to(&self, vpc: &str, known: &Vpc) -> Visible {
        if known.host_access {
            return Visible::default();
        }
        let vpc_of = |network: &String| self.networks.get(network).map(|network| network.vpc.as_str());
        let own = self.networks_of(vpc);
        let namespaces = own.filter_map(|network| self.services.namespaces_of.get(network));
        let namespaces: BTreeSet<&str> = namespaces.flatten().map(String::as_str).collect();
        let is_here = |name: &EndpointName| {
            let service = self.service(name);
            service.is_some_and(|service| vpc_of(&service.network) == Some(vpc))
        };
        let mut services: BTreeSet<ServiceName> = known
            .shared
            .iter()
            .map(|(namespace, service)| ServiceName::new(namespace, service))
            .collect();
        let own = self.services_of_vpc(vpc);
        let strays = own.filter(|name| !namespaces.contains(name.0.as_str()));
        services.extend(strays.filter_map(|name| Some(ServiceName::new(&name.0, &self.service(name)?.name))));
        let hidden = namespaces.iter().flat_map(|namespace| {
            let elsewhere = self.services_of_namespace(namespace);
            let elsewhere = elsewhere.filter(|(_, name)| !is_here(name));
            elsewhere.map(|(service, _)| ServiceName::new(*namespace, service))
        });
        let hidden = hidden.filter(|name| !services.contains(name)).collect();
        Visible {
            namespaces: namespaces.into_iter().map(str::to_owned).collect(),
            services,
            hidden,
        }
    }
}
