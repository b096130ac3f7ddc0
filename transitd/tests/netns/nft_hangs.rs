//! An nft that is slow: only those who need its rules wait for it. An nft that refuses rules: they are left out.

use std::net::Ipv4Addr;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use thuban_proto::transit::droplet_message::Message;
use thuban_proto::transit::row::Row;
use thuban_proto::transit::row_key::Key;
use thuban_proto::transit::{AddressKey, ExposedPort, ExposedRow, RowKey, ServiceBackend};

use crate::dns::{asks, prepare, socket, start};
use crate::rig::{Rig, deny_all, eventually, judged, local, mapped};

const SERVICE: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 20);

/// Returns the row of NodePort 30080 to p1.
fn exposed() -> Row {
    Row::Exposed(ExposedRow {
        vni: 7,
        address: SERVICE.to_ipv6_mapped().octets().to_vec(),
        ports: vec![ExposedPort {
            protocol: 6,
            port: 80,
            node_port: 30080,
            local: true,
            backends: vec![ServiceBackend {
                address: mapped(5),
                port: 8080,
            }],
            ..ExposedPort::default()
        }],
        service: "ns/web".into(),
        ..ExposedRow::default()
    })
}

/// An nft that waits for as long as the file `hang` exists, and makes the file `hangs` while it waits. It refuses texts
/// with the words in the file `refused`.
struct Nft {
    directory: PathBuf,
}

impl Nft {
    fn new(rig: &mut Rig) -> Self {
        let directory = rig.directory.clone();
        let (program, at) = (directory.join("nft"), directory.display());
        let script = format!(
            "#!/bin/sh\nif [ \"$1\" = -f ]; then while [ -e {at}/hang ]; do touch {at}/hangs; sleep 0.05; done; fi\n\
             if [ \"$1\" = -f ] && [ -e {at}/refused ]; then text=$(cat)\n\
             case \"$text\" in *\"$(cat {at}/refused)\"*) echo refused >&2; exit 1;; esac\n\
             echo \"$text\" | nft \"$@\"; exit; fi\n\
             exec nft \"$@\"\n"
        );
        std::fs::write(&program, script).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        let program = program.display().to_string();
        rig.environment.push(("THUBAN_NFT".into(), program));
        Self { directory }
    }

    fn hang(&self) {
        std::fs::write(self.directory.join("hang"), "").unwrap();
    }

    fn hangs(&self) -> bool {
        self.directory.join("hangs").exists()
    }

    fn go_on(&self) {
        std::fs::remove_file(self.directory.join("hang")).unwrap();
    }
}

impl Drop for Nft {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(self.directory.join("hang"));
    }
}

#[test]
fn while_nft_hangs_dns_adds_and_stream_go_on_and_acks_wait() {
    let mut rig = prepare();
    let nft = Nft::new(&mut rig);
    start(&mut rig);
    let pod = socket(&rig, "p3");
    eventually("DNS", || asks(&pod));
    nft.hang();
    let sequence = rig.operator.push(vec![exposed()], vec![]);
    eventually("nft hangs", || nft.hangs());
    eventually("DNS while nft hangs", || asks(&pod));
    // One pod has its rows before, and one gets its rows meanwhile.
    rig.add_pod("p4");
    let later = rig.operator.push(vec![local(7, "p5", 9)], vec![]);
    rig.add_pod("p5");
    assert!(rig.ping("p5", "10.0.1.8"));
    // This is longer than the stream's keepalive takes to give up.
    std::thread::sleep(std::time::Duration::from_secs(7));
    let acks = |from| {
        rig.operator
            .count(move |message| matches!(message, Message::Ack(ack) if ack.sequence >= from))
    };
    assert_eq!(acks(sequence), 0, "its rules are not in force");
    assert_eq!(rig.operator.hellos().len(), 1, "the stream is the first one");
    let pod = socket(&rig, "p4");
    eventually("a new pod's DNS", || asks(&pod));
    nft.go_on();
    rig.operator.wait_for_ack_of(later);
    assert!(
        rig.on_node("nft list map inet thuban node-ports")
            .contains("30080")
    );
    assert_eq!(rig.del("p5"), None);
    assert_eq!(rig.operator.hellos().len(), 1);
}

