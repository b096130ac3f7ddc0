//! Flows that a whole transitd tells thuban-observe of.

use std::net::{Ipv4Addr, TcpListener, UdpSocket};
use std::time::{Duration, Instant};

use aya::maps::{HashMap, Map, MapData};
use thuban_common::counters::Counter;
use thuban_common::flow_events::{SeenFlowEntry, SeenFlowKey};
use thuban_proto::observe::{DenyingPolicy, Flow, FlowEvent, FlowMode};
use thuban_proto::transit::row::Row;
use thuban_testkit::observe::Observer;

use crate::denials::{INGRESS, judged, sets};
use crate::rig::{Rig, base_rows, in_namespace, local, mapped};

/// An address in no range of the VPC, which has no way out.
const OUTSIDE: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 9);
const FIRST: Ipv4Addr = Ipv4Addr::new(10, 0, 1, 5);
/// How soon an event must be told.
const SOON: Duration = Duration::from_secs(5);

/// Makes a node with the pods p1, which no other pod may reach, and p2. Its daemon tells the observer of flows.
fn observed(flags: &[&str]) -> (Rig, Observer) {
    let mut rows: Vec<Row> = base_rows();
    rows.extend(sets());
    rows.extend([judged("p1", 5, INGRESS, 0), local(7, "p2", 6)]);
    let mut rig = Rig::prepare(rows);
    let listener = in_namespace(rig.node(), || TcpListener::bind("127.0.0.1:0").unwrap());
    let observer = Observer::start(listener, &rig.directory);
    let (ca, token) = (observer.ca.display(), rig.directory.join("token"));
    rig.flags = vec![
        "--observe-namespace=observe".into(),
        format!("--observe-address={}", observer.address),
        format!("--observe-ca={ca}"),
        format!("--observe-token-file={}", token.display()),
    ];
    rig.flags.extend(flags.iter().map(|flag| (*flag).to_owned()));
    rig.start();
    rig.operator.wait_for_ack();
    for pod in ["p1", "p2"] {
        rig.add_pod(pod);
    }
    observer.wait_for("a stream", |heard| !heard.reports.is_empty());
    (rig, observer)
}

/// Sends a datagram from p2 to a port that nobody has.
fn send(rig: &Rig, to: Ipv4Addr, port: u16) {
    in_namespace(&format!("{}-p2", rig.name), move || {
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap();
        socket.send_to(b"?", (to, port)).unwrap();
    });
}

/// Waits for an event that fits.
fn wait_for(observer: &Observer, what: &str, fits: impl Fn(&Flow) -> bool) -> Flow {
    let begin = Instant::now();
    observer.wait_for(what, |heard| {
        let mut flows = heard.reports.iter().flat_map(|report| &report.flows);
        flows.any(&fits)
    });
    let took = begin.elapsed();
    assert!(took < SOON, "{what}: {took:?}");
    observer.flows().into_iter().find(fits).unwrap()
}

#[test]
fn thuban_observe_is_told_of_dropped_packets_soon() {
    let (rig, observer) = observed(&[]);
    {
        let heard = observer.heard.lock().unwrap();
        let first = &heard.reports[0];
        assert_eq!(
            (first.droplet.as_str(), first.mode()),
            ("node-t", FlowMode::Drops)
        );
        assert_eq!(heard.tokens, ["Bearer a-token"]);
    }
    send(&rig, OUTSIDE, 53);
    let flow = wait_for(&observer, "the packet out of the VPC", |flow| {
        flow.destination_port == 53
    });
    assert_eq!((flow.vni, flow.protocol, flow.packets), (7, 17, 1));
    assert_eq!(flow.source, mapped(6));
    assert_eq!(flow.destination, OUTSIDE.to_ipv6_mapped().octets());
    assert_eq!(flow.counter, Counter::OutsideVpc as u32);
    assert_eq!(flow.event(), FlowEvent::First);
    assert_eq!(flow.denied_by, None);

    send(&rig, FIRST, 8080);
    let flow = wait_for(&observer, "the packet that policy denies", |flow| {
        flow.destination_port == 8080
    });
    assert_eq!(flow.counter, Counter::PolicyIngress as u32);
    assert_eq!(
        flow.denied_by,
        Some(DenyingPolicy::default()),
        "no rule accepts it"
    );
    let passed = |flow: &Flow| Counter::of(flow.counter).is_none_or(|counter| !counter.is_drop());
    assert!(!observer.flows().iter().any(passed), "drops alone are told");
}

#[test]
fn a_flow_that_goes_silent_is_told_to_its_last_packet() {
    let (mut rig, observer) = observed(&["--flows=all"]);
    // The next daemon looks for such flows at once.
    rig.kill();
    let key = SeenFlowKey {
        source: FIRST.to_ipv6_mapped().octets(),
        destination: OUTSIDE.to_ipv6_mapped().octets(),
        vni: 7,
        server_port: 4053_u16.to_be(),
        protocol: 17,
        verdict: Counter::SentDirect as u8,
        ..SeenFlowKey::default()
    };
    let entry = SeenFlowEntry {
        packets: 3,
        bytes: 180,
        ..SeenFlowEntry::default()
    };
    let maps = rig.pins().join("maps");
    let data = MapData::from_pin(maps.join("SEEN_FLOWS")).unwrap();
    let mut table: HashMap<MapData, SeenFlowKey, SeenFlowEntry> = Map::LruHashMap(data).try_into().unwrap();
    table.insert(key, entry, 0).unwrap();
    rig.start();
    rig.operator.wait_for_ack();
    let flow = wait_for(&observer, "the rest", |flow| flow.destination_port == 4053);
    assert_eq!((flow.packets, flow.bytes), (3, 180));
    assert_eq!(flow.event(), FlowEvent::GoesOn);
    let left = table.get(&key, 0).unwrap();
    assert_eq!((left.packets, left.bytes), (0, 0));
}

#[test]
fn without_a_namespace_or_a_mode_nobody_is_told() {
    let (mut rig, observer) = observed(&[]);
    let told = rig.flags.clone();
    for (flag, value) in [("--flows", "off"), ("--observe-namespace", "")] {
        rig.kill();
        rig.flags = told.clone();
        rig.flags.retain(|given| !given.starts_with(flag));
        rig.flags.push(format!("{flag}={value}"));
        rig.start();
        rig.operator.wait_for_ack();
        observer.heard.lock().unwrap().reports.clear();
        send(&rig, OUTSIDE, 53);
        std::thread::sleep(Duration::from_secs(3));
        assert!(observer.heard.lock().unwrap().reports.is_empty(), "{flag}");
    }
}
