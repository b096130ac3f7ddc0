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
mod tests {
    use thuban_common::tables::RemoteRow;
    use thuban_proto::transit as proto;
    use thuban_rows::Network;
    use thuban_rows::builders::{self, VNI, network_id, vni};

    use super::*;

    fn apply(program: &mut Program, tables: &mut HashMap<TableKey, TableEntry>, row: proto::row::Row) {
        let row = Row::try_from(proto::Row { row: Some(row) }).unwrap();
        apply_changes(tables, program.upsert(row));
    }

    fn apply_changes(tables: &mut HashMap<TableKey, TableEntry>, changes: Vec<Change>) {
        for (key, entry) in changes {
            match entry {
                Some(entry) => tables.insert(key, entry),
                None => tables.remove(&key),
            };
        }
    }

    fn vpc(cidrs: &[&str]) -> proto::row::Row {
        let cidrs = cidrs.iter().map(ToString::to_string).collect();
        proto::row::Row::Vpc(proto::VpcRow {
            vni: 7,
            cidrs,
            dividers: vec![vec![1, 1, 1, 1]],
            ..Default::default()
        })
    }

    fn network(cidrs: &[&str]) -> proto::row::Row {
        let cidrs = cidrs.iter().map(ToString::to_string).collect();
        let bouncers = vec![vec![2, 2, 2, 2]];
        proto::row::Row::Network(proto::NetworkRow {
            vni: 7,
            network: 5,
            cidrs,
            bouncers,
            bouncer_here: true,
            ..Default::default()
        })
    }

    fn subnet(a: u8, b: u8, prefix: u8) -> TableKey {
        let address = std::net::Ipv4Addr::new(10, a, b, 0).to_ipv6_mapped().octets();
        TableKey::Subnet {
            vni: 7,
            address,
            prefix: 96 + prefix,
        }
    }

    fn network_of(tables: &HashMap<TableKey, TableEntry>, key: TableKey) -> Option<u32> {
        match tables.get(&key) {
            Some(TableEntry::Subnet(entry)) => Some(entry.network),
            _ => None,
        }
    }

    #[test]
    fn network_takes_vpcs_range_in_any_order_and_returns_it() {
        for network_first in [true, false] {
            let (mut program, mut tables) = (Program::default(), HashMap::new());
            let rows = if network_first {
                [network(&["10.0.0.0/16"]), vpc(&["10.0.0.0/16"])]
            } else {
                [vpc(&["10.0.0.0/16"]), network(&["10.0.0.0/16"])]
            };
            for row in rows {
                apply(&mut program, &mut tables, row);
            }
            assert_eq!(network_of(&tables, subnet(0, 0, 16)), Some(5));
            apply_changes(
                &mut tables,
                program.delete(&RowKey::Network(vni(7), network_id(5))),
            );
            assert_eq!(network_of(&tables, subnet(0, 0, 16)), Some(0));
            apply_changes(&mut tables, program.delete(&RowKey::Vpc(vni(7))));
            assert!(tables.is_empty(), "{tables:?}");
        }
    }

    #[test]
    fn ranges_of_services_are_marked_and_go_with_their_vpc() {
        use thuban_common::tables::SUBNET_SERVICES;

        let row = |cidrs: &[&str]| {
            let proto::row::Row::Vpc(mut row) = vpc(&["10.0.0.0/16"]) else {
                panic!("a VPC")
            };
            row.service_cidrs = cidrs.iter().map(ToString::to_string).collect();
            row
        };
        let (mut program, mut tables) = (Program::default(), HashMap::new());
        let both = row(&["10.96.0.0/16", "fd00:96::/108"]);
        apply(&mut program, &mut tables, proto::row::Row::Vpc(both));
        let marked = |tables: &HashMap<TableKey, TableEntry>| {
            let is_marked = |entry: &&TableEntry| matches!(entry, TableEntry::Subnet(subnet) if subnet.flags == SUBNET_SERVICES && subnet.network == 0);
            tables.values().filter(is_marked).count()
        };
        assert_eq!(marked(&tables), 2);
        assert!(
            matches!(tables.get(&subnet(96, 0, 16)), Some(TableEntry::Subnet(entry)) if entry.flags == SUBNET_SERVICES)
        );
        apply(&mut program, &mut tables, proto::row::Row::Vpc(row(&[])));
        assert_eq!(marked(&tables), 0);
        for bad in ["10.96.0.1/16", "::ffff:10.96.0.0/112", "x"] {
            let bad = proto::row::Row::Vpc(row(&[bad]));
            let error = Row::try_from(proto::Row { row: Some(bad) }).unwrap_err();
            assert!(
                error.to_string().starts_with("service_cidrs: expected"),
                "{error}"
            );
        }
    }

