//! The wall clock of the node goes forth and back by an hour under a running transitd: nothing changes.

use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};

use crate::flow::{Flow, datagrams, port};
use crate::rig::{Rig, base_rows, eventually, local};

#[test]
fn steps_of_the_wall_clock_by_an_hour_change_nothing() {
    let mut rows = base_rows();
    rows.extend([local(7, "p1", 5), local(7, "p2", 6), local(7, "p3", 7)]);
    let mut rig = Rig::prepare(rows);
    let clock = rig.directory.join("clock");
    let step = |seconds: i64| std::fs::write(&clock, seconds.to_string()).unwrap();
    step(0);
    // The feature `clock-steps` reads this.
    rig.environment = vec![("CLOCK_STEP".into(), clock.display().to_string())];
    rig.flags = vec!["--metrics-port".into(), "6084".into()];
    rig.start();
    rig.operator.wait_for_ack();
    for pod in ["p1", "p2"] {
        rig.add_pod(pod);
    }
    let of = |pod: &str| format!("{}-{pod}", rig.name);
    assert!(rig.ping("p1", "10.0.1.6"));
    let flow = Flow::start(1, datagrams(&of("p1"), "10.0.1.6:7", 1), port(&of("p2"), 7));
    let attempts = rig.metrics()["stream_attempts_total"];
    for (round, seconds) in [3600, -3600, 0].into_iter().enumerate() {
        step(seconds);
        // Keep-alives, scans and reports pass.
        std::thread::sleep(Duration::from_secs(2));
        assert_eq!(
            rig.metrics()["stream_attempts_total"],
            attempts,
            "the same stream"
        );
        // A new sandbox takes the pod's traffic, and the DEL of the old one leaves it alone.
        let (old, new) = (format!("c{round}"), format!("c{}", round + 1));
        let netns = rig.pod_namespace(&new);
        if round == 0 {
            let first = rig.pod_namespace(&old);
            rig.add(&old, "p3", &first).unwrap();
        }
        rig.add(&new, "p3", &netns).unwrap();
        assert!(
            rig.ping(&new, "10.0.1.5"),
            "after a step to {seconds}: {}",
            rig.log()
        );
        assert_eq!(rig.del(&old), None);
        assert!(rig.ping(&new, "10.0.1.5"), "after a step to {seconds}");
    }
    // A DEL that waited while the clock went back is for the attachment that existed then.
    rig.kill();
    assert_eq!(rig.plugin("DEL", "c3", "1.1.0", json!({})), (0, Value::Null));
    step(-3600);
    rig.start();
    eventually("done", || rig.rows("ATTACHMENTS").len() == 2);
    let hour_ago = Command::new("date")
        .args(["-u", "-d", "-1 hour", "+%FT%H"])
        .output()
        .unwrap();
    let hour_ago = String::from_utf8(hour_ago.stdout).unwrap();
    assert!(
        rig.log().contains(hour_ago.trim()),
        "its clock did go back: {}",
        rig.log()
    );
    let outcome = flow.stop();
    assert_eq!((outcome.lost, outcome.foreign), (0, 0), "{outcome:?}");
}
