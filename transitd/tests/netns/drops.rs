//! Which packets of pods are dropped: the operator is told, if it asks.

use std::net::{Ipv4Addr, UdpSocket};
use std::time::Duration;

use thuban_common::counters::Counter;
use thuban_proto::transit::Dropped;
use thuban_proto::transit::droplet_message::Message;

use crate::rig::{Rig, base_rows, in_namespace, local, mapped};

/// An address in no range of the VPC, which has no way out.
const OUTSIDE: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 9);
/// A group, to which every host may send without being asked.
const GROUP: Ipv4Addr = Ipv4Addr::new(224, 0, 0, 251);
/// The last byte of the pod's address.
const POD: u8 = 5;

/// Sends datagrams from the pod, which nobody answers.
fn send(rig: &Rig, to: Ipv4Addr, count: usize) {
    in_namespace(&format!("{}-p1", rig.name), move || {
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap();
        for _ in 0..count {
            socket.send_to(b"?", (to, 5353)).unwrap();
        }
    });
}

/// Returns what the droplet has reported since its operator forgot what it received.
fn reported(rig: &Rig) -> Vec<Dropped> {
    let shared = rig.operator.shared.lock().unwrap();
    let received = shared.received.iter();
    let drops = received.filter_map(|message| match message {
        Message::Denials(report) => Some(report.drops.clone()),
        _ => None,
    });
    drops.flatten().collect()
}

#[test]
fn the_operator_is_told_of_drops_if_it_asks() {
    let mut rows = base_rows();
    rows.push(local(7, "p1", POD));
    let mut rig = Rig::prepare(rows);
    rig.flags = vec!["--denial-interval".into(), "1".into()];
    rig.start();
    rig.operator.wait_for_ack();
    rig.add_pod("p1");
    let pause = || std::thread::sleep(Duration::from_millis(2500));
    send(&rig, OUTSIDE, 3);
    pause();
    assert!(reported(&rig).is_empty(), "nobody has asked");

    rig.operator.ask_for_drops();
    pause();
    assert!(reported(&rig).is_empty(), "of before");
    send(&rig, GROUP, 5);
    pause();
    assert!(reported(&rig).is_empty(), "noise");
    send(&rig, OUTSIDE, 4);
    rig.operator
        .wait_for("a report", |message| matches!(message, Message::Denials(_)));
    pause();
    let told = reported(&rig);
    let is_it = |dropped: &Dropped| {
        dropped.reason == Counter::OutsideVpc as u32 && dropped.vni == 7 && dropped.address == mapped(POD)
    };
    assert!(told.iter().all(is_it), "{told:?}");
    assert_eq!(told.iter().map(|dropped| dropped.packets).sum::<u64>(), 4);

    // An operator that does not know of drops asks without them.
    rig.operator.ask_for_denials(&[]);
    pause();
    rig.operator.forget_received();
    send(&rig, OUTSIDE, 2);
    pause();
    assert!(reported(&rig).is_empty(), "nobody asks any more");
}
