//! The node's own endpoint: it reaches members and services of its VPC, for the node and for those whose packets the
//! node forwards.

use std::net::{IpAddr, Ipv4Addr, SocketAddrV4};
use std::os::fd::AsRawFd;
use std::time::Duration;

use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, SockaddrIn, sendto, socket,
};

use aya::maps::{HashMap, Map, MapData};
use thuban_common::services::CONNECTIONS_OF_CLIENT;
use thuban_common::tables::{EndpointKey, HOST_SOURCE};
use thuban_proto::transit::row::Row;
use thuban_proto::transit::{
    AddressKey, Clients, DirectRow, ExposedPort, ExposedRow, LocalRow, RowKey, ServiceBackend, ServicePort,
    ServiceRow, row_key,
};

use crate::rig::{NODE, Rig, base_rows, eventually, in_namespace, local, mapped};
use crate::tcp::{ANSWER_TIMEOUT, ask, connect, serve};

const SERVICE: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 10);
/// Last byte of the address of the node's endpoint, in VPC 7.
const OWN: u8 = 9;
const OWN_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 0, 1, OWN);
/// Another droplet.
const FAR: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 2);

fn host_row(last: u8) -> Row {
    let Row::Local(row) = local(7, "node/n", last) else {
        panic!("a local row")
    };
    Row::Local(LocalRow { host: true, ..row })
}

fn host_key(last: u8) -> RowKey {
    RowKey {
        key: Some(row_key::Key::Local(AddressKey {
            vni: 7,
            address: mapped(last),
        })),
    }
}

fn service_address() -> Vec<u8> {
    SERVICE.to_ipv6_mapped().octets().to_vec()
}

/// Returns VPC 7's service, port 80, with the pod at 10.0.1.`last`, port 8080, as its backend.
fn service(last: u8) -> Row {
    Row::Service(ServiceRow {
        vni: 7,
        address: service_address(),
        ports: vec![ServicePort {
            protocol: 6,
            port: 80,
            backends: vec![ServiceBackend {
                address: mapped(last),
                port: 8080,
            }],
            affinity_seconds: 0,
            local: false,
        }],
        ..ServiceRow::default()
    })
}

/// Returns a rig where nodes, p1 and p2 are in VPC 7; p3 is another tenant's.
fn rig() -> Rig {
    let mut rows = base_rows();
    for row in &mut rows {
        if let Row::Vpc(vpc) = row {
            vpc.service_cidrs.push("10.96.0.0/16".into());
            vpc.host_access = vpc.vni == 7;
            vpc.egress = vpc.vni == 7;
        }
    }
    rows.extend([local(7, "p1", 5), local(7, "p2", 6), local(8, "p3", 7)]);
    rows.extend([host_row(OWN), service(5)]);
    let mut rig = Rig::new(rows);
    for pod in ["p1", "p2", "p3"] {
        rig.add_pod(pod);
    }
    eventually("the node has its endpoint", || has_endpoint(&rig));
    rig
}

fn has_endpoint(rig: &Rig) -> bool {
    rig.on_node("ip -o address show").contains("thuban0") && routes(rig).contains("10.96.0.0/16")
}

/// Returns the routes to services, for packets that the node forwards.
fn routes(rig: &Rig) -> String {
    rig.on_node("ip route show table 6082 2>/dev/null || true")
}

fn pod(rig: &Rig, name: &str) -> String {
    format!("{}-{name}", rig.name)
}

#[test]
fn the_node_reaches_members_and_services_in_its_own_name() {
    let mut rig = rig();
    let clients = serve(&pod(&rig, "p1"), Ipv4Addr::UNSPECIFIED, 8080, 1);
    let mut stream = connect(rig.node(), SERVICE, 80).unwrap();
    assert_eq!(ask(&mut stream), 1);
    assert_eq!(
        clients.recv_timeout(ANSWER_TIMEOUT).unwrap(),
        IpAddr::from(OWN_ADDRESS)
    );
    // A member elsewhere is reached through its droplet; nobody answers there.
    rig.operator.push_and_wait(
        vec![Row::Direct(DirectRow {
            vni: 7,
            address: mapped(77),
            droplet: FAR.octets().to_vec(),
        })],
        vec![],
    );
    let before = rig.counter("sent_direct");
    assert!(!rig.ping_from_node("10.0.1.77"));
    assert!(rig.counter("sent_direct") > before);
    // Members reach the endpoint, and no pod of another VPC does.
    assert!(rig.ping("p2", &OWN_ADDRESS.to_string()));
    assert!(!rig.ping("p3", &OWN_ADDRESS.to_string()));

    // A daemon that starts finds everything unchanged, even while no operator sends anything.
    let links = rig.on_node("ip -o link show type veth");
    let routes = rig.on_node("ip route show table 6081");
    rig.kill();
    assert_eq!(ask(&mut stream), 1);
    let operator = std::mem::replace(&mut rig.operator.address, "127.0.0.1:9".into());
    rig.start();
    std::thread::sleep(ANSWER_TIMEOUT);
    assert_eq!(rig.on_node("ip route show table 6081"), routes);
    assert_eq!(ask(&mut stream), 1);
    rig.kill();
    rig.operator.address = operator;
    rig.start();
    rig.operator.wait_for_ack();
    assert_eq!(ask(&mut stream), 1);
    assert_eq!(rig.on_node("ip -o link show type veth"), links);
    assert_eq!(rig.on_node("ip route show table 6081"), routes);
}

