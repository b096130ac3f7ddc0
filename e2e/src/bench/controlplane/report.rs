//! The report at the end: numbers beside their goals, a file of them, and a plot.

use std::ops::Range;

use anyhow::Result;
use serde::Serialize;

use super::{Plan, plot, sampler::Point, track::Track};
use crate::bench::{
    report::{Bound, Number, Session, judge},
    stats::{quantile, sorted},
    table::{Table, maybe, number},
};

#[derive(Debug, Default)]
pub struct Report {
    pub numbers: Vec<Number>,
    /// Distributions, for the plot: name and sorted milliseconds.
    pub times: Vec<(String, Vec<f64>)>,
    /// The beginning of each phase, in seconds since the start, and its name.
    pub phases: Vec<(f64, String)>,
    /// Pods that were made in the churn.
    pub churned: Range<usize>,
    /// Steps that did not end.
    pub problems: Vec<String>,
}

#[derive(Serialize)]
struct File<'a> {
    droplets: usize,
    vpcs: usize,
    networks: usize,
    endpoints: usize,
    churn: usize,
    bouncers: u32,
    results: &'a [Number],
    problems: &'a [String],
}

/// A metric, its bound, and its description.
type Goal = (&'static str, Option<Bound>, &'static str);

/// Returns the goals: the bound is `bouncers + 1` where it depends.
fn goals(plan: &Plan) -> Vec<Goal> {
    use Bound::AtMost;
    let rows = f64::from(plan.bouncers + 1);
    vec![
        (
            "rows_per_endpoint_10",
            Some(AtMost(rows)),
            "new rows of an endpoint, few droplets",
        ),
        (
            "rows_per_endpoint_1000",
            Some(AtMost(rows)),
            "new rows of an endpoint, all droplets",
        ),
        (
            "ready_rows_per_endpoint_1000",
            Some(AtMost(1.0)),
            "its row once more, ready",
        ),
        (
            "repeated_rows_per_endpoint_1000",
            None,
            "its rows once more, the same",
        ),
        (
            "role_rows_per_endpoint_1000",
            None,
            "rows of VPCs and networks that droplets enter",
        ),
        ("writes_per_endpoint", Some(AtMost(3.0)), "writes to Provisioned"),
        (
            "writes_before_ready",
            Some(AtMost(1.0)),
            "of these, what the pod waits for: claim and Endpoint made",
        ),
        (
            "events_per_endpoint",
            Some(AtMost(0.0)),
            "events on the happy path",
        ),
        (
            "network_writes_per_endpoint",
            None,
            "numbers of networks, at most one a second",
        ),
        (
            "writes_to_gone",
            Some(AtMost(4.0)),
            "writes from Provisioned to claim gone",
        ),
        (
            "writes_per_life",
            Some(AtMost(4.0)),
            "both: from a pod's binding to its claim gone",
        ),
        (
            "resync_s",
            Some(AtMost(20.0)),
            "operator killed: start to last snapshot",
        ),
        ("resync_leadership_s", None, "of that: until it leads"),
        (
            "resync_from_leadership_s",
            Some(resync(plan)),
            "of that: from then on",
        ),
        (
            "resync_rss_most_mib",
            None,
            "most memory of the operator meanwhile",
        ),
        (
            "lock_held_p99_ms",
            Some(AtMost(5.0)),
            "the rows of all droplets locked at a time, 99 of 100",
        ),
        (
            "resync_lock_held_p99_ms",
            Some(AtMost(5.0)),
            "the same in the resync",
        ),
        ("load_rate", None, "endpoints a second in bulk"),
        ("drain_rate", None, "endpoints a second removed in bulk"),
    ]
}

