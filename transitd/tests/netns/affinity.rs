//! Clients of a service with session affinity keep their backends, by whatever way they come.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{Ipv4Addr, UdpSocket};
use std::time::Duration;

use thuban_proto::transit::row::Row;
use thuban_proto::transit::{
    DropletRow, ExposedPort, ExposedRow, LocalRow, ServiceBackend, ServicePort, ServiceRow,
};
use thuban_testkit::wait::uninterrupted;

use crate::policies::{FAR, OUTSIDE, SERVICE, backends, bytes};
use crate::rig::{NODE, Rig, base_rows, eventually, in_namespace, local};
use crate::tcp::{ANSWER_TIMEOUT, ask, connect, serve};

/// Pods of the nodes' VPC.
const OWN: [Ipv4Addr; 2] = [Ipv4Addr::new(10, 0, 1, 5), Ipv4Addr::new(10, 0, 1, 6)];
/// Pods of another VPC.
const TENANTS: [Ipv4Addr; 2] = [Ipv4Addr::new(10, 8, 1, 7), Ipv4Addr::new(10, 8, 1, 8)];
const CLIENTS: u8 = 16;
const LONG: u32 = 600;

/// Returns NodePort 30080 of the service, and its balancer's address.
fn exposed(vni: u32, port: ExposedPort) -> Row {
    Row::Exposed(ExposedRow {
        vni,
        address: bytes(SERVICE),
        ports: vec![ExposedPort {
            protocol: 6,
            port: 80,
            node_port: 30080,
            ..port
        }],
        addresses: vec![bytes(OUTSIDE)],
        ..ExposedRow::default()
    })
}

/// Returns a port that leads to these members, wherever they are.
fn everywhere(members: &[Ipv4Addr], affinity_seconds: u32) -> ExposedPort {
    ExposedPort {
        members: backends(members),
        affinity_seconds,
        ..ExposedPort::default()
    }
}

/// Returns a port that leads to these pods of the node.
fn here(by: &[Ipv4Addr]) -> ExposedPort {
    ExposedPort {
        local: true,
        backends: backends(by),
        affinity_seconds: LONG,
        ..ExposedPort::default()
    }
}

/// Returns a service that nodes serve, port 80, with these backends outside of the VPC.
fn served(backends: Vec<ServiceBackend>) -> Row {
    Row::NodeService(ServiceRow {
        vni: 7,
        address: bytes(SERVICE),
        ports: vec![ServicePort {
            protocol: 6,
            port: 80,
            backends,
            affinity_seconds: LONG,
            local: false,
        }],
        ..ServiceRow::default()
    })
}

/// Returns another service with affinity, which is of no use but to have the table written again.
fn another(last: u8) -> Row {
    let Row::Exposed(row) = exposed(7, everywhere(&OWN, LONG)) else {
        panic!("an exposed row")
    };
    let mut ports = row.ports;
    ports[0].node_port = 30100 + u32::from(last);
    Row::Exposed(ExposedRow {
        address: bytes(Ipv4Addr::new(10, 96, 1, last)),
        ports,
        addresses: vec![],
        ..row
    })
}

fn client(number: u8) -> Ipv4Addr {
    Ipv4Addr::new(198, 51, 100, number)
}

/// Returns a rig where nodes, p1 and p2 are in VPC 7; p3 and p4 are in VPC 8, which has a range of its own. Each pod
/// answers with its number. The clients are behind the other host.
fn rig() -> Rig {
    let mut rows = base_rows();
    for row in &mut rows {
        match row {
            Row::Vpc(vpc) => {
                vpc.service_cidrs.push("10.96.0.0/16".into());
                vpc.egress = true;
                vpc.host_access = vpc.vni == 7;
                if vpc.vni == 8 {
                    vpc.cidrs = vec!["10.8.0.0/16".into()];
                }
            }
            Row::Network(network) if network.vni == 8 => {
                network.network = 0x0a08_0100;
                network.cidrs = vec!["10.8.1.0/24".into()];
            }
            _ => {}
        }
    }
    let own = |row, change: &dyn Fn(LocalRow) -> LocalRow| {
        let Row::Local(row) = row else {
            panic!("a local row")
        };
        Row::Local(change(row))
    };
    let tenants = |uid, last: u8| {
        own(local(8, uid, last), &|row| LocalRow {
            address: bytes(Ipv4Addr::new(10, 8, 1, last)),
            network: 0x0a08_0100,
            gateway: "10.8.1.1".into(),
            ..row
        })
    };
    rows.push(own(local(7, "node/n", 9), &|row| LocalRow { host: true, ..row }));
    rows.extend([
        local(7, "p1", 5),
        local(7, "p2", 6),
        tenants("p3", 7),
        tenants("p4", 8),
    ]);
    let mut rig = Rig::new(rows);
    for number in 1..=4 {
        rig.add_pod(&format!("p{number}"));
        drop(serve(&pod(&rig, number), Ipv4Addr::UNSPECIFIED, 8080, number));
    }
    eventually("the node has its endpoint", || {
        rig.on_node("ip route show table 6082 2>/dev/null || true")
            .contains("10.96.0.0/16")
    });
    rig.on_far(&format!("ip route add {OUTSIDE}/32 via {}", Ipv4Addr::from(NODE)));
    for number in 1..=CLIENTS {
        rig.on_far(&format!("ip address add {}/32 dev lo", client(number)));
    }
    rig.on_node(&format!("ip route add default via {FAR}"));
    rig
}

