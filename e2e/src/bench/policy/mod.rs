//! The benchmark of network policy: the same two pods on two droplets with and without policies, beside plain routing
//! with and without sets of nftables, and beside kube-network-policies, on one machine, in one run. Two pods on one
//! droplet, and limits of bandwidth, are cases of their own.
//!
//! Cases take turns as in the benchmark of the data plane. Each proves that its rules are asked: without the one that
//! lets the client in, no ping comes through.

mod limits;
mod near;
pub(super) mod nft;
mod peer;
pub(super) mod rules;

use std::{path::Path as Folder, rc::Rc};

use anyhow::{Context, Result, bail};

use super::{
    datapath::{
        Case, File, Plan,
        rigs::{Path, PathCase, cable},
        take_turns,
    },
    go_on,
    report::{
        Bound::{self, AtLeast, AtMost},
        Session, judge,
    },
    results::{Results, Sample},
    table::Table,
    traffic::Measure,
};

pub use peer::Parts;
use peer::{Site, SiteCase};

/// The measures, each of which every case gives.
const MEASURES: [Measure; 4] = [
    Measure::RoundTrips,
    Measure::Connections,
    Measure::Stream,
    Measure::Datagrams,
];

/// The cases with Thuban, and how many rules each endpoint has for each direction; none: it has no policy.
const CASES: [(&str, Option<usize>); 7] = [
    ("none", None),
    ("elsewhere", None),
    ("deny1", Some(0)),
    ("rules10", Some(10)),
    ("rules100", Some(100)),
    ("rules1000", Some(1_000)),
    ("rules10000", Some(10_000)),
];

/// The cases with both pods on one droplet, and how many rules each endpoint has for each direction.
const NEAR: [(&str, Option<usize>); 3] = [
    ("near", None),
    ("near-deny1", Some(0)),
    ("near-rules10000", Some(10_000)),
];

/// Both pods have limits of bandwidth in both directions, and no policy.
const LIMITED: &str = "limited";

/// The cases of plain routing, and how many addresses the sets of nftables have.
const PLAIN: [(&str, Option<usize>); 3] = [
    ("plain", None),
    ("plain-nft1", Some(1)),
    ("plain-nft10000", Some(10_000)),
];

/// The cases of kube-network-policies, and how many entries the policy has in each direction.
const PEERS: [(&str, usize); 2] = [("plain-knp1", 1), ("plain-knp10000", 10_000)];

/// The measures with kube-network-policies. Datagrams without answers are no connection to conntrack, so it judges each
/// of them; too few arrive to be measured.
const PEER_MEASURES: [Measure; 3] = [Measure::RoundTrips, Measure::Connections, Measure::Stream];

/// The promises: a case, the case whose median divides, a metric, the bound.
const TARGETS: [(&str, &str, &str, Option<Bound>); 39] = [
    ("elsewhere", "none", "rr_p50_us", Some(AtMost(1.01))),
    ("deny1", "none", "rr_p50_us", Some(AtMost(1.03))),
    ("deny1", "none", "crr_per_s", Some(AtLeast(0.95))),
    ("deny1", "none", "tcp1_gbps", Some(AtLeast(0.99))),
    ("deny1", "none", "udp64_pps", Some(AtLeast(0.95))),
    ("rules10000", "none", "rr_p50_us", Some(AtMost(1.03))),
    ("rules10000", "none", "crr_per_s", Some(AtLeast(0.95))),
    ("rules10000", "none", "tcp1_gbps", Some(AtLeast(0.99))),
    ("rules10000", "none", "udp64_pps", Some(AtLeast(0.95))),
    ("rules10000", "deny1", "rr_p50_us", Some(AtMost(1.03))),
    ("rules10000", "deny1", "crr_per_s", Some(AtLeast(0.97))),
    ("rules10000", "deny1", "tcp1_gbps", Some(AtLeast(0.97))),
    ("rules10000", "deny1", "udp64_pps", Some(AtLeast(0.97))),
    ("near-deny1", "near", "rr_p50_us", Some(AtMost(1.03))),
    ("near-deny1", "near", "crr_per_s", Some(AtLeast(0.95))),
    ("near-deny1", "near", "tcp1_gbps", Some(AtLeast(0.99))),
    ("near-deny1", "near", "udp64_pps", Some(AtLeast(0.95))),
    ("near-rules10000", "near-deny1", "rr_p50_us", Some(AtMost(1.03))),
    ("near-rules10000", "near-deny1", "crr_per_s", Some(AtLeast(0.97))),
    ("near-rules10000", "near-deny1", "tcp1_gbps", Some(AtLeast(0.97))),
    ("near-rules10000", "near-deny1", "udp64_pps", Some(AtLeast(0.97))),
    // Some 3 µs.
    ("limited", "none", "rr_p50_us", Some(AtMost(1.04))),
    ("limited", "none", "cpu_ms_per_gb", Some(AtMost(1.15))),
    ("plain-nft1", "plain", "rr_p50_us", None),
    ("plain-nft1", "plain", "crr_per_s", None),
    ("plain-nft1", "plain", "tcp1_gbps", None),
    ("plain-nft1", "plain", "udp64_pps", None),
    ("plain-nft10000", "plain", "rr_p50_us", None),
    ("plain-nft10000", "plain", "crr_per_s", None),
    ("deny1", "plain-nft1", "crr_per_s", None),
    ("deny1", "plain-nft1", "rr_p50_us", None),
    ("plain-knp1", "plain", "rr_p50_us", None),
    ("plain-knp1", "plain", "crr_per_s", None),
    ("plain-knp1", "plain", "tcp1_gbps", None),
    ("plain-knp10000", "plain", "rr_p50_us", None),
    ("plain-knp10000", "plain", "crr_per_s", None),
    ("deny1", "plain-knp1", "crr_per_s", None),
    ("deny1", "plain-knp1", "rr_p50_us", None),
    ("rules10000", "plain-knp10000", "crr_per_s", None),
];

