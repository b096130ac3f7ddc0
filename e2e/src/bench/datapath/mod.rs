//! The data-plane benchmark: Thuban beside plain routing and the kernel's VXLAN, on one machine, in one run.
//!
//! Cases take turns, run after run and measure by measure, so that a slow minute of the machine affects all cases that
//! are compared. Comparisons are ratios of medians within one run, because absolute numbers depend on the machine.
//! Every case proves that its traffic went the way that its name says.

mod plot;
pub mod rigs;
mod targets;
pub mod testrun;

use std::{path::Path, time::Duration};

use anyhow::{Context, Result, bail};
use serde::Serialize;

use super::{
    go_on,
    report::Session,
    results::{Results, Sample, Series},
    table::number,
};
use rigs::{cable, switch};

/// The plan of a run: the measurements and their lengths.
#[derive(Clone, Debug)]
pub struct Plan {
    pub runs: usize,
    pub time: Duration,
    /// Cases by name, or by the beginning of their names before a `*`; all when empty.
    pub only: Vec<String>,
    /// Metrics by name; all when empty.
    pub metrics: Vec<String>,
}

impl Plan {
    /// Whether any of the metrics is asked for.
    pub fn wants(&self, metrics: &[&str]) -> bool {
        self.metrics.is_empty()
            || metrics
                .iter()
                .any(|metric| self.metrics.iter().any(|m| m == metric))
    }

    /// Whether a case is asked for.
    pub fn wants_case(&self, name: &str) -> bool {
        let matches = |pattern: &String| match pattern.strip_suffix('*') {
            Some(start) => name.starts_with(start),
            None => pattern == name,
        };
        self.only.is_empty() || self.only.iter().any(matches)
    }
}

/// Something set up that is measured once a run.
pub trait Case {
    fn name(&self) -> &str;
    /// Returns the metrics that the case can measure.
    fn metrics(&self) -> Vec<&'static str>;
    fn measure(&mut self, plan: &Plan) -> Result<Vec<Sample>>;
}

#[derive(Serialize)]
struct File<'a> {
    runs: usize,
    results: &'a [Series],
}

/// Measures, prints the tables and writes `datapath.json`, `datapath.svg` and, if rsvg-convert is there,
/// `datapath.png`.
pub fn run(plan: &Plan, folder: &Path) -> Result<()> {
    let session = Session::begin("datapath", folder)?;
    println!("setting up");
    let mut switches = Vec::new();
    let mut cases = cases(plan, &mut switches)?;
    cases.retain(|case| plan.wants(&case.metrics()));
    if cases.is_empty() {
        bail!("no case of these names gives these metrics");
    }
    println!("{} cases, set up in {:.0} s", cases.len(), session.seconds());
    let mut results = Results::default();
    for run in 1..=plan.runs {
        for case in &mut cases {
            go_on()?;
            let samples = case.measure(plan).with_context(|| case.name().to_owned())?;
            println!("{run}/{} {:<26}{}", plan.runs, case.name(), line(&samples));
            results.add(case.name(), &samples);
        }
    }
    let tables = format!("{}\n{}", results.table(), targets::table(&results));
    let file = File {
        runs: plan.runs,
        results: &results.series,
    };
    session.finish(&tables, &file, plot::picture(&results).as_ref())
}

/// Returns the samples of one case and run as a line.
fn line(samples: &[Sample]) -> String {
    let parts = samples
        .iter()
        .map(|sample| format!("{} {}", sample.metric, number(sample.value)));
    parts.collect::<Vec<_>>().join("  ")
}

/// Sets up every case that is asked for.
fn cases(plan: &Plan, switches: &mut Vec<switch::Switch>) -> Result<Vec<Box<dyn Case>>> {
    let mut paths = Vec::new();
    for spec in cable::SPECS.iter().filter(|spec| plan.wants_case(spec.name)) {
        go_on()?;
        paths.push(cable::path(spec).with_context(|| format!("setting up {}", spec.name))?);
    }
    for variant in switch::Variant::ALL {
        if variant.names().iter().any(|name| plan.wants_case(name)) {
            go_on()?;
            let (switch, found) = switch::paths(variant).context("setting up a switch")?;
            switches.push(switch);
            paths.extend(found.into_iter().filter(|path| plan.wants_case(&path.name)));
        }
    }
    let mut cases = rigs::cases(paths);
    testrun::add_cases(plan, &mut cases)?;
    Ok(cases)
}
