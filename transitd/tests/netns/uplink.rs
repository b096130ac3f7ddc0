//! The uplink is made anew, loses its address, or gets another MTU, while transitd runs.

use std::net::IpAddr;
use std::time::Duration;

use thuban_proto::transit::{BouncerRow, DropletRow, row::Row};

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
