//! The node of a bouncer falls silent under bounced flows: the senders notice by themselves, long before the operator
//! moves the role.

use std::collections::BTreeMap;
use std::net::UdpSocket;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::json;
use thuban_cluster::Cluster;
use thuban_cluster::wait::uninterrupted;

use super::role_moves::NoDirectPaths;
use crate::audit::wait_sound;
use crate::flows::wait_settled;
use crate::leadership::{leader, pod_of};
use crate::support::{Pod, apply, netexec_manifest, running};
use crate::tenant::{Tenant, manifests};
use crate::tenants::tenants;

const NAME: &str = "bereft";
/// The number of bouncers. One of them dies: the flows are shared between both.
const BOUNCERS: usize = 2;
const FLOWS: u8 = 32;
/// The time between datagrams of all flows together.
const STEP: Duration = Duration::from_millis(1);
/// How long flows go on before anything happens, and while the node is cut off. The operator takes 10 s to suspect the
/// node.
const WARM: Duration = Duration::from_secs(3);
const CUT: Duration = Duration::from_secs(6);
/// The longest gap that is accepted. The documented time is a second, and a busy machine looks later. Without the
/// probes, the gap was as long as the node was cut off.
const GENEROUS: Duration = Duration::from_secs(3);

/// The times at which datagrams of a flow came, by the flow's number.
type Arrivals = BTreeMap<u8, Vec<Instant>>;

/// Sends flows until it is over, each from a port of its own.
fn send(client: &Pod, server: &UdpSocket, to: &Pod, is_over: &AtomicBool) -> Result<()> {
    let to = (to.address, server.local_addr()?.port());
    client.inside(|| {
        let sockets: Vec<UdpSocket> = (0..FLOWS)
            .map(|_| Ok(UdpSocket::bind("0.0.0.0:0")?))
            .collect::<Result<_>>()?;
        for (number, socket) in (0..FLOWS).zip(&sockets).cycle() {
            if is_over.load(Ordering::Relaxed) {
                break;
            }
            // A datagram that can't be sent counts as lost.
            let _ = socket.send_to(&[number], to);
            thread::sleep(STEP);
        }
        Ok(())
    })
}

fn receive(server: &UdpSocket, is_over: &AtomicBool) -> Result<Arrivals> {
    server.set_read_timeout(Some(Duration::from_millis(100)))?;
    let mut arrivals = Arrivals::new();
    let mut buffer = [0; 16];
    while !is_over.load(Ordering::Relaxed) {
        if uninterrupted(|| server.recv(&mut buffer)).is_ok() {
            arrivals.entry(buffer[0]).or_default().push(Instant::now());
        }
    }
    Ok(arrivals)
}

/// Returns the longest gap in each flow that had come before `since`, from its last datagram before `since` on; the
/// maximum if no datagram came afterwards. Sorted.
fn gaps(arrivals: &Arrivals, since: Instant) -> Vec<Duration> {
    let gap = |times: &Vec<Instant>| {
        let last = times.iter().rfind(|time| **time < since)?;
        let later = times.iter().filter(|time| **time >= since);
        let ends = std::iter::once(last).chain(later);
        let pairs = ends.clone().zip(ends.skip(1));
        pairs
            .map(|(one, next)| *next - *one)
            .max()
            .or(Some(Duration::MAX))
    };
    let mut gaps: Vec<Duration> = arrivals.values().filter_map(gap).collect();
    gaps.sort();
    gaps
}

/// Cuts the node off until this is dropped.
struct CutOff<'a>(&'a Cluster, &'a str);

impl<'a> CutOff<'a> {
    fn new(cluster: &'a Cluster, node: &'a str) -> Result<Self> {
        cluster.cut_off(node, true)?;
        Ok(Self(cluster, node))
    }
}

impl Drop for CutOff<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.0.cut_off(self.1, false) {
            eprintln!("{} stays cut off: {error:#}", self.1);
        }
    }
}

/// Returns a node with a bouncer that is to fall silent, one whose bouncer stays, and one without a bouncer.
fn parts(cluster: &Cluster) -> Result<[String; 3]> {
    let (_, leads) = pod_of(cluster, &leader(cluster)?.0)?;
    let bouncers = wait_settled(cluster, "bouncers", NAME, BOUNCERS)?;
    let victim = bouncers
        .iter()
        .find(|node| **node != leads)
        .context("two bouncers")?;
    let stays = bouncers
        .iter()
        .find(|node| *node != victim)
        .context("on two nodes")?;
    let nodes = cluster.nodes()?;
    let sender = nodes
        .iter()
        .find(|node| !bouncers.contains(node))
        .context("three nodes")?;
    Ok([victim, stays, sender].map(Clone::clone))
}

#[test]
fn a_bounced_flow_leaves_a_bouncer_whose_node_falls_silent() {
    let cluster = &tenants().cluster;
    let _guard = NoDirectPaths::new(cluster).unwrap();
    let mut objects = manifests(NAME, &["10.79.0.0/16"], &["10.79.1.0/24"]);
    objects[1]["spec"]["bouncers"] = json!(BOUNCERS);
    let tenant = Tenant::of(cluster, NAME, &objects).unwrap();
    let [victim, stays, sender] = parts(cluster).unwrap();
    let pods = [("client", &sender), ("server", &stays)];
    apply(
        cluster,
        &pods.map(|(name, node)| netexec_manifest(NAME, name, node, None)),
    )
    .unwrap();
    let [client, server] = pods.map(|(name, _)| running(cluster, NAME, name).unwrap());
    let socket = server.inside(|| Ok(UdpSocket::bind("0.0.0.0:0")?)).unwrap();
    let (is_sent, is_over) = (AtomicBool::new(false), AtomicBool::new(false));
    let (arrivals, cut) = thread::scope(|scope| {
        let sending = scope.spawn(|| send(&client, &socket, &server, &is_sent));
        let receiving = scope.spawn(|| receive(&socket, &is_over));
        let worked = || -> Result<Instant> {
            thread::sleep(WARM);
            let now = Instant::now();
            let cut_off = CutOff::new(cluster, &victim)?;
            thread::sleep(CUT);
            drop(cut_off);
            Ok(now)
        };
        let cut = worked();
        is_sent.store(true, Ordering::Relaxed);
        let sent = sending.join().unwrap();
        thread::sleep(Duration::from_millis(300));
        is_over.store(true, Ordering::Relaxed);
        let arrivals = receiving.join().unwrap();
        sent.unwrap();
        (arrivals.unwrap(), cut.unwrap())
    });
    let gaps = gaps(&arrivals, cut);
    let stopped = gaps
        .iter()
        .filter(|gap| **gap > Duration::from_millis(300))
        .count();
    let longest = gaps.last().copied().unwrap_or_default();
    eprintln!(
        "{victim} cut off: {stopped} of {} flows stopped, for {longest:.1?} at most",
        gaps.len()
    );
    judge(&gaps, stopped, longest).unwrap();
    tenant.remove().unwrap();
    wait_sound(cluster);
}

fn judge(gaps: &[Duration], stopped: usize, longest: Duration) -> Result<()> {
    ensure!(
        gaps.len() == usize::from(FLOWS),
        "all flows came before: {gaps:?}"
    );
    ensure!(stopped > 0, "none went by it: {gaps:?}");
    ensure!(longest < GENEROUS, "{gaps:?}");
    Ok(())
}
