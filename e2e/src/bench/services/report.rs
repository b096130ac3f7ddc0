//! The report at the end: medians by size and contestant, ratios round by round, a file of all, and a plot.

use anyhow::Result;
use serde::Serialize;

use super::{Plan, plot};
use crate::bench::{
    float,
    report::{Bound, Number, Session, judge},
    stats::{median, median_ratio, quantile, sorted},
    table::{Table, maybe},
};

pub const WHO: [&str; 3] = ["thuban", "iptables", "nftables"];
const CHANGE_GOAL_MS: f64 = 200.0;
/// The largest difference between values that count as flat.
const FLAT: f64 = 0.10;

/// A value of one turn.
#[derive(Clone, Debug, Serialize)]
struct Entry {
    services: usize,
    /// The round; 0: the value is not of a round.
    round: usize,
    who: String,
    metric: String,
    value: f64,
    #[serde(skip)]
    unit: &'static str,
}

#[derive(Debug, Default)]
pub struct Report {
    entries: Vec<Entry>,
}

#[derive(Serialize)]
struct File<'a> {
    sizes: &'a [usize],
    rounds: usize,
    seconds: f64,
    changes: usize,
    results: Vec<Number>,
    samples: &'a [Entry],
}

/// Whether a higher value of a metric is better.
fn is_rate(metric: &str) -> bool {
    metric.ends_with("_per_s") || metric.ends_with("_gbps")
}

impl Report {
    pub fn add(
        &mut self,
        services: usize,
        round: usize,
        who: &str,
        metric: &str,
        unit: &'static str,
        value: f64,
    ) {
        self.entries.push(Entry {
            services,
            round,
            who: who.to_owned(),
            metric: metric.to_owned(),
            value,
            unit,
        });
    }

    pub fn add_all(&mut self, services: usize, round: usize, who: &str, samples: Vec<Number>) {
        for sample in samples {
            self.add(services, round, who, &sample.metric, sample.unit, sample.value);
        }
    }

    /// Returns all values, ascending.
    fn values(&self, services: usize, who: &str, metric: &str) -> Vec<f64> {
        let is_wanted =
            |entry: &&Entry| entry.services == services && entry.who == who && entry.metric == metric;
        sorted(self.entries.iter().filter(is_wanted).map(|entry| entry.value))
    }

    pub fn median(&self, services: usize, who: &str, metric: &str) -> Option<f64> {
        let values = self.values(services, who, metric);
        (!values.is_empty()).then(|| median(values))
    }

    pub fn worst(&self, services: usize, who: &str, metric: &str) -> Option<f64> {
        let values = self.values(services, who, metric);
        (!values.is_empty()).then(|| quantile(&values, 0.99))
    }

    fn of_round(&self, services: usize, round: usize, who: &str, metric: &str) -> Option<f64> {
        let is_wanted = |entry: &&Entry| {
            entry.services == services && entry.round == round && entry.who == who && entry.metric == metric
        };
        self.entries.iter().find(is_wanted).map(|entry| entry.value)
    }

    /// Returns the median over rounds of one value divided by another of the same round.
    fn ratio(&self, services: usize, rounds: usize, over: (&str, &str), under: (&str, &str)) -> Option<f64> {
        let both = |round| {
            let over = self.of_round(services, round, over.0, over.1)?;
            Some((over, self.of_round(services, round, under.0, under.1)?))
        };
        median_ratio((1..=rounds).filter_map(both))
    }

