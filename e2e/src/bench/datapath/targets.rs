//! Thuban's promises, as ratios of medians of one run. A missed promise is reported, and fails nothing.

use crate::bench::results::Results;
use crate::bench::{
    report::{
        Bound::{self, AtLeast, AtMost},
        judge,
    },
    table::Table,
};

struct Target {
    case: &'static str,
    metric: &'static str,
    /// The case and its metric whose median divides, or nothing.
    against: Option<(&'static str, &'static str)>,
    bound: Option<Bound>,
}

const fn ratio(case: &'static str, against: &'static str, metric: &'static str, bound: Bound) -> Target {
    Target {
        case,
        metric,
        against: Some((against, metric)),
        bound: Some(bound),
    }
}

/// Returns a figure with a promise that no other figure is part of.
const fn alone(case: &'static str, metric: &'static str, bound: Bound) -> Target {
    Target {
        case,
        metric,
        against: None,
        bound: Some(bound),
    }
}

/// Returns a ratio that is shown without a promise.
const fn known(case: &'static str, against: &'static str, metric: &'static str) -> Target {
    Target {
        case,
        metric,
        against: Some((against, metric)),
        bound: None,
    }
}

const TARGETS: &[Target] = &[
    ratio("thuban-seg", "vxlan-seg", "tcp1_gbps", AtLeast(1.15)),
    ratio("thuban-seg", "vxlan-seg", "tcp8_gbps", AtLeast(1.0)),
    ratio("thuban-seg", "vxlan-seg", "cpu_ms_per_gb", AtMost(0.85)),
    ratio("thuban", "vxlan", "tcp1_gbps", AtLeast(1.15)),
    ratio("thuban", "vxlan", "tcp8_gbps", AtLeast(1.0)),
    ratio("thuban", "plain", "tcp1_gbps", AtLeast(0.90)),
    ratio("thuban", "vxlan", "udp64_pps", AtLeast(1.75)),
    ratio("thuban", "plain", "udp64_pps", AtLeast(0.97)),
    ratio("thuban", "vxlan", "crr_per_s", AtLeast(1.0)),
    ratio("thuban", "plain", "rr_p50_us", AtMost(1.0)),
    ratio("thuban", "vxlan", "cpu_ms_per_gb", AtMost(0.85)),
    ratio("bounced", "direct-switch", "rr_p50_us", AtMost(1.25)),
    ratio("bounced", "direct-switch", "tcp1_gbps", AtLeast(0.85)),
    ratio("bounced-seg", "direct-switch-seg", "tcp1_gbps", AtLeast(0.85)),
    alone("prog-agent-direct-tc", "ns_per_packet", AtMost(200.0)),
    alone("prog-transit-deliver-tc", "ns_per_packet", AtMost(230.0)),
    Target {
        case: "rows-1000000",
        metric: "ns_active",
        against: Some(("rows-100", "ns_active")),
        bound: Some(AtMost(1.15)),
    },
    Target {
        case: "rows-1000000",
        metric: "mpps_active",
        // The smallest case that has as many active destinations.
        against: Some(("rows-1000", "mpps_active")),
        bound: Some(AtLeast(0.87)),
    },
    alone("maps-100-pods-10k-rows", "map_mib", AtMost(24.0)),
    Target {
        case: "maps-100-pods-10k-rows-services",
        metric: "map_mib",
        against: None,
        bound: None,
    },
    alone("maps-of-10k-rules", "map_mib", AtMost(20.0)),
    alone("compile-1000-classes", "compile_ms", AtMost(50.0)),
    known("prog-front-send-tc", "prog-transit-bounce-tc", "ns_per_packet"),
    known(
        "prog-front-deliver-tc",
        "prog-transit-deliver-tc",
        "ns_per_packet",
    ),
    known("prog-front-answer-tc", "prog-agent-direct-tc", "ns_per_packet"),
    known("thuban", "vxlan", "rr_p50_us"),
    known("thuban", "vxlan", "rr_p99_us"),
    known("thuban", "plain", "crr_per_s"),
    known("thuban-seg", "plain-seg", "tcp1_gbps"),
    known("thuban-seg-xdp", "vxlan-seg-xdp", "tcp1_gbps"),
    known("thuban-seg-xdp", "vxlan-seg-xdp", "cpu_ms_per_gb"),
    known("thuban-seg-xdp", "vxlan-seg-xdp", "udp64_pps"),
    known("thuban-seg", "vxlan-seg", "rr_p50_us"),
    known("thuban-seg", "vxlan-seg", "crr_per_s"),
    known("thuban-seg", "vxlan-seg", "udp64_pps"),
    known("thuban-seg-xdp", "vxlan-seg", "tcp1_gbps"),
    known("thuban-seg-xdp", "vxlan-seg", "cpu_ms_per_gb"),
    known("thuban-seg-xdp", "thuban-seg", "tcp1_gbps"),
    known("thuban-seg-xdp", "thuban-seg", "udp64_pps"),
    known("thuban-xdp-agent", "thuban-seg-xdp", "tcp1_gbps"),
    known("thuban-xdp-agent", "thuban-seg-xdp", "udp64_pps"),
    known("thuban-9000", "vxlan-9000", "tcp1_gbps"),
    known("thuban-9000", "plain-9000", "tcp1_gbps"),
    known("thuban-seg-9000", "vxlan-seg-9000", "tcp1_gbps"),
    known("thuban-seg-9000", "plain-seg-9000", "tcp1_gbps"),
    known("bounced-seg", "direct-switch-seg", "rr_p50_us"),
    known("divided", "direct-switch", "rr_p50_us"),
    known("divided-seg", "direct-switch-seg", "rr_p50_us"),
    known("bounced-seg-xdp", "direct-switch-seg-xdp", "tcp1_gbps"),
    known("bounced-seg-xdp", "direct-switch-seg-xdp", "rr_p50_us"),
    known("bounced-seg-xdp", "direct-switch-seg", "tcp1_gbps"),
    known("rows-1000000", "rows-1000", "ns_active"),
    known("rows-1000000", "rows-100", "mpps_active"),
    known("rows-1000000", "rows-100", "mpps_random"),
    known("rows-1000000", "rows-100", "ns_random"),
];

/// Returns every ratio whose cases were measured, with its promise.
pub fn table(results: &Results) -> Table {
    let mut table = Table::new(["ratio of medians", "", "target"]).right(1..2);
    for target in TARGETS {
        let Some(value) = value(results, target) else {
            continue;
        };
        let against = target.against.map(|(case, _)| format!(" / {case}"));
        let name = format!("{} {}{}", target.metric, target.case, against.unwrap_or_default());
        let said = target.bound.map(|bound| judge(value, bound)).unwrap_or_default();
        table.row([name, format!("{value:.3}"), said]);
    }
    table
}

fn value(results: &Results, target: &Target) -> Option<f64> {
    let value = results.median(target.case, target.metric)?;
    match target.against {
        Some((case, metric)) => Some(value / results.median(case, metric)?),
        None => Some(value),
    }
}

#[cfg(test)]
mod tests {
    use super::table;
    use crate::bench::results::{Results, Sample};

    #[test]
    fn only_what_was_measured_is_judged() {
        let mut results = Results::default();
        results.add("thuban", &[Sample::new("tcp1_gbps", "", 12.0)]);
        results.add("vxlan", &[Sample::new("tcp1_gbps", "", 10.0)]);
        let text = table(&results).to_string();
        assert!(text.contains("1.200  >= 1.15 met"), "{text}");
        assert_eq!(text.lines().count(), 2, "{text}");
    }
}
