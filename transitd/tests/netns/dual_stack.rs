//! Pods with an address of each family: what ADD makes on both ends, in the tables and in the file for them; that DEL,
//! a crash and a restart treat both alike; and that a pod without IPv6 is not affected.

use thuban_proto::transit::droplet_message::Message;
use thuban_proto::transit::{AddressKey, BouncerRow, NackReason, RowKey, row::Row, row_key::Key};

use crate::rig::{Rig, dual, dual_rows, eventually, local, mapped};

fn rows(locals: &[Row]) -> Vec<Row> {
    let mut rows = dual_rows();
    rows.extend_from_slice(locals);
    rows
}

/// Returns the addresses of one table's rows, sorted.
fn addresses(rig: &Rig, table: &str) -> Vec<String> {
    let rows = rig.rows(table);
    let mut addresses: Vec<String> = rows
        .iter()
        .map(|row| row["key"]["address"].as_str().unwrap().to_owned())
        .collect();
    addresses.sort_unstable();
    addresses
}

fn local_key(last: u8) -> RowKey {
    let key = AddressKey {
        vni: 7,
        address: mapped(last),
    };
    RowKey {
        key: Some(Key::Local(key)),
    }
}

/// Rules by which packets from the host, and answers from outside, find pods in the table of pods.
const RULES: [&str; 2] = [
    "from all fwmark 0x55/0x1fff lookup 6081",
    "from all iif lo lookup 6081",
];

/// Returns the rules that lead to the table of pods, sorted.
fn lookups(rules: &str) -> Vec<&str> {
    let rules = rules.lines().filter_map(|rule| rule.split_once('\t'));
    let rules = rules.map(|(_, rule)| rule.trim());
    let mut rules: Vec<_> = rules.filter(|rule| rule.ends_with("lookup 6081")).collect();
    rules.sort_unstable();
    rules
}

