//! Probes of paths: a pod sends one packet when the operator asks, and the programs' verdicts are reported.

use std::net::{Ipv4Addr, TcpListener};
use std::time::Duration;

use thuban_common::counters::Counter;
use thuban_proto::transit::droplet_message::Message;
use thuban_proto::transit::{Probe, ProbeAnswer, Probed, Sighting};

use crate::rig::{Rig, base_rows, in_namespace, local, mapped};

const TCP: u32 = 6;
const PORT: u16 = 8080;
/// The last bytes of the pods' addresses, and of one that nobody has.
const SERVER: u8 = 5;
const CLIENT: u8 = 6;
const NOBODY: u8 = 99;
/// A little more than the time between two packets of a pod.
const PAUSE: Duration = Duration::from_millis(1100);

fn rig() -> Rig {
    let mut rows = base_rows();
    rows.extend([local(7, "p1", SERVER), local(7, "p2", CLIENT)]);
    let mut rig = Rig::new(rows);
    rig.add_pod("p1");
    rig.add_pod("p2");
    rig
}

/// Has the client send to a port of an address, and returns the report.
fn probed(rig: &Rig, id: u64, to: u8, port: u16) -> Probed {
    ask(
        rig,
        Probe {
            id,
            vni: 7,
            source: mapped(CLIENT),
            destination: mapped(to),
            protocol: TCP,
            source_port: 61_000 + id as u32,
            port: port.into(),
            send: true,
        },
    )
}

fn ask(rig: &Rig, probe: Probe) -> Probed {
    let id = probe.id;
    rig.operator.probe(probe);
    let reported = rig.operator.wait_for(
        "the report of a probe",
        |message| matches!(message, Message::Probed(probed) if probed.id == id),
    );
    match reported {
        Message::Probed(probed) => probed,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_pod_sends_a_packet_and_hears_the_answer() {
    let rig = rig();
    assert!(rig.operator.hellos().iter().all(|hello| hello.can_probe));
    let listener = in_namespace(&format!("{}-p1", rig.name), || {
        TcpListener::bind((Ipv4Addr::UNSPECIFIED, PORT)).unwrap()
    });
    let answered = probed(&rig, 1, SERVER, PORT);
    assert_eq!(answered.answer(), ProbeAnswer::Answered, "{answered:?}");
    let is_delivered = |seen: &Sighting| seen.counter == Counter::DeliveredLocal as u32;
    assert!(answered.sightings.iter().any(is_delivered), "{answered:?}");
    assert_eq!(answered.sightings[0].after_ns, 0);
    drop(listener);
    std::thread::sleep(PAUSE);
    let refused = probed(&rig, 2, SERVER, PORT);
    assert_eq!(refused.answer(), ProbeAnswer::Refused, "{refused:?}");
    std::thread::sleep(PAUSE);
    let silent = probed(&rig, 3, NOBODY, PORT);
    assert_eq!(silent.answer(), ProbeAnswer::Silent, "{silent:?}");
    assert!(!silent.sightings.is_empty(), "the agent has seen it");
}

#[test]
fn a_pod_sends_one_packet_a_second_at_most() {
    let rig = rig();
    let first = probed(&rig, 1, SERVER, PORT);
    assert_eq!(first.answer(), ProbeAnswer::Refused, "{first:?}");
    // The report of the first came within the second.
    let second = probed(&rig, 2, SERVER, PORT);
    assert_eq!(second.answer(), ProbeAnswer::TooOften, "{second:?}");
    std::thread::sleep(PAUSE);
    let third = probed(&rig, 3, SERVER, PORT);
    assert_eq!(third.answer(), ProbeAnswer::Refused, "{third:?}");
}

#[test]
fn a_droplet_without_the_pod_sends_nothing() {
    let rig = rig();
    let probe = |id, source: u8, send| Probe {
        id,
        vni: 7,
        source: mapped(source),
        destination: mapped(SERVER),
        protocol: TCP,
        source_port: 61_000,
        port: PORT.into(),
        send,
    };
    let unknown = ask(&rig, probe(1, NOBODY, true));
    assert_eq!(unknown.answer(), ProbeAnswer::NoPod, "{unknown:?}");
    assert!(unknown.sightings.is_empty(), "{unknown:?}");
    let watched = ask(&rig, probe(2, CLIENT, false));
    assert_eq!(watched.answer(), ProbeAnswer::Unspecified, "{watched:?}");
    assert!(watched.sightings.is_empty(), "{watched:?}");
}