#[test]
fn a_pod_with_an_ingress_set_starts_once_the_rules_hold_it() {
    let mut rig = prepare();
    let nft = Nft::new(&mut rig);
    start(&mut rig);
    nft.hang();
    let row = judged(local(7, "p5", 9), 0, [9, 0]);
    rig.operator.push(vec![row], vec![]);
    eventually("nft hangs", || nft.hangs());
    let netns = rig.pod_namespace("p5");
    std::thread::scope(|scope| {
        let added = scope.spawn(|| rig.add("p5", "p5", &netns));
        std::thread::sleep(std::time::Duration::from_secs(1));
        assert!(!added.is_finished());
        nft.go_on();
        added.join().unwrap().unwrap();
    });
    let pods = rig.on_node("nft list map inet thuban-policy pods");
    assert!(pods.contains("10.0.1.9 : goto closed"), "{pods}");
}

#[test]
fn a_set_that_the_kernel_refuses_is_closed_and_no_other() {
    let mut rig = prepare();
    let nft = Nft::new(&mut rig);
    std::fs::write(nft.directory.join("refused"), "chain set-7-000009").unwrap();
    start(&mut rig);
    let isolated = |uid, last, set| judged(local(7, uid, last), 0, [set, 0]);
    let rows = vec![
        deny_all(8, false),
        deny_all(9, false),
        isolated("p5", 9, 9),
        isolated("p6", 10, 8),
    ];
    rig.operator.push_and_wait(rows, vec![]);
    let pods = || rig.on_node("nft list map inet thuban-policy pods");
    let closed = "10.0.1.9 : goto closed";
    assert!(
        pods().contains(closed) && pods().contains("10.0.1.10 : goto set-7-000008"),
        "{}",
        pods()
    );
    // It stays so, and other changes are written.
    rig.operator
        .push_and_wait(vec![deny_all(10, false), isolated("p6", 10, 10)], vec![]);
    assert!(
        pods().contains(closed) && pods().contains("10.0.1.10 : goto set-7-00000a"),
        "{}",
        pods()
    );
    // Once no pod has the set, it may be tried again.
    rig.operator.push_and_wait(vec![isolated("p5", 9, 8)], vec![]);
    std::fs::remove_file(nft.directory.join("refused")).unwrap();
    rig.operator.push_and_wait(vec![isolated("p5", 9, 9)], vec![]);
    assert!(pods().contains("10.0.1.9 : goto set-7-000009"), "{}", pods());
}

#[test]
fn nft_that_never_ends_holds_acks_until_ports_are_shut() {
    let mut rig = prepare();
    let nft = Nft::new(&mut rig);
    rig.environment.push(("THUBAN_NFT_PATIENCE".into(), "1".into()));
    rig.flags.push("--node-port-lease=8".into());
    start(&mut rig);
    rig.operator.push_and_wait(vec![exposed()], vec![]);
    let ports = |rig: &Rig| rig.on_node("nft list map inet thuban node-ports");
    let lease = |rig: &Rig| rig.on_node("nft list set inet thuban lease");
    assert!(ports(&rig).contains("30080"));
    nft.hang();
    let key = RowKey {
        key: Some(Key::Exposed(AddressKey {
            vni: 7,
            address: SERVICE.to_ipv6_mapped().octets().to_vec(),
        })),
    };
    let sequence = rig.operator.push(vec![], vec![key]);
    let acks = || {
        rig.operator
            .count(|message| matches!(message, Message::Ack(ack) if ack.sequence >= sequence))
    };
    // nft is ended several times meanwhile, and the port leads to the pod.
    std::thread::sleep(std::time::Duration::from_secs(4));
    if lease(&rig).contains("elements") {
        assert_eq!(acks(), 0, "the port is open");
    }
    rig.operator.wait_for_ack_of(sequence);
    assert!(ports(&rig).contains("30080"), "the old rules stand");
    assert!(!lease(&rig).contains("elements"), "{}", lease(&rig));
    assert!(rig.log().contains("was ended after 1 s"), "{}", rig.log());
    nft.go_on();
    eventually("the rules", || !ports(&rig).contains("30080"));
}
