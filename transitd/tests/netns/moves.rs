//! An endpoint moves from node to node. Its old droplet forwards, its new one accepts the forwarded packets, and both
//! stop when the rows go. The endpoint has the MAC that the operator says, whatever it is.

use std::net::IpAddr;

use thuban_proto::transit::{
    AddressKey, BouncerRow, DropletRow, ForwardRow, NackReason, NetworkRow, RowKey, droplet_message::Message,
    row::Row, row_key::Key,
};

use crate::rig::{NODE, Rig, dual, dual_rows, eventually, local, mapped};
use crate::wire::Peer;

const OLD: [u8; 4] = [192, 0, 2, 2];
const THIRD: [u8; 4] = [192, 0, 2, 3];

/// Returns the rows of other droplets; 10.0.1.99 and its IPv6 address live on the third one.
fn rows() -> Vec<Row> {
    let mut rows = dual_rows();
    for droplet in [OLD, THIRD] {
        rows.push(Row::Droplet(DropletRow {
            address: droplet.to_vec(),
            ..DropletRow::default()
        }));
    }
    rows.push(Row::Bouncer(BouncerRow {
        vni: 7,
        address: mapped(99),
        droplet: THIRD.to_vec(),
        address6: address("fd00:1::99"),
    }));
    rows
}

