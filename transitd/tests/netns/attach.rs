//! ADD and DEL on real veths: what they make, what they refuse, and that nothing is left.

use std::time::{Duration, Instant};

use thuban_proto::transit::droplet_message::Message;
use thuban_proto::transit::{RefusedRow, RowKey, row::Row, row_key::Key};

use crate::rig::{Rig, base_rows, eventually, local};

fn rows(locals: &[Row]) -> Vec<Row> {
    let mut rows = base_rows();
    rows.extend_from_slice(locals);
    rows
}

#[test]
fn add_wires_the_pod_and_del_leaves_nothing() {
    let mut rig = Rig::new(rows(&[local(7, "p1", 5)]));
    let attached = rig.add_pod("p1");
    assert_eq!(attached.addresses[0].address, "10.0.1.5/24");
    assert_eq!(attached.addresses[0].gateway, "10.0.1.1");
    assert_eq!(
        (attached.pod_mac.as_str(), attached.mtu),
        ("02:07:0a:00:01:05", 1450)
    );
    let link = rig.in_pod_text("p1", "ip -o link show eth0; ip -o -4 address show eth0; ip route");
    for part in [
        "mtu 1450",
        "02:07:0a:00:01:05",
        "10.0.1.5/24",
        "default via 10.0.1.1",
    ] {
        assert!(link.contains(part), "{part}: {link}");
    }
    let features = rig.in_pod_text("p1", "ethtool -k eth0");
    for feature in [
        "tx-udp_tnl-segmentation",
        "tx-udp_tnl-csum-segmentation",
        "tx-udp-segmentation",
        "tx-sctp-segmentation",
    ] {
        assert!(features.contains(&format!("{feature}: off")), "{features}");
    }
    assert!(features.contains("tx-tcp-segmentation: on"), "{features}");
    let host = rig.on_node(&format!(
        "ip -o link show {}; ip route show table 6081; ip rule",
        attached.host_interface
    ));
    for part in [
        "mtu 1450",
        "02:54:68:75:62:61",
        "10.0.1.5 dev",
        "src 169.254.64.1",
        "iif lo lookup 6081",
    ] {
        assert!(host.contains(part), "{part}: {host}");
    }
    assert_eq!(rig.rows("ATTACHMENTS").len(), 1);
    assert_eq!(rig.rows("LOCAL_ENDPOINTS")[0]["key"]["address"], "10.0.1.5");
    rig.operator.wait_for(
        "the attachment",
        |m| matches!(m, Message::Attachment(change) if !change.removed),
    );
    assert_eq!(rig.operator.shared.lock().unwrap().tokens[0], "Bearer a-token");

    assert_eq!(rig.del("p1"), None);
    assert_eq!(rig.traces(), Vec::<String>::new());
    assert!(!rig.in_pod("p1", "ip link show eth0"));
    assert_eq!(rig.del("p1"), None, "DEL is idempotent");
    assert_eq!(rig.del("never-was"), None);
    rig.operator.wait_for(
        "its removal",
        |m| matches!(m, Message::Attachment(change) if change.removed),
    );
}

#[test]
fn pods_reach_their_vpc_only_and_the_host_reaches_its_pods() {
    let mut rig = Rig::new(rows(&[local(7, "r1", 5), local(7, "r2", 6), local(8, "b1", 7)]));
    for pod in ["r1", "r2", "b1"] {
        rig.add_pod(pod);
    }
    assert!(rig.ping("r1", "10.0.1.6"), "{}", rig.log());
    assert!(rig.ping("r2", "10.0.1.5"));
    for address in ["10.0.1.5", "10.0.1.6", "10.0.1.7"] {
        assert!(rig.ping_from_node(address), "{address}");
    }
    assert!(!rig.ping("r1", "10.0.1.7"), "another VPC's pod");
    assert!(!rig.ping("b1", "10.0.1.5"), "another VPC's pod");
    assert!(
        !rig.ping("r1", "169.254.64.1"),
        "the node may reach the pod, not the pod the node"
    );
    assert!(
        !rig.ping("r1", "192.0.2.1"),
        "a tenant's pod has no way to the node"
    );
}

