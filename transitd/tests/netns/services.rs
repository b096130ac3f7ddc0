//! Services of a whole transitd: sockets of pods reach the rows of the contract, also over a restart.

use std::io::ErrorKind;
use std::net::{Ipv4Addr, TcpStream};

use aya::maps::{HashMap, Map, MapData};
use nix::sys::sysinfo::sysinfo;
use thuban_common::services::{ConnectionEntry, ConnectionKey};
use thuban_proto::transit::droplet_message::Message;
use thuban_proto::transit::row::Row;
use thuban_proto::transit::{
    AddressKey, ForwardRow, NackReason, RowKey, ServiceBackend, ServicePort, ServiceRow, row_key,
};
use transitd::dataplane::connections::entries_for;

use crate::pressure::shrunk;
use crate::rig::{Rig, base_rows, eventually, local};
use crate::rows::mapped;
use crate::tcp::{self, ask};

const SERVICE: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 10);

/// Returns VPC 7's service, port 80, with pods at 10.0.1.`last`, port 8080, as its backends.
fn service(backends: &[u8]) -> Row {
    let backend = |last: &u8| ServiceBackend {
        address: mapped(*last),
        port: 8080,
    };
    Row::Service(ServiceRow {
        vni: 7,
        address: SERVICE.to_ipv6_mapped().octets().to_vec(),
        ports: vec![ServicePort {
            protocol: 6,
            port: 80,
            backends: backends.iter().map(backend).collect(),
            affinity_seconds: 0,
            local: false,
        }],
        ..ServiceRow::default()
    })
}

fn key() -> RowKey {
    RowKey {
        key: Some(row_key::Key::Service(AddressKey {
            vni: 7,
            address: SERVICE.to_ipv6_mapped().octets().to_vec(),
        })),
    }
}

fn rig() -> Rig {
    let mut rig = prepare();
    start(&mut rig);
    rig
}

fn prepare() -> Rig {
    let mut rows = base_rows();
    for row in &mut rows {
        if let Row::Vpc(vpc) = row {
            vpc.service_cidrs.push("10.96.0.0/16".into());
        }
    }
    rows.extend([local(7, "p1", 5), local(7, "p2", 6), local(7, "p3", 7)]);
    Rig::prepare(rows)
}

fn start(rig: &mut Rig) {
    rig.start();
    rig.operator.wait_for_ack();
    for pod in ["p1", "p2", "p3"] {
        rig.add_pod(pod);
    }
}

/// Runs a server in a pod that answers each byte with its own byte.
fn answer_with(rig: &Rig, pod: &str, own: u8) {
    drop(tcp::serve(
        &format!("{}-{pod}", rig.name),
        Ipv4Addr::UNSPECIFIED,
        8080,
        own,
    ));
}

fn connect(rig: &Rig, pod: &str) -> Result<TcpStream, ErrorKind> {
    tcp::connect(&format!("{}-{pod}", rig.name), SERVICE, 80)
}

#[test]
fn a_service_serves_changes_and_goes_and_its_connections_stay() {
    let mut rig = rig();
    answer_with(&rig, "p2", 2);
    answer_with(&rig, "p3", 3);
    rig.operator.push_and_wait(vec![service(&[])], vec![]);
    assert_eq!(connect(&rig, "p1").unwrap_err(), ErrorKind::ConnectionRefused);
    rig.operator.push_and_wait(vec![service(&[6])], vec![]);
    let mut first = connect(&rig, "p1").unwrap();
    assert_eq!(ask(&mut first), 2);
    rig.operator.push_and_wait(vec![service(&[7])], vec![]);
    let mut second = connect(&rig, "p1").unwrap();
    assert_eq!((ask(&mut second), ask(&mut first)), (3, 2));
    // The pod reaches itself as a backend, too.
    let mut own = connect(&rig, "p3").unwrap();
    assert_eq!(ask(&mut own), 3);

    rig.kill();
    assert_eq!((ask(&mut second), ask(&mut first)), (3, 2), "without a daemon");
    rig.start();
    rig.operator.wait_for_ack();
    assert_eq!((ask(&mut second), ask(&mut first)), (3, 2));
    assert_eq!(ask(&mut connect(&rig, "p1").unwrap()), 3);

    rig.operator.push_and_wait(vec![], vec![key()]);
    assert_eq!(
        (ask(&mut second), ask(&mut first)),
        (3, 2),
        "the service is gone, its connections are not"
    );
    assert!(connect(&rig, "p1").is_err());
    assert!(rig.counter("service_connections") >= 4 && rig.counter("service_refused") >= 1);
}

