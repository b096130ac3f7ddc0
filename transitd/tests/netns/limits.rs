//! Connections by the node's own stack, when one pod takes as many as it can.

use std::net::{Ipv4Addr, SocketAddrV4, UdpSocket};
use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use thuban_proto::transit::row::Row;
use thuban_testkit::packets::{Raw, datagram};
use thuban_testkit::wait::uninterrupted;

use crate::rig::{Rig, base_rows, eventually, in_namespace, judged, local};

/// The server at the other end of the uplink, in no range of any VPC.
const SERVER: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::new(198, 51, 100, 9), 5000);
const FAR: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 2);
const QUESTION: &[u8] = b"?";
/// Connections that are tried beside the flood.
const TRIES: usize = 20;

/// Returns a rig where p1 and p3 are of VPC 7, p2 and p4 of 8; both VPCs may go out.
fn rig() -> Rig {
    let mut rows = base_rows();
    for row in &mut rows {
        if let Row::Vpc(vpc) = row {
            vpc.egress = true;
        }
    }
    rows.extend([
        local(7, "p1", 5),
        local(8, "p2", 6),
        local(7, "p3", 7),
        local(8, "p4", 8),
    ]);
    let mut rig = Rig::prepare(rows);
    rig.flags = vec!["--metrics-port".into(), "6084".into()];
    rig.start();
    rig.operator.wait_for_ack();
    rig.on_far(&format!("ip address add {}/32 dev lo", SERVER.ip()));
    rig.on_node(&format!("ip route add default via {FAR}"));
    for pod in ["p1", "p2"] {
        rig.add_pod(pod);
    }
    rig
}

/// Runs a server that answers questions, and does nothing else.
fn serve(rig: &Rig) {
    let socket = in_namespace(rig.far(), || UdpSocket::bind(SERVER).unwrap());
    std::thread::spawn(move || {
        let mut buffer = [0; 16];
        while let Ok((length, from)) = uninterrupted(|| socket.recv_from(&mut buffer)) {
            if &buffer[..length] == QUESTION {
                let _ = socket.send_to(QUESTION, from);
            }
        }
    });
}

/// Returns how many new connections get an answer. Each asks three times: the server's socket may be full for a moment.
fn answered(namespace: &str) -> usize {
    let tries = (0..TRIES).filter(|_| {
        let socket = in_namespace(namespace, || UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap());
        socket.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
        socket.connect(SERVER).unwrap();
        (0..3).any(|_| socket.send(QUESTION).is_ok() && uninterrupted(|| socket.recv(&mut [0; 16])).is_ok())
    });
    tries.count()
}

/// Opens a connection from each port of a pod, again and again until it is over; none of them is ever answered.
fn flood(rig: &Rig, pod: &str, is_over: &AtomicBool, all_sent: &AtomicBool) {
    let address = Ipv4Addr::new(10, 0, 1, 5);
    let raw = in_namespace(&format!("{}-{pod}", rig.name), || Raw::open().unwrap());
    while !is_over.load(Ordering::Relaxed) {
        for port in 1..=u16::MAX {
            let _ = raw.send(&datagram(SocketAddrV4::new(address, port), SERVER, b"x"));
        }
        all_sent.store(true, Ordering::Relaxed);
    }
}

#[test]
fn a_pod_that_connects_without_end_leaves_others_ports() {
    let rig = rig();
    serve(&rig);
    let p2 = format!("{}-p2", rig.name);
    assert_eq!((answered(&p2), answered(rig.node())), (TRIES, TRIES), "before");
    let (is_over, all_sent) = (AtomicBool::new(false), AtomicBool::new(false));
    let beside = std::thread::scope(|scope| {
        scope.spawn(|| flood(&rig, "p1", &is_over, &all_sent));
        while !all_sent.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(10));
        }
        let beside = (answered(&p2), answered(rig.node()));
        is_over.store(true, Ordering::Relaxed);
        beside
    });
    assert_eq!(beside, (TRIES, TRIES), "another VPC's pod, and the node");
    let dropped = rig.metrics()[r#"drops_total{reason="pod_connection_rate"}"#];
    assert!(dropped > 10_000, "{dropped}");
}

