//! Rows of all kinds, and what they make of the tables in whatever order they come.

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
