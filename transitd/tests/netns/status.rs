//! STATUS by the real plugin: it says the truth, and bridges a restart of transitd.

use std::time::Duration;

use serde_json::{Value, json};
use thuban_proto::transit::droplet_message::Message;

use crate::rig::{Rig, base_rows, eventually};

fn status(rig: &Rig) -> (i32, Value) {
    rig.plugin("STATUS", "nobody", "1.1.0", json!({}))
}

/// Asserts that STATUS fails with code 50, and with the reason in this part of the error.
fn assert_not_ready(rig: &Rig, part: &str, text: &str) {
    let (exit, error) = status(rig);
    assert_eq!((exit, &error["code"]), (1, &json!(50)), "{error}");
    assert!(error[part].as_str().unwrap().contains(text), "{error}");
}

#[test]
fn a_restart_of_transitd_never_fails_status() {
    let mut rig = Rig::new(base_rows());
    eventually("ready", || rig.directory.join("run/ready").exists());
    assert_eq!(status(&rig), (0, Value::Null));
    for _ in 0..3 {
        rig.kill();
        assert_eq!(status(&rig), (0, Value::Null), "just gone");
        std::thread::sleep(Duration::from_millis(200));
        assert_eq!(status(&rig), (0, Value::Null), "away");
        assert!(rig.directory.join("run/away").exists());
        // Otherwise the file of the previous transitd would count until this one removes it.
        std::fs::remove_file(rig.directory.join("run/ready")).unwrap();
        rig.start();
        while !rig.directory.join("run/ready").exists() {
            assert_eq!(status(&rig), (0, Value::Null), "starting");
        }
        assert_eq!(status(&rig), (0, Value::Null), "back");
        assert!(
            !rig.directory.join("run/away").exists(),
            "the absence is forgotten"
        );
    }
}

#[test]
fn long_absence_or_missing_program_fails_status_with_reason() {
    let mut rig = Rig::new(base_rows());
    eventually("ready", || rig.directory.join("run/ready").exists());
    rig.kill();
    assert_eq!(status(&rig), (0, Value::Null));
    let note = rig.directory.join("run/away");
    let age = || {
        let text = std::fs::read_to_string(&note).unwrap();
        let (boot, since) = text.trim().split_once(' ').unwrap();
        let since: u64 = since.parse().unwrap();
        std::fs::write(&note, format!("{boot} {}", since - 121)).unwrap();
    };
    age();
    assert_not_ready(&rig, "details", "does not answer");
    // transitd answers, but has no program: this counts as the same absence.
    rig.operator.shared.lock().unwrap().epoch = 0;
    rig.start();
    rig.operator
        .wait_for("a hello", |m| matches!(m, Message::Hello(_)));
    assert_not_ready(&rig, "details", "has not sent this node's program");
    rig.operator.shared.lock().unwrap().epoch = 2;
    rig.operator.hang_up();
    eventually("it has one", || status(&rig).0 == 0);
}

#[test]
fn a_node_that_never_served_is_not_ready_at_once() {
    let mut rig = Rig::prepare(base_rows());
    assert_eq!(status(&rig).1["code"], 50);
    rig.operator.shared.lock().unwrap().epoch = 0;
    std::fs::write(rig.directory.join("state/epoch"), "1").unwrap();
    rig.start();
    rig.operator
        .wait_for("a hello", |m| matches!(m, Message::Hello(_)));
    assert_not_ready(&rig, "msg", "has not sent this node's program");
}

#[test]
fn a_dead_uplink_is_code_51() {
    let rig = Rig::new(base_rows());
    rig.on_node("ip link set up0 down");
    // STATUS bridges this like a restart, because links flap.
    eventually("ready", || rig.directory.join("run/ready").exists());
    assert_eq!(status(&rig).0, 0);
    std::fs::remove_file(rig.directory.join("run/served")).unwrap();
    assert_eq!(status(&rig).1["code"], 51);
    rig.on_node("ip link set up0 up");
    assert_eq!(status(&rig), (0, Value::Null));
}
