//! Traffic from outside that stays on its node, ports of nodes that a chained plugin made, and addresses that Services
//! have in their own VPC.

use std::collections::BTreeSet;
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use thuban_common::tables::HOST_SOURCE;
use thuban_proto::transit::row::Row;
use thuban_proto::transit::{
    AddressKey, DropletRow, ExposedPort, ExposedRow, LocalRow, NetworkRow, RowKey, ServiceBackend,
    ServicePort, ServiceRow, row_key,
};
use thuban_testkit::wait::uninterrupted;

use crate::host::send_ack;
use crate::rig::{NODE, Rig, base_rows, eventually, local};
use crate::tcp::{ANSWER_TIMEOUT, ask, connect, serve};

pub const SERVICE: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 10);
pub const OUTSIDE: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 7);
/// The node's own endpoint, in VPC 7.
const OWN: Ipv4Addr = Ipv4Addr::new(10, 0, 1, 9);
const FIRST: Ipv4Addr = Ipv4Addr::new(10, 0, 1, 5);
const SECOND: Ipv4Addr = Ipv4Addr::new(10, 0, 1, 6);
/// An address of VPC 8.
pub const TENANTS: Ipv4Addr = Ipv4Addr::new(10, 8, 1, 7);
/// A host beside the node.
pub const FAR: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 2);
/// A host farther away.
pub const STRANGER: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 9);

pub fn bytes(address: Ipv4Addr) -> Vec<u8> {
    address.to_ipv6_mapped().octets().to_vec()
}

pub fn backends(addresses: &[Ipv4Addr]) -> Vec<ServiceBackend> {
    let each = addresses.iter().map(|address| ServiceBackend {
        address: bytes(*address),
        port: 8080,
    });
    each.collect()
}

/// Returns a service of port 80.
fn service(vni: u32, address: Ipv4Addr, by: &[Ipv4Addr], local: bool) -> Row {
    Row::Service(ServiceRow {
        vni,
        address: bytes(address),
        ports: vec![ServicePort {
            protocol: 6,
            port: 80,
            backends: backends(by),
            local,
            ..ServicePort::default()
        }],
        ..ServiceRow::default()
    })
}

/// Returns NodePort 30080, whose traffic stays on its node.
pub fn exposed(vni: u32, by: &[Ipv4Addr]) -> Row {
    exposed_ending(vni, by, &[])
}

/// Returns the same port of VPC 8, for backends of all nodes. `peers` are droplets whose backends count too, if the
/// Service is a tenant's.
pub fn exposed_everywhere(by: &[Ipv4Addr], peers: &[Ipv4Addr]) -> Row {
    let Row::Exposed(mut row) = exposed(8, by) else {
        panic!("an exposed row")
    };
    row.ports[0].peers = peers.iter().map(|address| bytes(*address)).collect();
    Row::Exposed(row)
}

fn exposed_ending(vni: u32, by: &[Ipv4Addr], ending: &[Ipv4Addr]) -> Row {
    Row::Exposed(ExposedRow {
        vni,
        address: bytes(SERVICE),
        ports: vec![ExposedPort {
            protocol: 6,
            port: 80,
            node_port: 30080,
            local: true,
            backends: backends(by),
            ending: ending.iter().map(|address| bytes(*address)).collect(),
            ..ExposedPort::default()
        }],
        addresses: vec![bytes(OUTSIDE)],
        health_port: 32000,
        service: "ns/web".into(),
        clients: None,
    })
}

fn exposed_key(vni: u32) -> RowKey {
    RowKey {
        key: Some(row_key::Key::Exposed(AddressKey {
            vni,
            address: bytes(SERVICE),
        })),
    }
}

fn local_key(vni: u32, address: Ipv4Addr) -> RowKey {
    RowKey {
        key: Some(row_key::Key::Local(AddressKey {
            vni,
            address: bytes(address),
        })),
    }
}

/// Returns a pod of VPC 8 or 9.
pub fn tenants(vni: u32, uid: &str) -> Row {
    let Row::Local(row) = local(vni, uid, 7) else {
        panic!("a local row")
    };
    Row::Local(LocalRow {
        address: bytes(TENANTS),
        network: 0x0a08_0100,
        gateway: "10.8.1.1".into(),
        ..row
    })
}

/// Returns a rig where nodes, p1 and p2 are in VPC 7; p3 is in VPC 8, which has a range of its own. VPC 9 is like 8.
fn rig() -> Rig {
    rig_with(vec![])
}