fn pod(rig: &Rig, number: u8) -> String {
    format!("{}-p{number}", rig.name)
}

/// Returns who answers a client.
fn answers(rig: &Rig, number: u8) -> u8 {
    let node = Ipv4Addr::from(NODE);
    rig.on_far(&format!(
        "ip route replace {node}/32 dev far src {}",
        client(number)
    ));
    ask(&mut connect(rig.far(), node, 30080).unwrap())
}

/// Returns the backend of each client; all connections of a client must go to the same one.
fn homes(rig: &Rig) -> BTreeMap<u8, u8> {
    let home = |number| {
        let answers: BTreeSet<u8> = (0..4).map(|_| answers(rig, number)).collect();
        assert_eq!(answers.len(), 1, "client {number}: {answers:?}");
        (number, answers.into_iter().next().unwrap())
    };
    (1..=CLIENTS).map(home).collect()
}

fn all(homes: &BTreeMap<u8, u8>) -> Vec<u8> {
    let all: BTreeSet<u8> = homes.values().copied().collect();
    all.into_iter().collect()
}

#[test]
fn clients_keep_backends_by_ports_of_nodes() {
    let mut rig = rig();
    let members = |by: &[Ipv4Addr]| vec![exposed(7, everywhere(by, LONG))];
    rig.operator.push_and_wait(members(&OWN), vec![]);
    let known = homes(&rig);
    assert_eq!(all(&known), [1, 2]);

    // The table is written again because of another service, by another daemon, and after somebody took the rules.
    rig.operator.push_and_wait(vec![another(1)], vec![]);
    assert_eq!(homes(&rig), known, "another service came");
    rig.kill();
    rig.start();
    rig.operator.wait_for_ack();
    rig.operator.push_and_wait(vec![another(2)], vec![]);
    assert_eq!(homes(&rig), known, "another daemon");

    // A backend goes with what was known of it.
    rig.operator.push_and_wait(members(&OWN[..1]), vec![]);
    assert_eq!(all(&homes(&rig)), [1]);
    rig.operator.push_and_wait(members(&OWN), vec![]);
    assert_eq!(all(&homes(&rig)), [1], "they have the other one now");
    rig.operator.push_and_wait(members(&OWN[1..]), vec![]);
    rig.operator.push_and_wait(members(&OWN), vec![]);
    let spread = homes(&rig);
    assert_eq!(all(&spread), [1, 2], "nobody is known");

    // Once the time is over they get any backend.
    rig.operator
        .push_and_wait(vec![exposed(7, everywhere(&OWN, 1))], vec![]);
    homes(&rig);
    let mut seen = BTreeSet::new();
    for _ in 0..12 {
        std::thread::sleep(Duration::from_millis(2100));
        seen.insert(answers(&rig, 1));
        if seen.len() == OWN.len() {
            break;
        }
    }
    assert_eq!(seen.len(), 2);
}

#[test]
fn one_client_has_one_backend_by_each_way_in() {
    let rig = rig();
    rig.operator
        .push_and_wait(vec![exposed(7, everywhere(&OWN, LONG))], vec![]);
    let known = homes(&rig);
    rig.on_far(&format!(
        "ip route replace {OUTSIDE}/32 via {} src {}",
        Ipv4Addr::from(NODE),
        client(1)
    ));
    for _ in 0..4 {
        assert_eq!(ask(&mut connect(rig.far(), OUTSIDE, 80).unwrap()), known[&1]);
    }
    // Pods and the node itself are clients of their own, by the node's port and its balancer's address.
    for namespace in [rig.node().to_owned(), pod(&rig, 1), pod(&rig, 2)] {
        let ways = [(Ipv4Addr::from(NODE), 30080), (OUTSIDE, 80)];
        for (to, port) in ways {
            let answers: BTreeSet<u8> = (0..8)
                .map(|_| ask(&mut connect(&namespace, to, port).unwrap()))
                .collect();
            assert_eq!(answers.len(), 1, "{namespace} by {to}");
        }
    }
    // The same ones by another policy, and others where it has no such backend.
    rig.operator.push_and_wait(vec![exposed(7, here(&OWN))], vec![]);
    assert_eq!(homes(&rig), known);
    rig.operator
        .push_and_wait(vec![exposed(7, here(&OWN[..1]))], vec![]);
    assert_eq!(all(&homes(&rig)), [1]);
    // The rules are taken by somebody, and made again.
    rig.on_node("nft flush ruleset");
    eventually("the rules are back", || {
        connect(rig.far(), NODE.into(), 30080).is_ok()
    });
    rig.operator.push_and_wait(vec![exposed(7, here(&OWN))], vec![]);
    assert_eq!(homes(&rig).len(), usize::from(CLIENTS));
}

