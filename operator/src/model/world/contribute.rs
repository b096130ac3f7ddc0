//! The rows that each object contributes to the programs of droplets.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use ipnet::Ipv6Net;
use thuban_api::BitRate;
use thuban_rows::{
    Bouncer, ByteRate, Direct, Forward, LocalEndpoint, MAX_MEMBERS, Members, Network, Refused, Row,
    Service as ServiceRow, Underlay, Vpc as VpcRow,
};

use super::roles::Roles;
use super::{EndpointName, Membership, Owner, Rows, Vpc, World};
use crate::model::bandwidth::Bandwidth;
use crate::model::policy::Assignment;
use crate::model::rows::{Key, PackedRow, ranges};

/// Returns a rate as rows have it.
fn rate(rate: Option<BitRate>) -> Option<ByteRate> {
    rate.and_then(|rate| ByteRate::new(rate.bytes_per_second()))
}

impl World {
    /// Returns the underlay addresses of droplets, sorted, as many as a row has room for.
    fn addresses(&self, droplets: &BTreeSet<&str>) -> Vec<Underlay> {
        let addresses = droplets
            .iter()
            .filter_map(|name| self.droplets.get(*name).copied())
            .map(Underlay);
        let mut addresses: Vec<_> = addresses.collect();
        addresses.sort_unstable();
        addresses.dedup();
        addresses.truncate(MAX_MEMBERS);
        addresses
    }

    /// Returns the droplets with the roles of a parent. Droplets that hold tables without being listed pass on packets
    /// that still arrive: other droplets hear of the change earlier, or later.
    fn members_of(&self, roles: &Roles, parent: &str) -> Members {
        let used = roles.members(parent, |droplet| self.droplets.contains_key(droplet));
        let relays = roles.holders(parent);
        let relays = relays.difference(&used).copied().collect();
        Members {
            used: self.addresses(&used),
            relays: self.addresses(&relays),
        }
    }

    /// Yields the droplets on which endpoints of the network live.
    pub(super) fn endpoint_droplets(&self, network: &str) -> impl Iterator<Item = &str> {
        let droplets = self.members.get(network).into_iter().flat_map(BTreeMap::keys);
        droplets.map(String::as_str).filter(|droplet| !droplet.is_empty())
    }

    pub(super) fn contribute(&self, owner: &Owner) -> Rows {
        match owner {
            Owner::Vpc(name) => self.contribute_vpc(name).unwrap_or_default(),
            Owner::Network(name) => self.contribute_network(name).unwrap_or_default(),
            Owner::Endpoint(name) => self.contribute_endpoint(name).unwrap_or_default(),
            Owner::Service(name) => self.contribute_service(name).unwrap_or_default(),
        }
    }

    fn contribute_vpc(&self, name: &str) -> Option<Rows> {
        let vpc = self.vpcs.get(name)?;
        let dividers = self.dividers.holders(name);
        let members = self.members_of(&self.dividers, name);
        let mut targets = dividers.clone();
        for network in self.networks_of(name) {
            targets.extend(self.endpoint_droplets(network));
            targets.extend(self.bouncers.holders(network));
        }
        let common = VpcRow {
            vni: vpc.vni,
            cidrs: ranges(&vpc.cidrs),
            service_cidrs: ranges(self.service_ranges_of(vpc)),
            closed_cidrs: ranges(&self.closed_to(vpc)),
            service_addresses: self.service_addresses_of(name),
            dividers: members,
            divider_here: false,
            host_access: vpc.host_access,
            egress: vpc.egress,
            reject: vpc.reject,
            dscp: vpc.dscp,
            egress_rate: rate(vpc.egress_rate),
            kept: self.kept_of(name),
            visible: Arc::new(self.visible_to(name, vpc)),
        };
        let row = |divider_here| {
            Row::Vpc(VpcRow {
                divider_here,
                ..common.clone()
            })
        };
        let mut made = share(&targets, &dividers, row);
        for address in self.refused_dns(name, vpc) {
            let nobody = Row::Service(ServiceRow {
                vni: vpc.vni,
                address,
                ports: Vec::new(),
            });
            made.extend(share(&targets, &targets, |_| nobody.clone()));
        }
        for (service, told) in self.node_services_of(name, vpc) {
            service.share_by_node(&targets, vpc.vni, &told, &self.services.zones, &mut made);
        }
        Some(made)
    }

    /// Returns the ranges that pods of a VPC can't reach though they reach outside: nodes, addresses that no packet may
    /// leave for, and the VPC of nodes.
    pub(super) fn closed_to(&self, vpc: &Vpc) -> Vec<String> {
        if !vpc.egress || vpc.host_access {
            return Vec::new();
        }
        let of_hosts = self.vpcs.values().filter(|vpc| vpc.host_access);
        let of_hosts = of_hosts.flat_map(|vpc| &vpc.cidrs);
        let ranges = self.closed_ranges.iter().chain(of_hosts).cloned();
        let nodes = self.closed_nodes.iter();
        let nodes = nodes.map(|node| format!("{node}/{}", if node.is_ipv4() { 32 } else { 128 }));
        ranges.chain(nodes).collect()
    }

