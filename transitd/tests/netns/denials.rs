//! Who denied a packet: `transitd denials` and `transitd trace` name the policies.

use std::io::ErrorKind;
use std::net::{Ipv4Addr, UdpSocket};
use std::process::Command;
use std::time::Duration;

use serde_json::json;
use thuban_proto::transit::droplet_message::Message;
use thuban_proto::transit::row::Row;
use thuban_proto::transit::{Denial, PolicyAction, PolicyRule, PolicySetRow, PolicyTier, VpcRow};
use thuban_testkit::wait::uninterrupted;

use crate::follow::Follower;
use crate::policies::{FAR, STRANGER, pod, rig_with, tenants, vpcs_and_networks};
use crate::rig::{self, Rig, eventually, in_namespace, local, mapped};
use crate::tcp::{ANSWER_TIMEOUT, connect};

const FIRST: Ipv4Addr = Ipv4Addr::new(10, 0, 1, 5);
pub const INGRESS: u32 = 9;
const EGRESS: u32 = 10;

/// Returns sets of a VPC with a network policy that accepts nobody, and a cluster policy that lets nobody out.
pub fn sets() -> [Row; 2] {
    let of_nobody = PolicyRule {
        tier: PolicyTier::NetworkPolicy.into(),
        action: PolicyAction::Accept.into(),
        policy: "ns/default-deny".into(),
        ..PolicyRule::default()
    };
    let ingress = PolicySetRow {
        vni: 7,
        id: INGRESS,
        isolated: true,
        rules: vec![of_nobody],
        ..PolicySetRow::default()
    };
    let rule = PolicyRule {
        tier: PolicyTier::Admin.into(),
        action: PolicyAction::Deny.into(),
        policy: "no-way-out".into(),
        index: 2,
        anyone: true,
        ..PolicyRule::default()
    };
    let egress = PolicySetRow {
        vni: 7,
        id: EGRESS,
        egress: true,
        rules: vec![rule],
        ..PolicySetRow::default()
    };
    [Row::PolicySet(ingress), Row::PolicySet(egress)]
}

pub fn judged(uid: &str, last: u8, ingress_set: u32, egress_set: u32) -> Row {
    rig::judged(local(7, uid, last), 1, [ingress_set, egress_set])
}

/// Returns what a verb says, a line each.
fn say(command: &mut Command) -> Vec<String> {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().map(ToOwned::to_owned).collect()
}

fn denials(rig: &Rig, arguments: &[&str]) -> Vec<String> {
    say(rig.verb("denials").args(arguments))
}

#[test]
fn who_denied_a_packet_is_named() {
    let mut rig = rig_with(vec![]);
    assert_eq!(denials(&rig, &[]), Vec::<String>::new());
    let mut rows = sets().to_vec();
    rows.extend([judged("p1", 5, INGRESS, 0), judged("p2", 6, 0, EGRESS)]);
    rig.operator.push_and_wait(rows, vec![]);

    let follow = ["--follow", "--pod", "ns/p1", "--count", "1", "--seconds", "30"];
    let followed = Follower::start(rig.verb("denials").args(follow));
    let traced = Follower::start(rig.verb("trace").args(["--pod", "ns/p1", "--seconds", "4"]));
    let follow = ["--follow", "--count", "1", "--seconds", "30"];
    let also = Follower::start(rig.verb("denials").args(follow));
    assert!(connect(&pod(&rig, "p2"), FAR, 8080).is_err());
    assert!(connect(&pod(&rig, "p2"), FIRST, 8080).is_err());

    let by_default = json!({
        "reason": "NoRule",
        "policies": ["ns/default-deny"],
        "morePolicies": 0,
        "rule": null,
        "set": "000009",
    });
    let followed = followed.end();
    let [seen] = &followed[..] else {
        panic!("{followed:?}")
    };
    assert_eq!(seen["by"], by_default);
    assert_eq!(
        [
            &seen["direction"],
            &seen["sourcePod"],
            &seen["destinationPod"],
            &seen["source"],
            &seen["destination"]
        ],
        ["ingress", "ns/p2", "ns/p1", "10.0.1.6", "10.0.1.5"]
    );
    assert_eq!(
        (&seen["protocol"], &seen["destinationPort"]),
        (&json!(6), &json!(8080))
    );
    // Of the other pod's packets, those out of the VPC are denied too.
    assert_eq!(also.end().len(), 1);
    let traced = traced.end();
    let denied = traced
        .iter()
        .find(|line| line["verdict"] == "dropped, policy_ingress");
    assert_eq!(denied.unwrap()["deniedBy"], by_default);

    // Later it is still known, with what was denied on the way out.
    let lines = denials(&rig, &[]);
    let has = |start: &str, end: &str| {
        lines
            .iter()
            .any(|line| line.contains(start) && line.contains(end))
    };
    assert!(
        has(
            "Z ingress ns/p2 10.0.1.6:",
            " > ns/p1 10.0.1.5:8080 tcp: no rule of ns/default-deny accepts it, packets: "
        ),
        "{lines:?}"
    );
    assert!(
        has(
            "Z egress outside ns/p2 10.0.1.6:",
            " > 192.0.2.2:8080 tcp: denied by no-way-out rule 2, packets: "
        ),
        "{lines:?}"
    );
    assert_eq!((lines.len(), denials(&rig, &["--pod", "ns/p1"]).len()), (2, 1));
    let nobody = rig.verb("denials").args(["--pod", "ns/p9"]).output().unwrap();
    assert!(!nobody.status.success());

    // Without the daemon the set is named, and nothing is lost.
    rig.kill();
    let lines = denials(&rig, &["--pod", "ns/p1"]);
    assert!(
        lines.len() == 1
            && lines[0].contains("denied by set 000009, whose rules only a running transitd knows"),
        "{lines:?}"
    );
    let unread = rig.verb("denials").arg("--follow").output().unwrap();
    let unread = String::from_utf8(unread.stderr).unwrap();
    assert!(unread.contains("transitd does not run on this node"), "{unread}");
}