#[test]
fn clients_of_services_that_nodes_serve_keep_backends() {
    let rig = rig();
    let ports = [6443, 6444, 6445];
    for (own, port) in (1..).zip(ports) {
        drop(serve(rig.far(), FAR, port, own));
    }
    let each = ports.map(|port| ServiceBackend {
        address: bytes(FAR),
        port: port.into(),
    });
    rig.operator.push_and_wait(
        vec![served(each.to_vec()), exposed(7, everywhere(&[], LONG))],
        vec![],
    );
    let mut seen = BTreeSet::new();
    for _ in 0..8 {
        // All of these are clients that are not known yet.
        rig.operator
            .push_and_wait(vec![served(each[..1].to_vec())], vec![]);
        rig.operator.push_and_wait(vec![served(each.to_vec())], vec![]);
        rig.on_node("nft flush ruleset");
        eventually("the rules are back", || {
            connect(&pod(&rig, 1), SERVICE, 80).is_ok()
        });
        for namespace in [pod(&rig, 1), pod(&rig, 2), rig.node().to_owned()] {
            let answers: BTreeSet<u8> = (0..6)
                .map(|_| ask(&mut connect(&namespace, SERVICE, 80).unwrap()))
                .collect();
            assert_eq!(answers.len(), 1, "{namespace}");
            seen.extend(answers);
        }
    }
    assert_eq!(seen.len(), ports.len());
    assert!(all(&homes(&rig)).len() > 1, "by the node's port, too");
}

#[test]
fn clients_of_tenants_ports_keep_nodes_and_backends() {
    let rig = rig();
    rig.operator
        .push_and_wait(vec![exposed(8, here(&TENANTS))], vec![]);
    let known = homes(&rig);
    assert_eq!(all(&known), [3, 4]);
    // Another droplet has backends, too.
    drop(serve(rig.far(), FAR, 30080, 9));
    let droplet = Row::Droplet(DropletRow {
        address6: Vec::new(),
        address: FAR.octets().to_vec(),
    });
    let shared = |by: &[Ipv4Addr]| {
        let peers = vec![bytes(FAR), bytes(NODE.into())];
        exposed(8, ExposedPort { peers, ..here(by) })
    };
    rig.operator
        .push_and_wait(vec![droplet, shared(&TENANTS)], vec![]);
    let homes_now = homes(&rig);
    assert_eq!(all(&homes_now), [3, 4, 9]);
    for (client, home) in &homes_now {
        assert!(
            *home == 9 || *home == known[client],
            "of this node's backends it has its own"
        );
    }
    rig.operator.push_and_wait(vec![another(1)], vec![]);
    assert_eq!(homes(&rig), homes_now, "the table was written again");
    // Without backends here all are the other droplet's.
    rig.operator.push_and_wait(vec![shared(&[])], vec![]);
    assert_eq!(all(&homes(&rig)), [9]);
}

#[test]
fn a_flow_of_udp_follows_when_its_backend_goes() {
    let rig = rig();
    for number in [1, 2] {
        let pod = pod(&rig, number);
        let server = in_namespace(&pod, || UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 8080)).unwrap());
        std::thread::spawn(move || {
            while let Ok((_, client)) = uninterrupted(|| server.recv_from(&mut [0])) {
                let _ = server.send_to(&[number], client);
            }
        });
    }
    let port = |members: &[Ipv4Addr]| {
        let Row::Exposed(mut row) = exposed(7, everywhere(members, LONG)) else {
            panic!("an exposed row")
        };
        row.ports[0].protocol = 17;
        vec![Row::Exposed(row)]
    };
    rig.operator.push_and_wait(port(&OWN), vec![]);
    let client = in_namespace(rig.far(), || UdpSocket::bind((FAR, 4000)).unwrap());
    client.connect((Ipv4Addr::from(NODE), 30080)).unwrap();
    client.set_read_timeout(Some(ANSWER_TIMEOUT)).unwrap();
    let answer = || {
        let mut answer = [0];
        client.send(&[1]).unwrap();
        uninterrupted(|| client.recv(&mut answer))
            .map(|_| answer[0])
            .unwrap()
    };
    let first = answer();
    let (gone, stays) = if first == 1 { (0, 1) } else { (1, 0) };
    rig.operator.push_and_wait(vec![another(1)], vec![]);
    assert_eq!(answer(), first, "another service came");
    rig.operator.push_and_wait(port(&OWN[stays..=stays]), vec![]);
    assert_eq!(answer(), 3 - first, "its backend has gone");
    rig.operator.push_and_wait(port(&OWN[gone..=gone]), vec![]);
    assert_eq!(answer(), first, "and the other one");
}
