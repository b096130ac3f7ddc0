//! Limits of pods' bandwidth, measured by a stream between two pods of the node. `datapath/limits.rs` measures streams
//! between droplets.

use std::net::Ipv4Addr;
use std::time::Duration;

use serde_json::{Value, json};
use thuban_proto::transit::{LocalRow, VpcRow, row::Row};
use thuban_testkit::rates::{Bounds, stream};

use crate::policies::{FAR, pod, rig_with};
use crate::rig::{NODE, Rig, base_rows, eventually, local};

const FIRST: Ipv4Addr = Ipv4Addr::new(10, 0, 1, 5);
const SECOND: Ipv4Addr = Ipv4Addr::new(10, 0, 1, 6);
/// 10 Mb/s and 40 Mb/s, in bytes per second.
const SLOW: u64 = 1_250_000;
const FASTER: u64 = 5_000_000;
/// How long a stream is measured.
const MEASURED: Duration = Duration::from_secs(2);

/// Returns the row of pod `p1` with limits; 0: none.
fn limited(egress_rate: u64, ingress_rate: u64) -> Row {
    let Row::Local(row) = local(7, "p1", FIRST.octets()[3]) else {
        panic!("a local row")
    };
    Row::Local(LocalRow {
        egress_rate,
        ingress_rate,
        ..row
    })
}

/// Makes a node with pod `p1`, which is limited, and pod `p2`, which is not.
fn rig(flags: &[&str], uplink: &str, first: Row) -> (Rig, String) {
    let mut rows = base_rows();
    rows.extend([first, local(7, "p2", SECOND.octets()[3])]);
    let mut rig = Rig::prepare(rows);
    rig.on_node(uplink);
    rig.flags = flags.iter().map(ToString::to_string).collect();
    rig.start();
    rig.operator.wait_for_ack();
    let host_end = rig.add_pod("p1").host_interface;
    let other = rig.add_pod("p2").host_interface;
    assert_eq!(limits(&rig, "p2", &other), [false, false]);
    (rig, host_end)
}

/// Whether what a pod sends is limited, and what it receives.
fn limits(rig: &Rig, pod: &str, host_end: &str) -> [bool; 2] {
    let sent = rig.in_pod_text(pod, "tc qdisc show dev eth0");
    let received = rig.on_node(&format!("tc qdisc show dev {host_end}"));
    [sent, received].map(|shown| shown.contains("qdisc tbf"))
}

/// Returns how often the limits of a running pod were set.
fn times_set(rig: &Rig) -> usize {
    rig.log().matches("limits of bandwidth set").count()
}

/// Returns how many bytes per second a stream between two pods carries, from its first byte on.
fn rate(rig: &Rig, from: &str, to: &str, address: Ipv4Addr, time: Duration) -> u64 {
    stream([&pod(rig, from), &pod(rig, to)], address, time)
}

/// Checks that a stream has the rate: at most 15 % more, and at least half of it, which load can take away.
fn assert_rate(rig: &Rig, from: &str, to: &str, address: Ipv4Addr, expected: u64) {
    let measured = rate(rig, from, to, address, MEASURED);
    let (least, most) = (expected / 2, expected * 115 / 100);
    assert!(
        (least..=most).contains(&measured),
        "{measured} bytes per second from {from} to {to}, expected {expected}"
    );
}

fn assert_unlimited(rig: &Rig, from: &str, to: &str, address: Ipv4Addr) {
    let measured = rate(rig, from, to, address, Duration::from_millis(500));
    assert!(
        measured > 4 * FASTER,
        "{measured} bytes per second from {from} to {to}"
    );
}

#[test]
fn limits_of_any_size_hold_from_the_first_second() {
    let bounds = Bounds::from_env();
    let mut off = Vec::new();
    for limit in bounds.limits {
        let rig = rig_with(vec![]);
        let [p1, p2] = ["p1", "p2"].map(|name| pod(&rig, name));
        let mtu = rig.in_pod_text("p1", "cat /sys/class/net/eth0/mtu");
        let mtu: u64 = mtu.trim().parse().unwrap();
        rig.operator.push_and_wait(vec![limited(*limit, *limit)], vec![]);
        eventually("the limits", || times_set(&rig) > 0);
        for (way, ends, address) in [
            ("to a pod", [&*p1, &*p2], SECOND),
            ("from a pod", [&p2, &p1], FIRST),
            ("to outside", [&p1, rig.far()], FAR),
            ("to the node", [&p1, rig.node()], Ipv4Addr::from(NODE)),
        ] {
            off.extend(bounds.check(way, ends, address, *limit, mtu));
        }
    }
    assert!(off.is_empty(), "{off:?}");
}

