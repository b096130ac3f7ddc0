//! Frames to an endpoint whose bandwidth is limited pass the queue at the host's end of its veth, by every way of
//! delivery. All others go round that queue. Between droplets a pod has its limits, and not only within one.

use anyhow::{Context, Result, ensure};
use thuban_common::tables::{ATTACHMENT_SHAPED, LOCAL_SHAPED};
use thuban_e2e::rig::{
    POD_MTU,
    droplet::{Droplet, Pod},
    limits::limit,
    topology::Topology,
    traffic::transfer,
};
use thuban_testkit::rates::Bounds;

use crate::{each, run};

/// Bytes sent to a pod by each family.
const BYTES: usize = 2 << 20;

/// Gives the host's end of a pod's veth a queue, which counts what passes it.
fn add_queue(droplet: &Droplet, pod: &Pod) -> Result<()> {
    let queue = format!(
        "tc qdisc add dev {} root handle 1: bfifo limit 100000000",
        pod.host_end
    );
    droplet.namespace.command(&queue).map(drop)
}

/// Returns the bytes that passed the queue.
fn queued(droplet: &Droplet, pod: &Pod) -> Result<usize> {
    let shown = format!("tc -s qdisc show dev {} root", pod.host_end);
    let shown = droplet.namespace.command(&shown)?;
    let (_, sent) = shown.split_once("Sent ").context(shown.clone())?;
    let bytes = sent.split_whitespace().next();
    Ok(bytes.context("no number")?.parse()?)
}

/// Sends to a pod of the first droplet and to a pod of the second, with a limit and without.
fn passes_the_queue(topology: &mut Topology) -> Result<()> {
    let Topology {
        rig,
        first,
        neighbour,
        second,
        ..
    } = topology;
    for (droplet, pod, way) in [(0, &*neighbour, "same droplet"), (1, &*second, "another droplet")] {
        let droplet = &mut rig.droplets[droplet];
        add_queue(droplet, pod)?;
        let send = || -> Result<()> {
            transfer(first.end(), pod.end(), BYTES)?;
            transfer(first.end6(), pod.end6(), BYTES)?;
            Ok(())
        };
        send().context(way)?;
        let before = queued(droplet, pod)?;
        ensure!(
            before < BYTES / 10,
            "{way}: {before} bytes queued without a limit"
        );
        droplet.change_rows(pod, LOCAL_SHAPED, |attachment| {
            attachment.flags = ATTACHMENT_SHAPED;
        })?;
        send().with_context(|| format!("{way}, limited"))?;
        let with_limit = queued(droplet, pod)? - before;
        ensure!(with_limit > 2 * BYTES, "{way}: {with_limit} bytes queued");
    }
    Ok(())
}

#[test]
fn frames_to_a_limited_endpoint_pass_the_queue() -> Result<()> {
    each(passes_the_queue)
}

#[test]
fn agents_at_xdp_leave_limited_endpoints_to_the_queue() -> Result<()> {
    run(&mut Topology::with_agents_at_xdp()?, &passes_the_queue)
}

#[test]
fn limits_hold_to_and_from_a_pod_of_another_droplet() -> Result<()> {
    let bounds = Bounds::from_env();
    each(|topology| {
        topology.make_direct()?;
        let transit = topology.transit;
        let Topology {
            rig, first, second, ..
        } = topology;
        let droplet = rig.droplet(1)?;
        droplet.change_rows(first, LOCAL_SHAPED, |attachment| {
            attachment.flags = ATTACHMENT_SHAPED;
        })?;
        let [limited, other] = [first.namespace.name(), second.namespace.name()];
        let mut off = Vec::new();
        for rate in bounds.limits {
            limit(&first.namespace, "eth0", *rate)?;
            limit(&droplet.namespace, &first.host_end, *rate)?;
            for (way, ends, address) in [
                ("to a far pod", [limited, other], second.address),
                ("from a far pod", [other, limited], first.address),
            ] {
                let way = format!("{way}, transit at {transit:?}");
                off.extend(bounds.check(&way, ends, address, *rate, POD_MTU.into()));
            }
        }
        ensure!(off.is_empty(), "{off:?}");
        Ok(())
    })
}
