//! The report at the end: medians, ratios round by round, goals, a file of all samples, and a plot.

use anyhow::Result;
use serde::Serialize;

use super::{Plan, control, cost, failover, memory, plot};
use crate::bench::{
    report::{
        Bound::{self, AtLeast, AtMost},
        Session, judge,
    },
    results::{Results, Series},
    table::Table,
};

/// Cases of rates, in the order of the table.
pub const WAYS: [&str; 5] = ["front", "node", "kube-proxy", "haproxy", "plain"];
/// The ratios of rates: case, the case that divides, metric, promise.
const RATIOS: [(&str, &str, &str, Option<Bound>); 11] = [
    ("front", "kube-proxy", "crr8_per_s", Some(AtLeast(1.3))),
    ("front", "haproxy", "crr8_per_s", Some(AtLeast(2.0))),
    ("front", "node", "crr8_per_s", None),
    ("front", "plain", "crr8_per_s", None),
    ("front", "kube-proxy", "connect_p50_us", None),
    ("front", "haproxy", "connect_p50_us", None),
    ("front", "kube-proxy", "tcp1_gbps", None),
    ("front", "kube-proxy", "cpu_ms_per_gb", None),
    ("front", "haproxy", "tcp1_gbps", None),
    ("front", "kube-proxy", "udp64_pps", None),
    ("front", "kube-proxy", "udp64_cpu_us", None),
];
/// The largest part of nftables' cost that a front may have.
const COST_GOAL: f64 = 0.4;
/// The largest cost with many load balancers beside that with few.
const FLAT: f64 = 1.1;

#[derive(Serialize)]
struct File<'a> {
    rounds: usize,
    seconds: f64,
    results: &'a [Series],
}

/// Prints the tables and writes the files.
pub fn write(plan: &Plan, results: &Results, session: &Session) -> Result<()> {
    let tables = format!("{}\n{}", results.table(), goals(plan, results));
    let file = File {
        rounds: plan.rounds,
        seconds: plan.time.as_secs_f64(),
        results: &results.series,
    };
    session.finish(&tables, &file, plot::picture(plan, results).as_ref())
}

fn goals(plan: &Plan, results: &Results) -> Table {
    let mut table = Table::new(["result", "", "goal"]).right(1..2);
    let mut add = |name: String, value: Option<f64>, bound: Option<Bound>| {
        if let Some(value) = value {
            let goal = bound.map(|bound| judge(value, bound)).unwrap_or_default();
            table.row([name, format!("{value:.3}"), goal]);
        }
    };
    for (case, against, metric, bound) in RATIOS {
        let name = format!("{metric}, {case} / {against}");
        add(name, results.ratio(case, against, metric), bound);
    }
    let p99 = |case, metric| results.quantile(case, metric, 0.99);
    for (case, bounds) in [
        (failover::FRONT_DIES, [Some(AtMost(1500.0)), Some(AtMost(0.0))]),
        (failover::NODE_DIES, [None, None]),
    ] {
        let [new, lost] = bounds;
        add(
            format!("{case}: new connections, ms, 99 of 100"),
            p99(case, "new_connections_ms"),
            new,
        );
        let most = results.quantile(case, "held_lost", 1.0);
        add(format!("{case}: open connections lost, most"), most, lost);
    }
    for (metric, bound) in [("answered_ms", 2000.0), ("change_ms", 200.0)] {
        let name = format!("{metric}, 99 of 100");
        add(name, p99(control::CASE, metric), Some(AtMost(bound)));
    }
    let memory = |metric| results.median(memory::CASE, metric);
    let daemons = memory("lbaasd_rss_mib").zip(memory("cidrd_rss_mib"));
    let daemons = daemons.map(|(one, other)| one + other);
    add(
        "memory of lbaasd and cidrd, MiB".to_owned(),
        daemons,
        Some(AtMost(60.0)),
    );
    add("maps, MiB".to_owned(), memory("maps_mib"), Some(AtMost(16.0)));
    for metric in ["cost_ns", cost::HOT_COST] {
        for size in &plan.sizes {
            let (front, nftables) = (cost::front(*size), cost::nftables(*size));
            let ratio = results.ratio(&front, &nftables, metric);
            let name = format!("{metric}, {front} / {nftables}");
            add(name, ratio, Some(AtMost(COST_GOAL)));
        }
        if let [first, .., last] = plan.sizes[..] {
            let [few, many] = [first, last].map(cost::front);
            // Few load balancers are all in use.
            let costs = results.median(&many, metric).zip(results.median(&few, "cost_ns"));
            let ratio = costs.map(|(many, few)| many / few);
            add(format!("{metric}, {many} / {few}"), ratio, Some(AtMost(FLAT)));
        }
    }
    table
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::bench::results::Sample;

    fn plan() -> Plan {
        Plan {
            parts: Vec::new(),
            rounds: 3,
            time: Duration::from_secs(1),
            deaths: 1,
            held: 1,
            services: 1,
            changes: 1,
            vips: 1,
            sizes: vec![10, 1000],
        }
    }

    #[test]
    fn a_goal_is_judged_by_ratios_of_one_round() {
        let mut results = Results::default();
        // Some rounds of the machine were slow, for both cases.
        for slow in [1.0, 0.1, 0.2] {
            results.add("front", &[Sample::new("crr8_per_s", "1/s", 1400.0 * slow)]);
            results.add("kube-proxy", &[Sample::new("crr8_per_s", "1/s", 1000.0 * slow)]);
        }
        let goals = goals(&plan(), &results).to_string();
        assert!(goals.contains("1.400  >= 1.3 met"), "{goals}");
    }

    #[test]
    fn one_lost_connection_misses_the_goal() {
        let mut results = Results::default();
        for lost in [0.0, 0.0, 1.0] {
            results.add(failover::FRONT_DIES, &[Sample::new("held_lost", "", lost)]);
        }
        let goals = goals(&plan(), &results).to_string();
        assert!(goals.contains("<= 0 missed"), "{goals}");
    }

    #[test]
    fn a_cost_that_grows_with_load_balancers_is_not_flat() {
        let mut results = Results::default();
        for (size, cost) in [(10, 100.0), (1000, 120.0)] {
            results.add(&cost::front(size), &[Sample::new("cost_ns", "ns", cost)]);
            results.add(&cost::nftables(size), &[Sample::new("cost_ns", "ns", 400.0)]);
        }
        let goals = goals(&plan(), &results).to_string();
        assert!(goals.contains("0.250  <= 0.4 met"), "{goals}");
        assert!(goals.contains("1.200  <= 1.1 missed"), "{goals}");
        assert!(!goals.contains(cost::HOT_COST), "{goals}");
    }

    #[test]
    fn the_cost_of_load_balancers_in_use_is_judged_too() {
        let mut results = Results::default();
        results.add(&cost::front(10), &[Sample::new("cost_ns", "ns", 100.0)]);
        results.add(&cost::front(1000), &[Sample::new(cost::HOT_COST, "ns", 105.0)]);
        results.add(&cost::nftables(1000), &[Sample::new(cost::HOT_COST, "ns", 420.0)]);
        let goals = goals(&plan(), &results).to_string();
        assert!(goals.contains("0.250  <= 0.4 met"), "{goals}");
        assert!(goals.contains("1.050  <= 1.1 met"), "{goals}");
    }
}
