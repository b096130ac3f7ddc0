//! UDP port 6081 is the overlay's: nobody else's packet leaves a node for it, and none for it reaches the node's own stack.
//!
//! Each way is tried with another port too, which shows that it leads there.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6, UdpSocket};
use std::time::Duration;

use nix::sys::socket::{AddressFamily, SockFlag, SockProtocol, SockType, socket};
use thuban_proto::transit::row::Row;
use thuban_proto::transit::{
    DropletRow, ExposedPort, ExposedRow, LocalRow, ServiceBackend, ServicePort, ServiceRow,
};
use thuban_testkit::packets::{self, GENEVE, Ipv4, checksum, udp};

use crate::rig::{NODE, Rig, dual, dual_rows, eventually, in_namespace};
use crate::tcp::PATIENCE;

/// Nobody's.
const OTHER: u16 = 7081;
/// Another droplet.
const FAR: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 2);
const FAR6: Ipv6Addr = Ipv6Addr::new(0xfd00, 9, 0, 0, 0, 0, 0, 2);
/// Beside it, and no droplet.
const STRANGER: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 9);
/// Nowhere, until somebody's rule leads it somewhere.
const OUTSIDE: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 9);
const SERVICE: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 10);
const SERVICE6: Ipv6Addr = Ipv6Addr::new(0xfd00, 96, 0, 0, 0, 0, 0, 1);
/// Of the VPC that nodes are in, by a backend in it.
const WITHIN: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 20);
/// The node's own endpoint.
const OWN: u8 = 9;
/// Another address of the node.
const SECOND: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 77);
const SEGMENTED: &str =
    "ethtool -K up0 tx off tso off gso off tx-udp_tnl-segmentation off tx-udp_tnl-csum-segmentation off";
/// How long nothing must come.
const SILENCE: Duration = Duration::from_millis(400);

fn bytes(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    }
}

