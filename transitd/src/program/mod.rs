//! The droplet's program: the rows that the operator wants here, validated, and what they mean in the tables.
//!
//! Pure: state in, table changes out. Must not touch maps, interfaces or files.

pub mod policy;
mod silent;
mod table_rows;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use ipnet::IpNet;
use thuban_api::identifiers::Vni;
use thuban_common::tables::DropletAddress;
use thuban_rows::{Droplet, Exposed, Front, LocalEndpoint, NodeService, Row, RowKey, Underlay, Visible, Vpc};

use crate::dataplane::tables::{TableEntry, TableKey};
pub use silent::Silent;
pub use table_rows::table_rows;

/// The least address, at which ranges of rows begin.
const FIRST: IpAddr = IpAddr::V4(Ipv4Addr::UNSPECIFIED);

/// A table row that must change: to this entry, or removed.
pub type Change = (TableKey, Option<TableEntry>);

/// All rows, and for each table row its contributing rows.
#[derive(Debug, Default)]
pub struct Program {
    rows: BTreeMap<RowKey, Row>,
    /// The entries of each table row. The least `RowKey` wins: a network's row covers its VPC's own range with the
    /// same CIDR.
    contributions: HashMap<TableKey, BTreeMap<RowKey, TableEntry>>,
    local_by_pod: HashMap<String, RowKey>,
}

impl Program {
    pub fn get(&self, key: &RowKey) -> Option<&Row> {
        self.rows.get(key)
    }

    pub fn keys(&self) -> impl Iterator<Item = &RowKey> {
        self.rows.keys()
    }

    /// Returns the endpoint of a pod on this droplet.
    pub fn local_of_pod(&self, pod_uid: &str) -> Option<&LocalEndpoint> {
        match self.local_by_pod.get(pod_uid).and_then(|key| self.rows.get(key)) {
            Some(Row::Local(endpoint)) => Some(endpoint),
            _ => None,
        }
    }

    pub fn locals(&self) -> impl Iterator<Item = &LocalEndpoint> {
        let rows = self.rows.range(RowKey::Local(Vni::MIN, FIRST)..);
        rows.map_while(|(_, row)| match row {
            Row::Local(endpoint) => Some(endpoint),
            _ => None,
        })
    }

    /// Returns the node's own endpoint.
    pub fn host(&self) -> Option<&LocalEndpoint> {
        self.locals().find(|endpoint| endpoint.host)
    }

    pub fn vpc(&self, vni: Vni) -> Option<&Vpc> {
        match self.rows.get(&RowKey::Vpc(vni)) {
            Some(Row::Vpc(vpc)) => Some(vpc),
            _ => None,
        }
    }

    pub fn vpcs(&self) -> impl Iterator<Item = &Vpc> {
        let rows = self.rows.range(RowKey::Vpc(Vni::MIN)..);
        rows.map_while(|(_, row)| match row {
            Row::Vpc(vpc) => Some(vpc),
            _ => None,
        })
    }

    /// Returns the rows of networks and VPCs, which name members of roles.
    fn of_roles(&self) -> impl Iterator<Item = &Row> {
        // These rows are between those of droplets and those of endpoints.
        let rows = self.rows.range(..RowKey::Local(Vni::MIN, FIRST)).rev();
        let rows = rows.take_while(|(key, _)| !matches!(key, RowKey::Droplet(_)));
        rows.map(|(_, row)| row)
    }

    /// Returns the droplets whose roles this one may use.
    pub fn members(&self) -> BTreeSet<DropletAddress> {
        let members = self.of_roles().filter_map(|row| match row {
            Row::Network(network) => Some(&network.bouncers.used),
            Row::Vpc(vpc) => Some(&vpc.dividers.used),
            _ => None,
        });
        members.flatten().map(|droplet| droplet.octets()).collect()
    }

    /// Returns the table rows that name members of roles, with their present entries.
    pub fn role_tables(&self) -> Vec<Change> {
        let entry = |key| self.contributions.get(&key)?.values().next().copied();
        let keys = self.of_roles().flat_map(table_rows).map(|(key, _)| key);
        keys.map(|key| (key, entry(key))).collect()
    }

