//! A transitd that crashes and comes back: no packet is lost, and what crashes left is removed.

use std::process::Command;
use std::time::Duration;

use thuban_proto::transit::droplet_message::Message;
use thuban_proto::transit::row::Row;

use crate::rig::{Rig, base_rows, eventually, local, ping};

fn rig() -> Rig {
    let mut rows = base_rows();
    rows.extend([local(7, "p1", 5), local(7, "p2", 6), local(7, "p3", 7)]);
    let mut rig = Rig::new(rows);
    rig.add_pod("p1");
    rig.add_pod("p2");
    rig
}

#[test]
fn traffic_flows_on_while_transitd_is_away_and_comes_back() {
    let mut rig = rig();
    let namespace = format!("{}-p1", rig.name);
    let flow = std::thread::spawn(move || ping(&namespace, None, "10.0.1.6", 200, Duration::from_secs(5)));
    rig.kill();
    std::thread::sleep(Duration::from_millis(500));
    assert!(rig.ping("p1", "10.0.1.6"), "without a daemon");
    rig.start();
    rig.operator.wait_for_ack();
    assert_eq!(flow.join().unwrap(), 200, "not one packet is lost");
    assert_eq!(rig.operator.hellos().last().unwrap().attachments.len(), 2);
    // transitd treats the adopted attachments as its own again.
    rig.add_pod("p3");
    assert!(rig.ping("p3", "10.0.1.5"));
    for pod in ["p1", "p2", "p3"] {
        assert_eq!(rig.del(pod), None);
    }
    assert_eq!(rig.traces(), Vec::<String>::new());
}

#[test]
fn rows_that_the_new_snapshot_lacks_go_and_the_others_stay() {
    let mut rig = rig();
    rig.kill();
    rig.operator.shared.lock().unwrap().rows.retain(|row| match row {
        Row::Vpc(vpc) => vpc.vni == 7,
        Row::Network(network) => network.vni == 7,
        row => *row != local(7, "p2", 6),
    });
    rig.start();
    rig.operator.wait_for_ack();
    assert_eq!(rig.rows("LOCAL_ENDPOINTS").len(), 1);
    assert_eq!(rig.rows("ATTACHMENTS").len(), 1);
    assert_eq!(rig.rows("VPCS").len(), 1);
    assert_eq!(rig.rows("SUBNETS").len(), 2);
    assert_eq!(rig.rows("DROPLETS").len(), 1);
}

#[test]
fn start_removes_veth_without_file_and_tolerates_torn_file() {
    let mut rig = rig();
    rig.kill();
    let directory = rig.directory.join("state/attachments");
    std::fs::remove_file(directory.join("p1_eth0.json")).unwrap();
    std::fs::write(directory.join("p2_eth0.json"), b"{\"sha256\":\"").unwrap();
    rig.start();
    rig.operator.wait_for_ack();
    eventually("both are cleared", || rig.rows("ATTACHMENTS").is_empty());
    assert!(rig.log().contains("p2_eth0.json"), "the torn file is named");
    assert_eq!(rig.del("p1"), None);
    assert_eq!(rig.del("p2"), None);
    let left: Vec<String> = rig
        .traces()
        .into_iter()
        .filter(|trace| !trace.contains("p2_eth0.torn"))
        .collect();
    assert_eq!(left, Vec::<String>::new());
}

#[test]
fn conflist_waits_for_first_snapshot_and_binary_does_not() {
    let mut rig = Rig::prepare(base_rows());
    rig.operator.shared.lock().unwrap().epoch = 0;
    std::fs::write(rig.directory.join("state/epoch"), "1").unwrap();
    rig.start();
    // The operator's epoch is too low: no snapshot is applied.
    rig.operator
        .wait_for("a hello", |m| matches!(m, Message::Hello(_)));
    std::thread::sleep(Duration::from_millis(500));
    assert!(rig.directory.join("bin/thuban").exists());
    assert!(!rig.directory.join("conf/05-thuban.conflist").exists());
    assert!(rig.rows("DROPLETS").is_empty());
    assert!(rig.log().contains("epoch 0 is lower than 1"), "{}", rig.log());
    rig.operator.shared.lock().unwrap().epoch = 2;
    rig.operator.hang_up();
    eventually("the conflist is written", || {
        rig.directory.join("conf/05-thuban.conflist").exists()
    });
    assert_eq!(
        std::fs::read_to_string(rig.directory.join("state/epoch")).unwrap(),
        "2"
    );
}

#[test]
fn a_pinned_map_of_another_shape_is_refused_loudly() {
    let mut rig = Rig::prepare(base_rows());
    let maps = rig.pins().join("maps");
    std::fs::create_dir_all(&maps).unwrap();
    let made = Command::new("bpftool")
        .args(["map", "create", &maps.join("VPCS").display().to_string()])
        .args([
            "type", "hash", "key", "4", "value", "8", "entries", "16384", "name", "VPCS", "flags", "1",
        ])
        .status()
        .unwrap();
    assert!(made.success());
    rig.start();
    assert_eq!(rig.wait_for_exit(), Some(1));
    assert!(
        rig.log().contains("the value's size is 8, expected 48"),
        "{}",
        rig.log()
    );
}
