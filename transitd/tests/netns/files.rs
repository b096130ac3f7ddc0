//! Attachment files that transitd must not believe: torn, forged, of another boot. Each costs at most its own pod the
//! network.

use std::path::PathBuf;

use sha2::{Digest, Sha256};
use thuban_proto::transit::droplet_message::Message;

use crate::rig::{Rig, base_rows, eventually, local};

const PODS: [&str; 4] = ["p1", "p2", "p3", "p4"];

fn rig() -> Rig {
    let mut rows = base_rows();
    rows.extend((5..).zip(PODS).map(|(last, pod)| local(7, pod, last)));
    let mut rig = Rig::prepare(rows);
    rig.flags = vec!["--metrics-port".into(), "6084".into()];
    rig.start();
    rig.operator.wait_for_ack();
    for pod in PODS {
        rig.add_pod(pod);
    }
    rig
}

fn file(rig: &Rig, pod: &str) -> PathBuf {
    rig.directory.join(format!("state/attachments/{pod}_eth0.json"))
}

fn edit(rig: &Rig, pod: &str, edit: impl Fn(&str) -> String) {
    let path = file(rig, pod);
    let text = std::fs::read_to_string(&path).unwrap();
    let new = edit(&text);
    assert_ne!(new, text);
    std::fs::write(path, new).unwrap();
}

/// Returns the text with a correct checksum.
fn summed(text: &str) -> String {
    let (head, body) = text.split_once(r#""attachment":"#).unwrap();
    let body = body.strip_suffix('}').unwrap();
    let (head, _) = head.split_once(r#""sha256":"#).unwrap();
    let sum = transitd::attachments::hex(&Sha256::digest(body));
    format!(r#"{head}"sha256":"{sum}","attachment":{body}}}"#)
}

fn boot_id() -> String {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    text.trim().to_owned()
}

#[test]
fn each_invalid_file_is_named_and_costs_only_its_own_pod() {
    let mut rig = rig();
    rig.kill();
    edit(&rig, "p1", |text| text.replace("node-t", "node-u"));
    // One pod takes another pod's address, and one takes another pod's place.
    edit(&rig, "p2", |text| text.replace("10.0.1.6", "10.0.1.8"));
    edit(&rig, "p3", |text| {
        summed(&text.replace(r#""container_id":"p3""#, r#""container_id":"p4""#))
    });
    rig.start();
    rig.operator.wait_for_ack();
    let log = rig.log();
    for part in [
        "p1_eth0.json: of node node-u, expected node-t",
        "p2_eth0.json: checksum mismatch",
        "p3_eth0.json: its content is of another attachment",
    ] {
        assert!(log.contains(part), "{part}: {log}");
    }
    for pod in ["p1", "p2", "p3"] {
        assert!(!rig.in_pod(pod, "ip link show eth0"), "{pod}: fail closed");
        assert!(!file(&rig, pod).exists());
    }
    assert!(rig.ping_from_node("10.0.1.8"), "the other one is left alone");
    let hello = rig.operator.hellos().last().unwrap().clone();
    assert_eq!(hello.attachments.len(), 1, "nothing false is told");
    let seen = rig.metrics();
    for reason in ["node", "checksum", "name"] {
        let series = format!(r#"attachment_files_refused_total{{reason="{reason}"}}"#);
        assert_eq!(seen[&series], 1, "{seen:#?}");
    }
    // Their pods are made again.
    for pod in ["p1", "p2", "p3"] {
        rig.plugin_add(pod);
        assert!(rig.ping(pod, "10.0.1.8"), "{pod}");
    }
}

#[test]
fn reboot_discards_state_of_old_boot_and_pods_start() {
    let mut rig = rig();
    rig.kill();
    let boot_id = boot_id();
    for pod in PODS {
        edit(&rig, pod, |text| summed(&text.replace(&boot_id, "another-boot")));
    }
    rig.reboot();
    rig.start();
    rig.operator.wait_for_ack();
    let hello = rig.operator.hellos().last().unwrap().clone();
    assert_eq!(hello.attachments, [], "the operator gives the claims back");
    assert_eq!(
        rig.traces(),
        Vec::<String>::new(),
        "neither rows, veths nor files"
    );
    let seen = rig.metrics();
    assert_eq!(seen[r#"reclaimed_total{kind="rebooted"}"#], 4, "{seen:#?}");
    assert_eq!(seen["attachments_adopted"], 0);
    // Lost sandboxes are deleted without a namespace, new ones of the same pods are made.
    for pod in PODS {
        assert_eq!(rig.del(pod), None);
        let netns = rig.netns(pod);
        rig.add(&format!("{pod}-new"), pod, &netns).unwrap();
    }
    rig.operator.wait_for(
        "the new ones are told",
        |m| matches!(m, Message::Attachment(change) if !change.removed),
    );
    assert!(rig.ping("p1", "10.0.1.8"));
}

#[test]
fn files_of_the_version_before_are_believed_and_written_anew() {
    let mut rig = rig();
    rig.kill();
    edit(&rig, "p1", |text| {
        text.replace(r#""version":2,"node":"node-t","#, "")
    });
    rig.start();
    rig.operator.wait_for_ack();
    assert!(rig.ping("p1", "10.0.1.6"));
    let text = std::fs::read_to_string(file(&rig, "p1")).unwrap();
    assert!(text.contains(r#""version":2,"node":"node-t""#), "{text}");
    // A file of a future version is not interpreted.
    rig.kill();
    edit(&rig, "p1", |text| {
        text.replace(r#""version":2"#, r#""version":9"#)
    });
    rig.start();
    rig.operator.wait_for_ack();
    assert!(rig.log().contains("version 9, expected 1 to 2"), "{}", rig.log());
    eventually("fail closed", || !rig.in_pod("p1", "ip link show eth0"));
    assert!(rig.ping("p2", "10.0.1.7"));
}

impl Rig {
    /// Removes what a reboot removes: bpffs, links, routes, the socket's directory.
    fn reboot(&self) {
        let bpf = self.directory.join("bpf");
        self.on_node(
            "for link in $(ip -o link | grep -o 'thb[0-9a-f]*'); do ip link del $link; done
             for family in -4 -6; do ip $family route flush table 6081; ip $family rule flush; done || true
             ip rule add from all lookup main; ip rule add from all lookup local priority 0",
        );
        let mount = format!("umount {0} && mount -t bpf {1} {0}", bpf.display(), self.name);
        let done = std::process::Command::new("sh")
            .args(["-ec", &mount])
            .status()
            .unwrap();
        assert!(done.success());
        std::fs::remove_dir_all(self.directory.join("run")).unwrap();
    }
}
