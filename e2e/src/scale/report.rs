//! What is said at the end: numbers beside their goals, a file of them, and a plot.

use std::{fmt::Write, ops::Range, path::Path};

use anyhow::{Context, Result};
use serde::Serialize;

use super::{Plan, plot, sampler::Point, track::Track};
use crate::bench::{
    machine::Machine,
    report::{
        save, save_picture,
        table::number,
        targets::{Bound, judge},
    },
};

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Number {
    pub metric: String,
    pub unit: &'static str,
    pub value: f64,
}

#[derive(Debug, Default)]
pub struct Report {
    pub numbers: Vec<Number>,
    /// Distributions, for the plot: name and sorted milliseconds.
    pub times: Vec<(String, Vec<f64>)>,
    /// When each began, in seconds since the start.
    pub phases: Vec<(f64, String)>,
    /// Pods that were made in the churn.
    pub churned: Range<usize>,
    /// What did not come to its end.
    pub problems: Vec<String>,
}

#[derive(Serialize)]
struct File<'a> {
    date: &'a str,
    machine: &'a Machine,
    droplets: usize,
    vpcs: usize,
    networks: usize,
    endpoints: usize,
    churn: usize,
    bouncers: u32,
    results: &'a [Number],
    problems: &'a [String],
}

/// The part's quantile of sorted values; the value that so many are not above.
pub fn quantile(sorted: &[f64], part: f64) -> f64 {
    let count = crate::bench::float(sorted.len() as u64);
    // Not negative, and not beyond the last.
    #[allow(clippy::cast_sign_loss)]
    let rank = (count * part).ceil().max(1.0) as usize;
    sorted
        .get(rank.min(sorted.len()).saturating_sub(1))
        .copied()
        .unwrap_or(f64::NAN)
}

pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    quantile(&sorted, 0.5)
}

/// What is promised: metric, bound (`bouncers + 1` where it depends), and what it is.
fn goals(plan: &Plan) -> Vec<(&'static str, Option<Bound>, &'static str)> {
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
            "operator_rss_mib",
            Some(AtMost(300.0)),
            "memory of the operator after the churn",
        ),
        ("operator_rss_most_mib", None, "the most until then"),
        ("writes_per_endpoint", Some(AtMost(3.0)), "writes to Provisioned"),
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
            "resync_s",
            Some(AtMost(20.0)),
            "operator killed: start to last snapshot",
        ),
        ("resync_leadership_s", None, "of that: until it leads"),
        ("resync_from_leadership_s", None, "of that: from then on"),
        (
            "resync_rss_most_mib",
            None,
            "most memory of the operator meanwhile",
        ),
        ("vpc_1_ms", None, "a VPC made to Provisioned"),
        ("vpcs_50_ms", None, "50 VPCs made at once"),
        ("vpcs_50_over_1", Some(AtMost(2.0)), "their ratio"),
        ("vpcs_50_writes", None, "writes of these 50, events aside"),
        (
            "api_alone_ms",
            None,
            "API server alone: as many ConfigMaps, 50 at once",
        ),
        ("vpcs_50_over_api_alone", None, "50 VPCs beside that"),
        ("load_rate", None, "endpoints a second in bulk"),
        ("drain_rate", None, "endpoints a second removed in bulk"),
    ]
}

impl Report {
    /// What is no number (of nothing measured) is left out.
    pub fn add(&mut self, metric: &str, unit: &'static str, value: f64) {
        if !value.is_finite() {
            return;
        }
        self.numbers.push(Number {
            metric: metric.to_owned(),
            unit,
            value,
        });
    }

    /// Median and the worst of a hundred, and all for the plot.
    pub fn add_times(&mut self, name: &str, times: &[f64]) {
        if times.is_empty() {
            return;
        }
        let mut sorted = times.to_vec();
        sorted.sort_by(f64::total_cmp);
        for (part, end) in [(0.5, "p50"), (0.99, "p99")] {
            self.add(&format!("{name}_{end}_ms"), "ms", quantile(&sorted, part));
        }
        self.times.push((name.to_owned(), sorted));
    }

    pub fn problem(&mut self, text: String) {
        println!("  PROBLEM: {text}");
        self.problems.push(text);
    }

    fn value(&self, metric: &str) -> Option<f64> {
        let number = self.numbers.iter().find(|number| number.metric == metric);
        number.map(|number| number.value)
    }

    fn table(&self, plan: &Plan) -> String {
        let mut text = format!("{:<34}{:>10}  {:<44}goal\n", "metric", "", "what it is");
        for (metric, bound, meaning) in goals(plan) {
            let Some(value) = self.value(metric) else { continue };
            let goal = bound.map(|bound| judge(value, bound)).unwrap_or_default();
            // A String takes everything.
            let _ = writeln!(text, "{metric:<34}{:>10}  {meaning:<44}{goal}", number(value));
        }
        text.push_str(&self.ladder(plan));
        for problem in &self.problems {
            let _ = writeln!(text, "PROBLEM: {problem}");
        }
        text
    }

    /// Waits and cores by rate of the churn.
    fn ladder(&self, plan: &Plan) -> String {
        const COLUMNS: [(&str, &str); 7] = [
            ("provisioned_p50_ms", "p50 ms"),
            ("provisioned_p99_ms", "p99 ms"),
            ("pod_create_p99_ms", "create p99"),
            ("configmap_watch_p99_ms", "ConfigMap p99"),
            ("operator_cores", "operator"),
            ("api_server_cores", "API server"),
            ("churn_left", "left"),
        ];
        let mut text = String::from("\nchurn/s");
        for (_, title) in COLUMNS {
            let _ = write!(text, "{title:>15}");
        }
        let steps = plan.ladder.iter().map(|rate| (rate, format!("at_{rate}_")));
        for (rate, prefix) in steps.chain([(&plan.churn, String::new())]) {
            let _ = write!(text, "\n{rate:>7}");
            for (metric, _) in COLUMNS {
                let value = self.value(&format!("{prefix}{metric}"));
                let _ = write!(text, "{:>15}", value.map(number).unwrap_or_default());
            }
        }
        text.push('\n');
        text
    }

    /// Prints the table and writes the files.
    pub fn write(
        &self,
        plan: &Plan,
        points: &[Point],
        track: &Track,
        machine: &Machine,
        date: &str,
        folder: &Path,
    ) -> Result<()> {
        println!("\n{}", self.table(plan));
        let file = File {
            date,
            machine,
            droplets: plan.droplets,
            vpcs: plan.vpcs,
            networks: plan.networks,
            endpoints: plan.endpoints,
            churn: plan.churn,
            bouncers: plan.bouncers,
            results: &self.numbers,
            problems: &self.problems,
        };
        let json = serde_json::to_string_pretty(&file).context("writing JSON")?;
        save(folder, "scale.json", &json)?;
        let plot = save(folder, "scale.svg", &plot::svg(self, plan, points, track))?;
        save_picture(&plot);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::{median, quantile};

    #[test]
    fn a_quantile_is_the_value_that_so_many_are_not_above() {
        let values: Vec<f64> = (1..=100).map(f64::from).collect();
        assert!((quantile(&values, 0.99) - 99.0).abs() < 1e-9);
        assert!((quantile(&values, 0.5) - 50.0).abs() < 1e-9);
        assert!((quantile(&values, 1.0) - 100.0).abs() < 1e-9);
        assert!((median(&[9.0, 1.0, 3.0]) - 3.0).abs() < 1e-9);
        assert!(quantile(&[], 0.5).is_nan());
    }
}