/// A measure between the pods of a rig, of which each run begins without known flows.
struct PolicyCase(PathCase);

impl Case for PolicyCase {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn metrics(&self) -> Vec<&'static str> {
        self.0.metrics()
    }

    fn measure(&mut self, plan: &Plan) -> Result<Vec<Sample>> {
        for node in self.0.path.nodes.iter() {
            if let Some(programs) = &node.programs {
                rules::forget_flows(programs)?;
            }
        }
        self.0.measure(plan)
    }
}

/// Measures, prints the tables and writes `policy.json`.
pub fn run(plan: &Plan, parts: &Parts, folder: &Folder) -> Result<()> {
    let session = Session::begin("policy", folder)?;
    println!("setting up");
    let mut cases = cases(plan, parts, folder)?;
    println!("{} cases, set up in {:.0} s", cases.len(), session.seconds());
    let results = take_turns(plan, &mut cases)?;
    let tables = format!("{}\n{}", results.table(), ratios(&results));
    session.finish(&tables, &File::new(plan, &results), None)
}

fn cases(plan: &Plan, parts: &Parts, folder: &Folder) -> Result<Vec<Box<dyn Case>>> {
    let mut paths = Vec::new();
    for (name, rules) in CASES.iter().filter(|(name, _)| plan.wants_case(name)) {
        go_on()?;
        let path = far(name).and_then(|path| with_rules(path, *rules));
        let path = path.with_context(|| format!("setting up {name}"))?;
        paths.push(Rc::new(path));
    }
    for (name, rules) in NEAR.iter().filter(|(name, _)| plan.wants_case(name)) {
        go_on()?;
        let path = near::path(name).and_then(|path| with_rules(path, *rules));
        let path = path.with_context(|| format!("setting up {name}"))?;
        paths.push(Rc::new(path));
    }
    if plan.wants_case(LIMITED) {
        go_on()?;
        let path = limits::path(LIMITED).with_context(|| format!("setting up {LIMITED}"))?;
        paths.push(Rc::new(path));
    }
    for (name, addresses) in PLAIN.iter().filter(|(name, _)| plan.wants_case(name)) {
        go_on()?;
        let path = nft::path(name, *addresses).with_context(|| format!("setting up {name}"))?;
        paths.push(Rc::new(path));
    }
    let mut peers = PEERS.to_vec();
    peers.retain(|(name, _)| plan.wants_case(name));
    let is_measured = PEER_MEASURES.iter().any(|measure| plan.wants(measure.metrics()));
    let site = if peers.is_empty() || !is_measured {
        None
    } else {
        go_on()?;
        let site = Site::up(parts, folder).context("setting up kube-network-policies")?;
        Some(Rc::new(site))
    };
    let mut cases: Vec<Box<dyn Case>> = Vec::new();
    for measure in MEASURES.iter().filter(|measure| plan.wants(measure.metrics())) {
        for path in paths.iter().filter(|path| path.measures.contains(measure)) {
            let case = PathCase {
                path: Rc::clone(path),
                measure: *measure,
            };
            cases.push(Box::new(PolicyCase(case)));
        }
        let Some(site) = site.as_ref().filter(|_| PEER_MEASURES.contains(measure)) else {
            continue;
        };
        for (name, entries) in &peers {
            cases.push(Box::new(SiteCase {
                name,
                entries: *entries,
                measure: *measure,
                site: Rc::clone(site),
            }));
        }
    }
    if cases.is_empty() {
        bail!("no case of these names gives these metrics");
    }
    Ok(cases)
}

/// Makes the rig of the data plane's case, as transitd sets it up on most NICs.
fn far(name: &str) -> Result<Path> {
    let mut path = cable::path(cable::spec_of("thuban-seg")?)?;
    name.clone_into(&mut path.name);
    Ok(path)
}

/// Gives the pods their rules.
fn with_rules(mut path: Path, rules: Option<usize>) -> Result<Path> {
    let nodes = Rc::get_mut(&mut path.nodes).context("the nodes are in use")?;
    match rules {
        Some(count) => {
            rules::isolate(nodes, count)?;
            rules::prove(&mut path)?;
        }
        None if path.name == "elsewhere" => rules::isolate_others(nodes)?,
        None => {}
    }
    Ok(path)
}

/// Returns the table of promises.
fn ratios(results: &Results) -> String {
    let mut table = Table::new(["metric", "case", "against", "ratio", "goal"]).right(3..4);
    for (case, against, metric, bound) in TARGETS {
        let Some(ratio) = results.ratio(case, against, metric) else {
            continue;
        };
        table.row([
            metric.to_owned(),
            case.to_owned(),
            against.to_owned(),
            format!("{ratio:.3}"),
            bound.map(|bound| judge(ratio, bound)).unwrap_or_default(),
        ]);
    }
    table.to_string()
}
