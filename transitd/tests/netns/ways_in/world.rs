//! A node with pods of its own VPC and of tenants, and a host beside it, all with both families. Servers and clients by
//! UDP, and packets of SCTP as they are on the wire.

use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use nix::sys::socket::{AddressFamily, SockFlag, SockProtocol, SockType};
use thuban_proto::transit::row::Row;
use thuban_proto::transit::{ExposedPort, ExposedRow, LocalRow, ServiceBackend, VpcRow};
use thuban_testkit::wait::{uninterrupted, wait_until};

use crate::policies::{FAR, STRANGER, vpcs_and_networks};
use crate::rig::{NODE, Rig, dual, eventually, in_namespace};
use crate::tcp::ANSWER_TIMEOUT;

/// The port of pods' servers.
pub const SERVER: u16 = 8080;
pub const NODE_PORT: u16 = 30080;
pub const SERVICE6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0x96, 0, 0, 0, 0, 0, 0x10);
pub const TCP: u32 = 6;
pub const UDP: u32 = 17;
pub const SCTP: u32 = 132;
/// A second droplet beside the node.
pub const SECOND: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 3);
pub const NODE6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 1, 0, 0, 0, 0, 1);
/// The host beside the node.
pub const FAR6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 1, 0, 0, 0, 0, 2);
/// A host farther away.
pub const STRANGER6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 9, 0, 0, 0, 0, 9);

/// Returns the addresses of a tenant's pod.
pub fn tenants(last: u8) -> (Ipv4Addr, Ipv6Addr) {
    let last6 = u16::from(last);
    (
        Ipv4Addr::new(10, 8, 1, last),
        Ipv6Addr::new(0xfd00, 8, 0, 0, 0, 0, 0, last6),
    )
}

pub fn bytes(address: impl Into<IpAddr>) -> Vec<u8> {
    match address.into() {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    }
}

/// Returns a pod of VPC 8 or 9.
pub fn tenants_pod(vni: u32, uid: &str, last: u8) -> Row {
    let Row::Local(row) = dual(vni, uid, last) else {
        panic!("a local row")
    };
    let (v4, v6) = tenants(last);
    Row::Local(LocalRow {
        address: bytes(v4),
        address6: bytes(v6),
        network: 0x0a08_0100,
        gateway: "10.8.1.1".into(),
        ..row
    })
}

fn add_family(tenants: &mut VpcRow) {
    tenants.cidrs6.push("fd00:8::/48".into());
    tenants.closed_cidrs.push("2001:db8:1::/64".into());
}

/// Returns VPCs 8 and 9 as [`rig`] has them.
pub fn tenants_vpcs() -> Vec<VpcRow> {
    let vpcs = vpcs_and_networks().into_iter().filter_map(|row| match row {
        Row::Vpc(mut vpc) if vpc.vni != 7 => {
            add_family(&mut vpc);
            Some(vpc)
        }
        _ => None,
    });
    vpcs.collect()
}

/// Returns a rig where nodes and p1 are in VPC 7; p3 is in VPC 8 and p4 in VPC 9, tenants' that may go out.
pub fn rig() -> Rig {
    let mut rows = vpcs_and_networks();
    for row in &mut rows {
        match row {
            Row::Vpc(vpc) if vpc.vni == 7 => {
                vpc.cidrs6.push("fd00:1::/48".into());
                vpc.service_cidrs.push("fd00:96::/108".into());
            }
            Row::Vpc(vpc) => add_family(vpc),
            Row::Network(network) if network.vni == 7 => network.cidrs6.push("fd00:1::/64".into()),
            Row::Network(network) => network.cidrs6.push("fd00:8::/64".into()),
            _ => {}
        }
    }
    let Row::Local(host) = dual(7, "node/n", 9) else {
        panic!("a local row")
    };
    rows.push(Row::Local(LocalRow { host: true, ..host }));
    rows.extend([dual(7, "p1", 5), tenants_pod(8, "p3", 7), tenants_pod(9, "p4", 8)]);
    let mut rig = Rig::prepare(rows);
    rig.on_node("sysctl -qw net.ipv6.conf.all.forwarding=1");
    rig.on_node(&format!("ip address add {NODE6}/64 dev up0 nodad"));
    rig.on_far(&format!("ip address add {FAR6}/64 dev far nodad"));
    rig.on_far(&format!("ip address add {SECOND}/24 dev far"));
    rig.on_far(&format!("ip address add {STRANGER}/32 dev lo"));
    rig.on_far(&format!("ip address add {STRANGER6}/128 dev lo nodad"));
    // Who knows a tenant's range does not reach it.
    rig.on_far(&format!("ip route add 10.8.0.0/16 via {}", Ipv4Addr::from(NODE)));
    rig.on_far(&format!("ip -6 route add fd00:8::/48 via {NODE6}"));
    rig.on_node(&format!("ip route add default via {FAR}"));
    rig.on_node(&format!("ip -6 route add default via {FAR6}"));
    rig.start();
    rig.operator.wait_for_ack();
    for pod in ["p1", "p3", "p4"] {
        rig.add_pod(pod);
    }
    eventually("the node has its endpoint", || {
        rig.on_node("ip route show table 6082 2>/dev/null || true")
            .contains("10.96.0.0/16")
    });
    rig
}

