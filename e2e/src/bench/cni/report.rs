//! The report at the end: times, ratios beside their goals, a file of them, and a plot.

use anyhow::Result;
use serde::Serialize;

use super::{Plan, measure::Times, plot};
use crate::bench::{
    report::{Bound, Number, Session, judge},
    table::{Table, number},
};

/// Ratios: the contestant whose time is divided, the contestant whose time divides, the measurement, and the goal.
const RATIOS: [(&str, &str, &str, Option<f64>); 7] = [
    ("add", "thuban", "ptp", Some(0.7)),
    ("add", "thuban", "bridge", None),
    ("del", "thuban", "link", Some(1.2)),
    ("del", "thuban", "ip-link", None),
    ("del", "thuban", "ptp", None),
    ("del", "thuban", "bridge", None),
    ("add", "thuban", "link", None),
];

#[derive(Debug, Default)]
pub struct Report {
    numbers: Vec<Number>,
    /// Metrics, each with its bound.
    goals: Vec<(String, Bound)>,
}

#[derive(Serialize)]
struct File<'a> {
    runs: usize,
    single: usize,
    rounds: usize,
    at_once: usize,
    pods: usize,
    results: &'a [Number],
}

impl Report {
    /// Makes a report of times, and of the ratios whose both sides were measured.
    pub fn new(times: &Times, at_once: usize) -> Self {
        let mut report = Self::default();
        for (who, what, many) in times.keys() {
            for (part, value) in [
                ("p50", times.p50(who, what, many)),
                ("p99", times.p99(who, what, many)),
            ] {
                let metric = format!("{who}_{what}_x{many}_{part}_ms");
                report.add(&metric, "ms", value.unwrap_or(f64::NAN));
            }
        }
        for many in [1, at_once] {
            for (what, who, against, bound) in RATIOS {
                let (Some(own), Some(other)) = (times.p50(who, what, many), times.p50(against, what, many))
                else {
                    continue;
                };
                let metric = format!("{what}_x{many}_p50_over_{against}");
                report.add(&metric, "", own / other);
                if let Some(bound) = bound {
                    report.goals.push((metric, Bound::AtMost(bound)));
                }
            }
        }
        for (metric, bound) in [("plugin_size_mib", 4.0), ("transitd_rss_mib_with_pods", 40.0)] {
            report.goals.push((metric.to_owned(), Bound::AtMost(bound)));
        }
        report
    }

    pub fn add(&mut self, metric: &str, unit: &'static str, value: f64) {
        self.numbers.push(Number::new(metric, unit, value));
    }

    fn table(&self) -> Table {
        let mut table = Table::new(["metric", "", "unit", "goal"]).right(1..2);
        for Number { metric, unit, value } in &self.numbers {
            let goal = self.goals.iter().find(|(known, _)| known == metric);
            let goal = goal.map(|(_, bound)| judge(*value, *bound)).unwrap_or_default();
            table.row([metric, &number(*value), *unit, &goal]);
        }
        table
    }

    /// Prints the table and writes the files.
    pub fn write(&self, times: &Times, plan: &Plan, session: &Session) -> Result<()> {
        let file = File {
            runs: plan.runs,
            single: plan.single,
            rounds: plan.rounds,
            at_once: plan.at_once,
            pods: plan.pods,
            results: &self.numbers,
        };
        let picture = plot::picture(times, plan);
        session.finish(&self.table().to_string(), &file, Some(&picture))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_goal_is_judged_by_the_ratio_of_medians() {
        let mut times = Times::default();
        times.add("thuban", "add", 1, 0, &[Duration::from_millis(8)]);
        times.add("ptp", "add", 1, 0, &[Duration::from_millis(10)]);
        let table = Report::new(&times, 16).table().to_string();
        let line = table
            .lines()
            .find(|line| line.starts_with("add_x1_p50_over_ptp"))
            .unwrap();
        assert!(
            line.contains("0.800") && line.ends_with("<= 0.7 missed"),
            "{table}"
        );
        assert!(!table.contains("over_link"), "{table}");
    }
}