    #[test]
    fn a_private_network_closes_the_way_out_for_its_endpoints() {
        let own = IpAddr::from(Ipv4Addr::new(10, 0, 1, 5));
        for (egress, private, gets_out) in [
            (true, false, true),
            (true, true, false),
            (false, false, false),
            (false, true, false),
        ] {
            let mut program = Program::default();
            let vpc = Vpc {
                egress,
                ..builders::vpc()
            };
            let network = Network {
                private,
                ..builders::network()
            };
            for row in [
                Row::Vpc(vpc),
                Row::Network(network.clone()),
                Row::Local(builders::local()),
            ] {
                program.upsert(row);
            }
            assert_eq!(program.has_egress(VNI, own), gets_out, "{egress} {private}");
            let ranges: Vec<IpNet> = program.private_ranges(VNI).copied().collect();
            assert_eq!(ranges, if private { network.cidrs } else { Vec::new() });
            assert_eq!(program.private_ranges(vni(8)).count(), 0, "another VPC's");
        }
    }

    #[test]
    fn a_cidr_that_left_a_network_leaves_the_tables() {
        let (mut program, mut tables) = (Program::default(), HashMap::new());
        apply(
            &mut program,
            &mut tables,
            network(&["10.0.1.0/24", "10.0.2.0/24"]),
        );
        apply(&mut program, &mut tables, network(&["10.0.2.0/24"]));
        assert_eq!(network_of(&tables, subnet(0, 1, 24)), None);
        assert_eq!(network_of(&tables, subnet(0, 2, 24)), Some(5));
    }

    #[test]
    fn ipv6_ranges_join_ipv4_ranges_with_own_prefix_length() {
        let (mut program, mut tables) = (Program::default(), HashMap::new());
        let proto::row::Row::Network(mut row) = network(&["10.0.1.0/24"]) else {
            panic!("a network")
        };
        row.cidrs6 = vec!["fd00:1::/64".into()];
        apply(&mut program, &mut tables, proto::row::Row::Network(row.clone()));
        let mut address = [0; 16];
        address[..4].copy_from_slice(&[0xfd, 0, 0, 1]);
        let key = TableKey::Subnet {
            vni: 7,
            address,
            prefix: 64,
        };
        assert_eq!(network_of(&tables, key), Some(5));
        assert_eq!(network_of(&tables, subnet(0, 1, 24)), Some(5));
        row.cidrs6.clear();
        apply(&mut program, &mut tables, proto::row::Row::Network(row.clone()));
        assert_eq!(network_of(&tables, key), None);
        for bad in ["fd00:1::1/64", "10.0.2.0/24", "::ffff:10.0.0.0/112", "x"] {
            row.cidrs6 = vec![bad.into()];
            let row = proto::row::Row::Network(row.clone());
            let error = Row::try_from(proto::Row { row: Some(row) }).unwrap_err();
            assert!(
                error.to_string().starts_with("cidrs6: expected"),
                "{bad}: {error}"
            );
        }
    }

