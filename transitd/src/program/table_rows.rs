//! The table rows that each kind of row asks for by itself. The tables of services and fronts are
//! `dataplane::services`'.

use std::net::Ipv6Addr;

use ipnet::IpNet;
use thuban_api::identifiers::mapped;
use thuban_common::meter::MeterKey;
use thuban_common::tables::{
    Address, DropletEntry, LOAD_OF_DIVIDER, LoadKey, MAX_MEMBERS, Members, RemoteRow, SOURCE_FRONT_BITS,
    SUBNET_BOUNCER_HERE, SUBNET_BY_NODE, SUBNET_CLOSED, SUBNET_PRIVATE, SUBNET_SERVICES, SourceEntry,
    SourceKey, SubnetEntry, VPC_DIVIDER_HERE, VPC_EGRESS, VPC_HOST_ACCESS, VpcEntry,
};
use thuban_rows::{self as rows, ByteRate, Front, LocalEndpoint, Network, NodeService, Row, Underlay, Vpc};

use crate::dataplane::contract::{endpoint_key, endpoint_keys};
use crate::dataplane::tables::{TableEntry, TableKey};

// The tables have room for as many members as rows may have.
const _: () = assert!(rows::MAX_MEMBERS == MAX_MEMBERS);

type TableRow = (TableKey, TableEntry);

/// Returns the table rows that a row asks for.
pub fn table_rows(row: &Row) -> Vec<TableRow> {
    match row {
        Row::Droplet(row) => vec![(
            TableKey::Droplet(row.address.octets()),
            TableEntry::Droplet(DropletEntry { flags: 0 }),
        )],
        Row::Vpc(row) => of_vpc(row),
        Row::Network(row) => of_network(row),
        Row::Local(row) => of_local(row),
        Row::Bouncer(row) => {
            let second = row.address6.map(|address| endpoint_key(row.vni, address));
            let keys = [Some(endpoint_key(row.vni, row.address)), second];
            let keys = keys.into_iter().flatten();
            keys.map(|key| (TableKey::Remote(RemoteRow::Bouncer, key), remote(row.droplet)))
                .collect()
        }
        Row::Direct(row) => {
            let key = endpoint_key(row.vni, row.address);
            vec![(TableKey::Remote(RemoteRow::Direct, key), remote(row.droplet))]
        }
        Row::Forward(row) => {
            let key = endpoint_key(row.vni, row.address);
            vec![(TableKey::Remote(RemoteRow::Forward, key), remote(row.droplet))]
        }
        Row::NodeService(row) => of_node_service(row),
        Row::Front(row) => clients_of(row),
        Row::Refused(_) | Row::Service(_) | Row::Exposed(_) | Row::Class(_) | Row::PolicySet(_) => Vec::new(),
    }
}

fn flag(on: bool, bit: u32) -> u32 {
    if on { bit } else { 0 }
}

fn of_vpc(row: &Vpc) -> Vec<TableRow> {
    let flags = flag(row.divider_here, VPC_DIVIDER_HERE)
        | flag(row.host_access, VPC_HOST_ACCESS)
        | flag(row.egress, VPC_EGRESS);
    let vni = row.vni.get();
    let entry = VpcEntry::new(vni, flags, members(&row.dividers));
    let mut rows = vec![(TableKey::Vpc(vni), TableEntry::Vpc(entry))];
    rows.extend(row.divider_here.then(|| load(vni, LOAD_OF_DIVIDER)));
    let meter = |rate: ByteRate| {
        (
            TableKey::Meter(MeterKey::of_vpc(vni)),
            TableEntry::Meter(rate.get()),
        )
    };
    rows.extend(row.egress_rate.map(meter));
    // A range that is both closed and the VPC's counts as the VPC's.
    let own = |cidr: &&IpNet| !row.cidrs.contains(cidr) && !row.service_cidrs.contains(cidr);
    let closed = row.closed_cidrs.iter().filter(own).copied();
    let ranges = row.cidrs.iter().map(|cidr| (*cidr, 0));
    let addresses = row.service_addresses.iter().map(|address| IpNet::from(*address));
    let services = row.service_cidrs.iter().copied().chain(addresses);
    let ranges = ranges.chain(services.map(|cidr| (cidr, SUBNET_SERVICES)));
    let ranges = ranges.chain(closed.map(|cidr| (cidr, SUBNET_CLOSED)));
    rows.extend(ranges.map(|(cidr, flags)| (subnet(vni, cidr), range(flags))));
    rows
}

fn of_network(row: &Network) -> Vec<TableRow> {
    let (vni, network) = (row.vni.get(), row.id.get());
    let entry = SubnetEntry {
        network,
        flags: flag(row.bouncer_here, SUBNET_BOUNCER_HERE) | flag(row.private, SUBNET_PRIVATE),
        bouncers: members(&row.bouncers),
    };
    let ranges = row.cidrs.iter();
    let ranges = ranges.map(|cidr| (subnet(vni, *cidr), TableEntry::Subnet(entry)));
    ranges
        .chain(row.bouncer_here.then(|| load(vni, network)))
        .collect()
}

/// Returns the table rows of an endpoint. Its delivery needs an attachment, see `state`.
fn of_local(row: &LocalEndpoint) -> Vec<TableRow> {
    let Some(droplet) = row.moved_from else {
        return Vec::new();
    };
    endpoint_keys(row)
        .map(|key| (TableKey::Remote(RemoteRow::Forwarder, key), remote(droplet)))
        .collect()
}

