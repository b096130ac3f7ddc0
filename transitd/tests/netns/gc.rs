//! GC by the real plugin: an attachment that the runtime does not list goes only if a second source says that its pod
//! is gone.

use serde_json::{Value, json};
use thuban_proto::transit::{RowKey, row_key::Key};

use crate::rig::{Rig, base_rows, local, mapped};

fn rig() -> Rig {
    let mut rows = base_rows();
    for (pod, last) in [("a", 5), ("b", 6), ("c", 7), ("d", 8)] {
        rows.push(local(7, pod, last));
    }
    let mut rig = Rig::new(rows);
    for pod in ["a", "b", "c", "d"] {
        rig.pod_namespace(pod);
        rig.plugin_add(pod);
    }
    rig
}

fn files(rig: &Rig) -> Vec<String> {
    let entries = std::fs::read_dir(rig.directory.join("state/attachments")).unwrap();
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

fn endpoint_goes(rig: &Rig, last: u8) {
    let key = thuban_proto::transit::AddressKey {
        vni: 7,
        address: mapped(last),
    };
    rig.operator.push_and_wait(
        vec![],
        vec![RowKey {
            key: Some(Key::Local(key)),
        }],
    );
}

fn gc(rig: &Rig, more: Value) -> (i32, Value) {
    rig.plugin("GC", "nobody", "1.1.0", more)
}

#[test]
fn gc_removes_unlisted_only_if_operator_or_kernel_agrees() {
    let rig = rig();
    let key = |pod: &str| json!({"containerID": pod, "ifname": "eth0"});
    // The operator says that the pods of c and d are gone, but the runtime lists d.
    endpoint_goes(&rig, 7);
    endpoint_goes(&rig, 8);
    let list = json!({"cni.dev/valid-attachments": [key("a"), key("d")]});
    assert_eq!(gc(&rig, list), (0, Value::Null));
    assert_eq!(
        files(&rig),
        ["a_eth0.json", "b_eth0.json", "d_eth0.json"],
        "{}",
        rig.log()
    );
    assert!(rig.log().contains("its pod is there: it stays"));
    assert!(rig.ping("a", "10.0.1.6"), "b works on");
    // A runtime that lost its memory lists nothing.
    assert_eq!(
        gc(&rig, json!({"cni.dev/valid-attachments": []})),
        (0, Value::Null)
    );
    assert_eq!(files(&rig), ["a_eth0.json", "b_eth0.json"]);
    // Rows of the operator count only while it is there.
    rig.operator.wait_for(
        "the removal of c",
        |m| matches!(m, thuban_proto::transit::droplet_message::Message::Attachment(change) if change.removed),
    );
}

#[test]
fn an_absent_list_and_another_networks_list_touch_nothing() {
    let rig = rig();
    endpoint_goes(&rig, 7);
    for absent in [json!({}), json!({"cni.dev/valid-attachments": null})] {
        let (exit, error) = gc(&rig, absent);
        assert_eq!((exit, &error["code"]), (1, &json!(7)), "{error}");
    }
    let other = json!({"name": "other", "cni.dev/valid-attachments": []});
    assert_eq!(gc(&rig, other), (0, Value::Null));
    assert_eq!(files(&rig).len(), 4);
    let bad = json!({"cni.dev/valid-attachments": [{"containerID": "../x", "ifname": "eth0"}]});
    assert_eq!(gc(&rig, bad).1["code"], 4);
    assert_eq!(files(&rig).len(), 4);
}

#[test]
fn gc_removes_nothing_after_restart_without_the_operator() {
    let mut rig = rig();
    rig.kill();
    rig.operator.shared.lock().unwrap().epoch = 0;
    rig.start();
    crate::rig::eventually("GC is served", || {
        gc(&rig, json!({"cni.dev/valid-attachments": []})).0 == 0
    });
    assert_eq!(files(&rig).len(), 4, "{}", rig.log());
}
