//! The hooks that programs run at, and the effects of the agent's misses.

use std::time::{Duration, Instant};

use thuban_proto::transit::droplet_message::Message;
use thuban_proto::transit::{DirectRow, DropletRow, NetworkRow, ServicePort, ServiceRow, row::Row};

use crate::rig::{Rig, base_rows, eventually, local, mapped};
use crate::tcp::connect;

fn links(rig: &Rig) -> Vec<String> {
    let entries = std::fs::read_dir(rig.pins().join("links")).unwrap();
    let mut names: Vec<String> = entries
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

fn started(flags: &[&str], uplink: &str) -> Rig {
    let mut rows = base_rows();
    rows.extend([local(7, "p1", 5), local(7, "p2", 6)]);
    let mut rig = Rig::prepare(rows);
    rig.on_node(uplink);
    rig.flags = flags.iter().map(ToString::to_string).collect();
    rig.start();
    rig.operator.wait_for_ack();
    rig
}

const SEGMENTED: &str =
    "ethtool -K up0 tx off tso off gso off tx-udp_tnl-segmentation off tx-udp_tnl-csum-segmentation off";

#[test]
fn auto_hook_uses_tc_on_veth_behind_segment_aggregation() {
    let rig = started(&[], SEGMENTED);
    assert_eq!(links(&rig), ["transit_tc_up0"]);
    assert!(rig.on_node("ip -d link show thuban-gro").contains("dstport 6081"));
    assert!(
        rig.on_node("ethtool -k up0")
            .contains("generic-receive-offload: on")
    );
    let rig = started(&[], "true");
    assert_eq!(links(&rig), ["transit_tc_up0"], "frames come whole");
    assert!(!rig.on_node("ip link").contains("thuban-gro"));
}

#[test]
fn without_aggregation_transit_is_at_xdp_on_a_segmented_uplink() {
    let never = ["--aggregation", "never"];
    let mut rig = started(&never, SEGMENTED);
    assert_eq!(links(&rig), ["transit_tc_up0", "transit_xdp_up0"]);
    assert!(!rig.on_node("ip link").contains("thuban-gro"));
    // A restart also switches back.
    for (flags, is_there) in [(vec![], true), (never.to_vec(), false)] {
        rig.kill();
        rig.flags = flags.iter().map(ToString::to_string).collect();
        rig.start();
        rig.operator.wait_for_ack();
        assert_eq!(rig.on_node("ip link").contains("thuban-gro"), is_there);
    }
}

#[test]
fn a_taken_port_is_no_reason_to_fail() {
    let taken = format!(
        "{SEGMENTED} && ip link add other type vxlan external dstport 6081 udp6zerocsumrx \
                         && ip link set other up"
    );
    let rig = started(&[], &taken);
    assert!(!links(&rig).is_empty());
}

#[test]
fn a_hook_that_was_given_up_leaves_the_uplink_at_restart() {
    let mut rig = started(&["--transit-hook", "xdp"], "true");
    assert_eq!(links(&rig), ["transit_tc_up0", "transit_xdp_up0"]);
    assert!(rig.on_node("ip -d link show up0").contains("xdp"));
    rig.kill();
    rig.flags = vec!["--transit-hook".into(), "tc".into()];
    rig.start();
    rig.operator.wait_for_ack();
    assert_eq!(links(&rig), ["transit_tc_up0"]);
    assert!(!rig.on_node("ip -d link show up0").contains("xdp"));
    assert!(
        rig.on_node("ip -o link show up0").contains("mtu 1500"),
        "the uplink's MTU is never changed"
    );
}

#[test]
fn the_agent_at_xdp_connects_pods_and_goes_without_a_trace() {
    let mut rig = started(&["--agent-hook", "xdp"], SEGMENTED);
    rig.add_pod("p1");
    rig.add_pod("p2");
    assert_eq!(
        links(&rig)
            .iter()
            .filter(|name| name.starts_with("agent_xdp"))
            .count(),
        2
    );
    assert!(
        rig.in_pod_text("p1", "ethtool -k eth0")
            .contains("tcp-segmentation-offload: off")
    );
    assert!(rig.ping("p1", "10.0.1.6"));
    assert!(rig.ping_from_node("10.0.1.5"));
    assert_eq!(rig.del("p1"), None);
    assert_eq!(rig.del("p2"), None);
    assert_eq!(rig.traces(), Vec::<String>::new());
}

#[test]
fn tc_pod_keeps_its_tc_agent_when_new_pods_get_xdp() {
    let mut rig = started(&["--agent-hook", "tc"], SEGMENTED);
    rig.add_pod("p1");
    rig.kill();
    rig.flags = vec!["--agent-hook".into(), "xdp".into()];
    rig.start();
    rig.operator.wait_for_ack();
    rig.add_pod("p2");
    let at_xdp = links(&rig)
        .iter()
        .filter(|name| name.starts_with("agent_xdp"))
        .count();
    assert_eq!(at_xdp, 1, "{:?}", links(&rig));
    assert!(rig.ping("p1", "10.0.1.6") && rig.ping("p2", "10.0.1.5"));
}

#[test]
fn a_flow_that_stays_subscribes_and_an_idle_row_is_given_back() {
    let mut rig = started(&[], "true");
    rig.add_pod("p1");
    let far = vec![192, 0, 2, 2];
    // The network's bouncer is on another droplet.
    let network = NetworkRow {
        vni: 7,
        network: 0x0a00_0100,
        cidrs: vec!["10.0.1.0/24".into()],
        bouncers: vec![far.clone()],
        ..NetworkRow::default()
    };
    rig.operator.push_and_wait(
        vec![
            Row::Droplet(DropletRow {
                address: far.clone(),
                ..DropletRow::default()
            }),
            Row::Network(network),
        ],
        vec![],
    );
    let subscribed =
        |m: &Message| matches!(m, Message::Subscribe(s) if s.vni == 7 && s.address == mapped(50));
    rig.send_pings("p1", "10.0.1.50", 18);
    rig.operator.wait_for("a subscription", subscribed);
    let direct = Row::Direct(DirectRow {
        vni: 7,
        address: mapped(50),
        droplet: far,
    });
    let before = rig.counter("sent_direct");
    // The packet is sent more than once: the direct row is given back when this thread has waited for a while.
    eventually("a packet by the direct row", || {
        rig.operator.push_and_wait(vec![direct.clone()], vec![]);
        rig.send_pings("p1", "10.0.1.50", 1);
        rig.counter("sent_direct") > before
    });
    rig.operator.wait_for(
        "the end of it",
        |m| matches!(m, Message::Unsubscribe(s) if s.vni == 7 && s.address == mapped(50)),
    );
    eventually("the row is gone", || rig.rows("DIRECT_ROWS").is_empty());
    // The next flow starts counting from zero.
    let before = rig.operator.count(subscribed);
    eventually("another subscription", || {
        rig.send_pings("p1", "10.0.1.50", 6);
        rig.operator.count(subscribed) > before
    });
}

#[test]
fn a_service_stays_known_while_clients_keep_their_backends() {
    let mut rows = base_rows();
    for row in &mut rows {
        if let Row::Vpc(vpc) = row {
            vpc.service_cidrs.push("10.96.0.0/16".into());
        }
    }
    rows.push(local(7, "p1", 5));
    let far = vec![192, 0, 2, 2];
    rows.push(Row::Droplet(DropletRow {
        address: far.clone(),
        ..DropletRow::default()
    }));
    // The network's bouncer, which knows all services, is on another droplet.
    rows.push(Row::Network(NetworkRow {
        vni: 7,
        network: 0x0a00_0100,
        cidrs: vec!["10.0.1.0/24".into()],
        bouncers: vec![far],
        ..NetworkRow::default()
    }));
    let mut rig = Rig::new(rows);
    rig.add_pod("p1");
    let pod = format!("{}-p1", rig.name);
    let address = |last| std::net::Ipv4Addr::new(10, 96, 0, last);
    let bytes = |last| address(last).to_ipv6_mapped().octets().to_vec();
    let ended = |last| move |message: &Message| matches!(message, Message::Unsubscribe(of) if of.address == bytes(last));
    for (last, affinity_seconds) in [(2, 0), (1, 8)] {
        // The row comes while the client still waits: a subscription without a row ends after two scans.
        let client = pod.clone();
        std::thread::spawn(move || connect(&client, address(last), 80));
        rig.operator.wait_for(
            "a subscription",
            |message| matches!(message, Message::Subscribe(of) if of.address == bytes(last)),
        );
        let port = ServicePort {
            protocol: 6,
            port: 80,
            affinity_seconds,
            ..ServicePort::default()
        };
        let row = Row::Service(ServiceRow {
            vni: 7,
            address: bytes(last),
            ports: vec![port],
            ..ServiceRow::default()
        });
        rig.operator.push_and_wait(vec![row], vec![]);
    }
    let (known, before) = (Instant::now(), rig.operator.count(ended(1)));
    rig.operator.wait_for("the end of the other one", ended(2));
    eventually("the end of the first one", || {
        rig.operator.count(ended(1)) > before
    });
    // A scan may come at once.
    assert!(
        known.elapsed() > Duration::from_secs(6),
        "clients keep their backends for 8 s"
    );
}