/// Has the host beside the node send to it from these addresses.
pub fn send_from(rig: &Rig, source: Ipv4Addr, source6: Ipv6Addr) {
    let node = Ipv4Addr::from(NODE);
    rig.on_far(&format!("ip route replace {node}/32 dev far src {source}"));
    rig.on_far(&format!("ip -6 route replace {NODE6}/128 dev far src {source6}"));
}

/// Returns the row of a tenant's node port that leads to these backends here, and to peers.
pub fn exposed(service: IpAddr, protocol: u32, by: &[IpAddr], peers: &[Ipv4Addr]) -> Row {
    let port = if protocol == SCTP { NODE_PORT } else { SERVER };
    let backends = by.iter().map(|address| ServiceBackend {
        address: bytes(*address),
        port: port.into(),
    });
    Row::Exposed(ExposedRow {
        vni: 8,
        address: bytes(service),
        ports: vec![ExposedPort {
            protocol,
            port: 80,
            node_port: NODE_PORT.into(),
            local: true,
            backends: backends.collect(),
            peers: peers.iter().map(|peer| bytes(*peer)).collect(),
            ..ExposedPort::default()
        }],
        service: "ns/web".into(),
        ..ExposedRow::default()
    })
}

/// Returns the same of any VPC, without peers.
pub fn exposed_of(vni: u32, service: IpAddr, protocol: u32, by: IpAddr) -> Row {
    let Row::Exposed(row) = exposed(service, protocol, &[by], &[]) else {
        panic!("an exposed row")
    };
    Row::Exposed(ExposedRow { vni, ..row })
}

/// Returns a socket for any address of both families.
pub fn socket(namespace: &str, port: u16) -> UdpSocket {
    socket_at(namespace, Ipv6Addr::UNSPECIFIED, port)
}

pub fn socket_at(namespace: &str, address: impl Into<IpAddr>, port: u16) -> UdpSocket {
    let address = address.into();
    let socket = in_namespace(namespace, move || {
        // An IPv6 address that was just added may not be usable at once.
        let pause = Duration::from_millis(20);
        wait_until(
            "a usable address",
            ANSWER_TIMEOUT,
            pause,
            || match UdpSocket::bind((address, port)) {
                Err(error) if error.kind() == ErrorKind::AddrNotAvailable => Ok(None),
                bound => Ok(Some(bound?)),
            },
        )
        .unwrap()
    });
    socket.set_read_timeout(Some(ANSWER_TIMEOUT)).unwrap();
    socket
}

fn unmapped(address: SocketAddr) -> SocketAddr {
    (address.ip().to_canonical(), address.port()).into()
}

/// Runs a server that sends each datagram back behind a byte of its own, and reports the clients.
pub fn serve(namespace: &str, port: u16, own: u8) -> Receiver<SocketAddr> {
    serve_at(namespace, Ipv6Addr::UNSPECIFIED, port, own)
}