#[test]
fn a_service_that_the_new_snapshot_lacks_goes() {
    let mut rig = rig();
    answer_with(&rig, "p2", 2);
    rig.operator.push_and_wait(vec![service(&[6])], vec![]);
    assert_eq!(ask(&mut connect(&rig, "p1").unwrap()), 2);
    rig.kill();
    let is_service = |row: &Row| matches!(row, Row::Service(_));
    rig.operator
        .shared
        .lock()
        .unwrap()
        .rows
        .retain(|row| !is_service(row));
    rig.start();
    rig.operator.wait_for_ack();
    assert!(connect(&rig, "p1").is_err());
}

/// Returns a service like [`service`], at another address, for each of these ports, with this many backends that do not
/// exist.
fn large(last: u8, ports: std::ops::Range<u32>, backends: u32) -> Row {
    let Row::Service(mut row) = service(&[]) else {
        unreachable!()
    };
    row.address = Ipv4Addr::new(10, 96, 0, last).to_ipv6_mapped().octets().to_vec();
    let backend = |number| ServiceBackend {
        address: Ipv4Addr::from_bits(0x0a01_0000 + number)
            .to_ipv6_mapped()
            .octets()
            .to_vec(),
        port: 8080,
    };
    let port = |port| ServicePort {
        protocol: 6,
        port,
        backends: (0..backends).map(backend).collect(),
        affinity_seconds: 0,
        local: false,
    };
    row.ports = ports.map(port).collect();
    Row::Service(row)
}

fn key_of(row: &Row) -> RowKey {
    let Row::Service(row) = row else { unreachable!() };
    RowKey {
        key: Some(row_key::Key::Service(AddressKey {
            vni: row.vni,
            address: row.address.clone(),
        })),
    }
}