#[test]
fn pods_of_different_vpcs_do_not_meet_by_way_of_the_node() {
    let mut rig = Rig::new(rows(&[local(7, "r1", 5), local(8, "b1", 7)]));
    let red = rig.add_pod("r1");
    rig.add_pod("b1");
    // The packet is routed by the node, with routes set by hand and with the node's own MAC as next hop.
    assert!(rig.in_pod("r1", "ip route add 10.0.1.7/32 via 10.0.1.1"));
    assert!(rig.in_pod(
        "r1",
        &format!("ip neighbour replace 10.0.1.1 lladdr {} dev eth0", red.host_mac)
    ));
    assert!(!rig.ping("r1", "10.0.1.7"));
    // The packet has a forged source: an address that the node itself routes.
    assert!(rig.in_pod("r1", "ip address add 10.0.1.99/32 dev eth0"));
    let before = rig.counter("spoofed_source");
    assert!(!rig.ping_from("r1", "10.0.1.99", "10.0.1.7"));
    assert!(rig.counter("spoofed_source") > before);
    // From outside: the node does not route to pods for others.
    let underlay = format!("ip -n {}-u route add 10.0.1.0/24 via 192.0.2.1", rig.name);
    assert!(
        std::process::Command::new("sh")
            .args(["-c", &underlay])
            .status()
            .unwrap()
            .success()
    );
    assert!(!rig.ping("u", "10.0.1.5"));
    let route = rig.on_node("ip route get 10.0.1.5 from 192.0.2.2 iif up0 2>&1 || true");
    assert!(!route.contains("thb"), "{route}");
}

#[test]
fn an_add_waits_for_its_row_and_says_what_is_missing() {
    let mut rig = Rig::new(base_rows());
    let netns = rig.pod_namespace("late");
    let started = Instant::now();
    let error = rig.add("late", "late", &netns).unwrap_err();
    assert_eq!(error.code, 11);
    assert!(error.message.contains("has not sent an endpoint"), "{error:?}");
    assert!(started.elapsed() >= Duration::from_secs(8));
    let Row::Local(mut row) = local(7, "late", 5) else {
        unreachable!()
    };
    row.ready = false;
    rig.operator.push_and_wait(vec![Row::Local(row)], vec![]);
    let error = rig.add("late", "late", &netns).unwrap_err();
    assert!(
        error.message.contains("bouncers have not acknowledged"),
        "{error:?}"
    );
    assert_eq!(rig.traces(), Vec::<String>::new());
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| rig.add("late", "late", &netns));
        std::thread::sleep(Duration::from_millis(500));
        rig.operator.push(vec![local(7, "late", 5)], vec![]);
        waiting.join().unwrap().unwrap();
    });
}

#[test]
fn a_refused_pods_add_fails_at_once_with_the_reason() {
    let refused = RefusedRow {
        pod_uid: "no".into(),
        reason: "NotAllowed".into(),
        message: "VPC red does not admit ns".into(),
    };
    let mut rig = Rig::new(rows(&[Row::Refused(refused)]));
    let netns = rig.pod_namespace("no");
    let started = Instant::now();
    let error = rig.add("no", "no", &netns).unwrap_err();
    assert!(started.elapsed() < Duration::from_secs(2));
    assert_eq!(error.code, 101);
    assert!(
        error.message.contains("NotAllowed: VPC red does not admit ns"),
        "{error:?}"
    );
    assert_eq!(rig.traces(), Vec::<String>::new());
}

#[test]
fn a_failing_add_leaves_nothing() {
    let mut rig = Rig::new(rows(&[local(7, "p1", 5)]));
    let netns = rig.pod_namespace("p1");
    // The interface is there already.
    assert!(rig.in_pod("p1", "ip link add eth0 type veth peer name other"));
    let error = rig.add("p1", "p1", &netns).unwrap_err();
    assert_eq!(error.code, 100, "{error:?}");
    assert_eq!(rig.traces(), Vec::<String>::new());
    assert!(
        rig.in_pod("p1", "ip link show other"),
        "the pod's own interface stays"
    );
    assert!(rig.in_pod("p1", "ip link del eth0"));
    // No file can be written.
    let attachments = rig.directory.join("state/attachments");
    std::fs::remove_dir_all(&attachments).unwrap();
    let error = rig.add("p1", "p1", &netns).unwrap_err();
    assert_eq!(error.code, 5, "{error:?}");
    std::fs::create_dir(&attachments).unwrap();
    assert_eq!(rig.traces(), Vec::<String>::new());
    // The very last step fails: a default route cannot be added.
    assert!(rig.in_pod("p1", "ip link set lo up; ip route add default dev lo"));
    let error = rig.add("p1", "p1", &netns).unwrap_err();
    assert_eq!(error.code, 102, "{error:?}");
    assert_eq!(rig.traces(), Vec::<String>::new());
    assert!(!rig.in_pod("p1", "ip link show eth0"));
    // Not a namespace, and the node's own.
    for path in ["/dev/null", "/nowhere", &format!("/run/netns/{}", rig.node())] {
        let error = rig.add("p1", "p1", path).unwrap_err();
        assert_eq!(error.code, 4, "{path}: {error:?}");
    }
    // The ADD works afterwards.
    assert!(rig.in_pod("p1", "ip route del default dev lo"));
    rig.add("p1", "p1", &netns).unwrap();
    assert_eq!(
        rig.add("p1", "p1", &netns).unwrap_err().code,
        100,
        "a second ADD of the same attachment"
    );
}

