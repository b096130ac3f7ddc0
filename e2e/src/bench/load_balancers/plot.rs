//! A plot of medians: a panel for each rate with a bar for each case, and one for the cost of the programs.

use super::{Plan, cost, report::WAYS};
use crate::bench::{
    plot::{BLUE, Bar, Bars, Colour, Entry, GREY, Group, LIGHT_BLUE, ORANGE, Panel, Picture, SAND, rounded},
    results::Results,
    table::number,
};

const COLOURS: [Colour; 5] = [BLUE, LIGHT_BLUE, ORANGE, SAND, GREY];
/// Metrics of rates, and their titles.
const RATES: [(&str, &str); 4] = [
    ("crr8_per_s", "Connections/s by 8 clients; more is better"),
    ("connect_p50_us", "One connection: median, µs; less is better"),
    ("tcp1_gbps", "TCP, 1 stream, Gbit/s; more is better"),
    ("udp64_pps", "UDP 64 B, packets/s; more is better"),
];

/// Returns nothing if nothing of it was measured.
pub fn picture(plan: &Plan, results: &Results) -> Option<Picture> {
    let rates = RATES.iter().map(|(metric, title)| {
        let bars = WAYS
            .iter()
            .zip(COLOURS)
            .filter_map(|(way, colour)| bar(results.median(way, metric)?, colour));
        (*title, vec![("", bars.collect())])
    });
    let sizes = plan
        .sizes
        .iter()
        .map(|size| (size.to_string(), [cost::front(*size), cost::nftables(*size)]));
    let sizes: Vec<(String, Vec<Bar>)> = sizes
        .map(|(name, cases)| {
            let bars = cases.iter().zip([COLOURS[0], COLOURS[2]]);
            let bars = bars.filter_map(|(case, colour)| bar(results.median(case, "cost_ns")?, colour));
            (name, bars.collect())
        })
        .collect();
    let title = "A datagram, by number of load balancers: front, nftables, ns; less is better";
    let mut panels: Vec<Panel> = rates.filter_map(|(title, groups)| panel(title, groups)).collect();
    panels.extend(panel(title, sizes));
    (!panels.is_empty()).then(|| Picture {
        title: format!("Load balancers: medians of {} rounds", plan.rounds),
        legend: WAYS
            .iter()
            .zip(COLOURS)
            .map(|(way, colour)| Entry::bar(*way, colour))
            .collect(),
        columns: 2,
        height: 250,
        panels,
    })
}

fn panel<T: Into<String>>(title: &str, groups: Vec<(T, Vec<Bar>)>) -> Option<Panel> {
    let groups: Vec<Group> = groups
        .into_iter()
        .map(|(name, bars)| Group {
            name: name.into(),
            note: String::new(),
            bars,
        })
        .collect();
    let values = groups.iter().flat_map(|group| &group.bars).map(|bar| bar.value);
    let most = values.reduce(f64::max)?;
    Some(Panel::Bars(Bars {
        title: title.to_owned(),
        legend: Vec::new(),
        groups,
        most: most * 1.1,
        one: None,
        scale: rounded,
    }))
}

fn bar(value: f64, colour: Colour) -> Option<Bar> {
    (value > 0.0).then(|| Bar {
        value,
        colour,
        mark: None,
        label: number(value),
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::bench::{plot::svg, results::Sample};

    #[test]
    fn what_was_measured_is_drawn() {
        let plan = Plan {
            parts: Vec::new(),
            rounds: 1,
            time: Duration::from_secs(1),
            deaths: 1,
            held: 1,
            services: 1,
            changes: 1,
            vips: 1,
            sizes: vec![10],
        };
        let mut results = Results::default();
        assert!(picture(&plan, &results).is_none());
        results.add("front", &[Sample::new("crr8_per_s", "1/s", 9000.0)]);
        results.add(&cost::front(10), &[Sample::new("cost_ns", "ns", 123.4)]);
        let plot = svg(&picture(&plan, &results).unwrap()).unwrap();
        assert!(plot.contains("9000") && plot.contains("123.4"), "{plot}");
    }
}
