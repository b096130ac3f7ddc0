//! The two pods on two droplets with limits of bandwidth in both directions, as transitd sets them.

use std::{net::Ipv4Addr, rc::Rc};

use anyhow::{Context, Result, ensure};
use thuban_common::{
    meter::{MeterEntry, MeterKey},
    tables::{ATTACHMENT_METERED, ATTACHMENT_SHAPED, AttachmentEntry, LOCAL_SHAPED, LocalEntry},
};

use super::rules::HOST_END;
use crate::{
    bench::{
        datapath::rigs::{
            Path,
            cable::{self, VNI},
            node::Node,
        },
        traffic::Measure,
    },
    programs::key,
    rig::limits::limit,
};

/// 1 Gb/s, in bytes.
const RATE: u64 = 125_000_000;
/// A limit decides how much more arrives, so that is not measured.
const MEASURES: &[Measure] = &[Measure::RoundTrips, Measure::Stream];

/// Makes the rig of a case with limits.
pub fn path(name: &str) -> Result<Path> {
    let mut path = cable::path(cable::spec_of("thuban-seg")?)?;
    name.clone_into(&mut path.name);
    path.measures = MEASURES;
    let pods = [&path.client, &path.server];
    let nodes = Rc::get_mut(&mut path.nodes).context("the nodes are in use")?;
    for ((node, pod), number) in nodes.iter_mut().zip(pods).zip(2..) {
        for (namespace, link) in [(pod, "eth0"), (&node.namespace, HOST_END)] {
            limit(namespace, link, RATE)?;
            let queues = namespace.command(&format!("tc qdisc show dev {link}"))?;
            ensure!(queues.contains("qdisc tbf"), "no limit at {link}: {queues}");
        }
        write_rows(node, Ipv4Addr::new(10, 0, 0, number))?;
    }
    path.ready()
}

/// Has the programs lead what the pod receives to its queue, and meter what the pod sends.
fn write_rows(node: &mut Node, address: Ipv4Addr) -> Result<()> {
    let interface = node.namespace.interface(HOST_END)?;
    let programs = node.programs.as_mut().context("a droplet without programs")?;
    // A twentieth more than the queue lets out.
    let meter = MeterEntry::new(RATE + RATE / 20);
    programs.insert("METERS", MeterKey::of_endpoint(interface), meter)?;
    let mut attachment: AttachmentEntry = programs.get("ATTACHMENTS", &interface)?;
    attachment.flags = ATTACHMENT_SHAPED | ATTACHMENT_METERED;
    programs.insert("ATTACHMENTS", interface, attachment)?;
    let local = LocalEntry {
        vni: VNI,
        ifindex: interface,
        mac: attachment.mac,
        flags: LOCAL_SHAPED,
    };
    programs.set_local(key(VNI, address), local)
}
