//! Answers of tenants' pods to the node, and what looks like them.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, UdpSocket};
use std::time::Duration;

use thuban_common::tables::{HOST_SOURCE, HOST_TRACKED, HOST_TRACKED_V6};
use thuban_testkit::packets::{datagram, send_raw};
use thuban_testkit::wait::uninterrupted;

use super::world::{
    Chunk, INIT, INIT_ACK, NODE_PORT, SCTP, SERVER, STRANGER6, Sctp, UDP, ask, exposed, rig, send_from,
    serve, socket, tenants,
};
use crate::policies::{FAR, SERVICE, STRANGER, pod};
use crate::rig::{NODE, Rig, in_namespace};
use crate::tcp::ANSWER_TIMEOUT;

/// A datagram of so many bytes comes in several fragments.
const FRAGMENTED: usize = 4000;
/// The port of a server of the node.
const NODES: u16 = 5555;
/// The port where the node answers for cluster DNS.
const DNS: u16 = 6085;

fn tracked() -> [IpAddr; 2] {
    [
        Ipv4Addr::from(HOST_TRACKED).into(),
        Ipv6Addr::from(HOST_TRACKED_V6).into(),
    ]
}

/// Returns the address as a socket of both families takes it.
fn as_v6(address: IpAddr) -> Ipv6Addr {
    match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => v6,
    }
}

/// Sends a datagram from a socket of the pod.
fn send(socket: &UdpSocket, to: IpAddr, port: u16) {
    // The host may have told the socket before that nobody listens.
    let _ = socket.take_error();
    let _ = socket.send_to(b"from a pod", (as_v6(to), port));
}

/// Whether something of a pod has come to the socket.
fn has_come(socket: &UdpSocket) -> bool {
    socket.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    let has_come = uninterrupted(|| socket.recv_from(&mut [0; 64])).is_ok();
    socket.set_read_timeout(Some(ANSWER_TIMEOUT)).unwrap();
    has_come
}

#[test]
fn tenants_pods_answer_the_node_by_udp() {
    let rig = rig();
    let tenants_clients = serve(&pod(&rig, "p3"), SERVER, 3);
    let members_clients = serve(&pod(&rig, "p1"), SERVER, 1);
    let [tracked, tracked6] = tracked();
    let (v4, v6) = tenants(7);
    for (address, client) in [(IpAddr::from(v4), tracked), (v6.into(), tracked6)] {
        for length in [1, FRAGMENTED] {
            assert_eq!(ask(rig.node(), (address, SERVER), length), Some(3), "{address}");
            assert_eq!(tenants_clients.recv().unwrap().ip(), client);
        }
        // The host beside the node is not the node.
        assert_eq!(ask(rig.far(), (address, SERVER), 1), None, "{address}");
    }
    // Pods of the node's own VPC reach the node, and see its usual address.
    let member = IpAddr::from([10, 0, 1, 5]);
    assert_eq!(ask(rig.node(), (member, SERVER), FRAGMENTED), Some(1));
    assert_eq!(members_clients.recv().unwrap().ip(), IpAddr::from(HOST_SOURCE));
    // A pod tells the node that nobody listens at a port.
    let client = in_namespace(rig.node(), move || {
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap();
        socket.connect((v4, SERVER + 1)).unwrap();
        socket
    });
    client.set_read_timeout(Some(ANSWER_TIMEOUT)).unwrap();
    client.send(b"?").unwrap();
    let refused = uninterrupted(|| client.recv(&mut [0])).unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused);
}

#[test]
fn tenants_node_port_works_by_udp_for_all_clients() {
    let rig = rig();
    let clients = serve(&pod(&rig, "p3"), SERVER, 3);
    rig.operator.push_and_wait(
        vec![exposed(SERVICE.into(), UDP, &[tenants(7).0.into()], &[])],
        vec![],
    );
    let [tracked, _] = tracked();
    let node = SocketAddr::from((NODE, NODE_PORT));
    // The pod may not answer to hosts beside the node, nor to the node's own address.
    for (namespace, source, client) in [
        (rig.far(), FAR, tracked),
        (rig.far(), STRANGER, STRANGER.into()),
        (rig.node(), FAR, tracked),
    ] {
        send_from(&rig, source, STRANGER6);
        for length in [1, FRAGMENTED] {
            assert_eq!(ask(namespace, node, length), Some(3), "{source}");
            assert_eq!(clients.recv().unwrap().ip(), client);
        }
    }
}

