//! Both pods on one droplet.

use std::{net::Ipv4Addr, rc::Rc};

use anyhow::Result;
use thuban_common::counters::Counter;

use crate::bench::{
    datapath::rigs::{
        Path,
        cable::VNI,
        node::{Hook, Node},
    },
    traffic::Measure,
};

const DROPLET: Ipv4Addr = Ipv4Addr::new(172, 31, 96, 1);
const MTU: u32 = 1500;
const NETWORK: u32 = 1;

/// Makes the droplet and its pods.
pub fn path(name: &str) -> Result<Path> {
    let mut node = Node::new(DROPLET, MTU)?;
    // No packet between the pods goes there.
    node.namespace
        .command("ip link add uplink type veth peer name far")?;
    node.bring_up()?;
    node.load(Hook::Tc)?;
    node.know(&[DROPLET])?;
    node.vpc(VNI, None)?;
    node.network(VNI, NETWORK, Ipv4Addr::new(10, 0, 0, 0), None)?;
    let address = Ipv4Addr::new(10, 0, 0, 3);
    let client = node.pod(VNI, NETWORK, Ipv4Addr::new(10, 0, 0, 2), Hook::Tc)?;
    let server = node.pod(VNI, NETWORK, address, Hook::Tc)?;
    Path {
        name: name.to_owned(),
        nodes: Rc::new(vec![node]),
        client,
        server,
        address,
        measures: Measure::ALL,
        raised: vec![(0, Counter::DeliveredLocal)],
        untouched: vec![(0, Counter::SentDirect), (0, Counter::SentToBouncer)],
    }
    .ready()
}