#[test]
fn add_wires_both_families_and_del_leaves_nothing_of_either() {
    let mut rig = Rig::new(rows(&[dual(7, "p1", 5)]));
    let attached = rig.add_pod("p1");
    let addresses_given: Vec<_> = attached.addresses.iter().map(|a| a.address.as_str()).collect();
    assert_eq!(addresses_given, ["10.0.1.5/24", "fd00:1::5/64"]);
    assert_eq!(attached.addresses[1].gateway, "fe80::5468:7562:6101");
    assert_eq!(attached.routes[1].destination, "::/0");

    let pod = rig.in_pod_text("p1", "ip -6 address show dev eth0; ip -6 route; ip route");
    for part in [
        "inet6 fd00:1::5/64 scope global nodad",
        "fe80::/64 dev eth0",
        "default via fe80::5468:7562:6101 dev eth0",
        "default via 10.0.1.1",
    ] {
        assert!(pod.contains(part), "{part}: {pod}");
    }
    for part in ["tentative", "fd00:1::/64 dev eth0"] {
        assert!(!pod.contains(part), "{part}: {pod}");
    }
    let conf = "cd /proc/sys/net/ipv6/conf/eth0 && cat disable_ipv6 accept_ra autoconf accept_dad";
    assert_eq!(rig.in_pod_text("p1", conf), "0\n0\n0\n0\n");

    let name = &attached.host_interface;
    let conf = format!("cd /proc/sys/net/ipv6/conf/{name} && cat disable_ipv6 accept_ra addr_gen_mode");
    assert_eq!(rig.on_node(&conf), "0\n0\n1\n");
    let own = rig.on_node(&format!("ip -o -6 address show dev {name}"));
    assert_eq!(own.lines().count(), 1, "the host's address and no other: {own}");
    assert!(own.contains("fe80::5468:7562:6101/128 scope link nodad"), "{own}");
    assert!(!own.contains("tentative"), "{own}");
    let host = rig.on_node(&format!(
        "ip -6 route show table 6081; ip -6 rule; ip -6 neighbour show dev {name} nud permanent"
    ));
    for part in [
        &format!("fd00:1::5 dev {name}"),
        "src fe80::5468:7562:6101",
        "from all iif lo lookup 6081",
        "fd00:1::5 lladdr 02:07:0a:00:01:05",
    ] {
        assert!(host.contains(part), "{part}: {host}");
    }
    let route = rig.on_node("ip -6 route get fd00:1::5");
    assert!(
        route.contains(name) && route.contains("src fe80::5468:7562:6101"),
        "{route}"
    );

    assert_eq!(addresses(&rig, "LOCAL_ENDPOINTS"), ["10.0.1.5", "fd00:1::5"]);
    let both = rig.rows("LOCAL_ENDPOINTS");
    assert_eq!(both[0]["entry"], both[1]["entry"]);
    let attachments = rig.rows("ATTACHMENTS");
    assert_eq!(attachments[0]["entry"]["address"], "10.0.1.5");
    let file = std::fs::read_to_string(rig.directory.join("state/attachments/p1_eth0.json")).unwrap();
    assert!(file.contains(r#""address6":"fd00:1::5/64""#), "{file}");
    let is_ours = |message: &Message| match message {
        Message::Attachment(change) => change.attachment.as_ref().is_some_and(|a| a.address6.len() == 16),
        _ => false,
    };
    rig.operator
        .wait_for("the attachment with both addresses", is_ours);

    assert_eq!(rig.del("p1"), None);
    assert_eq!(rig.traces(), Vec::<String>::new());
    assert!(!rig.in_pod("p1", "ip link show eth0"));
    assert_eq!(rig.del("p1"), None, "DEL is idempotent");
}

#[test]
fn both_families_connect_vpc_pods_and_node_but_no_other_vpc() {
    let mut rig = Rig::new(rows(&[dual(7, "r1", 5), dual(7, "r2", 6), dual(8, "b1", 7)]));
    for pod in ["r1", "r2", "b1"] {
        rig.add_pod(pod);
    }
    for (first, second) in [("10.0.1.5", "10.0.1.6"), ("fd00:1::5", "fd00:1::6")] {
        assert!(rig.connects(Some("r1"), "r2", second), "{second}\n{}", rig.log());
        assert!(rig.connects(Some("r2"), "r1", first), "{first}");
        assert!(rig.connects(None, "r1", first), "the node to {first}");
    }
    for address in ["10.0.1.7", "fd00:1::7"] {
        assert!(rig.connects(None, "b1", address), "the node to {address}");
        assert!(
            !rig.connects(Some("r1"), "b1", address),
            "another VPC's {address}"
        );
    }
    // The pod's own addresses count as its own for as long as the pod has them.
    assert!(!rig.in_pod_text("r1", "ip -6 address").contains("dadfailed"));
}

#[test]
fn a_pod_without_ipv6_changes_nothing_of_the_nodes_ipv6() {
    let mut rig = Rig::new(rows(&[local(7, "p1", 5)]));
    let attached = rig.add_pod("p1");
    assert_eq!((attached.addresses.len(), attached.routes.len()), (1, 1));
    let conf = format!(
        "cd /proc/sys/net/ipv6/conf && cat {0}/accept_ra {0}/addr_gen_mode; cat default/accept_ra default/addr_gen_mode",
        attached.host_interface
    );
    let values = rig.on_node(&conf);
    let values: Vec<_> = values.lines().collect();
    assert_eq!(values[..2], values[2..], "as of any new interface");
    let state = rig.on_node("ip -6 rule; ip -6 route show table 6081 2>&1 || true");
    assert!(!state.contains("6081"), "{state}");
    assert!(!rig.in_pod_text("p1", "ip -6 route").contains("default"));
    assert_eq!(addresses(&rig, "LOCAL_ENDPOINTS"), ["10.0.1.5"]);
}

#[test]
fn a_node_without_ipv6_says_which_sysctl_and_serves_the_others() {
    let mut rig = Rig::new(rows(&[dual(7, "p1", 5), local(7, "p2", 6)]));
    rig.on_node("echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6");
    let netns = rig.pod_namespace("p1");
    let error = rig.add("p1", "p1", &netns).unwrap_err();
    assert_eq!(error.code, 102, "{error:?}");
    assert!(
        error.details.contains("net.ipv6.conf.all.disable_ipv6"),
        "{error:?}"
    );
    assert_eq!(rig.traces(), Vec::<String>::new());
    rig.add_pod("p2");
    rig.on_node("echo 0 > /proc/sys/net/ipv6/conf/all/disable_ipv6");
    rig.add("p1", "p1", &netns).unwrap();
}

#[test]
fn interfaces_that_are_made_without_ipv6_get_it() {
    let mut rig = Rig::new(rows(&[dual(7, "p1", 5)]));
    // Container runtimes do this.
    rig.on_node("echo 1 > /proc/sys/net/ipv6/conf/default/disable_ipv6");
    let netns = rig.pod_namespace("p1");
    assert!(rig.in_pod("p1", "echo 1 > /proc/sys/net/ipv6/conf/default/disable_ipv6"));
    rig.add("p1", "p1", &netns).unwrap();
    let pod = rig.in_pod_text("p1", "ip -6 address show dev eth0; ip -6 route");
    assert!(
        pod.contains("fd00:1::5/64") && pod.contains("default via"),
        "{pod}"
    );
    assert!(rig.on_node("ip -6 route show table 6081").contains("fd00:1::5"));
}

#[test]
fn an_endpoint_that_goes_takes_both_rows_and_brings_both_back() {
    let mut rig = Rig::new(rows(&[dual(7, "p1", 5)]));
    rig.add_pod("p1");
    rig.operator.push_and_wait(vec![], vec![local_key(5)]);
    assert_eq!(addresses(&rig, "LOCAL_ENDPOINTS"), [""; 0]);
    assert_eq!(rig.rows("ATTACHMENTS").len(), 0);
    rig.operator.push_and_wait(vec![dual(7, "p1", 5)], vec![]);
    assert_eq!(addresses(&rig, "LOCAL_ENDPOINTS"), ["10.0.1.5", "fd00:1::5"]);
    // An operator that knows no IPv6 does not send the second address.
    rig.operator.push_and_wait(vec![local(7, "p1", 5)], vec![]);
    assert_eq!(addresses(&rig, "LOCAL_ENDPOINTS"), ["10.0.1.5"]);
    assert_eq!(rig.rows("ATTACHMENTS").len(), 1);
}

#[test]
fn new_sandbox_takes_both_addresses_and_old_del_keeps_them() {
    let mut rig = Rig::new(rows(&[dual(7, "p1", 5)]));
    rig.add_pod("p1");
    let second = rig.pod_namespace("again");
    let attached = rig.add("again", "p1", &second).unwrap();
    let route = || rig.on_node("ip -6 route show table 6081");
    assert_eq!(route().lines().count(), 1, "{}", route());
    assert_eq!(rig.del("p1"), None);
    assert!(route().contains(&attached.host_interface), "{}", route());
    assert_eq!(addresses(&rig, "LOCAL_ENDPOINTS"), ["10.0.1.5", "fd00:1::5"]);
    assert_eq!(rig.del("again"), None);
    assert_eq!(rig.traces(), Vec::<String>::new());
}

#[test]
fn restart_keeps_both_addresses_and_sweeps_stale_routes() {
    let mut rig = Rig::new(rows(&[dual(7, "p1", 5), dual(7, "p2", 6)]));
    rig.add_pod("p1");
    rig.add_pod("p2");
    rig.kill();
    // p2's file is lost, as after an ADD that a crash cut off.
    std::fs::remove_file(rig.directory.join("state/attachments/p2_eth0.json")).unwrap();
    rig.on_node("ip -6 route add fd00:1::99/128 dev up0 table 6081; ip -6 rule del priority 6081");
    rig.start();
    rig.operator.wait_for_ack();
    assert_eq!(addresses(&rig, "LOCAL_ENDPOINTS"), ["10.0.1.5", "fd00:1::5"]);
    let routes = rig.on_node("ip -6 route show table 6081");
    assert!(
        routes.contains("fd00:1::5") && routes.lines().count() == 1,
        "{routes}"
    );
    for family in ["-4", "-6"] {
        let rules = rig.on_node(&format!("ip {family} rule"));
        assert_eq!(lookups(&rules), RULES, "{rules}");
    }
    assert_eq!(rig.del("p1"), None);
    assert_eq!(rig.traces(), Vec::<String>::new());
}

#[test]
fn an_attachment_of_a_transitd_without_ipv6_goes_on_with_ipv4() {
    let mut rig = Rig::new(rows(&[local(7, "p1", 5)]));
    rig.add_pod("p1");
    let file = std::fs::read_to_string(rig.directory.join("state/attachments/p1_eth0.json")).unwrap();
    assert!(!file.contains("address6"), "as older ones wrote it: {file}");
    rig.kill();
    rig.start();
    rig.operator.wait_for_ack();
    // An operator of this version sends both; the pod has only one.
    rig.operator.push_and_wait(vec![dual(7, "p1", 5)], vec![]);
    assert_eq!(addresses(&rig, "LOCAL_ENDPOINTS"), ["10.0.1.5"]);
    assert_eq!(rig.rows("ATTACHMENTS").len(), 1);
    assert!(rig.ping_from_node("10.0.1.5"));
}

#[test]
fn ipv6_address_in_use_in_another_vpc_is_nacked_by_row() {
    let mut rig = Rig::new(rows(&[dual(7, "p1", 5)]));
    let Row::Local(mut row) = dual(8, "b1", 6) else {
        unreachable!()
    };
    let Row::Local(first) = dual(7, "p1", 5) else {
        unreachable!()
    };
    row.address6 = first.address6;
    rig.operator.push_and_wait(vec![Row::Local(row)], vec![]);
    rig.operator.wait_for("a nack that names the row and the reason", |message| {
        matches!(message, Message::Nack(nack)
            if nack.reason() == NackReason::AddressInUseOnNode
            && nack.message.contains("fd00:1::5")
            && matches!(&nack.key, Some(RowKey { key: Some(Key::Local(key)) }) if key.vni == 8 && key.address == mapped(6)))
    });
    rig.add_pod("p1");
    assert_eq!(addresses(&rig, "LOCAL_ENDPOINTS"), ["10.0.1.5", "fd00:1::5"]);
}

#[test]
fn ranges_and_bouncer_rows_of_both_families_are_in_the_tables() {
    let rig = Rig::new(dual_rows());
    let Row::Local(remote) = dual(7, "far", 9) else {
        unreachable!()
    };
    let row = BouncerRow {
        vni: 7,
        address: remote.address,
        droplet: vec![192, 0, 2, 2],
        address6: remote.address6,
    };
    rig.operator.push_and_wait(vec![Row::Bouncer(row)], vec![]);
    assert_eq!(addresses(&rig, "BOUNCER_ROWS"), ["10.0.1.9", "fd00:1::9"]);
    let subnets = rig.rows("SUBNETS");
    for cidr in ["10.0.0.0/16", "10.0.1.0/24", "fd00:1::/48", "fd00:1::/64"] {
        let of_both = subnets.iter().filter(|row| row["key"]["cidr"] == cidr);
        assert_eq!(of_both.count(), 2, "{cidr}: {subnets:?}");
    }
    let key = AddressKey {
        vni: 7,
        address: mapped(9),
    };
    let key = RowKey {
        key: Some(Key::Bouncer(key)),
    };
    rig.operator.push_and_wait(vec![], vec![key]);
    assert_eq!(addresses(&rig, "BOUNCER_ROWS"), [""; 0]);
}

#[test]
fn many_dual_stack_adds_and_dels_at_once_leave_nothing() {
    let locals: Vec<Row> = (10..22).map(|last| dual(7, &format!("m{last}"), last)).collect();
    let mut rig = Rig::new(rows(&locals));
    let pods: Vec<(String, String)> = (10..22)
        .map(|last| format!("m{last}"))
        .map(|pod| (rig.pod_namespace(&pod), pod))
        .collect();
    std::thread::scope(|scope| {
        for (netns, pod) in &pods {
            scope.spawn(|| rig.add(pod, pod, netns).unwrap());
        }
    });
    assert_eq!(rig.rows("LOCAL_ENDPOINTS").len(), 24);
    let rules = rig.on_node("ip -6 rule");
    assert_eq!(lookups(&rules), RULES, "{rules}");
    std::thread::scope(|scope| {
        for (_, pod) in &pods {
            scope.spawn(|| assert_eq!(rig.del(pod), None));
        }
    });
    assert_eq!(rig.traces(), Vec::<String>::new());
}

#[test]
fn a_lost_del_of_a_dual_stack_pod_is_cleaned() {
    let mut rig = Rig::new(rows(&[dual(7, "p1", 5)]));
    rig.add_pod("p1");
    let name = format!("{}-p1", rig.name);
    let deleted = std::process::Command::new("ip")
        .args(["netns", "del", &name])
        .status();
    assert!(deleted.unwrap().success());
    eventually("the attachment is removed", || rig.traces().is_empty());
}