fn of_node_service(row: &NodeService) -> Vec<TableRow> {
    let own = endpoint_key(row.vni, row.address);
    let key = TableKey::Subnet {
        vni: own.vni,
        address: own.address,
        prefix: 128,
    };
    vec![(key, range(SUBNET_BY_NODE))]
}

/// Returns the ranges of a front's clients, after what holds for all others.
fn clients_of(row: &Front) -> Vec<TableRow> {
    let Some(clients) = &row.clients else {
        return Vec::new();
    };
    let entry = |(client, prefix): (Address, u8), admits: u32| {
        let key = SourceKey {
            vni: row.vni.get().to_be_bytes(),
            front: mapped(row.address),
            client,
        };
        let prefix = SOURCE_FRONT_BITS + u32::from(prefix);
        (
            TableKey::Source { key, prefix },
            TableEntry::Source(SourceEntry { admits }),
        )
    };
    let mut rows = vec![entry((Ipv6Addr::UNSPECIFIED.octets(), 0), 0)];
    rows.extend(clients.iter().map(|range| entry(bits(*range), 1)));
    rows
}

fn remote(droplet: Underlay) -> TableEntry {
    TableEntry::Remote(droplet.octets())
}

/// Returns the members, followed by as many relays as there is room for.
fn members(of: &rows::Members) -> Members {
    let mut droplets = [[0; 4]; MAX_MEMBERS];
    for (slot, droplet) in droplets.iter_mut().zip(of.used.iter().chain(&of.relays)) {
        *slot = droplet.octets();
    }
    Members {
        count: of.used.len() as u32,
        droplets,
    }
}

fn load(vni: u32, network: u32) -> TableRow {
    (TableKey::Load(LoadKey { vni, network }), TableEntry::Load)
}

/// Returns the entry of a range that is no network's.
fn range(flags: u32) -> TableEntry {
    TableEntry::Subnet(SubnetEntry {
        network: 0,
        flags,
        bouncers: members(&rows::Members::default()),
    })
}

fn subnet(vni: u32, cidr: IpNet) -> TableKey {
    let (address, prefix) = bits(cidr);
    TableKey::Subnet { vni, address, prefix }
}

/// Returns a range's address as tables have it, and how many bits of it count.
fn bits(cidr: IpNet) -> (Address, u8) {
    let (address, prefix) = match cidr {
        IpNet::V4(cidr) => (cidr.network().to_ipv6_mapped(), 96 + cidr.prefix_len()),
        IpNet::V6(cidr) => (cidr.network(), cidr.prefix_len()),
    };
    (address.octets(), prefix)
}

#[cfg(test)]
mod tests {
    use thuban_rows::builders;

    use super::*;

    #[test]
    fn no_endpoint_has_the_mac_address_that_programs_answer_with() {
        assert_eq!(rows::GATEWAY_MAC.0, thuban_common::tables::GATEWAY_MAC);
    }

    #[test]
    fn relays_stand_behind_the_members_as_far_as_there_is_room() {
        let all: Vec<Underlay> = (1..=12).map(builders::underlay).collect();
        let many = rows::Members {
            used: all[..6].to_vec(),
            relays: all[6..].to_vec(),
        };
        let made = members(&many);
        assert_eq!(made.count, 6);
        let last: Vec<u8> = made.droplets.iter().map(|droplet| droplet[3]).collect();
        assert_eq!(last, [1, 2, 3, 4, 5, 6, 7, 8]);
    }

    #[test]
    fn each_flag_of_a_network_is_a_bit_of_all_its_ranges() {
        let entries = |bouncer_here, private| {
            let row = Network {
                bouncer_here,
                private,
                ..builders::network()
            };
            let entries = table_rows(&Row::Network(row)).into_iter();
            let flags = entries.filter_map(|(_, entry)| match entry {
                TableEntry::Subnet(subnet) => Some(subnet.flags),
                _ => None,
            });
            flags.collect::<Vec<_>>()
        };
        assert_eq!(entries(false, false), [0; 2]);
        assert_eq!(entries(true, false), [SUBNET_BOUNCER_HERE; 2]);
        assert_eq!(entries(false, true), [SUBNET_PRIVATE; 2]);
        assert_eq!(entries(true, true), [SUBNET_BOUNCER_HERE | SUBNET_PRIVATE; 2]);
    }

    #[test]
    fn clients_of_a_front_stand_beside_a_refusal_of_all() {
        let rows = |front: Front| {
            let rows = table_rows(&Row::Front(front)).into_iter();
            let rows = rows.map(|(key, entry)| match (key, entry) {
                (TableKey::Source { prefix, .. }, TableEntry::Source(entry)) => (prefix, entry.admits),
                other => panic!("{other:?}"),
            });
            rows.collect::<Vec<_>>()
        };
        let front = builders::front();
        let nobody = Some([].into());
        assert_eq!(rows(front.clone()), [(160, 0), (160 + 96 + 24, 1)]);
        assert_eq!(
            rows(Front {
                clients: nobody,
                ..front.clone()
            }),
            [(160, 0)]
        );
        assert_eq!(
            rows(Front {
                clients: None,
                ..front
            }),
            []
        );
    }

    #[test]
    fn an_address_that_moved_in_is_forwarded_from_its_old_droplet() {
        let keys: Vec<TableKey> = table_rows(&Row::Local(builders::local()))
            .into_iter()
            .map(|(key, _)| key)
            .collect();
        let of = |address: &str| endpoint_key(builders::VNI, address.parse::<std::net::IpAddr>().unwrap());
        assert_eq!(
            keys,
            [
                TableKey::Remote(RemoteRow::Forwarder, of("10.0.1.5")),
                TableKey::Remote(RemoteRow::Forwarder, of("fd00:1::5"))
            ]
        );
    }
}