    #[test]
    fn one_bouncer_row_is_two_table_rows_and_goes_with_both() {
        let (mut program, mut tables) = (Program::default(), HashMap::new());
        let v4 = std::net::Ipv4Addr::new(10, 0, 1, 9).to_ipv6_mapped().octets();
        let v6 = |last| {
            let mut address = [0xfd; 16];
            address[15] = last;
            address
        };
        let bouncer = |address6: Vec<u8>| {
            proto::row::Row::Bouncer(proto::BouncerRow {
                vni: 7,
                address: v4.to_vec(),
                droplet: vec![3, 3, 3, 3],
                address6,
            })
        };
        let held = |tables: &HashMap<TableKey, TableEntry>| {
            let mut keys: Vec<_> = tables
                .keys()
                .map(|key| match key {
                    TableKey::Remote(RemoteRow::Bouncer, key) => key.address,
                    other => panic!("{other:?}"),
                })
                .collect();
            keys.sort_unstable();
            keys
        };
        apply(&mut program, &mut tables, bouncer(v6(1).to_vec()));
        assert_eq!(held(&tables), [v4, v6(1)]);
        apply(&mut program, &mut tables, bouncer(v6(2).to_vec()));
        assert_eq!(
            held(&tables),
            [v4, v6(2)],
            "the old address of a changed row goes"
        );
        apply(&mut program, &mut tables, bouncer(vec![]));
        assert_eq!(held(&tables), [v4], "a peer that knows no IPv6");
        apply(&mut program, &mut tables, bouncer(v6(1).to_vec()));
        apply_changes(
            &mut tables,
            program.delete(&RowKey::Bouncer(vni(7), [10, 0, 1, 9].into())),
        );
        assert!(tables.is_empty(), "{tables:?}");
    }

    #[test]
    fn an_ipv6_address_of_another_vpc_on_the_droplet_is_taken_too() {
        let local = |vni, last: u8, last6: u8| {
            let mut address6 = vec![0xfd; 16];
            address6[15] = last6;
            let address = std::net::Ipv4Addr::new(10, 0, 1, last).to_ipv6_mapped();
            let row = proto::LocalRow {
                vni,
                address: address.octets().to_vec(),
                network: 5,
                prefix_length: 24,
                gateway: "10.0.1.1".into(),
                mac: vec![2, 0, 0, 0, 0, last],
                pod_uid: format!("{vni}/{last}"),
                address6: if last6 == 0 { vec![] } else { address6 },
                prefix_length6: if last6 == 0 { 0 } else { 64 },
                ..Default::default()
            };
            let row = Row::try_from(proto::Row {
                row: Some(proto::row::Row::Local(row)),
            });
            match row.unwrap() {
                Row::Local(endpoint) => endpoint,
                other => panic!("{other:?}"),
            }
        };
        let mut program = Program::default();
        program.upsert(Row::Local(local(7, 5, 5)));
        let taken = |endpoint| program.address_taken(&endpoint).map(|address| address.is_ipv6());
        assert_eq!(taken(local(8, 6, 5)), Some(true));
        assert_eq!(taken(local(8, 5, 6)), Some(false));
        assert_eq!(taken(local(8, 6, 6)), None);
        assert_eq!(taken(local(8, 6, 0)), None, "without IPv6");
        assert_eq!(taken(local(7, 6, 5)), None, "within a VPC the claim decides");
    }

    #[test]
    fn the_same_row_twice_changes_nothing() {
        let (mut program, mut tables) = (Program::default(), HashMap::new());
        apply(&mut program, &mut tables, vpc(&["10.0.0.0/16"]));
        let row = Row::try_from(proto::Row {
            row: Some(vpc(&["10.0.0.0/16"])),
        })
        .unwrap();
        assert!(program.upsert(row).is_empty());
    }

    #[test]
    fn a_pods_endpoint_is_found_by_its_uid_until_its_row_goes() {
        let local = |uid: &str, last| {
            let address = std::net::Ipv4Addr::new(10, 0, 1, last)
                .to_ipv6_mapped()
                .octets()
                .to_vec();
            let row = proto::LocalRow {
                vni: 7,
                address,
                network: 5,
                prefix_length: 24,
                gateway: "10.0.1.1".into(),
                mac: vec![2, 0, 0, 0, 0, last],
                pod_uid: uid.into(),
                ..Default::default()
            };
            Row::try_from(proto::Row {
                row: Some(proto::row::Row::Local(row)),
            })
            .unwrap()
        };
        let mut program = Program::default();
        assert!(program.upsert(local("a", 5)).is_empty());
        assert_eq!(program.local_of_pod("a").map(|e| e.address.octets()[3]), Some(5));
        // The address goes to another pod, so the first pod no longer has one.
        program.upsert(local("b", 5));
        assert!(program.local_of_pod("a").is_none());
        program.delete(&local("b", 5).key());
        assert!(program.local_of_pod("b").is_none());
    }
}
