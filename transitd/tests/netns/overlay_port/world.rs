//! The node, its rows and the network around it.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::time::Duration;

use thuban_proto::transit::row::Row;
use thuban_proto::transit::{
    DropletRow, ExposedPort, ExposedRow, LocalRow, ServiceBackend, ServicePort, ServiceRow,
};
use thuban_testkit::packets::GENEVE;
use thuban_testkit::wait::uninterrupted;

use crate::rig::{Rig, dual, dual_rows, eventually, in_namespace};
use crate::tcp::ANSWER_TIMEOUT;

/// A port that nobody uses.
pub(super) const OTHER: u16 = 7081;
/// Another droplet.
pub(super) const FAR: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 2);
pub(super) const FAR6: Ipv6Addr = Ipv6Addr::new(0xfd00, 9, 0, 0, 0, 0, 0, 2);
/// A host beside the other droplet that is not a droplet.
pub(super) const STRANGER: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 9);
/// An address that is nowhere, until a rule of somebody leads it somewhere.
pub(super) const OUTSIDE: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 9);
pub(super) const SERVICE: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 10);
pub(super) const SERVICE6: Ipv6Addr = Ipv6Addr::new(0xfd00, 96, 0, 0, 0, 0, 0, 1);
/// A Service address of the VPC that nodes are in, with a backend in the VPC.
pub(super) const WITHIN: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 20);
/// Last byte of the address of the node's own endpoint.
pub(super) const OWN: u8 = 9;
/// Another address of the node.
pub(super) const SECOND: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 77);
pub(super) const SEGMENTED: &str =
    "ethtool -K up0 tx off tso off gso off tx-udp_tnl-segmentation off tx-udp_tnl-csum-segmentation off";
/// How long a test waits for datagrams that must not come.
pub(super) const SILENCE: Duration = Duration::from_millis(400);

pub(super) fn bytes(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    }
}

pub(super) fn udp_port(port: u32, backend: IpAddr, to: u16) -> ServicePort {
    ServicePort {
        protocol: 17,
        port,
        backends: vec![ServiceBackend {
            address: bytes(backend),
            port: to.into(),
        }],
        ..ServicePort::default()
    }
}

/// Returns two ports, one that leads to the overlay's port and one that leads to another port.
pub(super) fn pair(first: u32, backend: IpAddr) -> Vec<ServicePort> {
    vec![
        udp_port(first, backend, GENEVE),
        udp_port(first + 1, backend, OTHER),
    ]
}

pub(super) fn by_node(address: IpAddr, backend: IpAddr) -> Row {
    Row::NodeService(ServiceRow {
        vni: 7,
        address: bytes(address),
        ports: pair(7000, backend),
        ..ServiceRow::default()
    })
}

pub(super) fn exposed(address: IpAddr, ports: &[(u32, u32)]) -> Row {
    let ports = ports.iter().map(|(port, node_port)| ExposedPort {
        protocol: 17,
        port: *port,
        node_port: *node_port,
        ..ExposedPort::default()
    });
    Row::Exposed(ExposedRow {
        vni: 7,
        address: bytes(address),
        ports: ports.collect(),
        ..ExposedRow::default()
    })
}

/// Returns a rig where nodes and p1 are in VPC 7.
pub(super) fn rig(uplink: &str) -> Rig {
    rig_with(uplink, true, true)
}

pub(super) fn rig_with(uplink: &str, egress: bool, knows_far: bool) -> Rig {
    let mut rows = dual_rows();
    for row in &mut rows {
        if let Row::Vpc(vpc) = row {
            vpc.service_cidrs
                .extend(["10.96.0.0/16".into(), "fd00:96::/112".into()]);
            vpc.host_access = vpc.vni == 7;
            vpc.egress = egress && vpc.vni == 7;
        }
    }
    let Row::Local(host) = dual(7, "node/n", OWN) else {
        panic!("a local row")
    };
    rows.push(Row::Local(LocalRow { host: true, ..host }));
    if knows_far {
        rows.push(Row::Droplet(DropletRow {
            address: FAR.octets().to_vec(),
            ..DropletRow::default()
        }));
    }
    rows.push(dual(7, "p1", 5));
    let mut rig = Rig::prepare(rows);
    rig.on_node(uplink);
    rig.start();
    rig.operator.wait_for_ack();
    rig.add_pod("p1");
    eventually("the node has its endpoint", || {
        rig.on_node("ip route show table 6082 2>/dev/null || true")
            .contains("10.96.0.0/16")
    });
    rig.on_node("ip address add fd00:9::1/64 dev up0 nodad && sysctl -qw net.ipv6.conf.all.forwarding=1");
    rig.on_far("ip address add fd00:9::2/64 dev far nodad");
    rig.on_far(&format!("ip address add {STRANGER}/24 dev far"));
    rig.on_node(&format!("ip route add default via {FAR}"));
    rig
}

pub(super) fn pod(rig: &Rig) -> String {
    format!("{}-p1", rig.name)
}

/// Returns a socket that takes datagrams of both families.
pub(super) fn listen(namespace: &str, port: u16) -> UdpSocket {
    listen_at(namespace, (Ipv6Addr::UNSPECIFIED, port).into())
}

pub(super) fn listen_at(namespace: &str, address: SocketAddr) -> UdpSocket {
    // A child that another test starts has this process's sockets until it executes its program. So a port that was
    // closed a moment ago may still be held.
    let mut socket = None;
    eventually("the port is free", || {
        socket = in_namespace(namespace, move || UdpSocket::bind(address)).ok();
        socket.is_some()
    });
    let socket = socket.unwrap();
    socket.set_read_timeout(Some(SILENCE)).unwrap();
    socket
}

/// Whether one of the datagrams that have come begins like this. Takes all that have come.
pub(super) fn has_come(socket: &UdpSocket, marker: &str) -> bool {
    let mut buffer = [0; 8192];
    while let Ok((length, _)) = uninterrupted(|| socket.recv_from(&mut buffer)) {
        if buffer[..length].starts_with(marker.as_bytes()) {
            return true;
        }
    }
    false
}

/// Sends a datagram from `port` of the namespace; 0: any.
pub(super) fn send(namespace: &str, port: u16, to: impl Into<SocketAddr>, payload: Vec<u8>) {
    let to = to.into();
    in_namespace(namespace, move || {
        let any: IpAddr = if to.is_ipv4() {
            Ipv4Addr::UNSPECIFIED.into()
        } else {
            Ipv6Addr::UNSPECIFIED.into()
        };
        let socket = UdpSocket::bind((any, port)).unwrap();
        socket.set_broadcast(true).unwrap();
        // A refusal that came before belongs to another datagram.
        let _ = socket.send_to(&payload, to);
    });
}

/// Answers each datagram with its own content, until no datagram comes any more.
pub(super) fn echo(namespace: &str, port: u16) {
    let socket = listen(namespace, port);
    socket.set_read_timeout(Some(ANSWER_TIMEOUT * 4)).unwrap();
    std::thread::spawn(move || {
        let mut buffer = [0; 2048];
        while let Ok((length, from)) = uninterrupted(|| socket.recv_from(&mut buffer)) {
            let _ = socket.send_to(&buffer[..length], from);
        }
    });
}
