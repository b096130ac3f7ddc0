//! Panels of bars: sizes side by side, one colour a contestant, its own way without a Service as a mark across the bar. SVG
//! written by hand; nothing in it but rectangles, lines and text.

use std::fmt::Write;

use super::{
    Plan,
    report::{Report, WHO},
};
use crate::bench::{float, report::table::number};

const COLOURS: [&str; 3] = ["#1f6f8b", "#e09f3e", "#f2cc8f"];
const WIDTH: f64 = 1180.0;
const PANEL: (f64, f64) = (565.0, 250.0);
const PLOT: (f64, f64) = (470.0, 150.0);

struct Panel {
    title: &'static str,
    metric: &'static str,
    /// Drawn as a mark across the bar, and what it is.
    mark: &'static str,
    /// The mark is the worst of a hundred of the metric's own values.
    is_worst: bool,
}

const fn panel(title: &'static str, metric: &'static str, mark: &'static str) -> Panel {
    Panel {
        title,
        metric,
        mark,
        is_worst: false,
    }
}

const PANELS: [Panel; 8] = [
    panel(
        "One connection, same node: median, µs",
        "near_service_p50_us",
        "near_direct_p50_us",
    ),
    panel(
        "One connection, other node: median, µs",
        "far_service_p50_us",
        "far_direct_p50_us",
    ),
    panel(
        "Connections/s by 8 clients, same node",
        "near_service_crr8_per_s",
        "near_direct_crr8_per_s",
    ),
    panel(
        "Connections/s by 8 clients, other node",
        "far_service_crr8_per_s",
        "far_direct_crr8_per_s",
    ),
    panel(
        "TCP, 4 streams, same node, Gbit/s",
        "near_service_tcp4_gbps",
        "near_direct_tcp4_gbps",
    ),
    panel(
        "TCP, 4 streams, other node, Gbit/s",
        "far_service_tcp4_gbps",
        "far_direct_tcp4_gbps",
    ),
    Panel {
        title: "EndpointSlice change to effect: median, ms; mark: 99 of 100",
        metric: "change_ms",
        mark: "change_ms",
        is_worst: true,
    },
    panel(
        "Memory of kube-proxy and of transitd, MiB",
        "kube-proxy_rss_mib",
        "",
    ),
];

pub fn svg(report: &Report, plan: &Plan) -> String {
    let mut body = String::new();
    for (index, panel) in PANELS.iter().enumerate() {
        let (x, y) = (
            float(index as u64 % 2) * PANEL.0,
            78.0 + float(index as u64 / 2) * PANEL.1,
        );
        // A String takes everything, here and below.
        let _ = writeln!(
            body,
            "<g transform=\"translate({x} {y})\">{}</g>",
            draw(panel, report, plan)
        );
    }
    let mut legend = String::new();
    let names = ["Thuban", "kube-proxy, iptables", "kube-proxy, nftables"];
    for (index, (name, colour)) in names.iter().zip(COLOURS).enumerate() {
        let x = 50.0 + 170.0 * float(index as u64);
        let _ = write!(
            legend,
            "<rect x=\"{x}\" y=\"40\" width=\"11\" height=\"11\" fill=\"{colour}\"/>\
             <text x=\"{}\" y=\"50\">{name}</text>",
            x + 16.0
        );
    }
    let height = 78.0 + PANEL.1 * float((PANELS.len() as u64).div_ceil(2));
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" \
         font-family=\"DejaVu Sans, Helvetica, Arial, sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
         <text x=\"50\" y=\"28\" font-size=\"17\" font-weight=\"bold\">Services by number of Services: medians of {} \
         rounds</text>\n{legend}<line x1=\"570\" y1=\"46\" x2=\"590\" y2=\"46\" stroke=\"#c0392b\" stroke-width=\"2\"/>\
         <text x=\"596\" y=\"50\">the same from pod to pod without a Service</text>\n{body}</svg>\n",
        plan.rounds
    )
}

fn draw(panel: &Panel, report: &Report, plan: &Plan) -> String {
    let value = |size, who: &str| {
        let is_memory = panel.metric == "kube-proxy_rss_mib";
        let metric = if is_memory && who == WHO[0] {
            "transitd_rss_mib"
        } else {
            panel.metric
        };
        report.median(size, who, metric)
    };
    let mark = |size, who: &str| {
        if panel.is_worst {
            report.worst(size, who, panel.mark)
        } else {
            report.median(size, who, panel.mark)
        }
    };
    let all = plan
        .sizes
        .iter()
        .flat_map(|size| WHO.map(|who| [value(*size, who), mark(*size, who)]));
    let most = all.flatten().flatten().fold(f64::MIN_POSITIVE, f64::max);
    let group = PLOT.0 / float(plan.sizes.len().max(1) as u64);
    let bar = (group - 16.0) / float(WHO.len() as u64);
    let bottom = 30.0 + PLOT.1;
    let mut text = format!(
        "<text x=\"50\" y=\"8\" font-size=\"14\" font-weight=\"bold\">{}</text>",
        panel.title
    );
    let _ = write!(
        text,
        "<line x1=\"50\" y1=\"{bottom}\" x2=\"{}\" y2=\"{bottom}\" stroke=\"#888\"/>",
        50.0 + PLOT.0
    );
    for (place, size) in plan.sizes.iter().enumerate() {
        let left = 58.0 + group * float(place as u64);
        let _ = write!(
            text,
            "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">{size} Services</text>",
            left + (group - 16.0) / 2.0,
            bottom + 18.0
        );
        for (index, (who, colour)) in WHO.iter().zip(COLOURS).enumerate() {
            let Some(value) = value(*size, who) else { continue };
            let (x, height) = (left + bar * float(index as u64), PLOT.1 * value / most);
            let y = bottom - height;
            let _ = write!(
                text,
                "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{height:.1}\" fill=\"{colour}\"/>",
                bar - 3.0
            );
            let mark = mark(*size, who).map(|mark| bottom - PLOT.1 * mark / most);
            if let Some(mark) = mark {
                let _ = write!(
                    text,
                    "<line x1=\"{x:.1}\" y1=\"{mark:.1}\" x2=\"{:.1}\" y2=\"{mark:.1}\" stroke=\"#c0392b\" \
                     stroke-width=\"2\"/>",
                    x + bar - 3.0
                );
            }
            // Above whatever is higher.
            let top = mark.map_or(y, |mark| mark.min(y)) - 4.0;
            let _ = write!(
                text,
                "<text x=\"{:.1}\" y=\"{top:.1}\" text-anchor=\"middle\" font-size=\"10\" fill=\"#444\">{}</text>",
                x + (bar - 3.0) / 2.0,
                number(value)
            );
        }
    }
    text
}
