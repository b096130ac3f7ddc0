//! Four droplets on a bridge: the direct path, the way by a bouncer, and the way by a divider and a bouncer, each in a
//! VPC of its own.
//!
//! Pods are on droplets 1 and 2. Droplet 3 is bouncer of the `bounced` VPC and divider of the `divided` VPC, droplet 4
//! is bouncer of the latter. The bridge's work is the same for each frame and each hop. On the segmented variant every
//! port of the bridge sends frames one by one, as the cable does, and aggregates what it receives.

use std::{net::Ipv4Addr, rc::Rc};

use anyhow::Result;
use thuban_common::{counters::Counter, tables::RemoteRow};

use super::{
    Path,
    node::{Hook, Node, segment},
};
use crate::{
    bench::traffic::Measure, programs::Programs, rig::droplet::aggregate, rig::namespace::Namespace,
};

const MTU: u32 = 1500;
const DIRECT: u32 = 100;
const BOUNCED: u32 = 101;
const DIVIDED: u32 = 102;
const MEASURES: &[Measure] = &[Measure::Stream, Measure::RoundTrips];

const fn droplet(number: u8) -> Ipv4Addr {
    Ipv4Addr::new(172, 31, 97, number)
}

const fn pod(vni: u32, number: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, vni as u8, number, 10)
}

/// The droplets and the bridge that the paths share.
pub struct Switch {
    _bridge: Namespace,
    // Programs at the bridge's ends, so that these take frames that XDP sends.
    _far_ends: Programs,
}

/// How frames come to the droplets of a switch, and where transit takes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Variant {
    /// GSO frames pass whole. Transit is at tc.
    Whole,
    /// Frames come one by one. The kernel aggregates them, and transit is at tc: what transitd chooses on a veth.
    Segmented,
    /// Frames come one by one, and transit is at XDP.
    SegmentedAtXdp,
}

impl Variant {
    pub const ALL: [Self; 3] = [Self::Whole, Self::Segmented, Self::SegmentedAtXdp];

    /// Returns the names of the cases of a switch.
    pub fn names(self) -> [&'static str; 3] {
        match self {
            Self::Whole => ["direct-switch", "bounced", "divided"],
            Self::Segmented => ["direct-switch-seg", "bounced-seg", "divided-seg"],
            Self::SegmentedAtXdp => ["direct-switch-seg-xdp", "bounced-seg-xdp", "divided-seg-xdp"],
        }
    }
}

/// Sets up a switch and its three paths.
pub fn paths(variant: Variant) -> Result<(Switch, Vec<Path>)> {
    let transit = if variant == Variant::SegmentedAtXdp {
        Hook::Xdp
    } else {
        Hook::Tc
    };
    let bridge = Namespace::new("switch")?;
    bridge.command("ip link add br0 type bridge")?;
    bridge.command("ip link set br0 up")?;
    let mut far_ends = Programs::load()?;
    let mut nodes = Vec::new();
    for number in 1..=4 {
        let mut node = Node::new(droplet(number), MTU)?;
        bridge.command(&format!(
            "ip link add port{number} type veth peer name uplink netns {}",
            node.namespace.name()
        ))?;
        bridge.command(&format!("ip link set port{number} master br0 up"))?;
        node.bring_up()?;
        node.load(transit)?;
        nodes.push(node);
    }
    if variant != Variant::Whole {
        for (number, node) in (1..).zip(&nodes) {
            let port = format!("port{number}");
            if transit == Hook::Xdp {
                bridge.run(|| far_ends.attach_xdp("xdp_pass", &port))?;
            } else {
                aggregate(&node.namespace)?;
            }
            segment(&node.namespace, "uplink")?;
            segment(&bridge, &port)?;
        }
    }
    fill(&mut nodes)?;
    let mut ends = Vec::new();
    for vni in [DIRECT, BOUNCED, DIVIDED] {
        let network = |number: u8| vni * 10 + if vni == DIVIDED { u32::from(number) } else { 0 };
        let client = nodes[0].pod(vni, network(1), pod(vni, 1), Hook::Tc)?;
        let server = nodes[1].pod(vni, network(2), pod(vni, 2), Hook::Tc)?;
        ends.push((vni, client, server));
    }
    let nodes = Rc::new(nodes);
    let mut paths = Vec::new();
    for ((vni, client, server), name) in ends.into_iter().zip(variant.names()) {
        let (mut raised, untouched) = proof(vni);
        if transit == Hook::Xdp {
            raised.push((1, Counter::DecapsulatedXdp));
        }
        let path = Path {
            name: name.to_owned(),
            nodes: Rc::clone(&nodes),
            client,
            server,
            address: pod(vni, 2),
            measures: MEASURES,
            raised,
            untouched,
        };
        paths.push(path.ready()?);
    }
    let switch = Switch {
        _bridge: bridge,
        _far_ends: far_ends,
    };
    Ok((switch, paths))
}

/// Writes all rows of all VPCs.
fn fill(nodes: &mut [Node]) -> Result<()> {
    let droplets: Vec<Ipv4Addr> = nodes.iter().map(|node| node.address).collect();
    for node in nodes.iter_mut() {
        node.know(&droplets)?;
        for (vni, divider, bouncer) in [
            (DIRECT, None, None),
            (BOUNCED, None, Some(droplet(3))),
            (DIVIDED, Some(droplet(3)), Some(droplet(4))),
        ] {
            node.vpc(vni, divider)?;
            for number in [1, 2] {
                let network = vni * 10 + if vni == DIVIDED { u32::from(number) } else { 0 };
                let [a, b, c, _] = pod(vni, number).octets();
                node.network(vni, network, Ipv4Addr::new(a, b, c, 0), bouncer)?;
            }
        }
    }
    for (number, other) in [(1, 2), (2, 1)] {
        nodes[number - 1].row(RemoteRow::Direct, DIRECT, pod(DIRECT, other), droplet(other))?;
        let home = droplet(number as u8);
        nodes[2].row(RemoteRow::Bouncer, BOUNCED, pod(BOUNCED, number as u8), home)?;
        nodes[3].row(RemoteRow::Bouncer, DIVIDED, pod(DIVIDED, number as u8), home)?;
    }
    Ok(())
}

type Counters = Vec<(usize, Counter)>;

/// Returns the counters that a path raises, and those that it must not raise.
fn proof(vni: u32) -> (Counters, Counters) {
    match vni {
        DIRECT => (
            vec![(0, Counter::SentDirect), (1, Counter::Delivered)],
            vec![(2, Counter::Bounced), (3, Counter::Bounced)],
        ),
        BOUNCED => (
            vec![(0, Counter::SentToBouncer), (2, Counter::Bounced)],
            vec![(0, Counter::SentDirect), (3, Counter::Bounced)],
        ),
        _ => (
            vec![
                (0, Counter::SentToDivider),
                (2, Counter::Divided),
                (3, Counter::Bounced),
            ],
            vec![(0, Counter::SentDirect), (2, Counter::Bounced)],
        ),
    }
}
