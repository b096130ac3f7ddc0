//! The forms in which a packet for the overlay's port bypasses the part that transit looks at.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};

use thuban_testkit::packets::{self, Ipv4, udp};

use super::world::{FAR, OWN, SECOND, STRANGER, pod, send};
use crate::rig::{NODE, Rig, in_namespace};

/// Returns a VXLAN header and a datagram of 10.0.1.66 to the node's port 9999 in Ethernet.
pub(super) fn tunnelled(vni: u8, mac: [u8; 6], marker: &str) -> Vec<u8> {
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
    // The frame is long enough for two fragments.
    frame.resize(frame.len().max(64), 0);
    frame
}

pub(super) fn packet(protocol: u8, from: Ipv4Addr, to: Ipv4Addr, options: &[u8], payload: &[u8]) -> Vec<u8> {
    let header = Ipv4 {
        identification: 0x1234,
        fragment: 0,
        options: options.to_vec(),
        ..Ipv4::new(protocol, from, to)
    };
    header.around(payload)
}

pub(super) fn datagram(
    from: Ipv4Addr,
    to: Ipv4Addr,
    ports: (u16, u16),
    options: &[u8],
    payload: &[u8],
) -> Vec<u8> {
    packet(17, from, to, options, &udp(ports.0, ports.1, payload))
}

/// Returns the same packet in two parts, the first with 24 bytes of payload.
pub(super) fn fragments(packet: &[u8]) -> [Vec<u8>; 2] {
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

pub(super) fn send_raw(namespace: &str, packets: Vec<Vec<u8>>) {
    in_namespace(namespace, move || {
        for packet in packets {
            packets::send_raw(&packet).unwrap();
        }
    });
}

/// A way to the node's stack that bypasses what transit looks at. The function gets the port and the payload.
pub(super) type Form = (String, Box<dyn Fn(u16, Vec<u8>)>);

/// Returns all forms. The forms that transit drops itself come first; the number says how many.
pub(super) fn forms(rig: &Rig) -> (usize, Vec<Form>) {
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

pub(super) fn link_local(rig: &Rig) -> Ipv6Addr {
    let shown = rig.on_node("ip -6 -o address show dev up0 scope link");
    let address = shown.split_whitespace().nth(3).unwrap();
    address.split('/').next().unwrap().parse().unwrap()
}

/// Returns how many packets the device took.
pub(super) fn received(rig: &Rig) -> u64 {
    let count = rig.on_node("cat /sys/class/net/thuban-gro/statistics/rx_packets");
    count.trim().parse().unwrap()
}