    fn contribute_network(&self, name: &str) -> Option<Rows> {
        let network = self.networks.get(name)?;
        let vni = self.vni(&network.vpc)?;
        let bouncers = self.bouncers.holders(name);
        let members = self.members_of(&self.bouncers, name);
        let mut targets = bouncers.clone();
        targets.extend(self.dividers.holders(&network.vpc));
        targets.extend(self.endpoint_droplets(name));
        let row = |bouncer_here| {
            Row::Network(Network {
                vni,
                id: network.id,
                cidrs: ranges(&network.cidrs),
                bouncers: members.clone(),
                bouncer_here,
                private: network.private,
            })
        };
        Some(share(&targets, &bouncers, row))
    }

    fn contribute_endpoint(&self, name: &EndpointName) -> Option<Rows> {
        let endpoint = self.endpoints.get(name)?;
        let member = match &endpoint.membership {
            Membership::Waiting => return None,
            Membership::Refused(reason, message) => {
                let refused = Row::Refused(Refused {
                    pod_uid: endpoint.pod.uid.clone(),
                    reason: reason.clone(),
                    message: message.clone(),
                });
                return Some([at(&endpoint.droplet, &refused)].into());
            }
            Membership::Member(member) => member,
        };
        let network = self.networks.get(&endpoint.network)?;
        let vni = self.vni(&network.vpc)?;
        let droplet = Underlay(*self.droplets.get(&endpoint.droplet)?);
        let previous = endpoint.previous.as_ref();
        let previous = previous.filter(|previous| **previous != endpoint.droplet);
        let previous = previous.and_then(|name| Some((name, self.droplets.get(name)?)));
        let second = member.address6;
        let Assignment {
            class,
            ingress,
            egress,
        } = self.assignment(name);
        let bandwidth = if endpoint.is_host {
            Bandwidth::default()
        } else {
            network.limits.apply(endpoint.asked)
        };
        let local = Row::Local(LocalEndpoint {
            vni,
            address: member.address,
            address6: second.and_then(|(address, prefix)| Ipv6Net::new(address, prefix).ok()),
            network: network.id,
            prefix_length: member.prefix_length,
            gateway: member.gateway,
            mac: member.mac,
            pod_uid: endpoint.pod.uid.clone(),
            pod_namespace: endpoint.pod.namespace.clone(),
            pod_name: endpoint.pod.name.clone(),
            vpc_name: network.vpc.clone(),
            network_name: endpoint.network.clone(),
            ready: endpoint.ready,
            moved_from: previous.map(|(_, address)| (*address).into()),
            host: endpoint.is_host,
            underlay6: self
                .droplets6
                .get(&endpoint.droplet)
                .copied()
                .filter(|_| endpoint.is_host),
            class,
            ingress_set: ingress,
            egress_set: egress,
            egress_rate: rate(bandwidth.egress),
            ingress_rate: rate(bandwidth.ingress),
        });
        let mut rows = Rows::from([at(&endpoint.droplet, &local)]);
        let bouncers = self.bouncers.holders(&endpoint.network);
        let bouncer = Row::Bouncer(Bouncer {
            vni,
            address: member.address.into(),
            address6: second.map(|(address, _)| address),
            droplet,
        });
        rows.extend(share(&bouncers, &bouncers, |_| bouncer.clone()));
        for address in member.all() {
            if let Some((previous, _)) = previous {
                let forward = Row::Forward(Forward {
                    vni,
                    address,
                    droplet,
                });
                rows.extend([at(previous, &forward)]);
            }
            if self.away.contains(&endpoint.droplet) {
                continue;
            }
            let subscribers = self.subscriptions.get(&(vni, address)).into_iter().flatten();
            let direct = Row::Direct(Direct {
                vni,
                address,
                droplet,
            });
            let others = subscribers.filter(|subscriber| **subscriber != endpoint.droplet);
            rows.extend(others.map(|subscriber| at(subscriber, &direct)));
        }
        Some(rows)
    }
}

fn at(droplet: &str, row: &Row) -> ((String, Key), PackedRow) {
    ((droplet.to_owned(), row.key()), PackedRow::new(row))
}

/// Returns the same row for all targets, except for one flag: whether the target is among `holders`.
pub(super) fn share(targets: &BTreeSet<&str>, holders: &BTreeSet<&str>, row: impl Fn(bool) -> Row) -> Rows {
    let with = row(true);
    let key = with.key();
    let (with, without) = (PackedRow::new(&with), PackedRow::new(&row(false)));
    let row = |target| if holders.contains(target) { &with } else { &without };
    targets
        .iter()
        .map(|target| (((*target).to_owned(), key.clone()), row(target).clone()))
        .collect()
}
