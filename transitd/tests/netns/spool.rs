//! DELs by the real plugin while transitd is away: transitd does them when it is back, once, and never to a later
//! attachment.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use thuban_proto::transit::droplet_message::Message;

use crate::rig::{Rig, base_rows, eventually, local};

fn rig() -> Rig {
    let mut rows = base_rows();
    rows.extend([local(7, "p1", 5), local(7, "p2", 6)]);
    let mut rig = Rig::new(rows);
    for pod in ["p1", "p2"] {
        rig.pod_namespace(pod);
        rig.plugin_add(pod);
    }
    rig
}

fn del(rig: &Rig, pod: &str) {
    let start = Instant::now();
    assert_eq!(rig.plugin("DEL", pod, "1.1.0", json!({})), (0, Value::Null));
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
}

fn spooled(rig: &Rig) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(rig.directory.join("state/spool")) else {
        return vec![];
    };
    entries.map(|entry| entry.unwrap().path()).collect()
}

#[test]
fn a_del_without_transitd_is_done_when_it_is_back() {
    let mut rig = rig();
    rig.kill();
    del(&rig, "p1");
    del(&rig, "p1");
    del(&rig, "never-was");
    assert_eq!(spooled(&rig).len(), 2);
    // This is the file of a plugin that was killed before it was done.
    std::fs::write(rig.directory.join("state/spool/p2_eth0.del.99.tmp"), "").unwrap();
    rig.start();
    eventually("the spool is empty", || spooled(&rig).is_empty());
    rig.operator.wait_for_ack();
    assert!(!rig.in_pod("p1", "ip link show eth0"));
    assert!(rig.ping_from_node("10.0.1.6"), "the other pod is left alone");
    rig.operator
        .wait_for("the operator hears of it", |message| match message {
            Message::Attachment(change) => change.removed,
            Message::Hello(hello) => hello.attachments.len() == 1,
            _ => false,
        });
    del(&rig, "p2");
    assert_eq!(rig.traces(), Vec::<String>::new());
    assert_eq!(
        spooled(&rig),
        Vec::<PathBuf>::new(),
        "with transitd there nothing is spooled"
    );
}

#[test]
fn earlier_del_does_not_undo_add_of_the_same_container() {
    let mut rig = rig();
    rig.kill();
    del(&rig, "p1");
    let file = spooled(&rig).remove(0);
    let old = std::fs::read(&file).unwrap();
    rig.start();
    rig.operator.wait_for_ack();
    // The spooled DEL is done before this ADD or by it, never after it.
    rig.plugin_add("p1");
    assert!(rig.ping("p1", "10.0.1.6"));
    // A copy that comes late is recognised as older.
    std::fs::write(&file, old).unwrap();
    eventually("the late one is dropped", || spooled(&rig).is_empty());
    assert!(
        rig.log().contains("older than what there is now"),
        "{}",
        rig.log()
    );
    assert!(rig.ping("p1", "10.0.1.6"), "{}", rig.log());
    // A DEL for this attachment works, also when it is doubled.
    rig.kill();
    del(&rig, "p1");
    del(&rig, "p2");
    rig.start();
    eventually("both are done", || rig.traces().is_empty());
}

#[test]
fn spooled_del_runs_before_next_add_of_same_container() {
    use prost::Message as _;
    let rig = rig();
    let directory = rig.directory.join("state/spool");
    std::fs::create_dir_all(&directory).unwrap();
    // This runs more than once: now and then transitd finds the DEL before the ADD comes.
    for _ in 0..3 {
        let now = nix::time::clock_gettime(nix::time::ClockId::CLOCK_BOOTTIME).unwrap();
        let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
        let del = thuban_proto::cni::SpooledDel {
            container_id: "p1".into(),
            ifname: "eth0".into(),
            netns: String::new(),
            boot_id: boot_id.trim().into(),
            asked_at: Duration::from(now).as_nanos() as u64,
        };
        std::fs::write(directory.join("aside"), del.encode_to_vec()).unwrap();
        std::fs::rename(directory.join("aside"), directory.join("p1_eth0.del")).unwrap();
        rig.plugin_add("p1");
        assert!(!directory.join("p1_eth0.del").exists());
    }
    std::thread::sleep(Duration::from_millis(1500));
    assert!(rig.ping("p1", "10.0.1.6"), "{}", rig.log());
}

#[test]
fn files_that_are_no_dels_of_this_boot_do_nothing_and_go() {
    use prost::Message as _;
    let rig = rig();
    let directory = rig.directory.join("state/spool");
    std::fs::create_dir_all(&directory).unwrap();
    let del = thuban_proto::cni::SpooledDel {
        container_id: "p1".into(),
        ifname: "eth0".into(),
        netns: String::new(),
        boot_id: "another".into(),
        asked_at: u64::MAX,
    };
    std::fs::write(directory.join("p1_eth0.del"), del.encode_to_vec()).unwrap();
    std::fs::write(directory.join("torn_eth0.del"), b"\x0a\x40torn").unwrap();
    let outside = thuban_proto::cni::SpooledDel {
        container_id: "../p2".into(),
        ..del.clone()
    };
    std::fs::write(directory.join("outside_eth0.del"), outside.encode_to_vec()).unwrap();
    let another = thuban_proto::cni::SpooledDel {
        container_id: "p2".into(),
        ..del
    };
    std::fs::write(directory.join("p9_eth0.del"), another.encode_to_vec()).unwrap();
    eventually("all are gone", || spooled(&rig).is_empty());
    assert!(rig.log().contains("torn_eth0.del"), "{}", rig.log());
    assert!(rig.ping("p1", "10.0.1.6"), "{}", rig.log());
}

#[test]
fn a_del_that_transitd_is_too_busy_for_waits_too() {
    use nix::sys::signal::{Signal, kill};
    let rig = rig();
    let daemon = nix::unistd::Pid::from_raw(rig.daemon_id().cast_signed());
    kill(daemon, Signal::SIGSTOP).unwrap();
    del(&rig, "p1");
    assert_eq!(spooled(&rig).len(), 1);
    kill(daemon, Signal::SIGCONT).unwrap();
    eventually("done", || spooled(&rig).is_empty());
    eventually("and gone", || !rig.in_pod("p1", "ip link show eth0"));
    rig.plugin_add("p1");
    std::thread::sleep(Duration::from_secs(2));
    assert!(rig.ping("p1", "10.0.1.6"));
}