/// Returns VPCs and networks: 7, of which the node is, and 8 and 9, tenants' with the same ranges.
pub fn vpcs_and_networks() -> Vec<Row> {
    let mut rows = Vec::new();
    for row in base_rows() {
        match row {
            Row::Vpc(mut vpc) => {
                vpc.service_cidrs.push("10.96.0.0/16".into());
                vpc.egress = true;
                if vpc.vni == 7 {
                    vpc.host_access = true;
                    rows.push(Row::Vpc(vpc));
                    continue;
                }
                vpc.cidrs = vec!["10.8.0.0/16".into()];
                vpc.closed_cidrs = vec!["192.0.2.0/24".into(), "10.0.0.0/16".into()];
                let mut other = vpc.clone();
                other.vni = 9;
                rows.extend([Row::Vpc(vpc), Row::Vpc(other)]);
            }
            Row::Network(mut network) if network.vni == 8 => {
                network.network = 0x0a08_0100;
                network.cidrs = vec!["10.8.1.0/24".into()];
                let mut other = network.clone();
                other.vni = 9;
                rows.extend([Row::Network(network), Row::Network(other)]);
            }
            other => rows.push(other),
        }
    }
    rows
}

/// Returns the same rig, with flags of the daemon.
pub fn rig_with(flags: Vec<String>) -> Rig {
    let mut rows = vpcs_and_networks();
    let Row::Local(host) = local(7, "node/n", OWN.octets()[3]) else {
        panic!("a local row")
    };
    rows.push(Row::Local(LocalRow { host: true, ..host }));
    rows.extend([local(7, "p1", 5), local(7, "p2", 6), tenants(8, "p3")]);
    let mut rig = Rig::prepare(rows);
    rig.flags = flags;
    rig.start();
    rig.operator.wait_for_ack();
    for pod in ["p1", "p2", "p3"] {
        rig.add_pod(pod);
    }
    eventually("the node has its endpoint", || {
        rig.on_node("ip route show table 6082 2>/dev/null || true")
            .contains("10.96.0.0/16")
    });
    rig.on_far(&format!("ip route add {OUTSIDE}/32 via {}", Ipv4Addr::from(NODE)));
    rig.on_far(&format!("ip address add {STRANGER}/32 dev lo"));
    rig.on_node(&format!("ip route add default via {FAR}"));
    rig
}

pub fn pod(rig: &Rig, name: &str) -> String {
    format!("{}-{name}", rig.name)
}

