//! Connections, one TCP stream and datagrams of a client outside, by Thuban and its peers in turns.
//!
//! Connections come by routes to all nodes, and go to servers on all nodes. A stream and datagrams are one flow, which
//! one node takes: they come by one node and go to a server on another, for all cases alike.

use std::{net::Ipv4Addr, path::PathBuf, slice, thread, time::Duration};

use anyhow::{Context, Result, ensure};
use thuban_cluster::NODES;

use super::{
    Parts, Plan,
    haproxy::{self, Haproxy, Listen},
    objects,
    site::{self, LAST, Site, VIA},
};
use crate::bench::{
    float, go_on,
    kube_proxy::Mode,
    pods::Pod,
    results::{Results, Sample},
    services::{
        kube_proxy::KubeProxy,
        traffic::{self, ANSWERS, Taken, Target, connections, wait_for_answers, warm_up},
    },
    stats::quantile,
    table::number,
    traffic::{Ends, Measure, PORTS},
};

/// Clients at once where connections a second are counted.
const WORKERS: usize = 8;
/// The pause after each measure, for other work of the machine.
const REST: Duration = Duration::from_millis(300);
const READY_TIMEOUT: Duration = Duration::from_mins(2);
/// The addresses of the other cluster's load balancers.
const BY_HAND: [Ipv4Addr; 2] = [Ipv4Addr::new(203, 0, 113, 1), Ipv4Addr::new(203, 0, 113, 2)];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// By fronts.
    Front,
    /// By the nodes' own stack.
    Node,
    KubeProxy,
    Haproxy,
    /// To servers in the nodes' own network, by nobody.
    Plain,
}

impl Way {
    const fn name(self) -> &'static str {
        match self {
            Self::Front => "front",
            Self::Node => "node",
            Self::KubeProxy => "kube-proxy",
            Self::Haproxy => "haproxy",
            Self::Plain => "plain",
        }
    }

    const fn measures(self) -> &'static [Measure] {
        match self {
            Self::Haproxy => &[Measure::Stream],
            _ => &[Measure::Stream, Measure::Datagrams],
        }
    }
}

struct Case<'a> {
    way: Way,
    site: &'a Site,
    /// Where connections go.
    targets: Vec<Target>,
    /// Where a stream and datagrams go.
    address: Ipv4Addr,
    /// The server that takes these, and its own address.
    server: Pod,
}

pub fn measure(thuban: &Site, other: &Site, plan: &Plan, parts: &Parts, results: &mut Results) -> Result<()> {
    let cases = cases(thuban, other)?;
    for round in 1..=plan.rounds {
        // The first case of one round is the last of the next.
        let first = round % cases.len();
        for case in cases[first..].iter().chain(&cases[..first]) {
            go_on()?;
            let samples = turn(case, plan, parts).with_context(|| case.way.name())?;
            let line: Vec<String> = samples
                .iter()
                .map(|sample| format!("{} {}", sample.metric, number(sample.value)))
                .collect();
            println!(
                "round {round} of {}, {:<10} {}",
                plan.rounds,
                case.way.name(),
                line.join("  ")
            );
            results.add(case.way.name(), &samples);
        }
    }
    Ok(())
}

fn cases<'a>(thuban: &'a Site, other: &'a Site) -> Result<Vec<Case<'a>>> {
    let mut cases = Vec::new();
    for (way, ports) in [(Way::Front, [0, 1]), (Way::Node, [2, 3])] {
        let by_node = way == Way::Node;
        let balance = |wanted| thuban.balance(&objects::Wanted { by_node, ..wanted });
        let address = balance(site::answers(way.name()))?;
        let one = balance(site::one(&format!("{}-one", way.name())))?;
        thuban.route_by_one(one)?;
        cases.push(Case {
            way,
            site: thuban,
            targets: ports.map(|way| Target::new(address, way)).into(),
            address: one,
            server: thuban.last().clone(),
        });
    }
    let [address, one] = BY_HAND;
    other.balance_by_hand(&site::answers("answers"), address)?;
    other.balance_by_hand(&site::one("one"), one)?;
    other.route_by_one(one)?;
    for (way, targets, one) in [
        (Way::KubeProxy, [0, 1].map(|way| Target::new(address, way)), one),
        (
            Way::Haproxy,
            [2, 3].map(|way| Target::new(haproxy::ADDRESS, way)),
            haproxy::ADDRESS,
        ),
    ] {
        cases.push(Case {
            way,
            site: other,
            targets: targets.into(),
            address: one,
            server: other.last().clone(),
        });
    }
    let servers = node_servers(other)?;
    let last = servers.last().context("a node")?.clone();
    cases.push(Case {
        way: Way::Plain,
        site: other,
        targets: servers.iter().map(|node| Target::new(node.address, 4)).collect(),
        address: last.address,
        server: last,
    });
    Ok(cases)
}

