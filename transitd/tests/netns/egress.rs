//! The way out of a VPC by its node's stack: in the node's name, to the addresses that the node serves, and nowhere
//! else.

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, TcpListener, UdpSocket};
use std::time::Duration;

use thuban_proto::transit::row::Row;
use thuban_proto::transit::{
    AddressKey, LocalRow, NetworkRow, RowKey, ServiceBackend, ServicePort, ServiceRow, row_key,
};
use thuban_testkit::wait::{uninterrupted, wait_for};

use crate::rig::{NODE, Rig, base_rows, in_namespace, local};
use crate::rows::mapped;
use crate::tcp::{ANSWER_TIMEOUT, ask, connect, serve};

/// An address at the other end of the uplink, in no range of any VPC.
const OUTSIDE: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 9);
/// The other end of the uplink itself.
const FAR: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 2);
/// An address in another network of VPC 7.
const BESIDE: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 8);
/// An address that nodes serve.
const SERVICE: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 1);

/// Returns a rig where VPC 7 may go out and 8 may not; p1 is of 7, p2 of 8.
fn rig() -> Rig {
    let mut rows = base_rows();
    for row in &mut rows {
        if let Row::Vpc(vpc) = row {
            vpc.service_cidrs.push("10.96.0.0/16".into());
            vpc.egress = vpc.vni == 7;
            vpc.closed_cidrs.push("192.0.2.0/24".into());
        }
    }
    rows.extend([local(7, "p1", 5), local(8, "p2", 6)]);
    let mut rig = Rig::new(rows);
    rig.on_far(&format!("ip address add {OUTSIDE}/32 dev lo"));
    rig.on_node(&format!("ip route add default via {FAR}"));
    for pod in ["p1", "p2"] {
        rig.add_pod(pod);
    }
    rig
}

fn pod(rig: &Rig, name: &str) -> String {
    format!("{}-{name}", rig.name)
}

/// Returns the row that nodes serve for a VPC on port 443, with these addresses outside as backends.
fn served(vni: u32, backends: &[(Ipv4Addr, u32)]) -> Row {
    let backends = backends.iter().map(|(address, port)| ServiceBackend {
        address: address.to_ipv6_mapped().octets().to_vec(),
        port: *port,
    });
    Row::NodeService(ServiceRow {
        vni,
        address: SERVICE.to_ipv6_mapped().octets().to_vec(),
        ports: vec![ServicePort {
            protocol: 6,
            port: 443,
            backends: backends.collect(),
            affinity_seconds: 0,
            local: false,
        }],
        ..ServiceRow::default()
    })
}

fn served_key(vni: u32) -> RowKey {
    RowKey {
        key: Some(row_key::Key::NodeService(AddressKey {
            vni,
            address: SERVICE.to_ipv6_mapped().octets().to_vec(),
        })),
    }
}

fn local_key(vni: u32, last: u8) -> RowKey {
    RowKey {
        key: Some(row_key::Key::Local(AddressKey {
            vni,
            address: mapped(last),
        })),
    }
}

#[test]
fn pods_reach_outside_in_their_nodes_name_if_their_vpc_may() {
    let mut rig = rig();
    let clients = serve(rig.far(), OUTSIDE, 8080, 9);
    let mut stream = connect(&pod(&rig, "p1"), OUTSIDE, 8080).unwrap();
    assert_eq!(ask(&mut stream), 9);
    assert_eq!(clients.recv_timeout(ANSWER_TIMEOUT).unwrap(), IpAddr::from(NODE));
    assert!(rig.ping("p1", &OUTSIDE.to_string()));
    assert!(connect(&pod(&rig, "p2"), OUTSIDE, 8080).is_err());
    assert!(!rig.ping("p2", &OUTSIDE.to_string()));
    assert!(rig.counter("outside_vpc") > 0);
    // Nodes and their network, and other addresses of the node.
    let _far = serve(rig.far(), FAR, 8080, 2);
    let _near = serve(rig.node(), NODE.into(), 8080, 1);
    rig.on_node("ip address add 198.51.100.77/32 dev lo");
    let _other = serve(rig.node(), Ipv4Addr::new(198, 51, 100, 77), 8080, 1);
    for closed in [FAR, NODE.into(), Ipv4Addr::new(198, 51, 100, 77)] {
        assert!(connect(&pod(&rig, "p1"), closed, 8080).is_err(), "{closed}");
        assert!(connect(rig.node(), closed, 8080).is_ok(), "{closed} serves");
    }
    // A connection survives its daemon, and new connections need none.
    rig.kill();
    assert_eq!(ask(&mut stream), 9);
    assert_eq!(ask(&mut connect(&pod(&rig, "p1"), OUTSIDE, 8080).unwrap()), 9);
    rig.start();
    rig.operator.wait_for_ack();
    assert_eq!(ask(&mut stream), 9);
}