/// Gives the service to the VPC of p3.
fn share_with_tenant(rig: &Rig) {
    let shared = Row::NodeService(ServiceRow {
        vni: 8,
        address: service_address(),
        inside: true,
        ..ServiceRow::default()
    });
    rig.operator.push_and_wait(vec![shared], vec![]);
}

#[test]
fn connections_of_a_tenant_by_the_node_are_of_its_own_room() {
    let rig = rig();
    let _clients = serve(&pod(&rig, "p1"), Ipv4Addr::UNSPECIFIED, 8080, 1);
    share_with_tenant(&rig);
    let path = rig.pins().join("maps/SHARES");
    let shares = MapData::from_pin(path).unwrap();
    let mut shares: HashMap<_, EndpointKey, u32> = HashMap::try_from(Map::HashMap(shares)).unwrap();
    let of_node = |vni| EndpointKey {
        vni,
        address: OWN_ADDRESS.to_ipv6_mapped().octets(),
    };
    let held = |shares: &HashMap<_, EndpointKey, u32>| {
        let held = |vni| shares.get(&of_node(vni), 0).unwrap_or_default();
        [7, 8].map(held)
    };
    let before = held(&shares);
    // The tenant's pod connects, and the node itself.
    let mut tenant = connect(&pod(&rig, "p3"), SERVICE, 80).unwrap();
    assert_eq!(held(&shares), [before[0], before[1] + 2]);
    let mut own = connect(rig.node(), SERVICE, 80).unwrap();
    assert_eq!(held(&shares), [before[0] + 2, before[1] + 2]);
    // The tenant now seems to have all connections that a client may have.
    shares.insert(of_node(8), CONNECTIONS_OF_CLIENT, 0).unwrap();
    let stateless = rig.counter("service_stateless");
    let mut beyond = connect(&pod(&rig, "p3"), SERVICE, 80).unwrap();
    // Each packet of the connection is counted.
    let without_room = rig.counter("service_stateless");
    assert!(without_room > stateless, "{without_room}");
    let mut others = connect(rig.node(), SERVICE, 80).unwrap();
    assert_eq!(
        rig.counter("service_stateless"),
        without_room,
        "the node has room"
    );
    for stream in [&mut tenant, &mut own, &mut beyond, &mut others] {
        assert_eq!(ask(stream), 1);
    }
}

#[test]
fn node_endpoint_is_restored_and_goes_only_with_its_row() {
    let rig = rig();
    let _server = serve(&pod(&rig, "p1"), Ipv4Addr::UNSPECIFIED, 8080, 1);
    rig.on_node("ip link del thuban0");
    eventually("it is there again", || has_endpoint(&rig));
    assert_eq!(ask(&mut connect(rig.node(), SERVICE, 80).unwrap()), 1);
    rig.on_node("ip route flush table 6082");
    eventually("its routes are there again", || has_endpoint(&rig));
    // The endpoint gets another address.
    rig.operator
        .push_and_wait(vec![host_row(19)], vec![host_key(OWN)]);
    eventually("it has the new address", || {
        rig.on_node("ip -o address show dev thuban0 2>/dev/null || true")
            .contains("10.0.1.19/32")
    });
    eventually("and serves", || connect(rig.node(), SERVICE, 80).is_ok());
    // The runtime does not know the endpoint, and can't remove it.
    assert!(rig.del("host").is_some());
    assert!(has_endpoint(&rig));
    rig.operator.push_and_wait(vec![], vec![host_key(19)]);
    eventually("it is gone", || {
        !rig.on_node("ip -o link show").contains("thuban0") && routes(&rig).is_empty()
    });
    assert!(connect(rig.node(), SERVICE, 80).is_err());
}

