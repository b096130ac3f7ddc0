//! A plot of sizes side by side, with one colour for each contestant. A mark across the bar is the contestant's own way
//! without a Service.

use super::{
    Plan,
    report::{Report, WHO},
};
use crate::bench::{
    plot::{BLUE, Bar, Bars, Colour, Entry, Group, ORANGE, Panel, Picture, RED, SAND, rounded},
    table::number,
};

const COLOURS: [Colour; 3] = [BLUE, ORANGE, SAND];

struct Measure {
    title: &'static str,
    metric: &'static str,
    /// The meaning of the mark across the bar.
    mark: &'static str,
    /// Whether the mark is the 99th percentile of the metric's own values.
    is_worst: bool,
}

const fn measure(title: &'static str, metric: &'static str, mark: &'static str) -> Measure {
    Measure {
        title,
        metric,
        mark,
        is_worst: false,
    }
}

const MEASURES: [Measure; 8] = [
    measure(
        "One connection, same node: median, µs",
        "near_service_p50_us",
        "near_direct_p50_us",
    ),
    measure(
        "One connection, other node: median, µs",
        "far_service_p50_us",
        "far_direct_p50_us",
    ),
    measure(
        "Connections/s by 8 clients, same node",
        "near_service_crr8_per_s",
        "near_direct_crr8_per_s",
    ),
    measure(
        "Connections/s by 8 clients, other node",
        "far_service_crr8_per_s",
        "far_direct_crr8_per_s",
    ),
    measure(
        "TCP, 4 streams, same node, Gbit/s",
        "near_service_tcp4_gbps",
        "near_direct_tcp4_gbps",
    ),
    measure(
        "TCP, 4 streams, other node, Gbit/s",
        "far_service_tcp4_gbps",
        "far_direct_tcp4_gbps",
    ),
    Measure {
        title: "EndpointSlice change to effect: median, ms; mark: 99 of 100",
        metric: "change_ms",
        mark: "change_ms",
        is_worst: true,
    },
    measure(
        "Memory of kube-proxy and of transitd, MiB",
        "kube-proxy_rss_mib",
        "",
    ),
];

pub fn picture(report: &Report, plan: &Plan) -> Picture {
    let names = ["Thuban", "kube-proxy, iptables", "kube-proxy, nftables"];
    let mut legend: Vec<Entry> = names
        .into_iter()
        .zip(COLOURS)
        .map(|(name, colour)| Entry::bar(name, colour))
        .collect();
    legend.push(Entry::line("the same from pod to pod without a Service", RED));
    Picture {
        title: format!(
            "Services by number of Services: medians of {} rounds",
            plan.rounds
        ),
        legend,
        columns: 2,
        height: 250,
        panels: MEASURES
            .iter()
            .map(|measure| panel(measure, report, plan))
            .collect(),
    }
}

fn panel(measure: &Measure, report: &Report, plan: &Plan) -> Panel {
    let groups: Vec<Group> = plan
        .sizes
        .iter()
        .map(|size| Group {
            name: format!("{size} Services"),
            note: String::new(),
            bars: WHO
                .iter()
                .zip(COLOURS)
                .filter_map(|(who, colour)| bar(measure, report, *size, who, colour))
                .collect(),
        })
        .collect();
    let ends = groups
        .iter()
        .flat_map(|group| &group.bars)
        .map(|bar| bar.value.max(bar.mark.unwrap_or_default()));
    let most = ends.fold(f64::MIN_POSITIVE, f64::max);
    Panel::Bars(Bars {
        title: measure.title.to_owned(),
        legend: Vec::new(),
        groups,
        most: most * 1.1,
        one: None,
        scale: rounded,
    })
}

fn bar(measure: &Measure, report: &Report, size: usize, who: &str, colour: Colour) -> Option<Bar> {
    let is_memory = measure.metric == "kube-proxy_rss_mib";
    let metric = if is_memory && who == WHO[0] {
        "transitd_rss_mib"
    } else {
        measure.metric
    };
    let value = report.median(size, who, metric)?;
    let mark = if measure.is_worst {
        report.worst(size, who, measure.mark)
    } else {
        report.median(size, who, measure.mark)
    };
    Some(Bar {
        value,
        colour,
        mark,
        label: number(value),
    })
}