/// Returns the goals of the churn.
fn churn_goals(plan: &Plan) -> Vec<Goal> {
    use Bound::AtMost;
    vec![
        (
            "provisioned_p50_ms",
            None,
            "binding to Provisioned under the churn",
        ),
        ("provisioned_p99_ms", Some(AtMost(500.0)), "the same, 99 of 100"),
        ("ready_p50_ms", None, "binding to ready at the droplet"),
        ("ready_p99_ms", None, "the same, 99 of 100"),
        ("pod_create_p50_ms", None, "of that: the create answered"),
        ("pod_create_p99_ms", None, "the same, 99 of 100"),
        (
            "configmap_watch_p50_ms",
            None,
            "API server alone: ConfigMap to watch",
        ),
        ("configmap_watch_p99_ms", None, "the same, 99 of 100"),
        ("api_write_p50_ms", None, "API server's answers to writes, bucket"),
        ("api_write_p99_ms", None, "the same, 99 of 100"),
        ("gone_p50_ms", None, "deletion to Endpoint gone"),
        ("gone_p99_ms", None, "the same, 99 of 100"),
        ("churn_rate", None, "made a second, and as many removed"),
        ("operator_cpu_s", None, "CPU of the operator in the churn"),
        ("operator_cores", None, "the same a second"),
        ("api_server_cores", None, "of the API server"),
        (
            "apiserver_cpu_ms_per_life",
            Some(AtMost(6.0)),
            "CPU of the API server for one made and one removed",
        ),
        (
            "apiserver_cpu_ms_per_bare_life",
            None,
            "the same for a pod that needs no network",
        ),
        (
            "operator_rss_mib",
            Some(memory(plan)),
            "memory of the operator after the churn",
        ),
        ("operator_rss_most_mib", None, "the most until then"),
    ]
}

/// The most memory, of which a large cluster may use more.
fn memory(plan: &Plan) -> Bound {
    let is_large = plan.endpoints > 20_000;
    Bound::AtMost(if is_large { 1024.0 } else { 220.0 })
}

/// The longest resync.
fn resync(plan: &Plan) -> Bound {
    Bound::AtMost(if plan.droplets > 1000 { 60.0 } else { 3.0 })
}

/// Returns the goals of VPCs that are made at once.
fn vpc_goals() -> Vec<Goal> {
    use Bound::AtMost;
    vec![
        ("vpc_1_ms", None, "a VPC made to Provisioned"),
        ("vpcs_50_ms", None, "50 VPCs made at once"),
        ("vpcs_50_over_1", Some(AtMost(2.0)), "their ratio"),
        ("vpcs_50_writes", None, "writes of these 50, events aside"),
        (
            "writes_per_vpc",
            Some(AtMost(5.0)),
            "of each, its user's own among them",
        ),
        (
            "api_alone_ms",
            None,
            "API server alone: as many writes of equal objects",
        ),
        ("vpcs_50_over_api_alone", Some(AtMost(1.5)), "50 VPCs beside that"),
    ]
}

/// Returns the goals of a cluster at rest.
fn rest_goals() -> [Goal; 1] {
    [(
        "requests_at_rest_per_s",
        Some(Bound::AtMost(1.0)),
        "requests of every kind from all of Thuban at rest",
    )]
}

/// Returns the goals with network policies.
fn policy_goals(plan: &Plan) -> Vec<Goal> {
    use Bound::AtMost;
    let rows = f64::from(plan.bouncers + 1);
    vec![
        (
            "policy_effect_p50_ms",
            None,
            "NetworkPolicy made to in force at all its pods",
        ),
        (
            "policy_effect_p99_ms",
            Some(AtMost(1000.0)),
            "the same, 99 of 100",
        ),
        (
            "policies_operator_mib",
            Some(AtMost(40.0)),
            "more memory of the operator with 500 policies",
        ),
        (
            "policies_operator_most_mib",
            None,
            "the same as soon as all are in force: the burst's memory is not given back yet",
        ),
        (
            "with_policies_churn_rows_per_endpoint",
            Some(AtMost(rows)),
            "new rows of an endpoint beside these",
        ),
        (
            "churn_writes_per_endpoint",
            None,
            "the operator's writes of an endpoint that is made and removed",
        ),
        (
            "with_policies_churn_writes_per_endpoint",
            None,
            "the same beside these policies",
        ),
        (
            "with_policies_provisioned_p99_ms",
            None,
            "binding to Provisioned beside these, 99 of 100",
        ),
    ]
}