/// Starts a server in each node's own network namespace.
fn node_servers(site: &Site) -> Result<Vec<Pod>> {
    let taken = Taken::default();
    let start = |(number, node): (u8, &&str)| {
        let path = format!("/proc/{}/ns/net", site.cluster.node_pid(node)?);
        let server = Pod::of(PathBuf::from(path), site.cluster.node_address(node)?);
        traffic::serve(&server, number, &taken)?;
        Ok(server)
    };
    (0..).zip(&NODES).map(start).collect()
}

fn turn(case: &Case, plan: &Plan, parts: &Parts) -> Result<Vec<Sample>> {
    let cluster = &case.site.cluster;
    let proxy = if matches!(case.way, Way::KubeProxy | Way::Haproxy) {
        Some(KubeProxy::start(
            cluster,
            &parts.kube_proxy,
            Mode::Nftables,
            &NODES,
        )?)
    } else {
        None
    };
    let haproxy = if case.way == Way::Haproxy {
        Some(Haproxy::start(case.site, &listens(case.site)?)?)
    } else {
        None
    };
    answering(case)?;
    if proxy.is_some() {
        // kube-proxy writes all rules once more when it has seen its own node.
        thread::sleep(Duration::from_secs(2));
    }
    let before = fronted(case)?;
    let samples = traffic(case, plan.time)?;
    if let Some(fronted) = fronted(case)?.zip(before).map(|(after, before)| after - before) {
        let is_front = case.way == Way::Front;
        ensure!(is_front == (fronted > 1000), "fronts sent {fronted} packets");
    }
    drop((haproxy, proxy));
    Ok(samples)
}

/// Returns the packets that the nodes sent as fronts, if this is a cluster with Thuban.
fn fronted(case: &Case) -> Result<Option<u64>> {
    if !matches!(case.way, Way::Front | Way::Node) {
        return Ok(None);
    }
    let counters = NODES.map(|node| case.site.cluster.counters(node));
    let mut sum = 0;
    for counters in counters {
        sum += counters?.get("fronted").copied().unwrap_or(0);
    }
    Ok(Some(sum))
}

/// Returns what haproxy does: connections to all nodes' ports, a stream by one node.
fn listens(site: &Site) -> Result<Vec<Listen>> {
    let listen = |service: &str, port: u16, nodes: &[&str]| {
        let service = objects::get(&site.cluster, service)?;
        let ports = service["spec"]["ports"].as_array().context("ports")?;
        let is_it = |one: &&serde_json::Value| one["port"] == port && one["protocol"] == "TCP";
        let node_port = ports.iter().find(is_it).and_then(|one| one["nodePort"].as_u64());
        let node_port = u16::try_from(node_port.context("a NodePort")?)?;
        let member = |node: &&str| Ok((site.cluster.node_address(node)?, node_port));
        let members = nodes.iter().map(member).collect::<Result<_>>()?;
        anyhow::Ok(Listen { port, members })
    };
    // iperf3's port is the first.
    let [(stream, _), ..] = PORTS;
    Ok(vec![
        listen("answers", ANSWERS, &NODES)?,
        listen("one", stream, &[VIA])?,
    ])
}

/// Waits until each target answers; all have been used then.
fn answering(case: &Case) -> Result<()> {
    let client = &case.site.client;
    wait_for_answers(client, &case.targets, READY_TIMEOUT, go_on)?;
    let all: Vec<&Target> = case.targets.iter().collect();
    warm_up(client, &all)
}

fn traffic(case: &Case, time: Duration) -> Result<Vec<Sample>> {
    let client = &case.site.client;
    let clients = slice::from_ref(client);
    let one = connections(clients, &case.targets, 1, time)?;
    thread::sleep(REST);
    let many = connections(clients, &case.targets, WORKERS, time)?;
    let failed = one.failed + many.failed;
    let mut samples = vec![
        Sample::new("connect_p50_us", "us", quantile(&one.micros, 0.50)),
        Sample::new("connect_p99_us", "us", quantile(&one.micros, 0.99)),
        Sample::new("crr1_per_s", "1/s", one.per_second),
        Sample::new("crr8_per_s", "1/s", many.per_second),
        Sample::new("failed", "connections", float(failed as u64)),
    ];
    let ends = Ends {
        client: client.namespace(),
        server: case.server.namespace(),
        own: case.server.address,
        address: case.address,
    };
    for measure in case.way.measures() {
        go_on()?;
        thread::sleep(REST);
        let found = measure.run(ends, time);
        samples.extend(found.with_context(|| format!("{measure:?} by {VIA} to {LAST}"))?);
    }
    Ok(samples)
}