fn address(text: &str) -> Vec<u8> {
    match text.parse::<IpAddr>().unwrap() {
        IpAddr::V4(address) => address.to_ipv6_mapped().octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}

fn moved(from: &[u8]) -> Row {
    let Row::Local(mut row) = dual(7, "p", 5) else {
        unreachable!()
    };
    row.moved_from = from.to_vec();
    Row::Local(row)
}

/// Returns how many packets that the old droplet forwards for both addresses of the endpoint are delivered, and how
/// many are refused.
fn forwarded(rig: &Rig, old: &Peer) -> [u64; 2] {
    let count = || [rig.counter("delivered"), rig.counter("source_mismatch")];
    let before = count();
    for [from, to] in [["10.0.1.99", "10.0.1.5"], ["fd00:1::99", "fd00:1::5"]] {
        old.send(7, from.parse().unwrap(), to.parse().unwrap());
    }
    eventually("both packets are judged", || {
        count().iter().sum::<u64>() >= before.iter().sum::<u64>() + 2
    });
    let after = count();
    [after[0] - before[0], after[1] - before[1]]
}

#[test]
fn new_droplet_accepts_both_forwarded_addresses_during_move() {
    let mut rig = Rig::new(rows());
    rig.operator.push_and_wait(vec![dual(7, "p", 5)], vec![]);
    rig.add_pod("p");
    let old = Peer::new(&rig, 2);
    assert_eq!(forwarded(&rig, &old), [0, 2], "a droplet that is nobody's");
    rig.operator.push_and_wait(vec![moved(&OLD)], vec![]);
    assert_eq!(rig.rows("FORWARDERS").len(), 2);
    assert_eq!(rig.rows("FORWARDERS")[0]["entry"]["droplet"], "192.0.2.2");
    assert_eq!(forwarded(&rig, &old), [2, 0]);
    rig.operator.push_and_wait(vec![moved(&THIRD)], vec![]);
    assert_eq!(forwarded(&rig, &old), [0, 2], "another one had it before");
    rig.operator.push_and_wait(vec![moved(&OLD)], vec![]);
    rig.operator.push_and_wait(vec![dual(7, "p", 5)], vec![]);
    assert!(rig.rows("FORWARDERS").is_empty());
    assert_eq!(forwarded(&rig, &old), [0, 2], "the move is over");
}

#[test]
fn forwarders_outlive_transitd_until_a_snapshot_lacks_them() {
    let mut rig = Rig::new(rows());
    rig.operator.push_and_wait(vec![moved(&OLD)], vec![]);
    rig.add_pod("p");
    let old = Peer::new(&rig, 2);
    rig.kill();
    assert_eq!(forwarded(&rig, &old), [2, 0], "without a daemon");
    rig.start();
    rig.operator.wait_for_ack();
    assert_eq!(forwarded(&rig, &old), [2, 0], "adopted");
    rig.kill();
    rig.operator
        .shared
        .lock()
        .unwrap()
        .rows
        .retain(|row| *row != moved(&OLD));
    rig.operator.shared.lock().unwrap().rows.push(dual(7, "p", 5));
    rig.start();
    rig.operator.wait_for_ack();
    assert!(rig.rows("FORWARDERS").is_empty());
    assert_eq!(forwarded(&rig, &old), [0, 2]);
    // The endpoint goes while it is moving.
    rig.operator.push_and_wait(vec![moved(&OLD)], vec![]);
    let key = Key::Local(AddressKey {
        vni: 7,
        address: mapped(5),
    });
    rig.operator
        .push_and_wait(vec![], vec![RowKey { key: Some(key) }]);
    assert!(rig.rows("FORWARDERS").is_empty());
}

#[test]
fn old_droplet_forwards_both_addresses_at_endpoint_removal() {
    let mut rig = Rig::new(rows());
    rig.operator.push_and_wait(vec![dual(7, "p", 5)], vec![]);
    rig.add_pod("p");
    // A packet for the endpoint must go on to its new droplet, even when the packet comes from the droplet where its
    // sender lives.
    let (third, new) = (Peer::new(&rig, 3), Peer::new(&rig, 2));
    let ask = |[from, to]: [&str; 2]| {
        third.send(7, from.parse().unwrap(), to.parse().unwrap());
        new.received().map(|address| address.to_string())
    };
    let both = [["10.0.1.99", "10.0.1.5"], ["fd00:1::99", "fd00:1::5"]];
    assert_eq!(both.map(ask), [None, None], "delivered here");
    let keys = [mapped(5), address("fd00:1::5")].map(|address| AddressKey { vni: 7, address });
    let forward = keys.clone().map(|key| {
        Row::Forward(ForwardRow {
            vni: 7,
            address: key.address,
            droplet: OLD.to_vec(),
        })
    });
    let gone = RowKey {
        key: Some(Key::Local(keys[0].clone())),
    };
    rig.operator.push_and_wait(forward.to_vec(), vec![gone]);
    assert_eq!(rig.rows("FORWARD_ROWS").len(), 2);
    assert_eq!(both.map(ask), [Some("10.0.1.5".into()), Some("fd00:1::5".into())]);
    let deletes = keys.map(|key| RowKey {
        key: Some(Key::Forward(key)),
    });
    rig.operator.push_and_wait(vec![], deletes.to_vec());
    assert!(rig.rows("FORWARD_ROWS").is_empty());
    assert_eq!(both.map(ask), [None, None]);
}

#[test]
fn role_traffic_is_accepted_before_and_after_publication() {
    let mut rig = Rig::new(rows());
    rig.operator.push_and_wait(vec![local(7, "p", 5)], vec![]);
    rig.add_pod("p");
    let other = Peer::new(&rig, 2);
    // The packet is of the third droplet's endpoint and comes through the second droplet.
    let is_taken = || {
        let count = || [rig.counter("delivered"), rig.counter("source_mismatch")];
        let before = count();
        other.send(7, "10.0.1.99".parse().unwrap(), "10.0.1.5".parse().unwrap());
        eventually("it is judged", || count() != before);
        count()[0] > before[0]
    };
    let network = |bouncers: &[[u8; 4]], relays: &[[u8; 4]]| {
        let droplets = |list: &[[u8; 4]]| list.iter().map(|droplet| droplet.to_vec()).collect();
        Row::Network(NetworkRow {
            vni: 7,
            network: 0x0a00_0100,
            cidrs: vec!["10.0.1.0/24".into()],
            bouncers: droplets(bouncers),
            relays: droplets(relays),
            ..NetworkRow::default()
        })
    };
    assert!(!is_taken(), "it is no bouncer");
    for (bouncers, relays, taken) in [
        (&[NODE][..], &[OLD][..], true),
        (&[OLD], &[NODE], true),
        (&[NODE], &[OLD, THIRD], true),
        (&[NODE], &[THIRD], false),
        (&[NODE, THIRD], &[], false),
    ] {
        rig.operator
            .push_and_wait(vec![network(bouncers, relays)], vec![]);
        assert_eq!(is_taken(), taken, "{bouncers:?} {relays:?}");
    }
}

#[test]
fn pod_has_operators_mac_and_delivered_frames_carry_it() {
    let with_mac = |uid: &str, last, mac: [u8; 6]| {
        let Row::Local(mut row) = local(7, uid, last) else {
            unreachable!()
        };
        row.mac = mac.to_vec();
        Row::Local(row)
    };
    let mut rig = Rig::new(rows());
    // One MAC that a vendor gave out, and one that is locally administered; each may also be another endpoint's
    // elsewhere.
    let macs = [
        [0xac, 0xde, 0x48, 0x00, 0x11, 0x22],
        [0xfe, 0xff, 0xff, 0xff, 0xff, 0xff],
    ];
    rig.operator
        .push_and_wait(vec![with_mac("p", 5, macs[0]), with_mac("q", 6, macs[1])], vec![]);
    assert_eq!(rig.add_pod("p").pod_mac, "ac:de:48:00:11:22");
    rig.add_pod("q");
    let link = rig.in_pod_text("p", "ip -o link show eth0");
    assert!(link.contains("ac:de:48:00:11:22"), "{link}");
    // The kernel drops frames that are not for its MAC.
    assert!(rig.ping("p", "10.0.1.6") && rig.ping("q", "10.0.1.5"));
    assert!(rig.ping_from_node("10.0.1.5"));
    let third = Peer::new(&rig, 3);
    let before = rig.in_pod_text("p", "cat /proc/net/snmp | grep Udp:");
    third.send(7, "10.0.1.99".parse().unwrap(), "10.0.1.5".parse().unwrap());
    eventually("the pod's stack takes the datagram", || {
        rig.in_pod_text("p", "cat /proc/net/snmp | grep Udp:") != before
    });
    for bad in [[1, 0, 0, 0, 0, 1], [0; 6], [2, 0x54, 0x68, 0x75, 0x62, 0x61]] {
        rig.operator.forget_received();
        rig.operator.push_and_wait(vec![with_mac("r", 7, bad)], vec![]);
        let nack = rig
            .operator
            .wait_for("the nack", |m| matches!(m, Message::Nack(_)));
        let Message::Nack(nack) = nack else { unreachable!() };
        assert_eq!(nack.reason(), NackReason::Invalid);
        assert!(nack.message.starts_with("local.mac: "), "{}", nack.message);
    }
}