#[test]
fn what_a_pod_sends_is_limited_from_its_start() {
    let (rig, host_end) = rig(&[], "true", limited(SLOW, 0));
    assert_eq!(limits(&rig, "p1", &host_end), [true, false]);
    // The queue is inside, or this kernel has none of its kind.
    let has_queue = rig
        .in_pod_text("p1", "tc qdisc show dev eth0")
        .contains("fq_codel");
    assert_ne!(has_queue, rig.log().contains("fq_codel can't be had"));
    assert_rate(&rig, "p1", "p2", SECOND, SLOW);
    assert_unlimited(&rig, "p2", "p1", FIRST);
    // To the node as well, which the data plane does not see.
    assert!(rig.ping_from_node("10.0.1.5"));
    rig.operator.push_and_wait(vec![limited(FASTER, 0)], vec![]);
    eventually("the other rate", || {
        rig.in_pod_text("p1", "tc qdisc show dev eth0")
            .contains("rate 40Mbit")
    });
    assert_rate(&rig, "p1", "p2", SECOND, FASTER);
    assert_eq!(
        times_set(&rig),
        1,
        "ADD has set the first ones, and scans set none again"
    );
}

#[test]
fn a_pod_without_its_queue_is_held_to_its_rate() {
    let (mut rig, host_end) = rig(&[], "true", limited(FASTER, 0));
    assert_rate(&rig, "p1", "p2", SECOND, FASTER);
    assert_eq!(rig.counter("rate_exceeded"), 0, "the queue alone limits it");
    assert!(rig.in_pod("p1", "tc qdisc delete dev eth0 root"));
    assert_eq!(limits(&rig, "p1", &host_end), [false, false]);
    assert_metered(&rig);
    // While no transitd looks after it, too, and without a new burst when one is back.
    rig.kill();
    assert_metered(&rig);
    rig.start();
    rig.operator.wait_for_ack();
    assert_unlimited(&rig, "p2", "p1", FIRST);
    eventually("a look at the attachment", || {
        limits(&rig, "p1", &host_end) == [true, false]
    });
    assert_rate(&rig, "p1", "p2", SECOND, FASTER);
    rig.operator.push_and_wait(vec![limited(0, 0)], vec![]);
    assert!(rig.rows("METERS").is_empty());
    eventually("the end of the limit", || {
        limits(&rig, "p1", &host_end) == [false, false]
    });
    assert_unlimited(&rig, "p1", "p2", SECOND);
}

/// Checks that the meter of `p1` holds a stream to a twentieth more than the rate, besides a burst.
fn assert_metered(rig: &Rig) {
    let before = rig.counter("rate_exceeded");
    let measured = rate(rig, "p1", "p2", SECOND, MEASURED);
    let burst = (256 << 10) + FASTER / 10;
    let most = FASTER * 105 / 100 + burst / MEASURED.as_secs();
    assert!(measured <= most * 11 / 10, "{measured} bytes per second");
    assert!(rig.counter("rate_exceeded") > before);
}

/// Returns the row of the VPC with a limit and a DSCP plus one; 0: none.
fn vpc(egress_rate: u64, dscp: u32) -> Row {
    let rows = base_rows().into_iter();
    let mut vpcs = rows.filter_map(|row| match row {
        Row::Vpc(vpc) if vpc.vni == 7 => Some(vpc),
        _ => None,
    });
    let row = vpcs.next().expect("a VPC");
    Row::Vpc(VpcRow {
        egress_rate,
        dscp,
        ..row
    })
}

#[test]
fn a_vpc_says_what_its_pods_send_out_of_the_node() {
    let (mut rig, _) = rig(&[], "true", limited(0, 0));
    let told = |rig: &Rig| -> Vec<(Value, Value)> {
        let rows = rig.rows("ATTACHMENTS").into_iter();
        let told = |row: Value| {
            (
                row["entry"]["vpc_metered"].clone(),
                row["entry"]["outer_dscp"].clone(),
            )
        };
        rows.map(told).collect()
    };
    let none = vec![(json!(false), json!(null)); 2];
    assert_eq!(told(&rig), none);
    rig.operator.push_and_wait(vec![vpc(FASTER, 47)], vec![]);
    let both = vec![(json!(true), json!(46)); 2];
    assert_eq!(told(&rig), both);
    let meters = rig.rows("METERS");
    assert_eq!(meters.len(), 1);
    assert_eq!(meters[0]["key"], json!({"vni": 7}));
    assert_eq!(meters[0]["entry"], json!({"bytes_per_second": FASTER}));
    // Between pods of a node nothing is limited.
    assert_unlimited(&rig, "p1", "p2", SECOND);
    // A new transitd keeps both before the row comes, and takes them back if the row says so.
    rig.kill();
    rig.operator.replace(&vpc(FASTER, 47), vec![], vpc(0, 0));
    assert_eq!(told(&rig), both);
    rig.start();
    rig.operator.wait_for_ack();
    assert_eq!(told(&rig), none);
    assert!(rig.rows("METERS").is_empty());
}