#[test]
fn new_sandbox_takes_over_and_old_del_does_not_affect_it() {
    let mut rig = Rig::new(rows(&[local(7, "p1", 5), local(7, "p2", 6)]));
    rig.add_pod("p1");
    rig.add_pod("p2");
    let second = rig.pod_namespace("again");
    rig.add("again", "p1", &second).unwrap();
    assert!(rig.ping("p2", "10.0.1.5"));
    assert!(rig.ping("again", "10.0.1.6"));
    assert_eq!(rig.del("p1"), None);
    assert_eq!(rig.rows("LOCAL_ENDPOINTS").len(), 2);
    assert!(rig.ping("p2", "10.0.1.5"));
    assert!(rig.ping_from_node("10.0.1.5"));
    assert_eq!(rig.del("again"), None);
    assert_eq!(rig.rows("LOCAL_ENDPOINTS").len(), 1);
}

#[test]
fn removed_endpoint_is_fenced_before_address_is_reused() {
    let mut rig = Rig::new(rows(&[local(7, "p1", 5), local(7, "p2", 6)]));
    rig.add_pod("p1");
    rig.add_pod("p2");
    let key = thuban_proto::transit::AddressKey {
        vni: 7,
        address: crate::rig::mapped(5),
    };
    rig.operator.push_and_wait(
        vec![],
        vec![RowKey {
            key: Some(Key::Local(key)),
        }],
    );
    assert!(!rig.ping("p2", "10.0.1.5"));
    assert!(
        !rig.ping("p1", "10.0.1.6"),
        "a pod without an endpoint cannot send"
    );
    rig.operator.push_and_wait(vec![local(7, "p1", 5)], vec![]);
    // The pod's own ARP attempts from before run out first.
    eventually("p1 answers again", || rig.ping("p2", "10.0.1.5"));
}

#[test]
fn many_adds_and_dels_at_once_leave_nothing() {
    let locals: Vec<Row> = (10..40).map(|last| local(7, &format!("m{last}"), last)).collect();
    let mut rig = Rig::new(rows(&locals));
    let pods: Vec<(String, String)> = (10..40)
        .map(|last| format!("m{last}"))
        .map(|p| (rig.pod_namespace(&p), p))
        .collect();
    std::thread::scope(|scope| {
        for (netns, pod) in &pods {
            scope.spawn(|| rig.add(pod, pod, netns).unwrap());
        }
    });
    assert_eq!(rig.rows("LOCAL_ENDPOINTS").len(), 30);
    assert!(rig.ping("m10", "10.0.1.39"));
    std::thread::scope(|scope| {
        for (_, pod) in &pods {
            scope.spawn(|| assert_eq!(rig.del(pod), None));
            scope.spawn(|| assert_eq!(rig.del(pod), None));
        }
    });
    assert_eq!(rig.traces(), Vec::<String>::new());
}

#[test]
fn a_lost_del_is_cleaned_once_the_pod_is_gone() {
    let mut rig = Rig::new(rows(&[local(7, "p1", 5)]));
    rig.add_pod("p1");
    let name = format!("{}-p1", rig.name);
    assert!(
        std::process::Command::new("ip")
            .args(["netns", "del", &name])
            .status()
            .unwrap()
            .success()
    );
    eventually("the attachment is removed", || rig.traces().is_empty());
}
