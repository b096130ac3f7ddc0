//! A plot of medians as bars beside Thuban's: one panel for pod to pod, one for a Service, one for pods and programs.

use super::{
    Plan,
    report::{Better, THUBAN, better},
    turn::BY_SERVICE,
};
use crate::bench::{
    plot::{
        BLUE, Bar, Bars, Colour, Entry, GREY, Group, LIGHT_BLUE, NAVY, ORANGE, Panel, Picture, SAND, SLATE,
    },
    results::Results,
    table::number,
};

const COLOURS: [Colour; 7] = [BLUE, ORANGE, SAND, LIGHT_BLUE, NAVY, SLATE, GREY];
/// Values are cut off above this many times Thuban's.
const MAX_RATIO: f64 = 3.0;

const PACKETS: [(&str, &str); 6] = [
    ("tcp1_gbps", "TCP, 1 stream"),
    ("tcp8_gbps", "TCP, 8 streams"),
    ("udp64_pps", "UDP 64 B, packets/s"),
    ("crr_per_s", "connections/s"),
    ("cpu_ms_per_gb", "CPU per Gbit"),
    ("rr_p50_us", "round trip, median"),
];
const PODS: [(&str, &str); 6] = [
    ("add_ms", "ADD"),
    ("del_ms", "DEL"),
    ("add_all_s", "all pods run"),
    ("del_all_s", "all pods gone"),
    ("churn_rss_mib", "memory, churn"),
    ("churn_machine_cpu_ms_per_pod", "CPU per pod"),
];

pub fn picture(results: &Results, cases: &[(&str, bool)], plan: &Plan) -> Picture {
    let by_service = |(metric, name)| {
        let found = BY_SERVICE.iter().find(|(direct, _)| *direct == metric);
        found.map(|(_, service)| (*service, name))
    };
    let service: Vec<(&str, &str)> = PACKETS.into_iter().filter_map(by_service).collect();
    Picture {
        title: format!("Beside Thuban (1): medians of {} rounds", plan.rounds),
        legend: cases
            .iter()
            .zip(COLOURS)
            .map(|((case, _), colour)| Entry::bar(*case, colour))
            .collect(),
        columns: 1,
        height: 270,
        panels: vec![
            panel("Pod to pod", &PACKETS, results, cases),
            panel("By a Service", &service, results, cases),
            panel("Pods and programs", &PODS, results, cases),
        ],
    }
}

fn panel(title: &str, metrics: &[(&str, &str)], results: &Results, cases: &[(&str, bool)]) -> Panel {
    let group = |(metric, name): &(&str, &str)| Group {
        name: (*name).to_owned(),
        note: match better(metric) {
            Some(Better::More) => "more is better".to_owned(),
            Some(Better::Less) => "less is better".to_owned(),
            None => String::new(),
        },
        bars: cases
            .iter()
            .zip(COLOURS)
            .filter_map(|((case, _), colour)| {
                let value = results.median(case, metric)?;
                Some(Bar {
                    // Without Thuban the first peer is 1.
                    value: value
                        / results
                            .median(THUBAN, metric)
                            .or(results.median(cases[0].0, metric))?,
                    colour,
                    mark: None,
                    label: number(value),
                })
            })
            .collect(),
    };
    Panel::Bars(Bars {
        title: title.to_owned(),
        legend: Vec::new(),
        groups: metrics.iter().map(group).collect(),
        most: MAX_RATIO,
        one: Some(1.0),
        scale: number,
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::bench::{plot::svg, results::Sample};

    #[test]
    fn all_that_was_measured_is_drawn() {
        let mut results = Results::default();
        results.add("thuban", &[Sample::new("service_tcp1_gbps", "Gbit/s", 4.0)]);
        results.add("flannel", &[Sample::new("service_tcp1_gbps", "Gbit/s", 12.5)]);
        let plan = Plan {
            rounds: 1,
            time: Duration::from_secs(1),
            rest: Duration::from_secs(1),
            pods: 1,
        };
        let cases = [("thuban", true), ("flannel", true)];
        let plot = svg(&picture(&results, &cases, &plan)).unwrap();
        assert!(plot.contains("12.50") && plot.contains("flannel"), "{plot}");
    }
}
