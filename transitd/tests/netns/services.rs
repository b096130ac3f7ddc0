//! Services of a whole transitd: rows of the contract become what sockets of pods reach, also over a restart.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::time::Duration;

use thuban_proto::transit::row::Row;
use thuban_proto::transit::{AddressKey, RowKey, ServiceBackend, ServicePort, ServiceRow, row_key};

use crate::rig::{Rig, base_rows, in_namespace, local};
use crate::rows::mapped;

const SERVICE: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 10);
const PATIENCE: Duration = Duration::from_secs(2);

/// VPC 7's service, port 80, by pods at 10.0.1.`last`, port 8080.
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
        }],
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
    let mut rows = base_rows();
    for row in &mut rows {
        if let Row::Vpc(vpc) = row {
            vpc.service_cidrs.push("10.96.0.0/16".into());
        }
    }
    rows.extend([local(7, "p1", 5), local(7, "p2", 6), local(7, "p3", 7)]);
    let mut rig = Rig::new(rows);
    for pod in ["p1", "p2", "p3"] {
        rig.add_pod(pod);
    }
    rig
}

/// A server in a pod that answers each byte with its own.
fn answer_with(rig: &Rig, pod: &str, own: u8) {
    let listener = in_namespace(&format!("{}-{pod}", rig.name), || {
        TcpListener::bind((Ipv4Addr::UNSPECIFIED, 8080)).unwrap()
    });
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            std::thread::spawn(move || {
                while stream.read_exact(&mut [0]).is_ok() && stream.write_all(&[own]).is_ok() {}
            });
        }
    });
}

fn connect(rig: &Rig, pod: &str) -> Result<TcpStream, ErrorKind> {
    let connected = in_namespace(&format!("{}-{pod}", rig.name), || {
        TcpStream::connect_timeout(&(SERVICE, 80).into(), PATIENCE)
    });
    let stream = connected.map_err(|error| error.kind())?;
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    Ok(stream)
}

fn ask(stream: &mut TcpStream) -> u8 {
    let mut answer = [0];
    stream.write_all(&[1]).unwrap();
    stream.read_exact(&mut answer).unwrap();
    answer[0]
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
    // Its own backend, too.
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
