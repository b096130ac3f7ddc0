//! The report at the end: medians by peer, Thuban's ratios to each, and a file of all samples.

use anyhow::Result;
use serde::Serialize;

use super::{Plan, plot, site::Site, turn::BY_SERVICE};
use crate::bench::{
    report::{Bound, Session, judge},
    results::{Results, Series},
    table::{Table, maybe},
};

pub const THUBAN: &str = "thuban";

/// Which values of a metric are better.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Better {
    More,
    Less,
}

/// Metrics that are compared, in the order of the table, without those by a Service.
const COMPARED: [(&str, Better); 16] = [
    ("tcp1_gbps", Better::More),
    ("cpu_ms_per_gb", Better::Less),
    ("tcp8_gbps", Better::More),
    ("rr_p50_us", Better::Less),
    ("rr_p99_us", Better::Less),
    ("crr_per_s", Better::More),
    ("udp64_pps", Better::More),
    ("add_all_s", Better::Less),
    ("del_all_s", Better::Less),
    ("add_ms", Better::Less),
    ("del_ms", Better::Less),
    ("rest_rss_mib", Better::Less),
    ("rest_cpu_percent", Better::Less),
    ("churn_rss_mib", Better::Less),
    ("churn_cpu_ms_per_pod", Better::Less),
    ("churn_machine_cpu_ms_per_pod", Better::Less),
];

#[derive(Serialize)]
struct File<'a> {
    rounds: usize,
    seconds: f64,
    pods: u32,
    peers: Vec<Described<'a>>,
    results: &'a [Series],
}

#[derive(Serialize)]
struct Described<'a> {
    case: &'a str,
    is_overlay: bool,
    setting: &'a [String],
}

/// Returns which values of a metric are better, if the metric is compared.
pub fn better(metric: &str) -> Option<Better> {
    let direct = BY_SERVICE.iter().find(|(_, service)| *service == metric);
    let metric = direct.map_or(metric, |(direct, _)| *direct);
    let found = COMPARED.iter().find(|(name, _)| *name == metric);
    found.map(|(_, better)| *better)
}

/// Prints the tables and writes the files.
pub fn write(results: &Results, sites: &[Site], plan: &Plan, session: &Session) -> Result<()> {
    let described = sites.iter().map(|site| Described {
        case: site.peer.name(),
        is_overlay: site.peer.is_overlay(),
        setting: &site.setting,
    });
    let described: Vec<Described> = described.collect();
    let cases: Vec<(&str, bool)> = described.iter().map(|one| (one.case, one.is_overlay)).collect();
    let settings: Vec<String> = described
        .iter()
        .map(|one| format!("{}: {}", one.case, one.setting.join("; ")))
        .collect();
    let tables = format!(
        "{}\n\n{}\n{}",
        settings.join("\n"),
        medians(results, &cases),
        goals(results, &cases)
    );
    let picture = plot::picture(results, &cases, plan);
    let file = File {
        rounds: plan.rounds,
        seconds: plan.time.as_secs_f64(),
        pods: plan.pods,
        peers: described,
        results: &results.series,
    };
    session.finish(&tables, &file, Some(&picture))
}

/// Returns the metrics with their units, in the order in which they were measured.
fn metrics(results: &Results) -> Vec<(&'static str, &'static str)> {
    let mut found: Vec<(&str, &str)> = Vec::new();
    for series in &results.series {
        if !found.iter().any(|(metric, _)| *metric == series.metric) {
            found.push((series.metric, series.unit));
        }
    }
    found
}

fn medians(results: &Results, cases: &[(&str, bool)]) -> Table {
    let mut titles = vec!["medians"];
    titles.extend(cases.iter().map(|(case, _)| *case));
    titles.push("unit");
    let mut table = Table::new(titles).right(1..cases.len() + 1);
    for (metric, unit) in metrics(results) {
        let mut row = vec![metric.to_owned()];
        row.extend(cases.iter().map(|(case, _)| maybe(results.median(case, metric))));
        row.push(unit.to_owned());
        table.row(row);
    }
    table
}

/// Returns Thuban's ratios to each peer; the goal is to be ahead of those that have a tunnel.
fn goals(results: &Results, cases: &[(&str, bool)]) -> Table {
    let peers: Vec<&(&str, bool)> = cases.iter().filter(|(case, _)| *case != THUBAN).collect();
    let mut titles = vec!["Thuban's ratio to".to_owned(), "better".to_owned()];
    for (case, _) in &peers {
        titles.extend([(*case).to_owned(), "goal".to_owned()]);
    }
    let mut table = Table::new(titles);
    for (index, _) in peers.iter().enumerate() {
        table = table.right(2 + 2 * index..3 + 2 * index);
    }
    for (metric, _) in metrics(results) {
        let Some(better) = better(metric) else { continue };
        let (word, bound) = match better {
            Better::More => ("more", Bound::AtLeast(1.0)),
            Better::Less => ("less", Bound::AtMost(1.0)),
        };
        let mut row = vec![metric.to_owned(), word.to_owned()];
        for (case, is_overlay) in &peers {
            let ratio = results
                .ratio(THUBAN, case, metric)
                .filter(|ratio| ratio.is_finite());
            let goal = ratio.filter(|_| *is_overlay).map(|ratio| judge(ratio, bound));
            row.extend([maybe(ratio), goal.unwrap_or_default()]);
        }
        table.row(row);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::results::Sample;

    #[test]
    fn only_peers_with_a_tunnel_have_a_goal() {
        let mut results = Results::default();
        for (case, value) in [("thuban", 2.0), ("tunnel", 4.0), ("routes", 4.0)] {
            results.add(case, &[Sample::new("service_tcp1_gbps", "Gbit/s", value)]);
        }
        let cases = [("thuban", true), ("tunnel", true), ("routes", false)];
        let goals = goals(&results, &cases).to_string();
        assert_eq!(goals.matches("0.500").count(), 2, "{goals}");
        assert_eq!(goals.matches(">= 1 missed").count(), 1, "{goals}");
    }

    #[test]
    fn losses_are_not_compared() {
        assert_eq!(better("service_udp64_loss"), None);
        assert_eq!(better("service_rr_p50_us"), Some(Better::Less));
        assert_eq!(better("add_ms"), Some(Better::Less));
    }
}
