//! UDP port 6081 is the overlay's: no packet of others leaves a node for it, and none for it reaches the node's own
//! stack.
//!
//! Each way is tried with another port too, which shows that the way works.

mod forms;
mod ways;
mod world;

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};

use nix::sys::socket::{AddressFamily, SockFlag, SockProtocol, SockType, socket};
use thuban_proto::transit::ServiceRow;
use thuban_proto::transit::row::Row;
use thuban_testkit::packets::{GENEVE, checksum};
use thuban_testkit::wait::uninterrupted;

use self::forms::{Form, datagram, forms, packet, received, send_raw, tunnelled};
use self::ways::{either, open_ways};
use self::world::{
    FAR, OTHER, SECOND, SEGMENTED, SERVICE, SILENCE, STRANGER, WITHIN, by_node, bytes, exposed, has_come,
    listen, listen_at, pod, rig, rig_with, send, udp_port,
};
use crate::rig::{NODE, Rig, eventually, in_namespace};

#[test]
fn nobody_elses_packet_leaves_for_the_overlays_port() {
    let mut rig = rig("true");
    let (open, far) = open_ways(&mut rig);
    assert_eq!(open, Vec::<String>::new(), "ways to the overlay's port");
    let (node, guest) = (rig.node().to_owned(), format!("{}-guest", rig.name));
    // A host that is not a droplet may have such a tunnel with the node.
    send(&node, 0, (STRANGER, GENEVE), b"a tunnel".to_vec());
    assert!(has_come(&far.overlay, "a tunnel"));
    // The operator is away, and this transitd knows only the tables that it finds.
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

/// Sends to a droplet that joined a moment ago, and that this node does not know yet.
#[test]
fn nor_does_one_for_a_droplet_that_the_node_does_not_know() {
    let mut rig = rig_with("true", true, false);
    let (open, _) = open_ways(&mut rig);
    // The node itself sends this, and no endpoint does.
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

/// Sends ICMP as another droplet's router would; it would make that droplet's packets small for ten minutes.
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
        while let Ok(length) = uninterrupted(|| heard.recv(&mut buffer)) {
            types.extend(buffer[..length].get(20).copied());
        }
        types
    };
    assert!(says(8, 0, &[0; 28]).contains(&8), "an echo request leads there");
    let quoted = datagram(FAR, NODE.into(), (40_000, GENEVE), &[], &[0; 8]);
    assert_eq!(says(3, 4, &quoted[..28]), Vec::<u8>::new(), "egress {egress}");
    // The ICMP is about a connection that the pod did make, and that the node translates and knows.
    send(&pod(rig), GENEVE, (FAR, OTHER), b"?".to_vec());
    let quoted = datagram(FAR, pod_address, (OTHER, GENEVE), &[], &[0; 8]);
    assert!(says(3, 3, &quoted[..28]).contains(&3), "refusals lead there");
    assert_eq!(says(3, 4, &quoted[..28]), Vec::<u8>::new(), "egress {egress}");
}

#[test]
fn nothing_for_the_overlays_port_reaches_the_nodes_stack() {
    let mut rig = rig(SEGMENTED);
    rig.on_node(&format!("ip address add {SECOND}/32 dev lo"));
    rig.on_far(&format!("ip route add {SECOND}/32 via {}", Ipv4Addr::from(NODE)));
    rig.on_node("sysctl -qw net.ipv4.icmp_echo_ignore_broadcasts=0");
    rig.on_far("ip route add 224.0.0.1/32 dev far");
    // The Service has the node's own port as its backend.
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
                // VNI 0 is the device's own.
                for vni in [7, 0] {
                    send(GENEVE, tunnelled(vni, mac.clone().try_into().unwrap(), what));
                }
            }
        }
        let mut came = BTreeSet::new();
        let mut buffer = [0; 256];
        while let Ok(length) = uninterrupted(|| inner.recv(&mut buffer)) {
            came.insert(String::from_utf8_lossy(&buffer[..length]).into_owned());
        }
        (received(rig) - before, came)
    };
    let nothing = (0, BTreeSet::new());
    assert_eq!(attack(&rig, &forms), nothing, "as transitd made it");
    assert!(rig.counter("bad_header") >= 20, "counted by transit");

    // The device is tried alone, then the rules alone, then neither; nobody repairs them meanwhile.
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
    // Somebody deleted the rules, and an earlier version made the device.
    rig.start();
    rig.operator.wait_for_ack();
    assert_eq!(attack(&rig, &forms), nothing, "after a restart");
    assert!(rig.on_node("ip -d link show thuban-gro").contains("vnifilter"));
    rig.on_node(plain);
    assert_eq!(attack(&rig, &forms), nothing, "by the table alone");
}
