//! What telling of flows costs: the modes off, drops and all beside each other.
//!
//! Each mode has two pods on two droplets (the rig `thuban-seg`), and a world for programs alone. Nobody reads the
//! events: there are few, because a client's connections to a server are one flow.

use std::{path::Path as Folder, rc::Rc};

use anyhow::{Context, Result, bail, ensure};
use transitd::{dataplane::seen_flows, settings::FlowMode};

use super::{
    Case, File, Plan,
    rigs::{self, Path, cable},
    take_turns, testrun,
};
use crate::bench::{
    go_on,
    report::{
        Bound::{self, AtLeast, AtMost},
        Session, judge,
    },
    results::Results,
    table::Table,
    traffic::Measure,
};

const MODES: [(&str, FlowMode); 3] = [
    ("off", FlowMode::Off),
    ("drops", FlowMode::Drops),
    ("all", FlowMode::All),
];

const MEASURES: &[Measure] = &[
    Measure::Stream,
    Measure::Datagrams,
    Measure::RoundTrips,
    Measure::Connections,
];

/// The promises as ratios: a case, the case whose samples divide, a metric, the bound.
const RATIOS: [(&str, &str, &str, Option<Bound>); 8] = [
    ("drops", "off", "tcp1_gbps", None),
    ("drops", "off", "udp64_pps", None),
    ("drops", "off", "rr_p50_us", None),
    ("drops", "off", "crr_per_s", None),
    ("all", "off", "tcp1_gbps", Some(AtLeast(0.97))),
    ("all", "off", "udp64_pps", Some(AtLeast(0.95))),
    ("all", "off", "rr_p50_us", None),
    ("all", "off", "crr_per_s", None),
];

/// The promises as differences of medians.
const DIFFERENCES: [(&str, &str, &str, Option<Bound>); 6] = [
    ("drops-agent", "off-agent", "ns_per_packet", None),
    ("drops-delivery", "off-delivery", "ns_per_packet", None),
    ("all-agent", "off-agent", "ns_per_packet", Some(AtMost(60.0))),
    (
        "all-delivery",
        "off-delivery",
        "ns_per_packet",
        Some(AtMost(60.0)),
    ),
    ("drops-maps", "off-maps", "map_mib", None),
    ("all-maps", "off-maps", "map_mib", Some(AtMost(12.0))),
];

/// Measures, prints the tables and writes `flows.json`.
pub fn run(plan: &Plan, folder: &Folder) -> Result<()> {
    let session = Session::begin("flows", folder)?;
    println!("setting up");
    let mut cases = cases(plan)?;
    println!("{} cases, set up in {:.0} s", cases.len(), session.seconds());
    let results = take_turns(plan, &mut cases)?;
    let tables = format!("{}\n{}", results.table(), promises(&results));
    session.finish(&tables, &File::new(plan, &results), None)
}

fn cases(plan: &Plan) -> Result<Vec<Box<dyn Case>>> {
    let mut paths = Vec::new();
    let mut alone = Vec::new();
    for (mode, flows) in MODES {
        go_on()?;
        if plan.wants_case(mode) {
            paths.push(path(mode, flows).with_context(|| format!("setting up {mode}"))?);
        }
        testrun::add_cases_of_flows(mode, flows, &mut alone)?;
    }
    let mut cases = rigs::cases(paths);
    cases.extend(alone.into_iter().filter(|case| plan.wants_case(case.name())));
    cases.retain(|case| plan.wants(&case.metrics()));
    if cases.is_empty() {
        bail!("no case of these names gives these metrics");
    }
    Ok(cases)
}

/// Makes the rig of the data plane's case, as transitd sets it up on most NICs, and has its programs tell of flows.
fn path(mode: &str, flows: FlowMode) -> Result<Path> {
    let mut path = cable::path(cable::spec_of("thuban-seg")?)?;
    mode.clone_into(&mut path.name);
    path.measures = MEASURES;
    let nodes = Rc::get_mut(&mut path.nodes).context("the nodes are in use")?;
    for node in nodes.iter_mut() {
        let programs = node.programs.as_mut().context("a droplet without programs")?;
        programs.set_flags(seen_flows::flags(flows))?;
    }
    let path = path.ready()?;
    prove(&path, flows)?;
    Ok(path)
}

/// Checks that the first packets of the rig were told where all are wanted, and not where none are. Some are dropped:
/// those of discovery.
fn prove(path: &Path, flows: FlowMode) -> Result<()> {
    let expected = match flows {
        FlowMode::Off => false,
        FlowMode::Drops => return Ok(()),
        FlowMode::All => true,
    };
    for node in path.nodes.iter() {
        let programs = node.programs.as_ref().context("a droplet without programs")?;
        let found = programs.has_seen_flows()?;
        ensure!(found == expected, "{}: flows in SEEN_FLOWS: {found}", path.name);
    }
    Ok(())
}

/// Returns the table of promises.
fn promises(results: &Results) -> String {
    let mut table = Table::new(["metric", "case", "against", "", "goal"]).right(3..4);
    let mut row =
        |(case, against, metric, bound): (&str, &str, &str, Option<Bound>), value: f64, text: String| {
            table.row([
                metric.to_owned(),
                case.to_owned(),
                against.to_owned(),
                text,
                bound.map(|bound| judge(value, bound)).unwrap_or_default(),
            ]);
        };
    for promise @ (case, against, metric, _) in RATIOS {
        if let Some(ratio) = results.ratio(case, against, metric) {
            row(promise, ratio, format!("x {ratio:.3}"));
        }
    }
    for promise @ (case, against, metric, _) in DIFFERENCES {
        let medians = [case, against].map(|case| results.median(case, metric));
        if let [Some(own), Some(other)] = medians {
            row(promise, own - other, format!("{:+.1}", own - other));
        }
    }
    table.to_string()
}
