//! The stream to the operator: to an operator of the previous version, with rows of a future version, and soon back
//! after it ends.

use std::time::{Duration, Instant};

use thuban_proto::PROTOCOL_VERSION;
use thuban_proto::transit::{Row as AnyRow, RowKey, droplet_message::Message};

use crate::rig::{Rig, base_rows, local};

#[test]
fn an_operator_of_the_version_before_is_spoken_to_in_its_own() {
    let mut rig = Rig::prepare(base_rows());
    rig.flags = vec!["--load-interval".into(), "1".into()];
    rig.operator.shared.lock().unwrap().speaks = Some(PROTOCOL_VERSION - 1);
    let start = Instant::now();
    rig.start();
    rig.operator.wait_for_ack();
    println!("served after {:?}", start.elapsed());
    assert_eq!(
        rig.operator.hellos().last().unwrap().protocol_version,
        PROTOCOL_VERSION - 1
    );
    rig.operator
        .push_and_wait(vec![local(7, "p", 5), local(7, "q", 6)], vec![]);
    rig.add_pod("p");
    rig.add_pod("q");
    assert!(rig.ping("p", "10.0.1.6"));
    // The operator is updated: the next stream has this version again.
    rig.operator.shared.lock().unwrap().speaks = Some(PROTOCOL_VERSION);
    rig.operator.forget_received();
    rig.operator.hang_up();
    rig.operator.wait_for_ack();
    assert_eq!(
        rig.operator.hellos().last().unwrap().protocol_version,
        PROTOCOL_VERSION
    );
}

#[test]
fn rows_of_a_kind_to_come_are_ignored_and_the_stream_goes_on() {
    let rig = Rig::new(base_rows());
    let row = |row| AnyRow { row: Some(row) };
    let sequence = rig.operator.push_raw(
        vec![AnyRow { row: None }, row(local(7, "p", 5)), AnyRow { row: None }],
        vec![RowKey { key: None }],
    );
    rig.operator.wait_for_ack_of(sequence);
    rig.operator.push_and_wait(vec![local(7, "q", 6)], vec![]);
    assert_eq!(rig.operator.count(|m| matches!(m, Message::Nack(_))), 0);
    assert_eq!(rig.operator.hellos().len(), 1, "one stream");
    assert!(rig.log().contains("are ignored"), "{}", rig.log());
}

#[test]
fn ended_stream_is_redialled_at_once_and_silent_one_soon() {
    let mut rig = Rig::new(base_rows());
    // This stream has lasted for a while.
    std::thread::sleep(Duration::from_secs(6));
    let again = |rig: &Rig, what: &str| {
        let start = Instant::now();
        rig.operator
            .wait_for("a hello", |m| matches!(m, Message::Hello(_)));
        println!("{what}: {:?}", start.elapsed());
        start.elapsed()
    };
    rig.operator.forget_received();
    rig.operator.hang_up();
    assert!(again(&rig, "ended") < Duration::from_secs(1));
    rig.operator.wait_for_ack();
    rig.operator.forget_received();
    // The operator's node is dead: nothing answers, nothing is closed.
    rig.on_node("ip link set lo down");
    std::thread::sleep(Duration::from_secs(11));
    rig.on_node("ip link set lo up");
    assert!(again(&rig, "reachable again") < Duration::from_secs(4));
    rig.kill();
}
