//! Two droplets whose uplinks are the two ends of one veth, a pod on each. The cases compare Thuban's direct path with
//! plain routing and the kernel's VXLAN on a bridge.
//!
//! A veth passes GSO frames whole, like a NIC that segments and aggregates inside tunnels. The `-seg` cases turn that
//! off, as on most NICs: frames cross one by one, and the receiver's stack aggregates (GRO) for all alike.
//!
//! `thuban-seg` is the hook that transitd chooses there by itself: transit at tc, Geneve segments aggregated before it.
//!
//! `thuban-seg-xdp` has transit at XDP, as on a NIC with native XDP. A veth must copy every frame before it can show it
//! to XDP (`skb_pp_cow_data`: senders' buffers are shared and have no headroom); a NIC's driver has frames in the form
//! that XDP wants. That copy is a cost of the rig. `vxlan-seg-xdp` pays it too, so that the difference between the two
//! is Thuban's.

use std::{net::Ipv4Addr, rc::Rc};

use anyhow::{Context, Result};
use thuban_common::{counters::Counter, tables::RemoteRow};

use super::{
    Path,
    node::{Hook, Node, segment},
};
use crate::{
    bench::traffic::Measure, programs::Programs, rig::droplet::aggregate, rig::namespace::Namespace,
};

/// The VPC of the cases with Thuban.
pub const VNI: u32 = 100;
const JUMBO: u32 = 9000;
/// The measures with Jumbo frames.
const BULK: &[Measure] = &[Measure::Stream, Measure::Streams];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Network {
    Plain,
    Vxlan,
    /// VXLAN with a program at both uplinks that passes every frame.
    VxlanBehindXdp,
    Thuban {
        agent: Hook,
        transit: Hook,
    },
}

/// A case on this rig.
#[derive(Clone, Copy, Debug)]
pub struct Spec {
    pub name: &'static str,
    network: Network,
    is_segmented: bool,
    mtu: u32,
}

const fn spec(name: &'static str, network: Network, is_segmented: bool, mtu: u32) -> Spec {
    Spec {
        name,
        network,
        is_segmented,
        mtu,
    }
}

const TC: Network = Network::Thuban {
    agent: Hook::Tc,
    transit: Hook::Tc,
};
const MIXED: Network = Network::Thuban {
    agent: Hook::Tc,
    transit: Hook::Xdp,
};
const XDP: Network = Network::Thuban {
    agent: Hook::Xdp,
    transit: Hook::Xdp,
};

pub const SPECS: &[Spec] = &[
    spec("plain", Network::Plain, false, 1500),
    spec("vxlan", Network::Vxlan, false, 1500),
    spec("thuban", TC, false, 1500),
    spec("plain-seg", Network::Plain, true, 1500),
    spec("vxlan-seg", Network::Vxlan, true, 1500),
    spec("vxlan-seg-xdp", Network::VxlanBehindXdp, true, 1500),
    spec("thuban-seg", TC, true, 1500),
    spec("thuban-seg-xdp", MIXED, true, 1500),
    spec("thuban-xdp-agent", XDP, true, 1500),
    spec("plain-9000", Network::Plain, false, JUMBO),
    spec("vxlan-9000", Network::Vxlan, false, JUMBO),
    spec("thuban-9000", TC, false, JUMBO),
    spec("plain-seg-9000", Network::Plain, true, JUMBO),
    spec("vxlan-seg-9000", Network::Vxlan, true, JUMBO),
    spec("thuban-seg-9000", TC, true, JUMBO),
];

const fn droplet(index: u8) -> Ipv4Addr {
    Ipv4Addr::new(172, 31, 98, 1 + index)
}

/// Returns the case of that name.
pub fn spec_of(name: &str) -> Result<&'static Spec> {
    let spec = SPECS.iter().find(|spec| spec.name == name);
    spec.with_context(|| format!("no case {name}"))
}