#[test]
fn tenants_pods_answer_the_node_by_sctp() {
    let rig = rig();
    let (v4, _) = tenants(7);
    rig.operator
        .push_and_wait(vec![exposed(SERVICE.into(), SCTP, &[v4.into()], &[])], vec![]);
    let server = Sctp::open(&pod(&rig, "p3"));
    for (namespace, to) in [
        (rig.node(), v4),
        (rig.node(), NODE.into()),
        (rig.far(), NODE.into()),
    ] {
        let client = Sctp::open(namespace);
        client.send(to, (4000, NODE_PORT), INIT);
        let asked = loop {
            let chunk = server.receive().expect("the pod hears of it");
            if chunk.kind == INIT {
                break chunk;
            }
        };
        assert_eq!((asked.from, asked.ports.1), (HOST_TRACKED.into(), NODE_PORT));
        server.send(asked.from, (NODE_PORT, asked.ports.0), INIT_ACK);
        let answer = Chunk {
            from: to,
            ports: (NODE_PORT, 4000),
            kind: INIT_ACK,
        };
        // A node's own socket gets what the node sends to itself, too.
        let mut received = std::iter::from_fn(|| client.receive());
        assert!(received.any(|chunk| chunk == answer), "{namespace} by {to}");
    }
    // What answers nobody reaches no socket of the node.
    let node = Sctp::open(rig.node());
    for kind in [INIT, INIT_ACK] {
        server.send(HOST_TRACKED.into(), (NODE_PORT, 4001), kind);
        server.send(HOST_SOURCE.into(), (NODE_PORT, 4001), kind);
    }
    assert_eq!(node.receive(), None);
}

/// Servers of the node: at any address, at the address towards pods, and in the place of cluster DNS.
fn nodes_servers(rig: &Rig) -> Vec<UdpSocket> {
    let towards_pods = in_namespace(rig.node(), || {
        UdpSocket::bind((Ipv4Addr::from(HOST_SOURCE), NODES + 1)).unwrap()
    });
    let dns = in_namespace(rig.node(), || {
        UdpSocket::bind((Ipv4Addr::from(HOST_SOURCE), DNS)).unwrap()
    });
    vec![socket(rig.node(), NODES), towards_pods, dns]
}

/// Sends datagrams of the pod to everything that its node could take for its own. Returns whether one has come.
fn has_reached(from: &UdpSocket, servers: &[UdpSocket]) -> bool {
    for address in tracked().into_iter().chain([HOST_SOURCE.into()]) {
        for server in servers {
            send(from, address, server.local_addr().unwrap().port());
        }
    }
    servers.iter().any(has_come)
}

#[test]
fn datagrams_of_tenants_reach_no_server_of_the_node() {
    let mut rig = rig();
    let pods = socket(&pod(&rig, "p3"), SERVER);
    let servers = nodes_servers(&rig);
    assert!(!has_reached(&pods, &servers), "with the rules");
    rig.on_node("nft add table inet others");
    rig.on_node("nft 'add chain inet others raw { type filter hook prerouting priority raw; }'");
    rig.on_node("nft add rule inet others raw iifname 'thb*' notrack");
    assert!(!has_reached(&pods, &servers), "untracked");

    // There are no rules, and nobody writes them again. Another host has the address.
    rig.kill();
    rig.on_node("nft flush ruleset");
    let [tracked, tracked6] = tracked();
    rig.on_far(&format!("ip address add {tracked}/32 dev lo"));
    rig.on_far(&format!("ip address add {tracked6}/128 dev lo nodad"));
    let elsewhere = socket(rig.far(), NODES);
    assert!(!has_reached(&pods, &servers), "without rules");
    assert!(!has_come(&elsewhere), "nothing leaves the node");
}

#[test]
fn only_the_pod_that_the_node_asked_answers_it() {
    let rig = rig();
    let (third, fourth) = (socket(&pod(&rig, "p3"), SERVER), socket(&pod(&rig, "p4"), SERVER));
    let other = socket(&pod(&rig, "p3"), SERVER + 1);
    let server = socket(rig.node(), NODES);
    rig.on_far(&format!(
        "ip route add {}/32 via {}",
        tracked()[0],
        Ipv4Addr::from(NODE)
    ));
    let (v4, v6) = tenants(7);
    for (address, tracked) in [IpAddr::from(v4), v6.into()].into_iter().zip(tracked()) {
        server.send_to(b"?", (as_v6(address), SERVER)).unwrap();
        let (_, client) = uninterrupted(|| third.recv_from(&mut [0; 64])).unwrap();
        assert_eq!(client.ip().to_canonical(), tracked);
        send(&fourth, tracked, client.port());
        send(&other, tracked, client.port());
        send(&third, tracked, client.port() ^ 1);
        if let IpAddr::V4(tracked) = tracked {
            // A host outside forges the answer.
            let to = SocketAddrV4::new(tracked, client.port());
            let forged = datagram(SocketAddrV4::new(v4, SERVER), to, b"forged");
            in_namespace(rig.far(), move || send_raw(&forged).unwrap());
        }
        assert!(!has_come(&server), "{address}");
        send(&third, tracked, client.port());
        assert!(has_come(&server), "{address}");
    }
}

#[test]
fn other_softwares_rules_lead_no_answer_of_a_pod_to_another() {
    let rig = rig();
    let (third, fourth) = (socket(&pod(&rig, "p3"), 0), socket(&pod(&rig, "p4"), SERVER));
    let (v4, v6) = tenants(8);
    rig.on_node("nft add table inet others");
    rig.on_node("nft 'add chain inet others nat { type nat hook prerouting priority dstnat - 5; }'");
    rig.on_node(&format!(
        "nft add rule inet others nat udp dport {NODES} dnat ip to {v4}:{SERVER}"
    ));
    rig.on_node(&format!(
        "nft add rule inet others nat udp dport {NODES} dnat ip6 to [{v6}]:{SERVER}"
    ));
    for tracked in tracked() {
        send(&third, tracked, NODES);
        assert!(!has_come(&fourth), "{tracked}");
    }
}