pub fn serve_at(namespace: &str, address: impl Into<IpAddr>, port: u16, own: u8) -> Receiver<SocketAddr> {
    let socket = socket_at(namespace, address, port);
    socket.set_read_timeout(None).unwrap();
    let (sender, clients) = channel();
    std::thread::spawn(move || {
        let mut buffer = vec![own; 1 << 16];
        while let Ok((length, from)) = uninterrupted(|| socket.recv_from(&mut buffer[1..])) {
            if sender.send(unmapped(from)).is_err() {
                return;
            }
            let _ = socket.send_to(&buffer[..=length], from);
        }
    });
    clients
}

/// Asks a server of [`serve`] with so many bytes, from a port of its own. Returns the byte of the server that answered.
pub fn ask(namespace: &str, to: impl Into<SocketAddr>, length: usize) -> Option<u8> {
    let to = to.into();
    let socket = in_namespace(namespace, move || {
        let any: IpAddr = if to.is_ipv4() {
            Ipv4Addr::UNSPECIFIED.into()
        } else {
            Ipv6Addr::UNSPECIFIED.into()
        };
        let socket = UdpSocket::bind((any, 0)).unwrap();
        // The client takes answers of that server alone.
        socket.connect(to).unwrap();
        socket
    });
    socket.set_read_timeout(Some(ANSWER_TIMEOUT)).unwrap();
    socket.send(&vec![1; length]).unwrap();
    let mut answer = vec![0; 1 << 16];
    let received = uninterrupted(|| socket.recv(&mut answer)).ok()?;
    (received == length + 1).then(|| answer[0])
}

/// A raw socket of SCTP over IPv4: it gets every such packet of its namespace.
pub struct Sctp(UdpSocket);

/// What a socket of SCTP got: who sent it, from and to which port, and the type of its chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    pub from: Ipv4Addr,
    pub ports: (u16, u16),
    pub kind: u8,
}

pub const INIT: u8 = 1;
pub const INIT_ACK: u8 = 2;

impl Sctp {
    pub fn open(namespace: &str) -> Self {
        let raw = in_namespace(namespace, || {
            let kind = (AddressFamily::Inet, SockType::Raw, SockProtocol::Sctp);
            nix::sys::socket::socket(kind.0, kind.1, SockFlag::SOCK_CLOEXEC, kind.2).unwrap()
        });
        // send_to and recv_from are the same calls for a raw socket.
        let socket = UdpSocket::from(raw);
        socket.set_read_timeout(Some(ANSWER_TIMEOUT)).unwrap();
        Self(socket)
    }

    /// Sends an INIT, or the answer to one.
    pub fn send(&self, to: Ipv4Addr, ports: (u16, u16), kind: u8) {
        let mut packet = [ports.0.to_be_bytes(), ports.1.to_be_bytes()].concat();
        // An INIT has no tag; the answer has the one that the INIT names.
        packet.extend(u32::from(kind == INIT_ACK).to_be_bytes());
        packet.extend([0; 4]);
        // Length; own tag, window, streams, first number.
        packet.extend([kind, 0, 0, 20, 0, 0, 0, 1, 0, 1, 0, 0, 0, 1, 0, 1, 0, 0, 0, 1]);
        let sum = crc32c(&packet).to_le_bytes();
        packet[8..12].copy_from_slice(&sum);
        self.0.send_to(&packet, (to, 0)).unwrap();
    }

    pub fn receive(&self) -> Option<Chunk> {
        let mut buffer = [0; 256];
        let (length, from) = self.0.recv_from(&mut buffer).ok()?;
        // Behind the IPv4 header.
        let packet = &buffer[20..length];
        let port = |at: usize| u16::from_be_bytes([packet[at], packet[at + 1]]);
        let IpAddr::V4(from) = from.ip() else { return None };
        Some(Chunk {
            from,
            ports: (port(0), port(2)),
            kind: packet[12],
        })
    }
}

/// Returns the checksum of SCTP (RFC 9260, appendix A).
fn crc32c(bytes: &[u8]) -> u32 {
    let sum = bytes.iter().fold(!0, |sum: u32, byte| {
        (0..8).fold(sum ^ u32::from(*byte), |sum, _| {
            (sum >> 1) ^ ((sum & 1) * 0x82f6_3b78)
        })
    });
    !sum
}