#[test]
fn vpc_reaches_shared_service_by_node_and_nothing_else() {
    let mut rig = rig();
    let clients = serve(&pod(&rig, "p1"), Ipv4Addr::UNSPECIFIED, 8080, 1);
    assert!(connect(&pod(&rig, "p3"), SERVICE, 80).is_err());
    share_with_tenant(&rig);
    let mut stream = connect(&pod(&rig, "p3"), SERVICE, 80).unwrap();
    assert_eq!(ask(&mut stream), 1);
    assert_eq!(
        clients.recv_timeout(ANSWER_TIMEOUT).unwrap(),
        IpAddr::from(OWN_ADDRESS)
    );
    assert!(connect(&pod(&rig, "p3"), Ipv4Addr::new(10, 0, 1, 5), 8080).is_err());
    assert!(connect(&pod(&rig, "p3"), OWN_ADDRESS, 22).is_err());
    rig.kill();
    assert_eq!(ask(&mut stream), 1);
    rig.start();
    rig.operator.wait_for_ack();
    assert_eq!(ask(&mut stream), 1);
    // Without the node's endpoint the address leads nowhere, and never out by the uplink.
    rig.operator.push_and_wait(vec![], vec![host_key(OWN)]);
    eventually("the endpoint is gone", || {
        !rig.on_node("ip -o link show").contains("thuban0")
    });
    rig.on_node(&format!("ip route add default via {FAR}"));
    rig.on_far("ip address add 10.96.0.10/32 dev lo");
    let _elsewhere = serve(rig.far(), SERVICE, 80, 66);
    assert!(connect(&pod(&rig, "p3"), SERVICE, 80).is_err());
}

/// Sends a segment of no connection, with a byte of data.
pub fn send_ack(namespace: &str, from: Ipv4Addr, to: Ipv4Addr, port: u16) {
    // Ports; sequence, acknowledged; 20 bytes, ACK and PSH; window, sum, urgent; data.
    let mut segment = vec![0x9c, 0x40];
    segment.extend(port.to_be_bytes());
    segment.extend([
        0, 0, 0, 1, 0, 0, 0, 1, 0x50, 0x18, 0xff, 0xff, 0, 0, 0, 0, b'!', 0,
    ]);
    let length = segment.len() as u16 - 1;
    let mut summed = [from.octets(), to.octets()].concat();
    summed.extend([0, 6]);
    summed.extend(length.to_be_bytes());
    summed.extend(&segment);
    let words = summed
        .chunks(2)
        .map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1]));
    let sum: u32 = words.sum();
    let sum = !(((sum & 0xffff) + (sum >> 16)) as u16);
    segment[16..18].copy_from_slice(&sum.to_be_bytes());
    segment.pop();
    in_namespace(namespace, move || {
        let kind = (AddressFamily::Inet, SockType::Raw, SockProtocol::Tcp);
        let socket = socket(kind.0, kind.1, SockFlag::empty(), kind.2).unwrap();
        let to = SockaddrIn::from(SocketAddrV4::new(to, 0));
        sendto(socket.as_raw_fd(), &segment, &to, MsgFlags::empty()).unwrap();
    });
    std::thread::sleep(Duration::from_millis(300));
}

/// Returns TCP port 80 of the service, at NodePort 30080 and at an address outside.
fn balanced(outside: Ipv4Addr) -> ExposedRow {
    ExposedRow {
        vni: 7,
        address: service_address(),
        ports: vec![ExposedPort {
            protocol: 6,
            port: 80,
            node_port: 30080,
            ..ExposedPort::default()
        }],
        addresses: vec![outside.to_ipv6_mapped().octets().to_vec()],
        ..ExposedRow::default()
    }
}