    /// Returns the ranges of a VPC: its own, and those of its services.
    pub fn ranges(&self, vni: Vni) -> (&[IpNet], &[IpNet]) {
        match self.vpc(vni) {
            Some(vpc) => (&vpc.cidrs, &vpc.service_cidrs),
            None => (&[], &[]),
        }
    }

    /// Whether an endpoint of this droplet gets outside: its VPC does, and its network isn't private.
    pub fn has_egress(&self, vni: Vni, address: IpAddr) -> bool {
        let Some(endpoint) = self.local_at(vni, address) else {
            return false;
        };
        let network = self.rows.get(&RowKey::Network(vni, endpoint.network));
        let is_private = matches!(network, Some(Row::Network(network)) if network.private);
        !is_private && self.vpc(vni).is_some_and(|vpc| vpc.egress)
    }

    /// Returns the ranges of a VPC's private networks that have a part on this droplet.
    pub fn private_ranges(&self, vni: Vni) -> impl Iterator<Item = &IpNet> {
        let networks = self.of_roles().filter_map(move |row| match row {
            Row::Network(network) if network.vni == vni && network.private => Some(&network.cidrs),
            _ => None,
        });
        networks.flatten()
    }

    /// Returns the outside ranges that stay closed to VPCs with egress. They are the same for all VPCs that nodes are
    /// not in.
    pub fn closed_ranges(&self) -> &[IpNet] {
        let mut all = self.vpcs().map(|vpc| vpc.closed_cidrs.as_slice());
        all.find(|ranges| !ranges.is_empty()).unwrap_or_default()
    }

    /// Whether an endpoint on this droplet has an address.
    pub fn has_local(&self, vni: Vni, address: IpAddr) -> bool {
        self.local_at(vni, address).is_some()
    }

    /// Returns the endpoint on this droplet that has an address.
    fn local_at(&self, vni: Vni, address: IpAddr) -> Option<&LocalEndpoint> {
        if let Some(Row::Local(endpoint)) = self.rows.get(&RowKey::Local(vni, address)) {
            return Some(endpoint);
        }
        let is_its = |endpoint: &&LocalEndpoint| {
            let second = endpoint.address6.map(|net| IpAddr::from(net.addr()));
            endpoint.vni == vni && second == Some(address)
        };
        address.is_ipv6().then(|| self.locals().find(is_its)).flatten()
    }

    /// Whether traffic from outside is led to an endpoint of this droplet by its address.
    pub fn is_led_to(&self, endpoint: &LocalEndpoint) -> bool {
        let own: Vec<IpAddr> = endpoint.addresses().collect();
        let mut exposed = self.exposed().filter(|exposed| exposed.vni == endpoint.vni);
        exposed.any(|exposed| {
            let mut backends = exposed.local_backends();
            backends.any(|backend| own.contains(&backend.address))
        })
    }

    /// Returns the ranges of services, which are the same in each VPC.
    pub fn service_ranges(&self) -> &[IpNet] {
        let mut all = self.vpcs().map(|vpc| vpc.service_cidrs.as_slice());
        all.next().unwrap_or_default()
    }

    /// Returns the names of the cluster that a VPC's pods find; `None` for the VPC of nodes, whose pods ask the
    /// cluster's DNS itself.
    pub fn visible(&self, vni: Vni) -> Option<&Arc<Visible>> {
        let vpc = self.vpc(vni).filter(|vpc| !vpc.host_access);
        vpc.map(|vpc| &vpc.visible)
    }

    /// Whether an address is in a range of a VPC that has a part on this droplet.
    pub fn is_in_vpc(&self, address: IpAddr) -> bool {
        self.vpcs()
            .any(|vpc| vpc.cidrs.iter().any(|range| range.contains(&address)))
    }

    /// Returns the other droplets.
    pub fn droplets(&self) -> impl Iterator<Item = &Droplet> {
        let rows = self.rows.range(RowKey::Droplet(Underlay::MIN)..);
        rows.map_while(|(_, row)| match row {
            Row::Droplet(droplet) => Some(droplet),
            _ => None,
        })
    }