    /// Returns the metrics in the order in which they came.
    fn metrics(&self) -> Vec<(&str, &'static str)> {
        let mut metrics: Vec<(&str, &'static str)> = Vec::new();
        for entry in &self.entries {
            if !metrics.iter().any(|(known, _)| *known == entry.metric) {
                metrics.push((&entry.metric, entry.unit));
            }
        }
        metrics
    }

    fn numbers(&self, plan: &Plan) -> Vec<Number> {
        let mut numbers = Vec::new();
        let mut add = |metric: String, unit, value: Option<f64>| {
            if let Some(value) = value.filter(|value| value.is_finite()) {
                numbers.push(Number::new(metric, unit, value));
            }
        };
        for &size in &plan.sizes {
            for (metric, unit) in self.metrics() {
                for who in WHO.iter().chain(&["kube-proxy"]) {
                    let base = format!("{who}_{size}_{metric}");
                    if metric == "change_ms" || metric == "change_written_ms" {
                        let base = base.trim_end_matches("_ms");
                        add(format!("{base}_p50_ms"), unit, self.median(size, who, metric));
                        add(format!("{base}_p99_ms"), unit, self.worst(size, who, metric));
                    } else {
                        add(base, unit, self.median(size, who, metric));
                    }
                }
            }
            for (metric, _) in self.metrics() {
                if !is_measured(metric) {
                    continue;
                }
                for who in &WHO[1..] {
                    let ratio = self.ratio(size, plan.rounds, (WHO[0], metric), (who, metric));
                    add(format!("thuban_over_{who}_{size}_{metric}"), "ratio", ratio);
                }
                if let Some(direct) = direct_of(metric) {
                    for who in WHO {
                        let ratio = self.ratio(size, plan.rounds, (who, metric), (who, &direct));
                        add(format!("{who}_{size}_{metric}_over_direct"), "ratio", ratio);
                    }
                }
            }
        }
        numbers
    }

    fn table(&self, size: usize, plan: &Plan) -> Table {
        let mut titles = vec![format!("{size} Services, medians")];
        titles.extend(WHO.map(str::to_owned));
        titles.extend(WHO[1..].iter().map(|who| format!("/ {who}")));
        titles.push("unit".to_owned());
        let mut table = Table::new(titles).right(1..2 * WHO.len());
        for (metric, unit) in self.metrics() {
            let cells = WHO.map(|who| self.median(size, who, metric));
            if cells.iter().all(Option::is_none) {
                continue;
            }
            let mut row = vec![metric.to_owned()];
            row.extend(cells.map(maybe));
            row.extend(WHO[1..].iter().map(|who| {
                let ratio = is_measured(metric)
                    .then(|| self.ratio(size, plan.rounds, (WHO[0], metric), (who, metric)))
                    .flatten();
                maybe(ratio)
            }));
            row.push(unit.to_owned());
            table.row(row);
            if metric == "change_ms" {
                let mut row = vec!["the same, 99 of 100".to_owned()];
                row.extend(WHO.map(|who| maybe(self.worst(size, who, metric))));
                row.extend(WHO[1..].iter().map(|_| String::new()));
                row.push(unit.to_owned());
                table.row(row);
            }
        }
        table
    }

    /// Returns the cost of a Service beside the way without one, by size.
    fn costs(&self, plan: &Plan) -> Table {
        let columns: Vec<(&str, usize)> = WHO
            .iter()
            .flat_map(|who| plan.sizes.iter().map(move |size| (*who, *size)))
            .collect();
        let mut titles = vec!["a Service's way over one's own direct".to_owned()];
        titles.extend(columns.iter().map(|(who, size)| format!("{who} {size}")));
        let mut table = Table::new(titles).right(1..columns.len() + 1);
        for (metric, _) in self.metrics() {
            let Some(direct) = direct_of(metric) else { continue };
            let mut row = vec![metric.to_owned()];
            row.extend(
                columns
                    .iter()
                    .map(|(who, size)| maybe(self.ratio(*size, plan.rounds, (who, metric), (who, &direct)))),
            );
            table.row(row);
        }
        table
    }

    fn goals(&self, plan: &Plan) -> Table {
        let mut table = Table::new(["goals", "", "goal"]).right(1..2);
        let (Some(least), Some(most)) = (plan.sizes.first(), plan.sizes.last()) else {
            return table;
        };
        let services: Vec<&str> = self
            .metrics()
            .into_iter()
            .map(|(metric, _)| metric)
            .filter(|metric| direct_of(metric).is_some() && !metric.contains("p99"))
            .collect();
        for metric in &services {
            for who in &WHO[1..] {
                let bound = if is_rate(metric) {
                    Bound::AtLeast(1.0)
                } else {
                    Bound::AtMost(1.0)
                };
                if let Some(value) = self.ratio(*least, plan.rounds, (WHO[0], metric), (who, metric)) {
                    let name = format!("{metric}, thuban / {who}, {least} Services");
                    table.row([name, format!("{value:.3}"), judge(value, bound)]);
                }
            }
        }
        if most > least {
            for metric in &services {
                let bound = if is_rate(metric) {
                    Bound::AtLeast(1.0 - FLAT)
                } else {
                    Bound::AtMost(1.0 + FLAT)
                };
                let direct = direct_of(metric).unwrap_or_default();
                for who in WHO {
                    let goal = |value| {
                        if who == WHO[0] {
                            judge(value, bound)
                        } else {
                            String::new()
                        }
                    };
                    let (few, many) = (self.median(*least, who, metric), self.median(*most, who, metric));
                    if let (Some(few), Some(many)) = (few, many) {
                        let name = format!("{metric}, {who}, {most} / {least}");
                        table.row([name, format!("{:.3}", many / few), goal(many / few)]);
                    }
                    let own = |size| self.ratio(size, plan.rounds, (who, metric), (who, &direct));
                    if let (Some(few), Some(many)) = (own(*least), own(*most)) {
                        let name = format!("{metric}, {who}, beside own direct, {most} / {least}");
                        table.row([name, format!("{:.3}", many / few), goal(many / few)]);
                    }
                }
            }
        }
        for size in &plan.sizes {
            if let Some(served) = self.median(*size, WHO[0], "provisioned") {
                let name = format!("Provisioned of {size} Services, thuban");
                let goal = judge(served, Bound::AtLeast(float(*size as u64)));
                table.row([name, served.to_string(), goal]);
            }
        }
        for size in &plan.sizes {
            for who in WHO {
                let Some(worst) = self.worst(*size, who, "change_ms") else {
                    continue;
                };
                let name = format!("change to effect, 99 of 100, ms, {who}, {size} Services");
                let goal = if who == WHO[0] {
                    judge(worst, Bound::AtMost(CHANGE_GOAL_MS))
                } else {
                    String::new()
                };
                table.row([name, format!("{worst:.1}"), goal]);
            }
        }
        table
    }

    /// Prints the tables and writes the files.
    pub fn write(&self, plan: &Plan, session: &Session) -> Result<()> {
        let tables = plan.sizes.iter().map(|size| self.table(*size, plan));
        let tables = tables.chain([self.costs(plan), self.goals(plan)]);
        let tables: Vec<String> = tables.map(|table| table.to_string()).collect();
        let file = File {
            sizes: &plan.sizes,
            rounds: plan.rounds,
            seconds: plan.time.as_secs_f64(),
            changes: plan.changes,
            results: self.numbers(plan),
            samples: &self.entries,
        };
        let picture = plot::picture(self, plan);
        session.finish(&tables.join("\n"), &file, Some(&picture))
    }
}

/// Whether the metric compares contestants.
fn is_measured(metric: &str) -> bool {
    metric.starts_with("near_") || metric.starts_with("far_")
}

/// Returns the metric of the same without a Service.
fn direct_of(metric: &str) -> Option<String> {
    metric
        .contains("_service_")
        .then(|| metric.replace("_service_", "_direct_"))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn plan() -> Plan {
        Plan {
            sizes: vec![10, 1000],
            rounds: 3,
            time: Duration::from_secs(1),
            changes: 1,
            only: Vec::new(),
        }
    }

    #[test]
    fn ratios_are_of_one_round_and_their_median_is_told() {
        let mut report = Report::default();
        let metric = "near_service_crr8_per_s";
        // Some rounds of the machine were slow, for both contestants.
        for (round, slow) in [(1, 1.0), (2, 0.1), (3, 0.2)] {
            report.add(10, round, "thuban", metric, "1/s", 1200.0 * slow);
            report.add(10, round, "iptables", metric, "1/s", 1000.0 * slow);
        }
        let ratio = report
            .ratio(10, 3, ("thuban", metric), ("iptables", metric))
            .unwrap();
        assert!((ratio - 1.2).abs() < 1e-9, "{ratio}");
        let goals = report.goals(&plan()).to_string();
        assert!(goals.contains("1.200  >= 1 met"), "{goals}");
    }

    #[test]
    fn flat_is_within_a_tenth_whichever_way_is_better() {
        let mut report = Report::default();
        for (metric, few, many) in [
            ("far_service_p50_us", 100.0, 111.0),
            ("far_service_crr1_per_s", 100.0, 91.0),
        ] {
            report.add(10, 1, "thuban", metric, "", few);
            report.add(1000, 1, "thuban", metric, "", many);
        }
        let goals = report.goals(&plan()).to_string();
        assert!(goals.contains("1.110  <= 1.1 missed"), "{goals}");
        assert!(goals.contains("0.910  >= 0.9 met"), "{goals}");
    }
}