#[test]
fn service_without_room_keeps_old_rows_and_applies_later() {
    let mut rig = prepare();
    rig.programs = shrunk(&rig, "SLOTS", 16);
    rig.flags = ["--metrics-port", "6084"].map(str::to_owned).to_vec();
    start(&mut rig);
    answer_with(&rig, "p2", 2);
    answer_with(&rig, "p3", 3);
    let other = large(11, 80..81, 5);
    rig.operator
        .push_and_wait(vec![service(&[6]), other.clone()], vec![]);
    assert_eq!(ask(&mut connect(&rig, "p1").unwrap()), 2);
    let Row::Service(mut more) = service(&[7]) else {
        unreachable!()
    };
    // Five backends are 4 rows: with the other's 4 and its own row, more than half of the table.
    more.ports.push(ServicePort {
        port: 81,
        ..match large(12, 81..82, 5) {
            Row::Service(row) => row.ports[0].clone(),
            _ => unreachable!(),
        }
    });
    let sequence = rig.operator.push(vec![Row::Service(more)], vec![]);
    rig.operator.wait_for_ack_of(sequence);
    let is_refusal = |m: &Message| matches!(m, Message::Nack(nack) if nack.sequence == sequence && nack.reason() == NackReason::TableFull && nack.key == Some(key()));
    rig.operator.wait_for("a nack", is_refusal);
    assert_eq!(ask(&mut connect(&rig, "p1").unwrap()), 2, "as it was");
    let metrics = rig.metrics();
    // This table follows the node's memory.
    let connections = entries_for(sysinfo().unwrap().ram_total());
    for (series, value) in [
        (r#"rows{table="SERVICES"}"#, 4),
        (r#"rows{table="SLOTS"}"#, 5),
        (r#"rows{table="BACKENDS"}"#, 6),
        (r#"rows_capacity{table="SLOTS"}"#, 16),
        (r#"rows_capacity{table="CONNECTIONS"}"#, connections.into()),
    ] {
        assert_eq!(metrics.get(series), Some(&value), "{series}");
    }
    eventually("counted", || rig.metrics()[r#"rows{table="CONNECTIONS"}"#] == 4);
    rig.operator.hang_up();
    eventually("a snapshot", || rig.operator.hellos().len() > 1);
    eventually("refused again", || {
        rig.operator.count(|m| matches!(m, Message::Nack(_))) > 1
    });
    assert_eq!(
        ask(&mut connect(&rig, "p1").unwrap()),
        2,
        "a snapshot changes nothing of it"
    );
    rig.operator.forget_received();
    rig.operator.push_and_wait(vec![], vec![key_of(&other)]);
    assert_eq!(ask(&mut connect(&rig, "p1").unwrap()), 3, "nobody sent it again");
}

#[test]
fn large_services_delay_no_row_and_are_acked_when_written() {
    let mut rig = rig();
    let netns = rig.pod_namespace("p4");
    let begun = std::time::Instant::now();
    let first = rig.operator.push(vec![large(11, 80..84, 16384)], vec![]);
    let mut last = rig.operator.push(vec![local(7, "p4", 8)], vec![]);
    rig.add("p4", "p4", &netns).unwrap();
    println!("an ADD with a large service under way: {:?}", begun.elapsed());
    let is_acked = |sequence: u64| {
        let is_later = |m: &Message| matches!(m, Message::Ack(ack) if ack.sequence >= sequence);
        rig.operator.count(is_later) > 0
    };
    assert!(!is_acked(first), "the ADD waited for it");
    rig.operator.wait_for_ack_of(last);
    println!("it took {:?}", begun.elapsed());

    // Rows that change faster than they are written have their last state in the end.
    answer_with(&rig, "p2", 2);
    answer_with(&rig, "p3", 3);
    let before = rig.operator.count(|m| matches!(m, Message::Ack(_)));
    for _ in 0..20 {
        rig.operator.push(vec![large(11, 80..81, 16384)], vec![]);
        rig.operator.push(vec![large(11, 80..81, 16383)], vec![]);
        last = rig.operator.push(vec![service(&[7])], vec![]);
    }
    rig.operator.wait_for_ack_of(last);
    assert_eq!(ask(&mut connect(&rig, "p1").unwrap()), 3);
    let acks = rig.operator.count(|m| matches!(m, Message::Ack(_))) - before;
    println!("60 changes were written in {acks} goes, {:?}", begun.elapsed());
    assert!(acks < 20, "{acks}");
}

/// Returns the number of entries of CONNECTIONS that name 10.0.1.`last`.
fn remembered(rig: &Rig, last: u8) -> usize {
    let path = rig.pins().join("maps/CONNECTIONS");
    let map = Map::HashMap(MapData::from_pin(path).unwrap());
    let flows: HashMap<_, ConnectionKey, ConnectionEntry> = HashMap::try_from(map).unwrap();
    let names = |key: &ConnectionKey| {
        [key.source, key.destination]
            .iter()
            .any(|a| a[..] == mapped(last))
    };
    flows.keys().filter(|key| names(key.as_ref().unwrap())).count()
}

fn local_key(last: u8) -> RowKey {
    RowKey {
        key: Some(row_key::Key::Local(AddressKey {
            vni: 7,
            address: mapped(last),
        })),
    }
}

#[test]
fn connections_to_a_backend_that_moves_stay() {
    let rig = rig();
    answer_with(&rig, "p2", 2);
    rig.operator.push_and_wait(vec![service(&[6])], vec![]);
    assert_eq!(ask(&mut connect(&rig, "p1").unwrap()), 2);
    let forward = Row::Forward(ForwardRow {
        vni: 7,
        address: mapped(6),
        droplet: vec![192, 0, 2, 2],
    });
    rig.operator.push_and_wait(vec![forward], vec![local_key(6)]);
    assert_eq!(remembered(&rig, 5), 2);
}

#[test]
fn an_endpoint_that_left_is_forgotten_when_that_is_acked() {
    let rig = rig();
    answer_with(&rig, "p2", 2);
    rig.operator.push_and_wait(vec![service(&[6])], vec![]);
    for pod in ["p1", "p3"] {
        assert_eq!(ask(&mut connect(&rig, pod).unwrap()), 2);
    }
    assert_eq!([5, 6, 7].map(|last| remembered(&rig, last)), [2, 2, 2]);
    assert_eq!(rig.del("p1"), None);
    rig.operator.push_and_wait(vec![], vec![local_key(5)]);
    assert_eq!(
        [5, 6, 7].map(|last| remembered(&rig, last)),
        [0, 1, 2],
        "the client"
    );
    assert_eq!(rig.del("p2"), None);
    rig.operator.push_and_wait(vec![], vec![local_key(6)]);
    assert_eq!(
        [5, 6, 7].map(|last| remembered(&rig, last)),
        [0, 0, 0],
        "the backend"
    );
}