impl Report {
    /// Adds a value. A value that is no number (of an empty measurement) is left out.
    pub fn add(&mut self, metric: &str, unit: &'static str, value: f64) {
        if !value.is_finite() {
            return;
        }
        self.numbers.push(Number::new(metric, unit, value));
    }

    /// Adds median and 99th percentile, and all times for the plot.
    pub fn add_times(&mut self, name: &str, times: &[f64]) {
        if times.is_empty() {
            return;
        }
        let sorted = sorted(times.iter().copied());
        for (part, end) in [(0.5, "p50"), (0.99, "p99")] {
            self.add(&format!("{name}_{end}_ms"), "ms", quantile(&sorted, part));
        }
        self.times.push((name.to_owned(), sorted));
    }

    pub fn problem(&mut self, text: String) {
        println!("  PROBLEM: {text}");
        self.problems.push(text);
    }

    pub(super) fn value(&self, metric: &str) -> Option<f64> {
        let number = self.numbers.iter().find(|number| number.metric == metric);
        number.map(|number| number.value)
    }

    fn tables(&self, plan: &Plan) -> String {
        let mut table = Table::new(["metric", "", "what it is", "goal"]).right(1..2);
        let goals = [goals(plan), churn_goals(plan), vpc_goals(), policy_goals(plan)];
        for (metric, bound, meaning) in goals.into_iter().flatten().chain(rest_goals()) {
            let Some(value) = self.value(metric) else { continue };
            let goal = bound.map(|bound| judge(value, bound)).unwrap_or_default();
            table.row([metric, &number(value), meaning, &goal]);
        }
        let mut text = format!("{table}\n{}", self.ladder(plan));
        for problem in &self.problems {
            text.extend(["PROBLEM: ", problem, "\n"]);
        }
        text
    }

    /// Returns waits and cores by rate of the churn.
    fn ladder(&self, plan: &Plan) -> Table {
        const COLUMNS: [(&str, &str); 7] = [
            ("provisioned_p50_ms", "p50 ms"),
            ("provisioned_p99_ms", "p99 ms"),
            ("pod_create_p99_ms", "create p99"),
            ("configmap_watch_p99_ms", "ConfigMap p99"),
            ("operator_cores", "operator"),
            ("api_server_cores", "API server"),
            ("churn_left", "left"),
        ];
        let titles = COLUMNS.iter().map(|(_, title)| *title);
        let mut table = Table::new(std::iter::once("churn/s").chain(titles)).right(0..COLUMNS.len() + 1);
        let steps = plan.ladder.iter().map(|rate| (rate, format!("at_{rate}_")));
        for (rate, prefix) in steps.chain([(&plan.churn, String::new())]) {
            let mut row = vec![rate.to_string()];
            row.extend(COLUMNS.map(|(metric, _)| maybe(self.value(&format!("{prefix}{metric}")))));
            table.row(row);
        }
        table
    }

    /// Prints the tables and writes the files.
    pub fn write(&self, plan: &Plan, points: &[Point], track: &Track, session: &Session) -> Result<()> {
        let file = File {
            droplets: plan.droplets,
            vpcs: plan.vpcs,
            networks: plan.networks,
            endpoints: plan.endpoints,
            churn: plan.churn,
            bouncers: plan.bouncers,
            results: &self.numbers,
            problems: &self.problems,
        };
        let picture = plot::picture(self, plan, points, track);
        session.finish(&self.tables(plan), &file, Some(&picture))
    }
}
