//! The uplink is made anew, loses its address, or gets another MTU or other routes, while transitd runs.

use std::net::IpAddr;
use std::time::Duration;

use thuban_proto::transit::{BouncerRow, DropletRow, row::Row};

use crate::flow::datagrams;
use crate::rig::{Rig, base_rows, eventually, local, mapped};
use crate::wire::Peer;

const POD: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 1, 5));
const OTHER: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 1, 20));

/// Returns a rig with p1 on this node and 10.0.1.20 on 192.0.2.2.
fn rig() -> Rig {
    let mut rows = base_rows();
    rows.push(local(7, "p1", 5));
    rows.push(Row::Droplet(DropletRow {
        address: vec![192, 0, 2, 2],
        ..DropletRow::default()
    }));
    rows.push(Row::Bouncer(BouncerRow {
        vni: 7,
        address: mapped(20),
        droplet: vec![192, 0, 2, 2],
        ..BouncerRow::default()
    }));
    let mut rig = Rig::new(rows);
    rig.add_pod("p1");
    rig
}

/// Whether another droplet's packet comes to the pod.
fn receives(rig: &Rig) -> bool {
    let before = rig.counter("delivered");
    Peer::new(rig, 2).send(7, OTHER, POD);
    std::thread::sleep(Duration::from_millis(50));
    rig.counter("delivered") > before
}

/// Asserts that transitd ends by itself and gives the reason, and starts it again as its supervisor would.
fn ends_and_is_started(rig: &mut Rig, why: &str) {
    assert_eq!(rig.wait_for_exit(), Some(1));
    assert!(rig.log().contains(why), "{}", rig.log());
    rig.start();
    eventually("ready", || rig.probe(false).0 == 0);
}

#[test]
fn a_new_uplink_of_the_same_name_is_taken() {
    let mut rig = rig();
    assert!(receives(&rig));
    rig.on_node("ip link del up0");
    let (node, far) = (rig.node().to_owned(), rig.far().to_owned());
    rig.on_node(&format!(
        "ip link add up0 netns {node} type veth peer name far netns {far}"
    ));
    rig.on_far("ip address add 192.0.2.2/24 dev far && ip link set far up");
    rig.on_node("ip address add 192.0.2.1/24 dev up0 && ip link set up0 up");
    ends_and_is_started(&mut rig, "the uplink has changed");
    eventually("packets come again", || receives(&rig));
}

#[test]
fn another_mtu_of_the_uplink_is_taken() {
    let mut rig = rig();
    rig.on_node("ip link set up0 mtu 1400");
    ends_and_is_started(&mut rig, "and MTU 1400");
    assert!(receives(&rig));
}

#[test]
fn an_uplink_that_comes_back_as_it_was_is_kept() {
    let mut rig = rig();
    rig.on_node("ip link set up0 down && ip address del 192.0.2.1/24 dev up0");
    std::thread::sleep(Duration::from_millis(2500));
    rig.on_node("ip address add 192.0.2.1/24 dev up0 && ip link set up0 up");
    rig.on_node("ip link add other type veth peer name other1 && ip link set other up");
    std::thread::sleep(Duration::from_millis(2500));
    assert!(!rig.is_dead(), "{}", rig.log());
    assert!(receives(&rig));
}

/// Whether a pod's packet comes to the other droplet.
fn sends(rig: &Rig, other: &Peer) -> bool {
    let mut receive = other.receiver();
    while receive().is_some() {}
    let pod = format!("{}-p1", rig.name);
    datagrams(&pod, "10.0.1.20:7", 5)(1);
    receive().is_some()
}

/// Whether the last range that transitd found is this one.
fn found(rig: &Rig, range: &str) -> bool {
    let log = rig.log();
    let last = log
        .lines()
        .rfind(|line| line.contains("reached without a gateway"));
    last.is_some_and(|line| line.contains(range))
}

#[test]
fn packets_to_droplets_follow_the_nodes_routes() {
    const ON_LINK: &str = "192.0.2.0/24";
    let mut rig = rig();
    let other = Peer::new(&rig, 2);
    // A gateway that is nobody.
    rig.on_node("ip neigh replace 192.0.2.9 lladdr 02:00:00:00:00:99 dev up0 nud permanent");
    let table = "ip route add default via 192.0.2.9 dev up0 table 100 && ip rule add";
    for (change, undo) in [
        (
            "ip route add 192.0.2.2/32 via 192.0.2.9 dev up0".to_owned(),
            "ip route del 192.0.2.2/32",
        ),
        (
            format!("{table} from 192.0.2.1 lookup 100"),
            "ip rule del lookup 100 && ip route flush table 100",
        ),
    ] {
        eventually("the range is found", || found(&rig, ON_LINK));
        assert!(sends(&rig, &other), "{change}");
        rig.on_node(&change);
        eventually("the range is given up", || !found(&rig, ON_LINK));
        assert!(!sends(&rig, &other), "{change}");
        // A transitd that was not there when the route went away, either.
        rig.kill();
        rig.on_node(undo);
        rig.start();
        eventually("the route is gone", || sends(&rig, &other));
    }
    eventually("the range is found", || found(&rig, ON_LINK));
    // A rule for marked packets alone, a route by another interface, and a host that needs no gateway.
    rig.on_node(&format!("{table} fwmark 0x77 lookup 100"));
    rig.on_node(
        "ip link add other type veth peer name other1 && ip link set other up && ip link set other1 up",
    );
    rig.on_node("ip route add 192.0.2.64/26 dev other");
    rig.on_node("ip route add 192.0.2.2/32 dev up0");
    std::thread::sleep(Duration::from_millis(500));
    assert!(found(&rig, ON_LINK), "{}", rig.log());
    assert!(sends(&rig, &other));
}