#[test]
fn node_ports_and_outside_addresses_lead_to_services() {
    let rig = rig();
    let clients = serve(&pod(&rig, "p1"), Ipv4Addr::UNSPECIFIED, 8080, 1);
    let outside = Ipv4Addr::new(203, 0, 113, 7);
    let exposed = Row::Exposed(balanced(outside));
    assert!(connect(rig.far(), NODE.into(), 30080).is_err());
    rig.operator.push_and_wait(vec![exposed], vec![]);
    rig.on_far(&format!("ip route add {outside}/32 via {}", Ipv4Addr::from(NODE)));
    // Packets to the address would take this way.
    rig.on_node(&format!("ip route add default via {FAR}"));
    let places = [
        (rig.far().to_owned(), Ipv4Addr::from(NODE), 30080, "from outside"),
        (rig.far().to_owned(), outside, 80, "the balancer's address"),
        (
            rig.node().to_owned(),
            Ipv4Addr::from(NODE),
            30080,
            "from the node itself",
        ),
        (
            rig.node().to_owned(),
            outside,
            80,
            "the balancer's address, from the node",
        ),
        (pod(&rig, "p2"), Ipv4Addr::from(NODE), 30080, "from a pod"),
        (
            pod(&rig, "p1"),
            Ipv4Addr::from(NODE),
            30080,
            "from the backend itself",
        ),
    ];
    for (namespace, address, port, what) in places {
        let mut stream = connect(&namespace, address, port).unwrap_or_else(|error| panic!("{what}: {error}"));
        assert_eq!(ask(&mut stream), 1, "{what}");
        let client = clients.recv_timeout(ANSWER_TIMEOUT).unwrap();
        assert_eq!(client, IpAddr::from(OWN_ADDRESS), "{what}");
    }
    // A tenant's pod reaches no node, not even by packets that look like answers.
    assert!(connect(&pod(&rig, "p3"), NODE.into(), 30080).is_err());
    rig.on_node("nft add table inet seen");
    rig.on_node("nft 'add chain inet seen out { type filter hook postrouting priority 300; }'");
    rig.on_node("nft add rule inet seen out oifname thuban0 tcp dport 80 counter");
    send_ack(
        &pod(&rig, "p3"),
        Ipv4Addr::new(10, 0, 1, 7),
        HOST_SOURCE.into(),
        30080,
    );
    let counted = rig.on_node("nft list chain inet seen out");
    assert!(counted.contains("counter packets 0 "), "{counted}");
    // Backends outside the VPC answer the node.
    let elsewhere = serve(rig.far(), FAR, 6443, 3);
    let by_node = Row::NodeService(ServiceRow {
        vni: 7,
        address: service_address(),
        ports: vec![ServicePort {
            protocol: 6,
            port: 80,
            backends: vec![ServiceBackend {
                address: FAR.to_ipv6_mapped().octets().to_vec(),
                port: 6443,
            }],
            affinity_seconds: 0,
            local: false,
        }],
        ..ServiceRow::default()
    });
    rig.operator.push_and_wait(vec![by_node], vec![]);
    assert_eq!(ask(&mut connect(rig.far(), NODE.into(), 30080).unwrap()), 3);
    assert_eq!(
        elsewhere.recv_timeout(ANSWER_TIMEOUT).unwrap(),
        IpAddr::from(NODE)
    );
    assert_eq!(
        ask(&mut connect(&pod(&rig, "p2"), NODE.into(), 30080).unwrap()),
        3
    );
    let key = row_key::Key::Exposed(AddressKey {
        vni: 7,
        address: service_address(),
    });
    rig.operator
        .push_and_wait(vec![], vec![RowKey { key: Some(key) }]);
    assert!(connect(rig.far(), NODE.into(), 30080).is_err());
}

#[test]
fn only_clients_in_source_ranges_reach_a_balancer() {
    let rig = rig();
    let _clients = serve(&pod(&rig, "p1"), Ipv4Addr::UNSPECIFIED, 8080, 1);
    let outside = Ipv4Addr::new(203, 0, 113, 7);
    // An address of the node, as some balancers have.
    rig.on_node(&format!("ip address add {outside}/32 dev lo"));
    let _own = serve(rig.node(), outside, 8081, 2);
    let exposed = |clients: Option<&[&str]>| {
        Row::Exposed(ExposedRow {
            clients: clients.map(|ranges| Clients {
                ranges: ranges.iter().copied().map(str::to_owned).collect(),
            }),
            ..balanced(outside)
        })
    };
    rig.on_far(&format!("ip route add {outside}/32 via {}", Ipv4Addr::from(NODE)));
    let reaches = |port| connect(rig.far(), outside, port).is_ok();
    let other = "198.51.100.0/24";
    rig.operator.push_and_wait(vec![exposed(Some(&[other]))], vec![]);
    eventually("no range has the client", || !reaches(80));
    assert!(reaches(8081), "another port of the address");
    assert!(
        connect(rig.far(), NODE.into(), 30080).is_ok(),
        "the node's own port"
    );
    // nft takes no range within another.
    let own = format!("{FAR}/32");
    let ranges = [own.as_str(), other, "0.0.0.0/1", "128.0.0.0/1"];
    rig.operator.push_and_wait(vec![exposed(Some(&ranges))], vec![]);
    eventually("a range has the client", || reaches(80));
    rig.operator.push_and_wait(vec![exposed(Some(&[]))], vec![]);
    eventually("nobody may send", || !reaches(80));
    rig.operator.push_and_wait(vec![exposed(None)], vec![]);
    eventually("all clients may send", || reaches(80));
}
