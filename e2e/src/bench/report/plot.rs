//! Medians as bars, relative to plain routing (or the direct path) on the same rig: one panel a rig, one group of bars
//! a metric, one colour a network. SVG written by hand; nothing in it but rectangles, lines and text.

use std::fmt::Write;

use super::results::Results;
use crate::bench::float;

/// A panel: its title and its cases, the first of which is 1.
struct Panel {
    title: &'static str,
    cases: &'static [&'static str],
}

const PANELS: &[Panel] = &[
    Panel {
        title: "Uplink that passes whole GSO frames, MTU 1500",
        cases: &["plain", "vxlan", "thuban"],
    },
    Panel {
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
    Panel {
        title: "MTU 9000, whole GSO frames",
        cases: &["plain-9000", "vxlan-9000", "thuban-9000"],
    },
    Panel {
        title: "MTU 9000, segments",
        cases: &["plain-seg-9000", "vxlan-seg-9000", "thuban-seg-9000"],
    },
    Panel {
        title: "Four droplets on a bridge, whole GSO frames",
        cases: &["direct-switch", "bounced", "divided"],
    },
    Panel {
        title: "Four droplets on a bridge, segments",
        cases: &["direct-switch-seg", "bounced-seg", "divided-seg"],
    },
];

/// Metrics, what they are called in the plot, and which way is good.
const METRICS: &[(&str, &str, &str)] = &[
    ("tcp1_gbps", "TCP, 1 stream", "more is better"),
    ("tcp8_gbps", "TCP, 8 streams", "more is better"),
    ("udp64_pps", "UDP 64 B, packets/s", "more is better"),
    ("crr_per_s", "connections/s", "more is better"),
    ("cpu_ms_per_gb", "CPU per Gbit", "less is better"),
    ("rr_p50_us", "round trip, median", "less is better"),
    ("rr_p99_us", "round trip, 99 %", "less is better"),
];

/// Colours by how a case's name begins; the first that fits.
const COLOURS: &[(&str, &str)] = &[
    ("plain", "#b8b8b8"),
    ("direct", "#b8b8b8"),
    ("vxlan-seg-xdp", "#f2cc8f"),
    ("vxlan", "#e09f3e"),
    ("thuban-seg-xdp", "#5aa9c4"),
    ("thuban-xdp-agent", "#3d405b"),
    ("bounced", "#5aa9c4"),
    ("divided", "#3d405b"),
    ("", "#1f6f8b"),
];
const WIDTH: f64 = 1180.0;
const MARGIN: f64 = 50.0;
const PLOT: f64 = 190.0;
const PANEL: f64 = 320.0;
/// Ratios beyond are cut off; their number still stands there.
const MOST: f64 = 2.5;

/// Nothing when no panel has two cases with numbers.
pub fn svg(results: &Results) -> Option<String> {
    let panels: Vec<String> = PANELS.iter().filter_map(|panel| draw(panel, results)).collect();
    if panels.is_empty() {
        return None;
    }
    let mut height = 46.0;
    let mut body = String::new();
    for panel in &panels {
        let _ = writeln!(body, "<g transform=\"translate(0 {height})\">{panel}</g>");
        height += PANEL;
    }
    Some(format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" \
         font-family=\"DejaVu Sans, Helvetica, Arial, sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
         <text x=\"{MARGIN}\" y=\"28\" font-size=\"17\" font-weight=\"bold\">Data plane: medians relative to the \
         grey bar of each group (numbers: ratio)</text>\n{body}</svg>\n"
    ))
}

/// A metric's group: names, and the ratio of each case that has a number.
struct Group {
    name: &'static str,
    good: &'static str,
    bars: Vec<(usize, f64)>,
}

fn groups(panel: &Panel, results: &Results) -> Vec<Group> {
    let group = |(metric, name, good): &(&str, &'static str, &'static str)| {
        let base = results.median(panel.cases.first()?, metric)?;
        let ratio = |case: &&str| Some(results.median(case, metric)? / base);
        let bars: Vec<(usize, f64)> = panel
            .cases
            .iter()
            .enumerate()
            .filter_map(|(index, case)| Some((index, ratio(case)?)))
            .collect();
        (bars.len() > 1).then_some(Group { name, good, bars })
    };
    METRICS.iter().filter_map(group).collect()
}

