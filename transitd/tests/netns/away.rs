//! The operator is out of reach while transitd restarts: transitd still serves the pods that the operator has placed
//! here.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use thuban_proto::transit::{AddressKey, RowKey, droplet_message::Message, row_key::Key};

use crate::flow::{Flow, datagrams, port};
use crate::rig::{Rig, base_rows, eventually, local, mapped};

/// Length of the outage; `THUBAN_SOAK_AWAY` sets another one.
const SECONDS: u64 = 10;

fn rig() -> Rig {
    let mut rows = base_rows();
    rows.extend([
        local(7, "p1", 5),
        local(7, "p2", 6),
        local(7, "p3", 7),
        local(8, "q", 9),
    ]);
    let mut rig = Rig::new(rows);
    for pod in ["p1", "p2", "p3", "q", "stranger"] {
        rig.pod_namespace(pod);
    }
    rig
}

/// Kills the daemon and starts it while no operator answers.
fn restart_alone(rig: &mut Rig) {
    rig.kill();
    rig.on_node("ip link set lo down");
    rig.start();
    eventually("alive", || rig.probe(true).0 == 0);
}

#[test]
fn transitd_started_without_operator_serves_pods_with_rows() {
    let mut rig = rig();
    let result = rig.plugin_add("p1");
    rig.plugin_add("p2");
    restart_alone(&mut rig);
    let check = json!({ "prevResult": result });
    assert_eq!(rig.plugin("CHECK", "p1", "1.1.0", check), (0, Value::Null));
    // One pod that waited for its sandbox, and one pod that gets a new sandbox.
    rig.plugin_add("p3");
    assert_eq!(rig.plugin("DEL", "p2", "1.1.0", json!({})), (0, Value::Null));
    rig.plugin_add("p2");
    rig.plugin_add("q");
    assert!(rig.ping("p3", "10.0.1.5") && rig.ping("p2", "10.0.1.7") && rig.ping_from_node("10.0.1.6"));
    assert!(!rig.ping("q", "10.0.1.5"), "another VPC");
    // A pod that the operator has not announced is refused, with the reason.
    let (exit, error) = rig.plugin("ADD", "stranger", "1.1.0", json!({}));
    assert_eq!((exit, &error["code"]), (1, &json!(11)), "{error}");
    assert!(
        error["msg"]
            .as_str()
            .unwrap()
            .contains("no stream to the operator"),
        "{error}"
    );
    assert!(!rig.in_pod("stranger", "ip link show eth0"));
    // The operator is back, and receives all reports.
    rig.operator.forget_received();
    rig.on_node("ip link set lo up");
    rig.operator.wait_for_ack();
    let hello = rig.operator.hellos().last().unwrap().clone();
    assert_eq!(hello.attachments.len(), 4);
    assert!(rig.ping("p3", "10.0.1.5") && rig.ping("p2", "10.0.1.7"));
}

#[test]
fn endpoint_removed_with_ack_is_not_served_after_restart() {
    let mut rig = rig();
    let key = |last| RowKey {
        key: Some(Key::Local(AddressKey {
            vni: 7,
            address: mapped(last),
        })),
    };
    rig.operator.push_and_wait(vec![], vec![key(7)]);
    restart_alone(&mut rig);
    let (exit, error) = rig.plugin("ADD", "p3", "1.1.0", json!({}));
    assert_eq!((exit, &error["code"]), (1, &json!(11)), "{error}");
    rig.plugin_add("p1");
    // Rows of the operator count as soon as it is there.
    rig.operator
        .shared
        .lock()
        .unwrap()
        .rows
        .retain(|row| *row != local(7, "p1", 5) && *row != local(7, "p3", 7));
    rig.operator.forget_received();
    rig.on_node("ip link set lo up");
    rig.operator.wait_for_ack();
    assert_eq!(rig.rows("ATTACHMENTS").len(), 0, "fenced");
    assert_eq!(rig.operator.count(|m| matches!(m, Message::Nack(_))), 0);
}

#[test]
fn a_file_of_endpoints_that_is_torn_or_forged_is_not_believed() {
    let mut rig = rig();
    let path = rig.directory.join("state/endpoints");
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text.replace("10.0.1.5", "10.0.1.6")).unwrap();
    restart_alone(&mut rig);
    assert!(!path.exists());
    assert!(rig.log().contains("not believed"), "{}", rig.log());
    let (exit, error) = rig.plugin("ADD", "p1", "1.1.0", json!({}));
    assert_eq!((exit, &error["code"]), (1, &json!(11)), "{error}");
    rig.operator.forget_received();
    rig.on_node("ip link set lo up");
    rig.operator.wait_for_ack();
    rig.plugin_add("p1");
    eventually("kept again", || path.exists());
}

/// Runs an outage. transitd looks through its attachments every second here, every 30 by default: two minutes are an
/// hour of looks.
fn outage(with_restarts: bool) {
    let seconds = std::env::var("THUBAN_SOAK_AWAY").map_or(SECONDS, |text| text.parse().unwrap());
    let mut rig = rig();
    for pod in ["p1", "p2"] {
        rig.plugin_add(pod);
    }
    let of = |rig: &Rig, pod: &str| format!("{}-{pod}", rig.name);
    assert!(rig.ping("p1", "10.0.1.6"));
    let flow = Flow::start(
        1,
        datagrams(&of(&rig, "p1"), "10.0.1.6:7", 1),
        port(&of(&rig, "p2"), 7),
    );
    rig.on_node("ip link set lo down");
    let (start, mut restarts, mut served) = (Instant::now(), 0, 0);
    while start.elapsed() < Duration::from_secs(seconds) {
        if with_restarts {
            rig.kill();
            rig.start();
            eventually("alive", || rig.probe(true).0 == 0);
            restarts += 1;
        }
        for _ in 0..3 {
            rig.plugin_add("p3");
            assert!(rig.ping("p3", "10.0.1.5"));
            assert_eq!(rig.plugin("DEL", "p3", "1.1.0", json!({})), (0, Value::Null));
            served += 1;
        }
    }
    let away = start.elapsed();
    rig.operator.forget_received();
    rig.on_node("ip link set lo up");
    let back = Instant::now();
    rig.operator.wait_for_ack();
    let healed = back.elapsed();
    let outcome = flow.stop();
    println!(
        "away {away:?}: {restarts} restarts, {served} ADDs and DELs, {outcome:?}; a stream again after {healed:?}"
    );
    assert_eq!((outcome.lost, outcome.foreign), (0, 0));
}

#[test]
fn restarts_in_outage_lose_no_packet_and_serve_add_and_del() {
    outage(true);
}

#[test]
fn an_outage_without_a_restart_is_the_same() {
    outage(false);
}
