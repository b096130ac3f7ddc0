//! The data-plane benchmark: Thuban beside plain routing and the kernel's VXLAN, on one machine, in one run.
//!
//! Cases take turns, run after run and measure by measure, so that a slow minute of the machine affects all cases that
//! are compared. Comparisons are ratios of medians within one run, because absolute numbers depend on the machine.
//! Every case proves that its traffic went the way that its name says.

pub mod flows;
mod plot;
pub mod rigs;
mod targets;
pub mod testrun;

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use anyhow::{Context, Result, bail};
use serde::Serialize;

use super::{
    go_on,
    report::Session,
    results::{Results, Sample, Series},
    table::number,
};
use rigs::{cable, switch};

/// What the command line says of a run.
#[derive(clap::Args)]
pub struct PlanArguments {
    /// Number of runs of each case
    #[arg(long, default_value_t = 5)]
    runs: usize,
    /// Duration in seconds of each stream and ping-pong. Measures that settle faster take half of it
    #[arg(long, default_value_t = 3)]
    seconds: u64,
    /// Measure only these cases, separated by commas. A `*` at the end stands for the rest of a name. Default: all
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Measure only these metrics, separated by commas. Default: all
    #[arg(long, value_delimiter = ',')]
    metrics: Vec<String>,
    /// Check only that everything works: one run of one second. The figures mean nothing
    #[arg(long)]
    quick: bool,
    /// Folder that the results are written to
    #[arg(long, default_value = "target/bench")]
    output: PathBuf,
}

impl PlanArguments {
    /// Runs a benchmark as they say.
    pub fn run(self, benchmark: impl FnOnce(&Plan, &Path) -> Result<()>) -> ExitCode {
        let (runs, seconds) = if self.quick {
            (1, 1)
        } else {
            (self.runs.max(1), self.seconds.max(1))
        };
        let plan = Plan {
            runs,
            time: Duration::from_secs(seconds),
            only: self.only,
            metrics: self.metrics,
        };
        match benchmark(&plan, &self.output) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("error: {error:#}");
                ExitCode::FAILURE
            }
        }
    }
}

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

/// The contents of the file that a benchmark of packets writes.
#[derive(Serialize)]
pub struct File<'a> {
    runs: usize,
    results: &'a [Series],
}

impl<'a> File<'a> {
    pub fn new(plan: &Plan, results: &'a Results) -> Self {
        Self {
            runs: plan.runs,
            results: &results.series,
        }
    }
}

/// Measures the cases in turns, and prints a line for each.
pub fn take_turns(plan: &Plan, cases: &mut [Box<dyn Case>]) -> Result<Results> {
    let mut results = Results::default();
    for run in 1..=plan.runs {
        for case in &mut *cases {
            go_on()?;
            let samples = case.measure(plan).with_context(|| case.name().to_owned())?;
            println!("{run}/{} {:<26}{}", plan.runs, case.name(), line(&samples));
            results.add(case.name(), &samples);
        }
    }
    Ok(results)
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
    let results = take_turns(plan, &mut cases)?;
    let tables = format!("{}\n{}", results.table(), targets::table(&results));
    let file = File::new(plan, &results);
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
