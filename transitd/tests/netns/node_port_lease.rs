//! A node that is cut off from the operator serves ports of tenants' Services only as long as no other Service can get
//! them.

use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use thuban_proto::transit::DropletRow;
use thuban_proto::transit::row::Row;

use crate::dns::cut_off;
use crate::policies::{FAR, STRANGER, TENANTS, exposed_everywhere, pod, rig_with};
use crate::rig::{NODE, Rig, eventually};
use crate::tcp::{ask, connect, serve};

const LEASE: Duration = Duration::from_secs(8);

/// Returns a rig where a pod of this node and the other droplet serve the port, for clients that are not droplets.
fn rig() -> Rig {
    let rig = rig_with(vec![format!("--node-port-lease={}", LEASE.as_secs())]);
    let node = Ipv4Addr::from(NODE);
    rig.on_far(&format!("ip route replace {node}/32 dev far src {STRANGER}"));
    let droplet = Row::Droplet(DropletRow {
        address: FAR.octets().to_vec(),
        ..DropletRow::default()
    });
    rig.operator.push_and_wait(
        vec![droplet, exposed_everywhere(&[TENANTS], &[FAR, node])],
        vec![],
    );
    rig
}

fn is_open(rig: &Rig) -> bool {
    connect(rig.far(), NODE.into(), 30080).is_ok()
}

/// Whether none of several connections succeeds, neither by the pod nor by the other droplet.
fn is_shut(rig: &Rig) -> bool {
    (0..3).all(|_| !is_open(rig))
}

fn dropped(rig: &Rig) -> u64 {
    let text = rig.on_node("nft -j list counters table inet thuban");
    let listed: serde_json::Value = serde_json::from_str(&text).unwrap();
    let counters = listed["nftables"].as_array().unwrap().iter();
    let mut counters = counters.filter(|object| object["counter"]["name"] == "node_port_stale");
    counters.next().unwrap()["counter"]["packets"].as_u64().unwrap()
}

fn reconnect(rig: &Rig) {
    rig.on_node("nft delete table ip cut");
}

#[test]
fn tenants_ports_shut_while_the_operator_is_away_too_long() {
    let mut rig = rig();
    let _here = serve(&pod(&rig, "p3"), Ipv4Addr::UNSPECIFIED, 8080, 3);
    let _others = serve(rig.far(), FAR, 30080, 9);
    let mut stays = connect(rig.far(), NODE.into(), 30080).unwrap();
    let own = ask(&mut stays);
    // This is far longer than a lease.
    std::thread::sleep(LEASE + LEASE / 2);
    assert!((0..10).all(|_| is_open(&rig)), "while the operator is there");
    assert_eq!(dropped(&rig), 0);

    cut_off(&rig);
    eventually("they shut", || is_shut(&rig));
    assert!(dropped(&rig) > 0);
    assert_eq!(ask(&mut stays), own, "connections that there were stay");
    // A daemon that starts does not know more.
    rig.kill();
    rig.start();
    eventually("alive", || rig.probe(true).0 == 0);
    std::thread::sleep(LEASE / 4);
    assert!(is_shut(&rig), "{}", rig.log());
    reconnect(&rig);
    eventually("they open", || is_open(&rig));

    // Without a daemon the kernel closes the port.
    rig.kill();
    let killed = Instant::now();
    let are_open = (0..3).all(|_| is_open(&rig));
    assert!(are_open || killed.elapsed() > LEASE / 2, "not before its time");
    eventually("they shut", || is_shut(&rig));
    assert!(killed.elapsed() > LEASE / 2);
    assert_eq!(ask(&mut stays), own);
    rig.start();
    eventually("they open", || is_open(&rig));
    assert_eq!(ask(&mut stays), own);
}