#[test]
fn pods_of_a_private_network_stay_in_their_vpc() {
    let mut rig = rig();
    let networks = |private| {
        let Some(Row::Network(own)) = base_rows().into_iter().find(|row| matches!(row, Row::Network(_)))
        else {
            panic!("a network's row")
        };
        let beside = NetworkRow {
            network: BESIDE.to_bits() & !0xff,
            cidrs: vec!["10.0.2.0/24".into()],
            ..own.clone()
        };
        vec![Row::Network(NetworkRow { private, ..own }), Row::Network(beside)]
    };
    let Row::Local(row) = local(7, "p4", 8) else {
        panic!("a local row")
    };
    let beside = Row::Local(LocalRow {
        address: BESIDE.to_ipv6_mapped().octets().to_vec(),
        network: BESIDE.to_bits() & !0xff,
        gateway: "10.0.2.1".into(),
        ..row
    });
    let _outside = serve(rig.far(), OUTSIDE, 8080, 9);
    let _served = serve(rig.far(), FAR, 6443, 1);
    rig.operator.push_and_wait(networks(false), vec![]);
    rig.operator
        .push_and_wait(vec![beside, served(7, &[(FAR, 6443)])], vec![]);
    rig.add_pod("p4");
    let (p1, p4) = (pod(&rig, "p1"), pod(&rig, "p4"));
    let mut open = connect(&p1, OUTSIDE, 8080).unwrap();
    assert_eq!(ask(&mut open), 9);

    rig.operator.push_and_wait(networks(true), vec![]);
    let dropped = rig.counter("outside_vpc");
    assert!(connect(&p1, OUTSIDE, 8080).is_err());
    assert!(rig.counter("outside_vpc") > dropped);
    open.write_all(&[1]).unwrap();
    assert!(
        uninterrupted(|| open.read(&mut [0])).is_err(),
        "a connection from before"
    );
    let shown = rig.rows("SUBNETS");
    let private = shown.iter().filter(|row| row["entry"]["private"] == true);
    let keys: Vec<_> = private.map(|row| row["key"].to_string()).collect();
    assert_eq!(keys, [r#"{"cidr":"10.0.1.0/24","vni":7}"#]);
    // Neither what nodes serve nor the VPC nor the node's probes are outside, and other networks are as before.
    assert_eq!(ask(&mut connect(&p1, SERVICE, 443).unwrap()), 1);
    assert!(rig.ping("p1", &BESIDE.to_string()) && rig.ping("p4", "10.0.1.5"));
    assert!(rig.ping_from_node("10.0.1.5"));
    assert_eq!(ask(&mut connect(&p4, OUTSIDE, 8080).unwrap()), 9);

    rig.operator.push_and_wait(networks(false), vec![]);
    assert_eq!(ask(&mut connect(&p1, OUTSIDE, 8080).unwrap()), 9);
}

#[test]
fn answers_find_nobody_who_has_the_address_later() {
    let mut rig = rig();
    let server = in_namespace(rig.far(), || UdpSocket::bind((OUTSIDE, 53)).unwrap());
    server.set_read_timeout(Some(ANSWER_TIMEOUT)).unwrap();
    let client = in_namespace(&pod(&rig, "p1"), || {
        UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 4000)).unwrap()
    });
    client.set_read_timeout(Some(ANSWER_TIMEOUT)).unwrap();
    client.send_to(b"?", (OUTSIDE, 53)).unwrap();
    let (_, from) = uninterrupted(|| server.recv_from(&mut [0; 8])).unwrap();
    assert_eq!(from.ip(), IpAddr::from(NODE));
    server.send_to(b"1", from).unwrap();
    assert!(uninterrupted(|| client.recv(&mut [0; 8])).is_ok());

    // The next tenant with this address comes on this node, before conntrack forgets by itself.
    assert_eq!(rig.del("p1"), None);
    rig.operator
        .push_and_wait(vec![local(8, "p3", 5)], vec![local_key(7, 5)]);
    rig.add_pod("p3");
    let stranger = in_namespace(&pod(&rig, "p3"), || {
        UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 4000)).unwrap()
    });
    stranger
        .set_read_timeout(Some(Duration::from_millis(500)))
        .unwrap();
    server.send_to(b"2", from).unwrap();
    assert!(
        uninterrupted(|| stranger.recv(&mut [0; 8])).is_err(),
        "an answer for another tenant"
    );
}

