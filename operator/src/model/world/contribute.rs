//! The rows that each object contributes to the programs of droplets.

use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;

use thuban_api::identifiers::mapped;
use thuban_proto::transit::{LocalRow, Row, row};

use super::{EndpointName, Membership, Owner, World, role_droplets};
use crate::model::rows::{self, Key};

/// Most bouncers of a network, and most dividers of a VPC, that a row has room for.
const MAX_MEMBERS: usize = 8;

impl World {
    /// Underlay addresses of droplets, sorted, as many as a row has room for.
    fn addresses(&self, droplets: &[&str]) -> Vec<Ipv4Addr> {
        let mut addresses: Vec<_> = droplets
            .iter()
            .filter_map(|name| self.droplets.get(*name).copied())
            .collect();
        addresses.sort_unstable();
        addresses.dedup();
        addresses.truncate(MAX_MEMBERS);
        addresses
    }

    fn endpoint_droplets(&self, network: &str) -> impl Iterator<Item = &str> {
        self.members
            .get(network)
            .into_iter()
            .flat_map(BTreeMap::keys)
            .map(String::as_str)
    }

    pub(super) fn contribute(&self, owner: &Owner) -> BTreeMap<(String, Key), Row> {
        match owner {
            Owner::Droplet(name) => self.contribute_droplets(name),
            Owner::Vpc(name) => self.contribute_vpc(name).unwrap_or_default(),
            Owner::Network(name) => self.contribute_network(name).unwrap_or_default(),
            Owner::Endpoint(name) => self.contribute_endpoint(name).unwrap_or_default(),
        }
    }

    /// The other droplets, as known to this one.
    fn contribute_droplets(&self, name: &str) -> BTreeMap<(String, Key), Row> {
        if !self.droplets.contains_key(name) {
            return BTreeMap::new();
        }
        let others = self.droplets.iter().filter(|(other, _)| *other != name);
        others
            .map(|(_, address)| at(name, rows::droplet(*address)))
            .collect()
    }

    fn contribute_vpc(&self, name: &str) -> Option<BTreeMap<(String, Key), Row>> {
        let vpc = self.vpcs.get(name)?;
        let dividers = role_droplets(&self.dividers, name);
        let members = self.addresses(&dividers);
        let mut targets: BTreeSet<&str> = dividers.iter().copied().collect();
        for (network, _) in self.networks.iter().filter(|(_, network)| network.vpc == name) {
            targets.extend(self.endpoint_droplets(network));
            targets.extend(role_droplets(&self.bouncers, network));
        }
        let row = |droplet: &str| {
            rows::vpc(
                vpc.vni,
                &vpc.cidrs,
                &members,
                dividers.contains(&droplet),
                vpc.host_access,
            )
        };
        Some(
            targets
                .into_iter()
                .map(|droplet| at(droplet, row(droplet)))
                .collect(),
        )
    }

    fn contribute_network(&self, name: &str) -> Option<BTreeMap<(String, Key), Row>> {
        let network = self.networks.get(name)?;
        let vni = self.vni(&network.vpc)?;
        let bouncers = role_droplets(&self.bouncers, name);
        let members = self.addresses(&bouncers);
        let mut targets: BTreeSet<&str> = bouncers.iter().copied().collect();
        targets.extend(role_droplets(&self.dividers, &network.vpc));
        targets.extend(self.endpoint_droplets(name));
        let row = |droplet: &str| {
            rows::network(
                vni,
                network.id,
                &network.cidrs,
                &members,
                bouncers.contains(&droplet),
            )
        };
        Some(
            targets
                .into_iter()
                .map(|droplet| at(droplet, row(droplet)))
                .collect(),
        )
    }

    fn contribute_endpoint(&self, name: &EndpointName) -> Option<BTreeMap<(String, Key), Row>> {
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
            moved_from: Vec::new(),
            prefix_length6: member.address6.map_or(0, |(_, prefix)| prefix.into()),
        };
        let key = (endpoint.droplet.clone(), Key::Local(vni, member.address.into()));
        let mut rows = BTreeMap::from([(
            key,
            Row {
                row: Some(row::Row::Local(local)),
            },
        )]);
        for bouncer in self.bouncer_droplets(&endpoint.network) {
            rows.extend([at(bouncer, rows::bouncer(vni, member.address, address6, home))]);
        }
        for address in member.all() {
            let subscribers = self.subscriptions.get(&(vni, address)).into_iter().flatten();
            for subscriber in subscribers.filter(|subscriber| **subscriber != endpoint.droplet) {
                rows.extend([at(subscriber, rows::direct(vni, address, home))]);
            }
        }
        Some(rows)
    }
}

fn at(droplet: &str, (key, row): (Key, Row)) -> ((String, Key), Row) {
    ((droplet.to_owned(), key), row)
}
