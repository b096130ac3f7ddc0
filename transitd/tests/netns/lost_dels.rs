//! DELs that are lost, doubled, late, or come after their namespace: attachments that belong to a pod stay, the rest
//! goes.

use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

use crate::rig::{Rig, base_rows, eventually, local};

const PODS: u8 = 8;

fn pods() -> Vec<String> {
    (0..PODS).map(|number| format!("p{number}")).collect()
}

fn rig() -> Rig {
    let mut rows = base_rows();
    rows.extend(pods().iter().zip(10..).map(|(pod, last)| local(7, pod, last)));
    rows.push(local(7, "stays", 5));
    let mut rig = Rig::new(rows);
    rig.pod_namespace("stays");
    rig.plugin_add("stays");
    for pod in pods() {
        rig.pod_namespace(&pod);
    }
    rig
}

fn sorted(rig: &Rig) -> Vec<String> {
    let mut traces = rig.traces();
    traces.sort();
    traces
}

fn all_at_once(rig: &Rig, verbs: &[(&str, &str)]) -> Vec<(i32, Value)> {
    thread::scope(|scope| {
        let calls: Vec<_> = verbs
            .iter()
            .map(|(verb, pod)| scope.spawn(move || rig.plugin(verb, pod, "1.1.0", json!({}))))
            .collect();
        calls.into_iter().map(|call| call.join().unwrap()).collect()
    })
}

#[test]
fn double_or_late_del_succeeds_and_lost_del_is_cleaned_up() {
    let mut rig = rig();
    let before = sorted(&rig);
    for pod in pods() {
        rig.plugin_add(&pod);
    }
    // Two DELs of each pod run at once.
    let doubled = all_at_once(
        &rig,
        &[("DEL", "p0"), ("DEL", "p0"), ("DEL", "p1"), ("DEL", "p1")],
    );
    assert!(
        doubled.iter().all(|answer| *answer == (0, Value::Null)),
        "{doubled:?}"
    );
    // The namespace is gone before the DEL.
    for pod in ["p2", "p3"] {
        rig.remove_namespace(pod);
        assert_eq!(rig.plugin("DEL", pod, "1.1.0", json!({})), (0, Value::Null));
    }
    // The DEL never comes, also not after a restart.
    for pod in ["p4", "p5"] {
        rig.remove_namespace(pod);
    }
    rig.kill();
    for pod in ["p6", "p7"] {
        rig.remove_namespace(pod);
    }
    rig.start();
    rig.operator.wait_for_ack();
    eventually("nothing of them is left", || sorted(&rig) == before);
    assert!(rig.ping_from_node("10.0.1.5"));
}

#[test]
fn forgotten_sandbox_is_removed_only_once_pod_has_another() {
    let mut rig = rig();
    let netns = rig.pod_namespace("forgotten");
    rig.add("forgotten", "p0", &netns).unwrap();
    assert!(rig.in_pod("forgotten", "ip link show eth0"));
    // This attachment is the only one of its pod: it stays, whatever the runtime thinks.
    thread::sleep(Duration::from_secs(3));
    assert!(rig.ping("forgotten", "10.0.1.5"));
    rig.plugin_add("p0");
    eventually("the forgotten one goes", || {
        !rig.in_pod("forgotten", "ip link show eth0")
    });
    thread::sleep(Duration::from_secs(2));
    assert!(rig.ping("p0", "10.0.1.5"), "{}", rig.log());
    assert_eq!(rig.plugin("DEL", "p0", "1.1.0", json!({})), (0, Value::Null));
}

#[test]
fn concurrent_add_and_del_leave_a_whole_pod_or_none() {
    let rig = rig();
    let before = sorted(&rig);
    for round in 0..4 {
        let names = pods();
        let mut verbs = Vec::new();
        for pod in &names {
            let pair = [("ADD", pod.as_str()), ("DEL", pod.as_str())];
            verbs.extend(if round % 2 == 0 { pair } else { [pair[1], pair[0]] });
        }
        let answers = all_at_once(&rig, &verbs);
        for ((verb, pod), (exit, answer)) in verbs.iter().zip(&answers) {
            assert_eq!(*exit, 0, "{verb} of {pod}: {answer}");
        }
        for ((verb, pod), (_, result)) in verbs.iter().zip(&answers) {
            if *verb == "ADD" {
                let previous = json!({ "prevResult": result });
                let (exit, error) = rig.plugin("CHECK", pod, "1.1.0", previous);
                // 3: the DEL came after the ADD.
                assert!(exit == 0 || error["code"] == 3, "{pod}: {error}");
                assert_eq!(rig.in_pod(pod, "ip link show eth0"), exit == 0, "{pod}");
            }
        }
        let dels: Vec<_> = names.iter().map(|pod| ("DEL", pod.as_str())).collect();
        all_at_once(&rig, &dels);
        assert_eq!(sorted(&rig), before);
    }
}