#[test]
fn what_a_pod_receives_is_limited_until_its_row_says_not() {
    let (mut rig, host_end) = rig(&[], "true", limited(0, SLOW));
    assert_eq!(limits(&rig, "p1", &host_end), [false, true]);
    assert_rate(&rig, "p2", "p1", FIRST, SLOW);
    assert_unlimited(&rig, "p1", "p2", SECOND);
    // The limit outlives transitd, and the next one knows of it.
    rig.kill();
    assert_rate(&rig, "p2", "p1", FIRST, SLOW);
    rig.start();
    rig.operator.wait_for_ack();
    eventually("a look at the attachment", || {
        rig.log().contains("limits of bandwidth set")
    });
    assert_rate(&rig, "p2", "p1", FIRST, SLOW);
    rig.operator.push_and_wait(vec![limited(0, 0)], vec![]);
    eventually("the end of the limit", || {
        limits(&rig, "p1", &host_end) == [false, false]
    });
    assert_unlimited(&rig, "p2", "p1", FIRST);
    // What changes while transitd is away is done when it is back.
    rig.kill();
    rig.operator.replace(&limited(0, 0), vec![], limited(SLOW, SLOW));
    rig.start();
    rig.operator.wait_for_ack();
    eventually("both limits", || limits(&rig, "p1", &host_end) == [true, true]);
    assert_eq!(rig.del("p1"), None);
    assert_eq!(rig.del("p2"), None);
    assert_eq!(rig.traces(), Vec::<String>::new());
}

#[test]
fn agents_at_xdp_keep_the_limit_of_what_a_pod_receives() {
    let segmented =
        "ethtool -K up0 tx off tso off gso off tx-udp_tnl-segmentation off tx-udp_tnl-csum-segmentation off";
    let (rig, host_end) = rig(&["--agent-hook", "xdp"], segmented, limited(SLOW, SLOW));
    assert_eq!(limits(&rig, "p1", &host_end), [true, true]);
    assert_rate(&rig, "p2", "p1", FIRST, SLOW);
    assert_rate(&rig, "p1", "p2", SECOND, SLOW);
}

#[test]
fn another_interface_by_the_pods_name_gets_no_limit() {
    let (rig, host_end) = rig(&[], "true", limited(0, 0));
    // Their numbers are not that of the host's end.
    let other = "ip link add eth0 index 7777 type veth peer name more index 7778";
    let exchange = format!("ip link set eth0 down && ip link set eth0 name own && {other}");
    assert!(rig.in_pod("p1", &exchange));
    rig.operator.push_and_wait(vec![limited(SLOW, 0)], vec![]);
    eventually("a failure", || {
        rig.log().contains("is not limited as its row says")
    });
    assert_eq!(limits(&rig, "p1", &host_end), [false, false]);
    let own = "ip link delete eth0 && ip link set own name eth0 && ip link set eth0 up";
    assert!(rig.in_pod("p1", own));
    eventually("the next scan", || limits(&rig, "p1", &host_end) == [true, false]);
    // The host's end, too.
    let failures = || rig.log().matches("is not limited as its row says").count();
    let before = failures();
    rig.on_node(&format!(
        "ip link set {host_end} down && ip link set {host_end} name own && ip link add {host_end} type veth"
    ));
    rig.operator.push_and_wait(vec![limited(SLOW, SLOW)], vec![]);
    eventually("another failure", || failures() > before);
    assert_eq!(limits(&rig, "p1", &host_end), [true, false]);
}

#[test]
fn a_queue_of_the_pods_own_outlives_a_look_at_its_limits() {
    let (mut rig, _) = rig(&[], "true", limited(0, 0));
    assert!(rig.in_pod("p1", "tc qdisc add dev eth0 root handle 1: bfifo limit 1000000"));
    rig.kill();
    rig.start();
    rig.operator.wait_for_ack();
    eventually("a look at both pods", || times_set(&rig) == 2);
    let shown = rig.in_pod_text("p1", "tc qdisc show dev eth0");
    assert!(shown.contains("qdisc bfifo 1: root"), "{shown}");
}