    /// Returns the services that are reached by way of this node.
    pub fn exposed(&self) -> impl Iterator<Item = &Exposed> {
        let rows = self.rows.range(RowKey::Exposed(Vni::MIN, FIRST)..);
        rows.map_while(|(_, row)| match row {
            Row::Exposed(exposed) => Some(exposed),
            _ => None,
        })
    }

    pub fn fronts(&self) -> impl Iterator<Item = &Front> {
        let rows = self.rows.range(RowKey::Front(Vni::MIN, FIRST)..);
        rows.map_while(|(_, row)| match row {
            Row::Front(front) => Some(front),
            _ => None,
        })
    }

    /// Returns the fronts at an address: one, unless it passes from one VPC to another.
    pub fn fronts_at(&self, address: IpAddr) -> impl Iterator<Item = &Front> {
        self.fronts().filter(move |front| front.address == address)
    }

    /// Returns the services of the node's own stack.
    pub fn served_by_node(&self) -> impl Iterator<Item = &NodeService> {
        let rows = self.rows.range(RowKey::NodeService(Vni::MIN, FIRST)..);
        rows.map_while(|(_, row)| match row {
            Row::NodeService(service) => Some(service),
            _ => None,
        })
    }

    /// Returns the endpoint's address that an endpoint of another VPC on this droplet has, if there is one.
    pub fn address_taken(&self, endpoint: &LocalEndpoint) -> Option<IpAddr> {
        let others = || self.locals().filter(|other| other.vni != endpoint.vni);
        if others().any(|other| other.address == endpoint.address) {
            return Some(endpoint.address.into());
        }
        let address6 = endpoint.address6.map(|net| net.addr())?;
        let is_same = |other: &LocalEndpoint| other.address6.is_some_and(|net| net.addr() == address6);
        others().any(is_same).then_some(address6.into())
    }

    /// Puts a row and returns the changes in the tables. The delivery of a local row isn't among them: it needs an
    /// attachment.
    pub fn upsert(&mut self, row: Row) -> Vec<Change> {
        let key = row.key();
        let mut changes = Vec::new();
        if self.rows.get(&key) == Some(&row) {
            return changes;
        }
        let entries = table_rows(&row);
        if let Some(old) = self.rows.get(&key) {
            for (table_key, _) in table_rows(old) {
                if !entries.iter().any(|(new, _)| *new == table_key) {
                    changes.push(self.withdraw(&key, table_key));
                }
            }
        }
        for (table_key, entry) in entries {
            let contributions = self.contributions.entry(table_key).or_default();
            contributions.insert(key.clone(), entry);
            changes.push((table_key, contributions.values().next().copied()));
        }
        self.forget_pod(&key);
        if let Row::Local(endpoint) = &row {
            self.local_by_pod.insert(endpoint.pod_uid.clone(), key.clone());
        }
        self.rows.insert(key, row);
        changes
    }

    /// Removes a row and returns the changes in the tables.
    pub fn delete(&mut self, key: &RowKey) -> Vec<Change> {
        self.forget_pod(key);
        let Some(row) = self.rows.remove(key) else {
            return Vec::new();
        };
        table_rows(&row)
            .into_iter()
            .map(|(table_key, _)| self.withdraw(key, table_key))
            .collect()
    }

    /// Whether some row asks for this table row.
    pub fn wants(&self, key: &TableKey) -> bool {
        self.contributions.contains_key(key)
    }

    fn forget_pod(&mut self, key: &RowKey) {
        if let Some(Row::Local(endpoint)) = self.rows.get(key)
            && self.local_by_pod.get(&endpoint.pod_uid) == Some(key)
        {
            self.local_by_pod.remove(&endpoint.pod_uid);
        }
    }

    fn withdraw(&mut self, key: &RowKey, table_key: TableKey) -> Change {
        let Some(contributions) = self.contributions.get_mut(&table_key) else {
            return (table_key, None);
        };
        contributions.remove(key);
        let left = contributions.values().next().copied();
        if left.is_none() {
            self.contributions.remove(&table_key);
        }
        (table_key, left)
    }
}

#[cfg(test)]
mod tests;