fn draw(panel: &Panel, results: &Results) -> Option<String> {
    let groups = groups(panel, results);
    if groups.is_empty() {
        return None;
    }
    let mut text = String::new();
    // A String takes everything, here and below.
    let _ = writeln!(
        text,
        "<text x=\"{MARGIN}\" y=\"16\" font-size=\"14\" font-weight=\"bold\">{}</text>",
        panel.title
    );
    legend(&mut text, panel);
    axis(&mut text);
    let slot = (WIDTH - 2.0 * MARGIN) / float(METRICS.len() as u64);
    let bar = ((slot - 26.0) / float(panel.cases.len() as u64)).min(36.0);
    let mut left = MARGIN;
    for group in &groups {
        let start = left + (slot - bar * float(group.bars.len() as u64)) / 2.0;
        let mut x = start;
        for (index, ratio) in &group.bars {
            draw_bar(&mut text, x, bar, *ratio, colour(panel.cases[*index]));
            x += bar;
        }
        let (middle, y) = (left + slot / 2.0, bottom());
        let _ = writeln!(
            text,
            "<text x=\"{middle:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>\
             <text x=\"{middle:.1}\" y=\"{:.1}\" text-anchor=\"middle\" font-size=\"10\" fill=\"#666\">{}</text>",
            y + 17.0,
            group.name,
            y + 31.0,
            group.good
        );
        left += slot;
    }
    Some(text)
}

fn colour(case: &str) -> &'static str {
    let fits = COLOURS.iter().find(|(start, _)| case.starts_with(start));
    fits.map_or("black", |(_, colour)| colour)
}

/// Where bars stand.
fn bottom() -> f64 {
    60.0 + PLOT
}

fn height(ratio: f64) -> f64 {
    ratio.clamp(0.0, MOST) / MOST * PLOT
}

fn draw_bar(text: &mut String, x: f64, width: f64, ratio: f64, colour: &str) {
    let top = bottom() - height(ratio);
    let (tall, middle) = (height(ratio), x + width / 2.0);
    // Numbers of narrow bars must not touch.
    let size = (width * 0.38).clamp(7.5, 10.0);
    let _ = writeln!(
        text,
        "<rect x=\"{:.1}\" y=\"{top:.1}\" width=\"{:.1}\" height=\"{tall:.1}\" fill=\"{colour}\"/>\
         <text x=\"{middle:.1}\" y=\"{:.1}\" text-anchor=\"middle\" font-size=\"{size:.1}\" \
         stroke=\"white\" stroke-width=\"3\" paint-order=\"stroke\">{ratio:.2}</text>",
        x + 1.0,
        width - 2.0,
        top - 4.0
    );
}

fn legend(text: &mut String, panel: &Panel) {
    let mut x = MARGIN;
    for case in panel.cases {
        let colour = colour(case);
        let _ = writeln!(
            text,
            "<rect x=\"{x:.1}\" y=\"25\" width=\"11\" height=\"11\" fill=\"{colour}\"/>\
             <text x=\"{:.1}\" y=\"35\">{case}</text>",
            x + 16.0
        );
        x += 36.0 + 7.5 * float(case.len() as u64);
    }
}

/// Lines at halves, and the one of the first case drawn darker.
fn axis(text: &mut String) {
    for half in 0..=5 {
        let ratio = f64::from(half) / 2.0;
        let (y, right) = (bottom() - height(ratio), WIDTH - MARGIN);
        let colour = if half == 0 || half == 2 { "#888" } else { "#e2e2e2" };
        let _ = writeln!(
            text,
            "<line x1=\"{MARGIN}\" x2=\"{right}\" y1=\"{y:.1}\" y2=\"{y:.1}\" stroke=\"{colour}\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\" fill=\"#666\">{ratio:.1}</text>",
            MARGIN - 6.0,
            y + 4.0
        );
    }
}

#[cfg(test)]
mod tests {
    use super::svg;
    use crate::bench::{Sample, report::results::Results};

    #[test]
    fn a_panel_is_drawn_when_two_of_its_cases_were_measured() {
        let mut results = Results::default();
        results.add("plain", &[Sample::new("tcp1_gbps", "", 10.0)]);
        assert!(svg(&results).is_none());
        results.add("thuban", &[Sample::new("tcp1_gbps", "", 9.0)]);
        let plot = svg(&results).unwrap();
        assert!(plot.contains(">0.90<") && plot.contains("thuban"), "{plot}");
    }
}
