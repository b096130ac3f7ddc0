//! A plot of medians as bars, relative to plain routing (or the direct path) on the same rig: one panel for each rig,
//! one group of bars for each metric, one colour for each network.

use crate::bench::plot::{
    BLUE, Bar, Bars, Colour, Entry, GREY, Group, LIGHT_BLUE, NAVY, ORANGE, Panel, Picture, SAND,
};
use crate::bench::results::Results;

/// A rig: its title and its cases. The first case is 1.
struct Rig {
    title: &'static str,
    cases: &'static [&'static str],
}

const RIGS: &[Rig] = &[
    Rig {
        title: "Uplink that passes whole GSO frames, MTU 1500",
        cases: &["plain", "vxlan", "thuban"],
    },
    Rig {
        title: "Uplink that passes segments (GRO at the receiver), MTU 1500",
        cases: &[
            "plain-seg",
            "vxlan-seg",
            "vxlan-seg-xdp",
            "thuban-seg",
            "thuban-seg-xdp",
            "thuban-xdp-agent",
        ],
    },
    Rig {
        title: "MTU 9000, whole GSO frames",
        cases: &["plain-9000", "vxlan-9000", "thuban-9000"],
    },
    Rig {
        title: "MTU 9000, segments",
        cases: &["plain-seg-9000", "vxlan-seg-9000", "thuban-seg-9000"],
    },
    Rig {
        title: "Four droplets on a bridge, whole GSO frames",
        cases: &["direct-switch", "bounced", "divided"],
    },
    Rig {
        title: "Four droplets on a bridge, segments",
        cases: &[
            "direct-switch-seg",
            "bounced-seg",
            "bounced-seg-xdp",
            "divided-seg",
        ],
    },
];

/// Metrics, their labels in the plot, and which direction is good.
const METRICS: &[(&str, &str, &str)] = &[
    ("tcp1_gbps", "TCP, 1 stream", "more is better"),
    ("tcp8_gbps", "TCP, 8 streams", "more is better"),
    ("udp64_pps", "UDP 64 B, packets/s", "more is better"),
    ("crr_per_s", "connections/s", "more is better"),
    ("cpu_ms_per_gb", "CPU per Gbit", "less is better"),
    ("rr_p50_us", "round trip, median", "less is better"),
    ("rr_p99_us", "round trip, 99 %", "less is better"),
];

/// Colours by the beginning of a case's name; the first that fits counts.
const COLOURS: &[(&str, Colour)] = &[
    ("plain", GREY),
    ("direct", GREY),
    ("vxlan-seg-xdp", SAND),
    ("vxlan", ORANGE),
    ("thuban-seg-xdp", LIGHT_BLUE),
    ("thuban-xdp-agent", NAVY),
    ("bounced", LIGHT_BLUE),
    ("divided", NAVY),
];
/// The longest bar as a ratio. Longer bars are cut off; their number is still written there.
const MAX_RATIO: f64 = 2.5;

/// Returns the picture; nothing when no rig has two cases with numbers.
pub fn picture(results: &Results) -> Option<Picture> {
    let panels: Vec<Panel> = RIGS.iter().filter_map(|rig| panel(rig, results)).collect();
    (!panels.is_empty()).then(|| Picture {
        title: "Data plane: medians relative to the grey bar of each group (numbers: ratio)".to_owned(),
        legend: Vec::new(),
        columns: 1,
        height: 320,
        panels,
    })
}

fn panel(rig: &Rig, results: &Results) -> Option<Panel> {
    let groups: Vec<Group> = METRICS
        .iter()
        .filter_map(|(metric, name, note)| {
            let bars = bars(rig, results, metric)?;
            Some(Group {
                name: (*name).to_owned(),
                note: (*note).to_owned(),
                bars,
            })
        })
        .collect();
    if groups.is_empty() {
        return None;
    }
    Some(Panel::Bars(Bars {
        title: rig.title.to_owned(),
        legend: rig
            .cases
            .iter()
            .map(|case| Entry::bar(*case, colour(case)))
            .collect(),
        groups,
        most: MAX_RATIO,
        one: Some(1.0),
        scale: |value| format!("{value:.1}"),
    }))
}

/// Returns the ratio of each case that has a number; nothing if only one has.
fn bars(rig: &Rig, results: &Results, metric: &str) -> Option<Vec<Bar>> {
    let base = results.median(rig.cases.first()?, metric)?;
    let bars: Vec<Bar> = rig
        .cases
        .iter()
        .filter_map(|case| {
            let value = results.median(case, metric)? / base;
            Some(Bar {
                value,
                colour: colour(case),
                mark: None,
                label: format!("{value:.2}"),
            })
        })
        .collect();
    (bars.len() > 1).then_some(bars)
}

fn colour(case: &str) -> Colour {
    let fits = COLOURS.iter().find(|(start, _)| case.starts_with(start));
    fits.map_or(BLUE, |(_, colour)| *colour)
}

#[cfg(test)]
mod tests {
    use super::picture;
    use crate::bench::{
        plot::svg,
        results::{Results, Sample},
    };

    #[test]
    fn a_panel_is_drawn_when_two_of_its_cases_were_measured() {
        let mut results = Results::default();
        results.add("plain", &[Sample::new("tcp1_gbps", "", 10.0)]);
        assert!(picture(&results).is_none());
        results.add("thuban", &[Sample::new("tcp1_gbps", "", 9.0)]);
        let plot = svg(&picture(&results).unwrap()).unwrap();
        assert!(plot.contains("0.90") && plot.contains("thuban"), "{plot}");
    }
}
