//! The rows that each object contributes to the programs of droplets.

use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;

use thuban_api::identifiers::mapped;
use thuban_proto::transit::{LocalRow, Row, row};

use super::roles::Roles;
use super::{EndpointName, Membership, Owner, Rows, Vpc, World};
use crate::model::rows::{self, Key, PackedRow};

/// Most bouncers of a network, and most dividers of a VPC, that a row has room for.
const MAX_MEMBERS: usize = 8;

impl World {
    /// Underlay addresses of droplets, sorted, as many as a row has room for.
    fn addresses(&self, droplets: &BTreeSet<&str>) -> Vec<Ipv4Addr> {
        let addresses = droplets
            .iter()
            .filter_map(|name| self.droplets.get(*name).copied());
        let mut addresses: Vec<_> = addresses.collect();
        addresses.sort_unstable();
        addresses.dedup();
        addresses.truncate(MAX_MEMBERS);
        addresses
    }

    /// Those that hold tables without being listed pass on what comes to them: others hear of them earlier, or later.
    fn members_of(&self, roles: &Roles, parent: &str) -> rows::Members {
        let used = roles.members(parent);
        let relays = roles.holders(parent);
        let relays = relays.difference(&used).copied().collect();
        rows::Members {
            used: self.addresses(&used),
            relays: self.addresses(&relays),
        }
    }

    /// Droplets on which endpoints of the network live.
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
        for (network, _) in self.networks.iter().filter(|(_, network)| network.vpc == name) {
            targets.extend(self.endpoint_droplets(network));
            targets.extend(self.bouncers.holders(network));
        }
        let visible = self.visible_to(name, vpc);
        let service_addresses = self.service_addresses_of(name);
        let row = |is_here| {
            rows::vpc(
                vpc.vni,
                rows::Ranges {
                    own: &vpc.cidrs,
                    services: &self.service_ranges,
                    closed: &self.closed_to(vpc),
                    service_addresses: &service_addresses,
                },
                &members,
                rows::Access {
                    divider_here: is_here,
                    host: vpc.host_access,
                    egress: vpc.egress,
                },
                &visible,
            )
        };
        let mut made = share(&targets, &dividers, row);
        for (service, told) in self.node_services_of(name, vpc) {
            service.share_by_node(&targets, vpc.vni, &told, &mut made);
        }
        Some(made)
    }

    /// Where pods of a VPC don't get though they get outside: nodes, what no packet may leave for, and the VPC of nodes.
    fn closed_to(&self, vpc: &Vpc) -> Vec<String> {
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
        let row = |is_here| rows::network(vni, network.id, &network.cidrs, &members, is_here);
        Some(share(&targets, &bouncers, row))
    }

    fn contribute_endpoint(&self, name: &EndpointName) -> Option<Rows> {
        let endpoint = self.endpoints.get(name)?;
        let member = match &endpoint.membership {
            Membership::Waiting => return None,
            Membership::Refused(reason, message) => {
                return Some(
                    [at(
                        &endpoint.droplet,
                        rows::refused(&endpoint.pod.uid, reason, message),
                    )]
                    .into(),
                );
            }
            Membership::Member(member) => member,
        };
        let network = self.networks.get(&endpoint.network)?;
        let vni = self.vni(&network.vpc)?;
        let home = *self.droplets.get(&endpoint.droplet)?;
        let previous = endpoint.previous.as_ref();
        let previous = previous.filter(|previous| **previous != endpoint.droplet);
        let previous = previous.and_then(|name| Some((name, self.droplets.get(name)?)));
        let address6 = member.address6.map(|(address, _)| address);
        let local = LocalRow {
            vni,
            address: mapped(member.address).to_vec(),
            network: network.id,
            prefix_length: member.prefix_length.into(),
            gateway: member.gateway.to_string(),
            mac: member.mac.0.to_vec(),
            pod_uid: endpoint.pod.uid.clone(),
            pod_namespace: endpoint.pod.namespace.clone(),
            pod_name: endpoint.pod.name.clone(),
            vpc_name: network.vpc.clone(),
            network_name: endpoint.network.clone(),
            ready: endpoint.ready,
            address6: rows::optional(address6),
            moved_from: previous
                .map(|(_, address)| address.octets().to_vec())
                .unwrap_or_default(),
            prefix_length6: member.address6.map_or(0, |(_, prefix)| prefix.into()),
            host: endpoint.is_host,
        };
        let key = (endpoint.droplet.clone(), Key::Local(vni, member.address.into()));
        let local = Row {
            row: Some(row::Row::Local(local)),
        };
        let mut rows = Rows::from([(key, PackedRow::new(&local))]);
        let bouncers = self.bouncers.holders(&endpoint.network);
        rows.extend(share(&bouncers, &bouncers, |_| {
            rows::bouncer(vni, member.address, address6, home)
        }));
        for address in member.all() {
            if let Some((previous, _)) = previous {
                rows.extend([at(previous, rows::forward(vni, address, home))]);
            }
            if self.away.contains(&endpoint.droplet) {
                continue;
            }
            let subscribers = self.subscriptions.get(&(vni, address)).into_iter().flatten();
            for subscriber in subscribers.filter(|subscriber| **subscriber != endpoint.droplet) {
                rows.extend([at(subscriber, rows::direct(vni, address, home))]);
            }
        }
        Some(rows)
    }
}

fn at(droplet: &str, (key, row): (Key, Row)) -> ((String, Key), PackedRow) {
    ((droplet.to_owned(), key), PackedRow::new(&row))
}

/// The same row for all targets but for one flag: whether the target is among `holders`.
fn share(targets: &BTreeSet<&str>, holders: &BTreeSet<&str>, row: impl Fn(bool) -> (Key, Row)) -> Rows {
    let (key, with) = row(true);
    let (with, without) = (PackedRow::new(&with), PackedRow::new(&row(false).1));
    let row = |target| if holders.contains(target) { &with } else { &without };
    targets
        .iter()
        .map(|target| (((*target).to_owned(), key.clone()), row(target).clone()))
        .collect()
}