#[test]
fn a_pod_that_policies_keep_in_has_the_same_limits() {
    let rig = rig();
    // Nobody knows this set, which denies all.
    let denied = judged(local(7, "p1", 5), 0, [0, 9]);
    rig.operator.push_and_wait(vec![denied], vec![]);
    let (is_over, all_sent) = (AtomicBool::new(false), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| flood(&rig, "p1", &is_over, &all_sent));
        while !all_sent.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(10));
        }
        is_over.store(true, Ordering::Relaxed);
    });
    let dropped = rig.metrics()[r#"drops_total{reason="pod_connection_rate"}"#];
    assert!(dropped > 10_000, "{dropped}");
}

#[test]
fn limits_follow_pods_and_come_back() {
    let mut rig = rig();
    let has = |rig: &Rig, vpcs: [bool; 2], pods: usize| {
        eventually("limits of the node's pods", || {
            // For a moment there may be no table.
            let output = Rig::try_in(rig.node(), "nft list table inet thuban-limits");
            let text = String::from_utf8(output.stdout).unwrap();
            let chains = [7, 8].map(|vni| text.contains(&format!("chain vpc-{vni} ")));
            chains == vpcs && text.matches(" : jump vpc-").count() == pods
        });
    };
    has(&rig, [true, true], 2);
    rig.add_pod("p3");
    has(&rig, [true, true], 3);
    assert_eq!(rig.del("p2"), None);
    has(&rig, [true, false], 2);
    // An administrator who reloads the node's own rules flushes all tables.
    rig.on_node("nft flush ruleset");
    has(&rig, [true, false], 2);
    rig.kill();
    rig.start();
    rig.operator.wait_for_ack();
    has(&rig, [true, false], 2);
    let masquerade = rig.on_node("nft list chain inet thuban leave");
    assert!(masquerade.contains("masquerade to :10000-32767"), "{masquerade}");
}

/// Returns the source ports that the server sees of new connections of a pod.
fn seen_ports(rig: &Rig, server: &UdpSocket, pod: &str) -> RangeInclusive<u16> {
    let client = format!("{}-{pod}", rig.name);
    let ports = (0..200).map(|_| {
        let socket = in_namespace(&client, || UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap());
        socket.send_to(QUESTION, SERVER).unwrap();
        uninterrupted(|| server.recv_from(&mut [0; 16])).unwrap().1.port()
    });
    let ports: Vec<u16> = ports.collect();
    *ports.iter().min().unwrap()..=*ports.iter().max().unwrap()
}

#[test]
fn each_vpc_has_source_ports_of_its_own() {
    let mut rig = rig();
    let server = in_namespace(rig.far(), || UdpSocket::bind(SERVER).unwrap());
    server.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    // The first VPC has the first eighth of all ports, the second VPC the second one.
    let (first, second, all) = (10_000..=12_815, 12_816..=15_631, 10_000..=32_767);
    let is_given = |rig: &Rig, vni: u8, ports: &RangeInclusive<u16>| {
        eventually("a VPC's ports", || {
            let list = format!("nft list chain inet thuban-limits ports-{vni}");
            let text = Rig::try_in(rig.node(), &list).stdout;
            let rule = format!("masquerade to :{}-{}", ports.start(), ports.end());
            String::from_utf8(text).unwrap().contains(&rule)
        });
    };
    let is_within = |seen: RangeInclusive<u16>, ports: &RangeInclusive<u16>| {
        assert!(
            ports.contains(seen.start()) && ports.contains(seen.end()),
            "{seen:?}"
        );
    };
    is_given(&rig, 7, &first);
    is_given(&rig, 8, &second);
    is_within(seen_ports(&rig, &server, "p1"), &first);
    is_within(seen_ports(&rig, &server, "p2"), &second);
    // The only VPC has all.
    assert_eq!(rig.del("p1"), None);
    is_given(&rig, 8, &all);
    assert!(!(second.contains(seen_ports(&rig, &server, "p2").end())));
    // Who comes first has the first share, also after a restart.
    assert_eq!(rig.del("p2"), None);
    rig.add_pod("p4");
    is_given(&rig, 8, &all);
    rig.add_pod("p3");
    is_given(&rig, 7, &second);
    rig.kill();
    rig.on_node("nft delete table inet thuban-limits");
    rig.start();
    rig.operator.wait_for_ack();
    is_given(&rig, 7, &second);
    is_given(&rig, 8, &first);
}