/// Sets up the rig of a case.
pub fn path(spec: &Spec) -> Result<Path> {
    let mut nodes = [Node::new(droplet(0), spec.mtu)?, Node::new(droplet(1), spec.mtu)?];
    let far = nodes[1].namespace.name();
    nodes[0].namespace.command(&format!(
        "ip link add uplink type veth peer name uplink netns {far}"
    ))?;
    for node in &nodes {
        node.bring_up()?;
    }
    if let Network::Thuban { transit, .. } = spec.network {
        for node in &mut nodes {
            node.load(transit)?;
            if spec.is_segmented && transit == Hook::Tc {
                aggregate(&node.namespace)?;
            }
        }
    }
    if spec.network == Network::VxlanBehindXdp {
        for node in &mut nodes {
            let mut programs = Programs::load()?;
            node.namespace.run(|| programs.attach_xdp("xdp_pass", "uplink"))?;
            node.programs = Some(programs);
        }
    }
    if spec.is_segmented {
        for node in &nodes {
            segment(&node.namespace, "uplink")?;
        }
    }
    let ([client, server], address) = match spec.network {
        Network::Plain => plain(&mut nodes)?,
        Network::Vxlan | Network::VxlanBehindXdp => vxlan(&mut nodes)?,
        Network::Thuban { agent, .. } => thuban(&mut nodes, agent)?,
    };
    let (mut raised, mut untouched) = (Vec::new(), Vec::new());
    if let Network::Thuban { transit, .. } = spec.network {
        raised.extend([(0, Counter::SentDirect), (1, Counter::Delivered)]);
        untouched.extend([(0, Counter::SentToBouncer), (1, Counter::Bounced)]);
        match transit {
            Hook::Tc => untouched.push((1, Counter::DecapsulatedXdp)),
            Hook::Xdp => raised.push((1, Counter::DecapsulatedXdp)),
        }
    }
    Path {
        name: spec.name.to_owned(),
        nodes: Rc::new(nodes.into()),
        client,
        server,
        address,
        measures: if spec.mtu == JUMBO { BULK } else { Measure::ALL },
        raised,
        untouched,
    }
    .ready()
}

type Pods = ([Namespace; 2], Ipv4Addr);

/// Sets up plain routing, without a tunnel: pods have the underlay's whole MTU.
fn plain(nodes: &mut [Node; 2]) -> Result<Pods> {
    let mut pods = Vec::new();
    for (index, node) in (0..).zip(nodes.iter_mut()) {
        let (own, other) = (index + 1, 2 - index);
        let (pod, host_end) = node.veth(node.mtu, None)?;
        node.namespace
            .command(&format!("ip addr add 10.0.{own}.1/24 dev {host_end}"))?;
        node.namespace.command(&format!(
            "ip route add 10.0.{other}.0/24 via {}",
            droplet(1 - index)
        ))?;
        pod.command(&format!("ip addr add 10.0.{own}.2/24 dev eth0"))?;
        pod.command(&format!("ip route add default via 10.0.{own}.1"))?;
        pods.push(pod);
    }
    Ok((pair(pods)?, Ipv4Addr::new(10, 0, 2, 2)))
}

/// Sets up the kernel's VXLAN device and the pod's veth on a bridge, with the remote droplet given.
fn vxlan(nodes: &mut [Node; 2]) -> Result<Pods> {
    let mut pods = Vec::new();
    for (index, node) in (0..).zip(nodes.iter_mut()) {
        let (pod, host_end) = node.veth(node.mtu - 50, None)?;
        for line in [
            format!(
                "ip link add vx0 type vxlan id {VNI} local {} remote {} dstport 4789 dev uplink",
                droplet(index),
                droplet(1 - index)
            ),
            "ip link add br0 type bridge".to_owned(),
            "ip link set vx0 master br0 up".to_owned(),
            format!("ip link set {host_end} master br0"),
            "ip link set br0 up".to_owned(),
        ] {
            node.namespace.command(&line)?;
        }
        pod.command(&format!("ip addr add 10.0.0.{}/24 dev eth0", index + 2))?;
        pods.push(pod);
    }
    Ok((pair(pods)?, Ipv4Addr::new(10, 0, 0, 3)))
}

/// Sets up Thuban with direct rows both ways and no bouncer.
fn thuban(nodes: &mut [Node; 2], agent: Hook) -> Result<Pods> {
    let address = |index: u8| Ipv4Addr::new(10, 0, 0, index + 2);
    let mut pods = Vec::new();
    for (index, node) in (0..).zip(nodes.iter_mut()) {
        node.know(&[droplet(0), droplet(1)])?;
        node.vpc(VNI, None)?;
        node.network(VNI, 1, Ipv4Addr::new(10, 0, 0, 0), None)?;
        node.row(RemoteRow::Direct, VNI, address(1 - index), droplet(1 - index))?;
        pods.push(node.pod(VNI, 1, address(index), agent)?);
    }
    Ok((pair(pods)?, address(1)))
}

fn pair(pods: Vec<Namespace>) -> Result<[Namespace; 2]> {
    <[Namespace; 2]>::try_from(pods).map_err(|pods| anyhow::anyhow!("{} pods", pods.len()))
}