/// Returns status and body of the health port.
fn health(rig: &Rig) -> (String, String) {
    let mut stream = connect(rig.far(), NODE.into(), 32000).unwrap();
    stream.write_all(b"GET / HTTP/1.1\r\nHost: node\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    let status = head.split(' ').nth(1).unwrap_or_default();
    (status.to_owned(), body.to_owned())
}

#[test]
fn local_port_reaches_own_backends_with_sender_address() {
    let rig = rig();
    let here = serve(&pod(&rig, "p1"), Ipv4Addr::UNSPECIFIED, 8080, 1);
    let anywhere = serve(&pod(&rig, "p2"), Ipv4Addr::UNSPECIFIED, 8080, 2);
    rig.operator.push_and_wait(
        vec![service(7, SERVICE, &[SECOND], false), exposed(7, &[FIRST])],
        vec![],
    );
    for (address, port) in [(NODE.into(), 30080), (OUTSIDE, 80)] {
        assert_eq!(ask(&mut connect(rig.far(), address, port).unwrap()), 1);
        assert_eq!(here.recv_timeout(ANSWER_TIMEOUT).unwrap(), IpAddr::from(FAR));
    }
    // The node's own processes and pods reach all backends.
    for namespace in [rig.node().to_owned(), pod(&rig, "p1")] {
        for (address, port) in [(NODE.into(), 30080), (OUTSIDE, 80)] {
            assert_eq!(ask(&mut connect(&namespace, address, port).unwrap()), 2);
            assert_eq!(anywhere.recv_timeout(ANSWER_TIMEOUT).unwrap(), IpAddr::from(OWN));
        }
    }
    let count =
        |number| format!(r#"{{"localEndpoints":{number},"service":{{"name":"web","namespace":"ns"}}}}"#);
    assert_eq!(health(&rig), ("200".into(), count(1)));
    let mut stays = connect(rig.far(), NODE.into(), 30080).unwrap();
    rig.operator
        .push_and_wait(vec![exposed_ending(7, &[FIRST], &[FIRST])], vec![]);
    assert_eq!(
        ask(&mut connect(rig.far(), NODE.into(), 30080).unwrap()),
        1,
        "one that ends serves"
    );
    assert_eq!(health(&rig), ("503".into(), count(0)), "and is not counted");
    rig.operator.push_and_wait(vec![exposed(7, &[])], vec![]);
    let refused = connect(rig.far(), NODE.into(), 30080).unwrap_err();
    assert_eq!(refused, ErrorKind::TimedOut, "silence, not a refusal");
    assert_eq!(ask(&mut stays), 1, "connections stay");
    assert_eq!(ask(&mut connect(rig.node(), NODE.into(), 30080).unwrap()), 2);
    assert_eq!(health(&rig), ("503".into(), count(0)));
    // A node's own process goes on to a node with backends, which sees its address. Pods and others don't.
    let there = serve(rig.far(), FAR, 30080, 4);
    let Row::Exposed(mut elsewhere) = exposed(7, &[]) else {
        panic!("an exposed row")
    };
    elsewhere.ports[0].peers = vec![bytes(FAR)];
    let droplet = Row::Droplet(DropletRow {
        address: FAR.octets().to_vec(),
        address6: Vec::new(),
    });
    rig.operator
        .push_and_wait(vec![droplet, Row::Exposed(elsewhere)], vec![]);
    assert_eq!(ask(&mut connect(rig.node(), NODE.into(), 30080).unwrap()), 4);
    assert_eq!(there.recv_timeout(ANSWER_TIMEOUT).unwrap(), IpAddr::from(NODE));
    assert_eq!(
        ask(&mut connect(&pod(&rig, "p1"), NODE.into(), 30080).unwrap()),
        2
    );
    assert_eq!(
        connect(rig.far(), NODE.into(), 30080).unwrap_err(),
        ErrorKind::TimedOut
    );
    rig.operator.push_and_wait(vec![], vec![exposed_key(7)]);
    eventually("nobody answers about its health", || {
        connect(rig.far(), NODE.into(), 32000).err() == Some(ErrorKind::ConnectionRefused)
    });
}

#[test]
fn pods_of_private_networks_answer_who_comes_to_their_ports() {
    let rig = rig();
    rig.on_far(&format!(
        "ip route replace {}/32 dev far src {STRANGER}",
        Ipv4Addr::from(NODE)
    ));
    let members = serve(&pod(&rig, "p1"), Ipv4Addr::UNSPECIFIED, 8080, 1);
    let tenants = serve(&pod(&rig, "p3"), Ipv4Addr::UNSPECIFIED, 8080, 3);
    let networks = |private| {
        let networks = vpcs_and_networks().into_iter().filter_map(|row| match row {
            Row::Network(network) => Some(Row::Network(NetworkRow { private, ..network })),
            _ => None,
        });
        networks.collect::<Vec<_>>()
    };
    for (vni, backend, clients, own) in [(7, FIRST, &members, 1), (8, TENANTS, &tenants, 3)] {
        rig.operator.push_and_wait(vec![exposed(vni, &[backend])], vec![]);
        for (private, client) in [
            (false, STRANGER),
            (true, HOST_SOURCE.into()),
            (false, STRANGER),
            (true, HOST_SOURCE.into()),
        ] {
            rig.operator.push_and_wait(networks(private), vec![]);
            assert_eq!(ask(&mut connect(rig.far(), NODE.into(), 30080).unwrap()), own);
            assert_eq!(
                clients.recv_timeout(ANSWER_TIMEOUT).unwrap(),
                IpAddr::from(client)
            );
        }
        rig.operator.push_and_wait(vec![], vec![exposed_key(vni)]);
    }
    // Pods of the nodes' VPC reach hosts, but not from a private network. The node reaches them.
    let _far = serve(rig.far(), FAR, 9090, 2);
    assert!(connect(&pod(&rig, "p1"), FAR, 9090).is_err());
    assert!(rig.ping_from_node(&FIRST.to_string()));
}

#[test]
fn tenant_port_reaches_own_pod_never_its_address_successor() {
    let mut rig = rig();
    let clients = serve(&pod(&rig, "p3"), Ipv4Addr::UNSPECIFIED, 8080, 3);
    let _members = serve(&pod(&rig, "p1"), Ipv4Addr::UNSPECIFIED, 8080, 1);
    rig.operator.push_and_wait(vec![exposed(8, &[TENANTS])], vec![]);
    let mut beside = connect(rig.far(), NODE.into(), 30080).unwrap();
    assert_eq!(ask(&mut beside), 3);
    let hosts = IpAddr::from(HOST_SOURCE);
    assert_eq!(
        clients.recv_timeout(ANSWER_TIMEOUT).unwrap(),
        hosts,
        "a tenant's pod may not answer to nodes"
    );
    assert_eq!(ask(&mut connect(rig.node(), NODE.into(), 30080).unwrap()), 3);
    assert_eq!(clients.recv_timeout(ANSWER_TIMEOUT).unwrap(), hosts);
    rig.on_far(&format!(
        "ip route replace {}/32 dev far src {STRANGER}",
        Ipv4Addr::from(NODE)
    ));
    let mut stranger = connect(rig.far(), NODE.into(), 30080).unwrap();
    assert_eq!(ask(&mut stranger), 3);
    assert_eq!(
        clients.recv_timeout(ANSWER_TIMEOUT).unwrap(),
        IpAddr::from(STRANGER)
    );

    // Whatever a row says, no pod of another VPC is a backend.
    rig.operator.push_and_wait(vec![exposed(8, &[FIRST])], vec![]);
    assert!(connect(rig.far(), NODE.into(), 30080).is_err());
    rig.operator.push_and_wait(vec![exposed(8, &[TENANTS])], vec![]);
    assert_eq!(ask(&mut connect(rig.far(), NODE.into(), 30080).unwrap()), 3);

    // The pod goes, and another VPC gets the address, while the service's row is unchanged.
    assert_eq!(rig.del("p3"), None);
    // Packets that still come for the pod go nowhere.
    rig.on_node("nft add table inet seen");
    rig.on_node("nft 'add chain inet seen out { type filter hook postrouting priority 300; }'");
    rig.on_node(&format!("nft add rule inet seen out ip daddr {TENANTS} counter"));
    assert!(connect(rig.far(), NODE.into(), 30080).is_err());
    rig.operator
        .push_and_wait(vec![tenants(9, "p4")], vec![local_key(8, TENANTS)]);
    rig.add_pod("p4");
    let _next = serve(&pod(&rig, "p4"), Ipv4Addr::UNSPECIFIED, 8080, 4);
    assert!(connect(rig.far(), NODE.into(), 30080).is_err());
    for stream in [&mut beside, &mut stranger] {
        let _ = stream.write_all(&[1]);
        stream.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
        assert_ne!(uninterrupted(|| stream.read(&mut [0])).ok(), Some(1));
    }
    let counted = rig.on_node("nft list chain inet seen out");
    assert!(counted.contains("counter packets 0 "), "{counted}");
}

#[test]
fn tenant_port_is_relayed_once_to_droplets_with_backends() {
    let rig = rig();
    let node = Ipv4Addr::from(NODE);
    let clients = serve(&pod(&rig, "p3"), Ipv4Addr::UNSPECIFIED, 8080, 3);
    // The other droplet answers like this.
    let others = serve(rig.far(), FAR, 30080, 9);
    let from = |source: Ipv4Addr| {
        rig.on_far(&format!("ip route replace {node}/32 dev far src {source}"));
        rig.on_far(&format!("ip route replace {OUTSIDE}/32 via {node} src {source}"));
    };
    from(STRANGER);
    rig.operator
        .push_and_wait(vec![exposed_everywhere(&[], &[FAR])], vec![]);
    assert!(
        connect(rig.far(), node, 30080).is_err(),
        "no droplet's row says that it is one"
    );
    let droplet = Row::Droplet(DropletRow {
        address: FAR.octets().to_vec(),
        ..DropletRow::default()
    });
    rig.operator.push_and_wait(vec![droplet], vec![]);
    for (address, port) in [(node, 30080), (OUTSIDE, 80)] {
        assert_eq!(ask(&mut connect(rig.far(), address, port).unwrap()), 9);
        assert_eq!(others.recv_timeout(ANSWER_TIMEOUT).unwrap(), IpAddr::from(node));
    }
    assert_eq!(ask(&mut connect(rig.node(), node, 30080).unwrap()), 9);
    assert_eq!(others.recv_timeout(ANSWER_TIMEOUT).unwrap(), IpAddr::from(node));
    // There are no pods, and no droplets.
    for name in ["p1", "p3"] {
        assert!(connect(&pod(&rig, name), node, 30080).is_err());
    }
    from(FAR);
    assert_eq!(
        connect(rig.far(), node, 30080).unwrap_err(),
        ErrorKind::ConnectionRefused
    );
    assert!(others.try_recv().is_err());

    // A node with a backend of its own takes its share.
    from(STRANGER);
    let mut stays = connect(rig.far(), node, 30080).unwrap();
    rig.operator
        .push_and_wait(vec![exposed_everywhere(&[TENANTS], &[FAR, node])], vec![]);
    let answers: BTreeSet<u8> = (0..40)
        .map(|_| ask(&mut connect(rig.far(), node, 30080).unwrap()))
        .collect();
    assert_eq!(answers, [3, 9].into());
    assert_eq!(
        clients.recv_timeout(ANSWER_TIMEOUT).unwrap(),
        IpAddr::from(STRANGER)
    );
    from(FAR);
    for _ in 0..20 {
        assert_eq!(ask(&mut connect(rig.far(), node, 30080).unwrap()), 3);
    }
    // While its own backend ends, the node serves connections that other droplets still send.
    let Row::Exposed(mut ending) = exposed_everywhere(&[TENANTS], &[FAR, node]) else {
        panic!("an exposed row")
    };
    ending.ports[0].ending = vec![bytes(TENANTS)];
    rig.operator.push_and_wait(vec![Row::Exposed(ending)], vec![]);
    assert_eq!(ask(&mut connect(rig.far(), node, 30080).unwrap()), 3);
    from(STRANGER);
    for _ in 0..20 {
        assert_eq!(ask(&mut connect(rig.far(), node, 30080).unwrap()), 9);
    }
    // Alone, the node takes all connections, and connections that it sent on stay where they are.
    rig.operator
        .push_and_wait(vec![exposed_everywhere(&[TENANTS], &[])], vec![]);
    for _ in 0..20 {
        assert_eq!(ask(&mut connect(rig.far(), node, 30080).unwrap()), 3);
    }
    assert_eq!(ask(&mut stays), 9);
}

#[test]
fn a_port_of_the_node_that_another_plugin_made_leads_to_its_pod() {
    let rig = rig();
    let clients = serve(&pod(&rig, "p1"), Ipv4Addr::UNSPECIFIED, 8080, 1);
    let of_tenant = serve(&pod(&rig, "p3"), Ipv4Addr::UNSPECIFIED, 8080, 3);
    rig.on_node("nft add table ip ports");
    for (chain, hook) in [
        ("in", "prerouting priority dstnat"),
        ("own", "output priority -100"),
    ] {
        rig.on_node(&format!(
            "nft 'add chain ip ports {chain} {{ type nat hook {hook}; }}'"
        ));
        for (port, to) in [(8081, FIRST), (8083, TENANTS)] {
            rig.on_node(&format!(
                "nft add rule ip ports {chain} fib daddr type local tcp dport {port} dnat to {to}:8080"
            ));
        }
    }
    // portmap marks what it is to masquerade.
    rig.on_node("nft insert rule ip ports in ip saddr 10.0.0.0/16 meta mark set meta mark or 0x2000");
    let node = Ipv4Addr::from(NODE);
    assert_eq!(ask(&mut connect(rig.far(), node, 8081).unwrap()), 1);
    assert_eq!(clients.recv_timeout(ANSWER_TIMEOUT).unwrap(), IpAddr::from(FAR));
    assert_eq!(ask(&mut connect(rig.node(), node, 8081).unwrap()), 1);
    assert_eq!(
        clients.recv_timeout(ANSWER_TIMEOUT).unwrap(),
        IpAddr::from(HOST_SOURCE)
    );
    assert_eq!(
        ask(&mut connect(&pod(&rig, "p2"), node, 8081).unwrap()),
        1,
        "a member's"
    );
    assert_eq!(clients.recv_timeout(ANSWER_TIMEOUT).unwrap(), IpAddr::from(OWN));
    for namespace in [rig.far(), rig.node()] {
        assert_eq!(ask(&mut connect(namespace, node, 8083).unwrap()), 3);
        assert_eq!(
            of_tenant.recv_timeout(ANSWER_TIMEOUT).unwrap(),
            IpAddr::from(HOST_SOURCE)
        );
    }
    // A tenant reaches no node, and reaches no pod by packets that look like answers to the node.
    assert!(connect(&pod(&rig, "p3"), node, 8081).is_err());
    rig.on_node("nft add table inet seen");
    rig.on_node("nft 'add chain inet seen out { type filter hook postrouting priority 300; }'");
    rig.on_node(&format!(
        "nft add rule inet seen out ip daddr {FIRST} tcp dport 8080 counter"
    ));
    send_ack(&pod(&rig, "p3"), TENANTS, HOST_SOURCE.into(), 8081);
    let counted = rig.on_node("nft list chain inet seen out");
    assert!(counted.contains("counter packets 0 "), "{counted}");
    // Connections that others' rules translate to a host elsewhere go there.
    let elsewhere = serve(rig.far(), FAR, 9090, 9);
    for chain in ["in", "own"] {
        rig.on_node(&format!(
            "nft add rule ip ports {chain} fib daddr type local tcp dport 8089 dnat to {FAR}:9090"
        ));
    }
    assert_eq!(ask(&mut connect(&pod(&rig, "p2"), node, 8089).unwrap()), 9);
    assert_eq!(ask(&mut connect(rig.node(), node, 8089).unwrap()), 9);
    drop(elsewhere);
    // Nor does an address that the sender chose lead to another pod of the host's table.
    assert!(connect(rig.far(), TENANTS, 8080).is_err());
}

#[test]
fn services_of_two_vpcs_have_one_address_among_their_own() {
    let mut rig = rig();
    let own = Ipv4Addr::new(10, 8, 1, 99);
    rig.operator.push_and_wait(
        vec![LocalRow {
            address: bytes(Ipv4Addr::new(10, 8, 1, 8)),
            mac: vec![2, 9, 10, 8, 1, 8],
            ..match tenants(9, "p4") {
                Row::Local(row) => row,
                other => panic!("{other:?}"),
            }
        }]
        .into_iter()
        .map(Row::Local)
        .collect(),
        vec![],
    );
    rig.add_pod("p4");
    let fourth = Ipv4Addr::new(10, 8, 1, 8);
    let _servers = [("p3", 3), ("p4", 4)]
        .map(|(name, answer)| serve(&pod(&rig, name), Ipv4Addr::UNSPECIFIED, 8080, answer));
    let rows: Vec<Row> = rig.operator.shared.lock().unwrap().rows.clone();
    let named = rows.into_iter().filter_map(|row| match row {
        Row::Vpc(mut vpc) if vpc.vni != 7 => {
            vpc.service_addresses = vec![bytes(own)];
            Some(Row::Vpc(vpc))
        }
        _ => None,
    });
    let services = [(8, TENANTS), (9, fourth)].map(|(vni, by)| service(vni, own, &[by], false));
    rig.operator
        .push_and_wait(named.clone().chain(services).collect(), vec![]);
    for (name, answer) in [("p3", 3), ("p4", 4)] {
        let mut stream = connect(&pod(&rig, name), own, 80).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(ask(&mut stream), answer);
    }
    // The address is not one of the VPC's services any more: it is an ordinary address of the network.
    let unnamed = named.map(|row| match row {
        Row::Vpc(mut vpc) => {
            vpc.service_addresses.clear();
            Row::Vpc(vpc)
        }
        other => other,
    });
    rig.operator.push_and_wait(unnamed.collect(), vec![]);
    assert!(connect(&pod(&rig, "p3"), own, 80).is_err());
}

#[test]
fn pods_reach_only_own_nodes_backends_or_time_out() {
    let rig = rig();
    let _server = serve(&pod(&rig, "p2"), Ipv4Addr::UNSPECIFIED, 8080, 2);
    rig.operator
        .push_and_wait(vec![service(7, SERVICE, &[SECOND], true)], vec![]);
    let mut stream = connect(&pod(&rig, "p1"), SERVICE, 80).unwrap();
    assert_eq!(ask(&mut stream), 2);
    rig.operator
        .push_and_wait(vec![service(7, SERVICE, &[], true)], vec![]);
    let refused = connect(&pod(&rig, "p1"), SERVICE, 80).unwrap_err();
    assert_eq!(refused, ErrorKind::TimedOut);
    assert_eq!(ask(&mut stream), 2);
    rig.operator
        .push_and_wait(vec![service(7, SERVICE, &[], false)], vec![]);
    let refused = connect(&pod(&rig, "p1"), SERVICE, 80).unwrap_err();
    assert_eq!(refused, ErrorKind::ConnectionRefused);
}