#[test]
fn a_server_of_the_node_finds_nobody_who_has_the_address_later() {
    let mut rig = rig();
    let listener = in_namespace(rig.node(), || {
        TcpListener::bind((Ipv4Addr::from(NODE), 6443)).unwrap()
    });
    rig.operator
        .push_and_wait(vec![served(7, &[(NODE.into(), 6443)])], vec![]);
    let client = connect(&pod(&rig, "p1"), SERVICE, 443).unwrap();
    let (mut server, _) = listener.accept().unwrap();
    assert_eq!(rig.del("p1"), None);
    drop(client);
    rig.operator
        .push_and_wait(vec![local(8, "p3", 5)], vec![local_key(7, 5)]);
    rig.add_pod("p3");
    server.write_all(&[1]).unwrap();
    std::thread::sleep(ANSWER_TIMEOUT);
    let counts = rig.in_pod_text("p3", "grep ^Tcp: /proc/net/snmp");
    let mut lines = counts.lines().map(str::split_whitespace);
    let (names, numbers) = (lines.next().unwrap(), lines.next().unwrap());
    let received = names.zip(numbers).find(|(name, _)| *name == "InSegs");
    assert_eq!(received, Some(("InSegs", "0")), "what was another tenant's");
}

#[test]
fn rules_that_somebody_took_away_come_back() {
    let rig = rig();
    let _far = serve(rig.far(), FAR, 6443, 1);
    rig.operator
        .push_and_wait(vec![served(7, &[(FAR, 6443)])], vec![]);
    rig.on_node("nft flush ruleset");
    let pause = Duration::from_millis(100);
    wait_for("the rules to come back", ANSWER_TIMEOUT * 4, pause, || {
        Ok(connect(&pod(&rig, "p1"), SERVICE, 443).is_ok())
    })
    .unwrap();
    assert!(rig.log().contains("a table of nftables is gone"));
}

#[test]
fn what_nodes_serve_is_reached_from_vpcs_that_have_it() {
    let mut rig = rig();
    let _first = serve(rig.far(), FAR, 6443, 1);
    let _second = serve(rig.far(), FAR, 7443, 2);
    let _here = serve(rig.node(), NODE.into(), 6443, 3);
    let (p1, p2) = (pod(&rig, "p1"), pod(&rig, "p2"));
    assert!(connect(&p1, SERVICE, 443).is_err());
    rig.operator
        .push_and_wait(vec![served(7, &[(FAR, 6443)])], vec![]);
    let mut first = connect(&p1, SERVICE, 443).unwrap();
    assert_eq!(ask(&mut first), 1);
    assert_eq!(
        connect(&p1, SERVICE, 444).unwrap_err(),
        ErrorKind::ConnectionRefused
    );
    assert!(connect(&p2, SERVICE, 443).is_err(), "another VPC");
    assert_eq!(
        ask(&mut connect(rig.node(), SERVICE, 443).unwrap()),
        1,
        "the node itself"
    );
    // VPC 8 may not go out, but may reach this.
    rig.operator
        .push_and_wait(vec![served(8, &[(FAR, 6443)])], vec![]);
    assert_eq!(ask(&mut connect(&p2, SERVICE, 443).unwrap()), 1);
    // The backends change: only new connections go to the new ones.
    let rows = [7, 8].map(|vni| served(vni, &[(FAR, 7443)]));
    rig.operator.push_and_wait(rows.to_vec(), vec![]);
    let mut second = connect(&p1, SERVICE, 443).unwrap();
    assert_eq!((ask(&mut second), ask(&mut first)), (2, 1));
    // One backend is on this very node.
    let rows = [7, 8].map(|vni| served(vni, &[(NODE.into(), 6443)]));
    rig.operator.push_and_wait(rows.to_vec(), vec![]);
    assert_eq!(ask(&mut connect(&p2, SERVICE, 443).unwrap()), 3);
    rig.kill();
    assert_eq!(
        ask(&mut connect(&p1, SERVICE, 443).unwrap()),
        3,
        "without a daemon"
    );
    rig.start();
    rig.operator.wait_for_ack();
    assert_eq!(ask(&mut connect(&p1, SERVICE, 443).unwrap()), 3);
    assert_eq!((ask(&mut second), ask(&mut first)), (2, 1));
    let nobody = [7, 8].map(|vni| served(vni, &[]));
    rig.operator.push_and_wait(nobody.to_vec(), vec![]);
    assert_eq!(
        connect(&p1, SERVICE, 443).unwrap_err(),
        ErrorKind::ConnectionRefused
    );
    rig.operator
        .push_and_wait(vec![], vec![served_key(7), served_key(8)]);
    assert!(connect(&p1, SERVICE, 443).is_err());
    first.write_all(&[1]).unwrap();
    assert!(
        uninterrupted(|| first.read(&mut [0])).is_err(),
        "what is taken from a VPC is taken at once"
    );
}

#[test]
fn a_node_without_nft_says_so_before_it_serves() {
    let mut rig = Rig::prepare(base_rows());
    rig.flags = vec!["--nft".into(), "/nonexistent/nft".into()];
    rig.start();
    assert_ne!(rig.wait_for_exit(), Some(0));
    assert!(rig.log().contains("cannot run /nonexistent/nft"), "{}", rig.log());
}
