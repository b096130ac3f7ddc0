//! Ways by which a process of the node, or a packet that the node forwards, could reach the overlay's port of another
//! node.

use std::cell::RefCell;
use std::net::{Ipv4Addr, UdpSocket};

use thuban_proto::transit::ServiceRow;
use thuban_proto::transit::row::Row;
use thuban_testkit::packets::GENEVE;

use super::world::{
    FAR, FAR6, OTHER, OUTSIDE, SERVICE, SERVICE6, WITHIN, by_node, bytes, echo, exposed, has_come, listen,
    pod, send, udp_port,
};
use crate::rig::{NODE, Rig, in_namespace};

/// Listeners at the other end of the uplink, on the overlay's port and on another one.
pub(super) struct Far {
    pub(super) overlay: UdpSocket,
    pub(super) other: UdpSocket,
    /// Ways that led to the overlay's port.
    pub(super) open: RefCell<Vec<String>>,
}

impl Far {
    pub(super) fn of(rig: &Rig) -> Self {
        Self {
            overlay: listen(rig.far(), GENEVE),
            other: listen(rig.far(), OTHER),
            open: RefCell::default(),
        }
    }

    /// Judges one way. `send` gets whether the overlay's port is meant, and the payload.
    pub(super) fn judge(&self, what: &str, send: impl Fn(bool, Vec<u8>)) {
        let marker = format!("{what};");
        send(false, marker.clone().into());
        assert!(has_come(&self.other, &marker), "{what}: leads nowhere at all");
        send(true, marker.clone().into());
        if has_come(&self.overlay, &marker) {
            self.open.borrow_mut().push(marker);
        }
    }
}

pub(super) fn either(is_overlay: bool, first: u16) -> u16 {
    if is_overlay { first } else { first + 1 }
}

pub(super) fn port(is_overlay: bool) -> u16 {
    if is_overlay { GENEVE } else { OTHER }
}

/// Tries every way to the overlay's port at the other end of the uplink, with a listener there; returns the ways that
/// led there.
pub(super) fn open_ways(rig: &mut Rig) -> (Vec<String>, Far) {
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

    // The port answers everybody who asks it.
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