fn udp_port(port: u32, backend: IpAddr, to: u16) -> ServicePort {
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

/// Two ports that lead to the overlay's and to another one.
fn pair(first: u32, backend: IpAddr) -> Vec<ServicePort> {
    vec![
        udp_port(first, backend, GENEVE),
        udp_port(first + 1, backend, OTHER),
    ]
}

fn by_node(address: IpAddr, backend: IpAddr) -> Row {
    Row::NodeService(ServiceRow {
        vni: 7,
        address: bytes(address),
        ports: pair(7000, backend),
        ..ServiceRow::default()
    })
}

fn exposed(address: IpAddr, ports: &[(u32, u32)]) -> Row {
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

/// Nodes are in VPC 7, and so is p1.
fn rig(uplink: &str) -> Rig {
    rig_with(uplink, true, true)
}

fn rig_with(uplink: &str, egress: bool, knows_far: bool) -> Rig {
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

fn pod(rig: &Rig) -> String {
    format!("{}-p1", rig.name)
}

/// Takes datagrams of both families.
fn listen(namespace: &str, port: u16) -> UdpSocket {
    listen_at(namespace, (Ipv6Addr::UNSPECIFIED, port).into())
}

fn listen_at(namespace: &str, address: SocketAddr) -> UdpSocket {
    // A child that another test starts has this process's sockets until it executes its program: one that was closed a
    // moment ago may still hold the port.
    let mut socket = None;
    eventually("the port is free", || {
        socket = in_namespace(namespace, move || UdpSocket::bind(address)).ok();
        socket.is_some()
    });
    let socket = socket.unwrap();
    socket.set_read_timeout(Some(SILENCE)).unwrap();
    socket
}

/// Whether a datagram that begins so has come, of all that have.
fn has_come(socket: &UdpSocket, marker: &str) -> bool {
    let mut buffer = [0; 8192];
    while let Ok((length, _)) = socket.recv_from(&mut buffer) {
        if buffer[..length].starts_with(marker.as_bytes()) {
            return true;
        }
    }
    false
}

/// From `port` of the namespace; 0: any.
fn send(namespace: &str, port: u16, to: impl Into<SocketAddr>, payload: Vec<u8>) {
    let to = to.into();
    in_namespace(namespace, move || {
        let any: IpAddr = if to.is_ipv4() {
            Ipv4Addr::UNSPECIFIED.into()
        } else {
            Ipv6Addr::UNSPECIFIED.into()
        };
        let socket = UdpSocket::bind((any, port)).unwrap();
        socket.set_broadcast(true).unwrap();
        // A refusal that came before is somebody else's.
        let _ = socket.send_to(&payload, to);
    });
}

/// Answers each datagram with its own content, until nobody asks any more.
fn echo(namespace: &str, port: u16) {
    let socket = listen(namespace, port);
    socket.set_read_timeout(Some(PATIENCE * 4)).unwrap();
    std::thread::spawn(move || {
        let mut buffer = [0; 2048];
        while let Ok((length, from)) = socket.recv_from(&mut buffer) {
            let _ = socket.send_to(&buffer[..length], from);
        }
    });
}

/// At the other end of the uplink, the overlay's port and another one.
struct Far {
    overlay: UdpSocket,
    other: UdpSocket,
    /// Ways that led to the overlay's port.
    open: RefCell<Vec<String>>,
}

impl Far {
    fn of(rig: &Rig) -> Self {
        Self {
            overlay: listen(rig.far(), GENEVE),
            other: listen(rig.far(), OTHER),
            open: RefCell::default(),
        }
    }

    /// `send` is told whether the overlay's port is meant, and what to send.
    fn judge(&self, what: &str, send: impl Fn(bool, Vec<u8>)) {
        let marker = format!("{what};");
        send(false, marker.clone().into());
        assert!(has_come(&self.other, &marker), "{what}: leads nowhere at all");
        send(true, marker.clone().into());
        if has_come(&self.overlay, &marker) {
            self.open.borrow_mut().push(marker);
        }
    }
}

fn either(is_overlay: bool, first: u16) -> u16 {
    if is_overlay { first } else { first + 1 }
}

fn port(is_overlay: bool) -> u16 {
    if is_overlay { GENEVE } else { OTHER }
}

/// Every way to the overlay's port at the other end of the uplink, and a listener there.
fn open_ways(rig: &mut Rig) -> (Vec<String>, Far) {
    let far = Far::of(rig);
    let (pod, node) = (pod(rig), rig.node().to_owned());
    rig.operator.push_and_wait(
        vec![
            by_node(SERVICE.into(), FAR.into()),
            by_node(SERVICE6.into(), FAR6.into()),
            exposed(SERVICE.into(), &[(7000, 30081), (7001, 30082)]),
        ],
        vec![],
    );
    far.judge("a Service's backend", |overlay, payload| {
        send(&pod, 0, (SERVICE, either(overlay, 7000)), payload);
    });
    far.judge("in fragments", |overlay, mut payload| {
        payload.resize(4000, 0);
        send(&pod, 0, (SERVICE, either(overlay, 7000)), payload);
    });
    far.judge("a Service's backend by IPv6", |overlay, payload| {
        send(&pod, 0, (SERVICE6, either(overlay, 7000)), payload);
    });
    far.judge(
        "a Service's backend, for the node's processes",
        |overlay, payload| {
            send(&node, 0, (SERVICE, either(overlay, 7000)), payload);
        },
    );
    far.judge("a NodePort", |overlay, payload| {
        send(
            rig.far(),
            0,
            (Ipv4Addr::from(NODE), either(overlay, 30081)),
            payload,
        );
    });

    rig.on_node("nft add table ip other");
    rig.on_node("nft 'add chain ip other in { type nat hook prerouting priority -110; }'");
    for (from, to) in [(7002, GENEVE), (7003, OTHER)] {
        rig.on_node(&format!(
            "nft add rule ip other in udp dport {from} dnat to {FAR}:{to}"
        ));
    }
    far.judge("rules of others", |overlay, payload| {
        send(&pod, 0, (OUTSIDE, either(overlay, 7002)), payload);
    });

    rig.pod_namespace("guest");
    let guest = format!("{}-guest", rig.name);
    rig.on_node(&format!(
        "ip link add guest0 type veth peer name eth0 netns {guest} && ip address add 172.30.0.1/24 dev guest0
         ip link set guest0 up && ip -n {guest} address add 172.30.0.2/24 dev eth0
         ip -n {guest} link set eth0 up && ip -n {guest} route add default via 172.30.0.1"
    ));
    far.judge("what the node forwards for others", |overlay, payload| {
        send(&guest, 0, (FAR, port(overlay)), payload);
    });

    // Answers to whoever asks from the port.
    let mut open = far.open.into_inner();
    drop((far.overlay, far.other));
    let mut asks = |what: &str, to: (Ipv4Addr, u16)| {
        for from in [OTHER, GENEVE] {
            let marker = format!("{what};");
            let asking = listen(rig.far(), from);
            let (socket, payload) = (asking.try_clone().unwrap(), marker.clone());
            in_namespace(rig.far(), move || {
                socket.send_to(payload.as_bytes(), (to.0.to_ipv6_mapped(), to.1))
            })
            .unwrap();
            match (has_come(&asking, &marker), from) {
                (true, GENEVE) => open.push(marker),
                (false, OTHER) => panic!("{what}: answers nobody"),
                _ => {}
            }
        }
    };
    echo(&node, 5300);
    asks("a server of the node", (NODE.into(), 5300));
    echo(&pod, 8080);
    let service = ServiceRow {
        vni: 7,
        address: bytes(WITHIN.into()),
        ports: vec![udp_port(80, Ipv4Addr::new(10, 0, 1, 5).into(), 8080)],
        ..ServiceRow::default()
    };
    let leads_in = vec![Row::Service(service), exposed(WITHIN.into(), &[(80, 30083)])];
    rig.operator.push_and_wait(leads_in, vec![]);
    asks("a pod behind a NodePort", (NODE.into(), 30083));

    let far = Far::of(rig);
    far.judge("a process of the node", |overlay, payload| {
        send(&node, 0, (FAR, port(overlay)), payload);
    });
    open.extend(far.open.take());
    (open, far)
}

#[test]
fn nobody_elses_packet_leaves_for_the_overlays_port() {
    let mut rig = rig("true");
    let (open, far) = open_ways(&mut rig);
    assert_eq!(open, Vec::<String>::new(), "ways to the overlay's port");
    let (node, guest) = (rig.node().to_owned(), format!("{}-guest", rig.name));
    // Who is no droplet may have such a tunnel with the node.
    send(&node, 0, (STRANGER, GENEVE), b"a tunnel".to_vec());
    assert!(has_come(&far.overlay, "a tunnel"));
    // The operator is away, and the tables that this transitd finds are all that it knows.
    rig.kill();
    rig.on_node("nft flush ruleset && ip link set lo down");
    rig.start();
    eventually("the table is there before the first row", || {
        rig.on_node("nft list tables").contains("thuban-overlay")
            && rig
                .on_node("nft list table inet thuban-overlay")
                .contains(&FAR.to_string())
    });
    send(&node, 0, (FAR, GENEVE), b"again".to_vec());
    send(&guest, 0, (FAR, GENEVE), b"again".to_vec());
    send(&guest, 0, (FAR, OTHER), b"again".to_vec());
    assert!(!has_come(&far.overlay, "again") && has_come(&far.other, "again"));
    rig.on_node("nft delete table inet thuban-overlay");
    eventually("the table is back, without a row", || {
        rig.on_node("nft list tables").contains("thuban-overlay")
    });
}

/// One that joined a moment ago, and of which this node has not heard.
#[test]
fn nor_does_one_for_a_droplet_that_the_node_does_not_know() {
    let mut rig = rig_with("true", true, false);
    let (open, _) = open_ways(&mut rig);
    // Which is the node's own word, and no endpoint's.
    assert_eq!(open, ["a process of the node;"]);
}

#[test]
fn the_port_is_one_like_any_other_inside_a_vpc() {
    let rig = rig("true");
    let ports = vec![udp_port(80, Ipv4Addr::new(10, 0, 1, 5).into(), GENEVE)];
    let service = ServiceRow {
        vni: 7,
        address: bytes(WITHIN.into()),
        ports,
        ..ServiceRow::default()
    };
    rig.operator.push_and_wait(
        vec![Row::Service(service), exposed(WITHIN.into(), &[(80, 30083)])],
        vec![],
    );
    let server = listen(&pod(&rig), GENEVE);
    let places = [
        ("the Service", rig.node(), WITHIN, 80),
        ("the NodePort", rig.far(), NODE.into(), 30083),
        ("the pod itself", rig.node(), Ipv4Addr::new(10, 0, 1, 5), GENEVE),
    ];
    for (what, from, address, port) in places {
        send(from, 0, (address, port), what.into());
        assert!(has_come(&server, what), "{what}");
    }
}

/// ICMP of another droplet's router would make that one's packets small for ten minutes.
#[test]
fn no_pod_speaks_as_a_router_of_the_underlay() {
    for egress in [true, false] {
        speak_as_a_router(&rig_with("true", egress, true), egress);
    }
}

fn speak_as_a_router(rig: &Rig, egress: bool) {
    let heard = in_namespace(rig.far(), || {
        let kind = SockType::Raw;
        UdpSocket::from(socket(AddressFamily::Inet, kind, SockFlag::empty(), SockProtocol::Icmp).unwrap())
    });
    heard.set_read_timeout(Some(SILENCE)).unwrap();
    let pod_address = Ipv4Addr::new(10, 0, 1, 5);
    let says = |kind: u8, code: u8, rest: &[u8]| {
        let mut icmp = vec![kind, code, 0, 0, 0, 0, 2, 0x76];
        icmp.extend(rest);
        let sum = checksum(&icmp);
        icmp[2..4].copy_from_slice(&sum.to_be_bytes());
        send_raw(&pod(rig), vec![packet(1, pod_address, FAR, &[], &icmp)]);
        let mut types = Vec::new();
        let mut buffer = [0; 256];
        while let Ok(length) = heard.recv(&mut buffer) {
            types.extend(buffer[..length].get(20).copied());
        }
        types
    };
    assert!(says(8, 0, &[0; 28]).contains(&8), "an echo request leads there");
    let quoted = datagram(FAR, NODE.into(), (40_000, GENEVE), &[], &[0; 8]);
    assert_eq!(says(3, 4, &quoted[..28]), Vec::<u8>::new(), "egress {egress}");
    // About a connection that the pod did make, which the node translates and knows.
    send(&pod(rig), GENEVE, (FAR, OTHER), b"?".to_vec());
    let quoted = datagram(FAR, pod_address, (OTHER, GENEVE), &[], &[0; 8]);
    assert!(says(3, 3, &quoted[..28]).contains(&3), "refusals lead there");
    assert_eq!(says(3, 4, &quoted[..28]), Vec::<u8>::new(), "egress {egress}");
}

/// A VXLAN header and a datagram of 10.0.1.66 to the node's port 9999 in Ethernet.
fn tunnelled(vni: u8, mac: [u8; 6], marker: &str) -> Vec<u8> {
    let mut frame = vec![8, 0, 0, 0, 0, 0, vni, 0];
    frame.extend(mac);
    frame.extend([2, 0, 0, 0, 0, 66, 8, 0]);
    frame.extend(datagram(
        Ipv4Addr::new(10, 0, 1, 66),
        NODE.into(),
        (1234, 9999),
        &[],
        marker.as_bytes(),
    ));
    // Enough for two fragments.
    frame.resize(frame.len().max(64), 0);
    frame
}

fn packet(protocol: u8, from: Ipv4Addr, to: Ipv4Addr, options: &[u8], payload: &[u8]) -> Vec<u8> {
    let header = Ipv4 {
        identification: 0x1234,
        fragment: 0,
        options: options.to_vec(),
        ..Ipv4::new(protocol, from, to)
    };
    header.around(payload)
}

fn datagram(from: Ipv4Addr, to: Ipv4Addr, ports: (u16, u16), options: &[u8], payload: &[u8]) -> Vec<u8> {
    packet(17, from, to, options, &udp(ports.0, ports.1, payload))
}

/// The same in two parts, the first with 24 bytes of payload.
fn fragments(packet: &[u8]) -> [Vec<u8>; 2] {
    let (head, payload) = packet.split_at(20);
    let part = |payload: &[u8], offset: u16| {
        let mut packet = [head, payload].concat();
        let length = packet.len() as u16;
        packet[2..4].copy_from_slice(&length.to_be_bytes());
        packet[6..8].copy_from_slice(&offset.to_be_bytes());
        packet[10..12].copy_from_slice(&[0, 0]);
        packet
    };
    [part(&payload[..24], 0x2000), part(&payload[24..], 3)]
}

fn send_raw(namespace: &str, packets: Vec<Vec<u8>>) {
    in_namespace(namespace, move || {
        for packet in packets {
            packets::send_raw(&packet).unwrap();
        }
    });
}

/// A way to the node's stack, past what transit looks at. It is told the port and what to send.
type Form = (String, Box<dyn Fn(u16, Vec<u8>)>);

/// Those that transit drops itself come first.
fn forms(rig: &Rig) -> (usize, Vec<Form>) {
    let (far, node, pod) = (rig.far().to_owned(), rig.node().to_owned(), pod(rig));
    let mut forms: Vec<Form> = Vec::new();
    for to in [Ipv4Addr::from(NODE), SECOND] {
        for (who, from) in [("a droplet", FAR), ("a stranger", STRANGER)] {
            let namespace = far.clone();
            forms.push((
                format!("IP options of {who} to {to}"),
                Box::new(move |port, payload| {
                    let packet = datagram(from, to, (4000, port), &[0x94, 4, 0, 0], &payload);
                    send_raw(&namespace, vec![packet]);
                }),
            ));
            let namespace = far.clone();
            forms.push((
                format!("fragments of {who} to {to}"),
                Box::new(move |port, payload| {
                    let packet = datagram(from, to, (4000, port), &[], &payload);
                    send_raw(&namespace, fragments(&packet).to_vec());
                }),
            ));
        }
    }
    let by_transit = 4;
    let mut add = |what: &str, namespace: &str, to: SocketAddr| {
        let namespace = namespace.to_owned();
        let send: Box<dyn Fn(u16, Vec<u8>)> = Box::new(move |port, payload| {
            let mut to = to;
            to.set_port(port);
            send(&namespace, 0, to, payload);
        });
        forms.push((what.to_owned(), send));
    };
    let v4 = |address: Ipv4Addr| SocketAddr::from((address, 0));
    add("another address of the node", &far, v4(SECOND));
    add("the subnet's broadcast", &far, v4(Ipv4Addr::new(192, 0, 2, 255)));
    add("all hosts of the link", &far, v4(Ipv4Addr::new(224, 0, 0, 1)));
    let link_local = link_local(rig);
    let index = in_namespace(&far, || nix::net::if_::if_nametoindex("far").unwrap());
    add(
        "IPv6, link-local",
        &far,
        SocketAddrV6::new(link_local, 0, 0, index).into(),
    );
    add(
        "IPv6",
        &far,
        (Ipv6Addr::new(0xfd00, 9, 0, 0, 0, 0, 0, 1), 0).into(),
    );
    add("a process of the node", &node, v4(Ipv4Addr::LOCALHOST));
    add(
        "a pod of the VPC that nodes are in",
        &pod,
        v4(Ipv4Addr::new(10, 0, 1, OWN)),
    );
    (by_transit, forms)
}

fn link_local(rig: &Rig) -> Ipv6Addr {
    let shown = rig.on_node("ip -6 -o address show dev up0 scope link");
    let address = shown.split_whitespace().nth(3).unwrap();
    address.split('/').next().unwrap().parse().unwrap()
}

/// What the device took.
fn received(rig: &Rig) -> u64 {
    let count = rig.on_node("cat /sys/class/net/thuban-gro/statistics/rx_packets");
    count.trim().parse().unwrap()
}

#[test]
fn nothing_for_the_overlays_port_reaches_the_nodes_stack() {
    let mut rig = rig(SEGMENTED);
    rig.on_node(&format!("ip address add {SECOND}/32 dev lo"));
    rig.on_far(&format!("ip route add {SECOND}/32 via {}", Ipv4Addr::from(NODE)));
    rig.on_node("sysctl -qw net.ipv4.icmp_echo_ignore_broadcasts=0");
    rig.on_far("ip route add 224.0.0.1/32 dev far");
    // A Service whose backend is the node's own port.
    rig.operator
        .push_and_wait(vec![by_node(SERVICE.into(), Ipv4Addr::from(NODE).into())], vec![]);
    let inner = listen(rig.node(), 9999);
    let (by_transit, mut forms) = forms(&rig);
    let namespace = pod(&rig);
    forms.push((
        "a Service's backend".into(),
        Box::new(move |port, payload| {
            let is_overlay = port == GENEVE;
            send(&namespace, 0, (SERVICE, either(is_overlay, 7000)), payload);
        }),
    ));
    eventually("the link-local address may be used", || {
        !rig.on_node("ip -6 address show dev up0").contains("tentative")
    });
    for (what, send) in &forms {
        let any: IpAddr = if what.starts_with("IPv6") {
            Ipv6Addr::UNSPECIFIED.into()
        } else {
            Ipv4Addr::UNSPECIFIED.into()
        };
        let other = listen_at(rig.node(), (any, OTHER).into());
        let mut marker = format!("{what};").into_bytes();
        marker.resize(64, 0);
        send(OTHER, marker);
        assert!(has_come(&other, what), "{what}: reaches no other port either");
    }
    let attack = |rig: &Rig, forms: &[Form]| {
        let mac = rig.on_node("cat /sys/class/net/thuban-gro/address");
        let mac: Vec<u8> = mac
            .trim()
            .split(':')
            .map(|byte| u8::from_str_radix(byte, 16).unwrap())
            .collect();
        let before = received(rig);
        for (what, send) in forms {
            for _ in 0..5 {
                // The second one is what the device has itself.
                for vni in [7, 0] {
                    send(GENEVE, tunnelled(vni, mac.clone().try_into().unwrap(), what));
                }
            }
        }
        let mut came = BTreeSet::new();
        let mut buffer = [0; 256];
        while let Ok(length) = inner.recv(&mut buffer) {
            came.insert(String::from_utf8_lossy(&buffer[..length]).into_owned());
        }
        (received(rig) - before, came)
    };
    let nothing = (0, BTreeSet::new());
    assert_eq!(attack(&rig, &forms), nothing, "as transitd made it");
    assert!(rig.counter("bad_header") >= 20, "counted by transit");

    // The device alone, the rules alone, and neither; nobody mends it meanwhile.
    rig.kill();
    rig.on_node("nft delete table inet thuban-overlay");
    assert_eq!(attack(&rig, &forms), nothing, "without the table");
    let plain = "ip link del thuban-gro && ip link add thuban-gro type vxlan external dstport 6081 \
                 && ip link set thuban-gro up";
    rig.on_node(plain);
    let (count, came) = attack(&rig, &forms[by_transit..]);
    assert!(
        count > 0 && !came.is_empty(),
        "the attack is none: {count} {came:?}"
    );
    // Somebody deleted the one, and an earlier version made the other.
    rig.start();
    rig.operator.wait_for_ack();
    assert_eq!(attack(&rig, &forms), nothing, "after a restart");
    assert!(rig.on_node("ip -d link show thuban-gro").contains("vnifilter"));
    rig.on_node(plain);
    assert_eq!(attack(&rig, &forms), nothing, "by the table alone");
}
