//! Rows that most rigs begin with.

use std::net::{Ipv4Addr, Ipv6Addr};

use thuban_proto::transit::{DropletRow, LocalRow, NetworkRow, PolicySetRow, VpcRow, row::Row};

use crate::rig::NODE;

/// Returns VPCs 7 and 8, each 10.0.0.0/16, network 10.0.1.0/24; this droplet has every role.
pub fn base_rows() -> Vec<Row> {
    let mut rows = vec![Row::Droplet(DropletRow {
        address: NODE.to_vec(),
        ..DropletRow::default()
    })];
    for vni in [7, 8] {
        rows.push(Row::Vpc(VpcRow {
            vni,
            cidrs: vec!["10.0.0.0/16".into()],
            dividers: vec![NODE.to_vec()],
            divider_here: true,
            host_access: false,
            ..VpcRow::default()
        }));
        rows.push(Row::Network(NetworkRow {
            vni,
            network: 0x0a00_0100,
            cidrs: vec!["10.0.1.0/24".into()],
            bouncers: vec![NODE.to_vec()],
            bouncer_here: true,
            ..NetworkRow::default()
        }));
    }
    rows
}

pub fn mapped(last: u8) -> Vec<u8> {
    Ipv4Addr::new(10, 0, 1, last).to_ipv6_mapped().octets().to_vec()
}

/// Returns the pod `uid` at 10.0.1.`last`.
pub fn local(vni: u32, uid: &str, last: u8) -> Row {
    Row::Local(LocalRow {
        vni,
        address: mapped(last),
        network: 0x0a00_0100,
        prefix_length: 24,
        gateway: "10.0.1.1".into(),
        mac: vec![2, vni as u8, 10, 0, 1, last],
        pod_uid: uid.into(),
        pod_namespace: "ns".into(),
        pod_name: uid.into(),
        vpc_name: format!("vpc-{vni}"),
        network_name: "net".into(),
        ready: true,
        ..LocalRow::default()
    })
}

/// Returns a pod's row with a class and sets of network policy, for ingress and egress; 0: none.
pub fn judged(row: Row, class: u32, [ingress_set, egress_set]: [u32; 2]) -> Row {
    let Row::Local(row) = row else {
        panic!("a local row")
    };
    Row::Local(LocalRow {
        class,
        ingress_set,
        egress_set,
        ..row
    })
}

/// Returns a set of VPC 7 that accepts nothing.
pub fn deny_all(id: u32, egress: bool) -> Row {
    Row::PolicySet(PolicySetRow {
        vni: 7,
        id,
        egress,
        isolated: true,
        rules: Vec::new(),
    })
}

/// Returns the rows of [`base_rows`], and fd00:1::/48 for the VPCs and fd00:1::/64 for the networks.
pub fn dual_rows() -> Vec<Row> {
    let mut rows = base_rows();
    for row in &mut rows {
        match row {
            Row::Vpc(vpc) => vpc.cidrs6.push("fd00:1::/48".into()),
            Row::Network(network) => network.cidrs6.push("fd00:1::/64".into()),
            _ => {}
        }
    }
    rows
}

/// Returns the pod of [`local`], with fd00:1::`last` (in decimal) as its second address.
pub fn dual(vni: u32, uid: &str, last: u8) -> Row {
    let Row::Local(mut row) = local(vni, uid, last) else {
        unreachable!()
    };
    let address: Ipv6Addr = format!("fd00:1::{last}").parse().unwrap();
    row.address6 = address.octets().to_vec();
    row.prefix_length6 = 64;
    Row::Local(row)
}