/// Returns what a pod hears of a connection to port 8080, and of a datagram.
fn heard(rig: &Rig, name: &str, to: Ipv4Addr) -> [Option<ErrorKind>; 2] {
    let connection = connect(&pod(rig, name), to, 8080).err();
    let datagram = in_namespace(&pod(rig, name), move || {
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap();
        socket.set_read_timeout(Some(ANSWER_TIMEOUT)).unwrap();
        socket.connect((to, 8080)).unwrap();
        socket.send(b"?").unwrap();
        uninterrupted(|| socket.recv(&mut [0; 8]))
            .err()
            .map(|error| error.kind())
    });
    [connection, datagram]
}

#[test]
fn in_a_vpc_that_rejects_pods_hear_of_denied_packets() {
    let rig = rig_with(vec![]);
    let mut rows = sets().to_vec();
    rows.extend([judged("p1", 5, INGRESS, 0), judged("p2", 6, INGRESS, EGRESS)]);
    let [_, Row::PolicySet(way_out)] = sets() else {
        panic!("sets")
    };
    rows.extend([
        Row::PolicySet(PolicySetRow { vni: 8, ..way_out }),
        rig::judged(tenants(8, "p3"), 0, [0, EGRESS]),
    ]);
    rig.operator.push_and_wait(rows, vec![]);
    // To a pod of the same node, and outside: by the nodes' VPC, and by a tenant's.
    let ways = [("p2", FIRST), ("p2", FAR), ("p3", STRANGER)];
    let nothing = [Some(ErrorKind::TimedOut), Some(ErrorKind::WouldBlock)];
    for (name, to) in ways {
        assert_eq!(heard(&rig, name, to), nothing, "{name} {to}");
    }
    let rejects = |reject| {
        let vpcs = vpcs_and_networks().into_iter().filter_map(|row| match row {
            Row::Vpc(vpc) => Some(Row::Vpc(VpcRow { reject, ..vpc })),
            _ => None,
        });
        rig.operator.push_and_wait(vpcs.collect(), vec![]);
    };
    rejects(true);
    // ICMP "administratively prohibited", not what somebody outside says.
    let refused = [
        Some(ErrorKind::ConnectionRefused),
        Some(ErrorKind::HostUnreachable),
    ];
    for (name, to) in ways {
        assert_eq!(heard(&rig, name, to), refused, "{name} {to}");
    }
    // kubelet is free, and so are the answers to it.
    assert!(rig.ping_from_node("10.0.1.6"));
    rejects(false);
    for (name, to) in ways {
        assert_eq!(heard(&rig, name, to), nothing, "{name} {to}");
    }
}

/// Returns what the droplet has reported since its operator forgot what it received.
fn reported(rig: &Rig) -> Vec<Denial> {
    let shared = rig.operator.shared.lock().unwrap();
    let received = shared.received.iter();
    let denials = received.filter_map(|message| match message {
        Message::Denials(report) => Some(report.denials.clone()),
        _ => None,
    });
    denials.flatten().collect()
}

#[test]
fn the_operator_is_told_what_it_asks_about() {
    let rig = rig_with(vec!["--denial-interval".into(), "1".into()]);
    let mut rows = sets().to_vec();
    rows.extend([judged("p1", 5, INGRESS, 0), judged("p2", 6, 0, EGRESS)]);
    rig.operator.push_and_wait(rows, vec![]);
    let deny = |rig: &Rig| {
        assert!(connect(&pod(rig, "p2"), FAR, 8080).is_err());
        assert!(connect(&pod(rig, "p2"), FIRST, 8080).is_err());
    };
    deny(&rig);
    std::thread::sleep(Duration::from_millis(2500));
    assert_eq!(reported(&rig), [], "nobody has asked");

    rig.operator.ask_for_denials(&[(7, INGRESS), (8, EGRESS)]);
    std::thread::sleep(Duration::from_millis(2500));
    assert_eq!(reported(&rig), [], "of before");
    deny(&rig);
    rig.operator
        .wait_for("a report", |message| matches!(message, Message::Denials(_)));
    let told = reported(&rig);
    let is_it = |denial: &Denial| {
        (denial.vni, denial.set, denial.protocol, denial.port) == (7, INGRESS, 6, 8080)
            && denial.source == mapped(6)
            && denial.destination == mapped(5)
            && denial.packets > 0
            && denial.age_ms < 60_000
            && denial.rank > 1
    };
    assert!(told.iter().all(is_it), "only what was asked about: {told:?}");

    // A new stream begins without a question, and what is denied meanwhile comes after the next one.
    std::thread::sleep(Duration::from_millis(2500));
    rig.operator.forget_received();
    rig.operator.hang_up();
    rig.operator.wait_for_ack();
    deny(&rig);
    std::thread::sleep(Duration::from_millis(2500));
    assert_eq!(reported(&rig), []);
    rig.operator.ask_for_denials(&[(7, INGRESS)]);
    eventually("what was denied before the question", || {
        !reported(&rig).is_empty()
    });
    rig.operator.ask_for_denials(&[]);
    std::thread::sleep(Duration::from_millis(1500));
    rig.operator.forget_received();
    deny(&rig);
    std::thread::sleep(Duration::from_millis(2500));
    assert_eq!(reported(&rig), [], "nobody asks any more");
}
