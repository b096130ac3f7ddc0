//! Three panels: how long endpoints of the churn waited, the same over the churn's time, and CPU and memory over the
//! whole run with its phases. SVG written by hand; nothing in it but lines, rectangles and text.

use std::fmt::Write;

use super::{
    Plan,
    report::{Report, quantile},
    sampler::Point,
    track::{Step, Track},
};

/// Marks of an axis of waits: milliseconds, and their words.
const WAITS: [(f64, &str); 5] = [
    (1.0, "1 ms"),
    (10.0, "10 ms"),
    (100.0, "100 ms"),
    (1000.0, "1 s"),
    (10_000.0, "10 s"),
];
const WIDTH: f64 = 1180.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 1110.0;
const PLOT: f64 = 210.0;
const PANEL: f64 = 320.0;
/// Milliseconds at the ends of the axis of waits, which is logarithmic.
const LEAST: f64 = 1.0;
const MOST: f64 = 10_000.0;
const GOAL_MS: f64 = 500.0;

/// Distributions: name, what it is called, colour.
const CURVES: [(&str, &str, &str); 5] = [
    (
        "configmap_watch",
        "ConfigMap, create to watch (API server alone)",
        "#b8b8b8",
    ),
    ("pod_create", "pod, create to answer", "#e09f3e"),
    ("provisioned", "binding to Provisioned", "#1f6f8b"),
    ("ready", "binding to ready at the droplet", "#5aa9c4"),
    ("gone", "deletion to Endpoint gone", "#3d405b"),
];

pub fn svg(report: &Report, plan: &Plan, points: &[Point], track: &Track) -> String {
    let panels = [curves(report), seconds(report, track), resources(report, points)];
    let mut body = String::new();
    for (index, panel) in panels.iter().enumerate() {
        let top = 46.0 + PANEL * crate::bench::float(index as u64);
        // A String takes everything, here and below.
        let _ = writeln!(body, "<g transform=\"translate(0 {top})\">{panel}</g>");
    }
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{}\" \
         font-family=\"DejaVu Sans, Helvetica, Arial, sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
         <text x=\"50\" y=\"28\" font-size=\"17\" font-weight=\"bold\">Control plane: {} droplets, {} VPCs, {} \
         networks, {} endpoints, churn of {}/s</text>\n{body}</svg>\n",
        46.0 + PANEL * 3.0,
        plan.droplets,
        plan.vpcs,
        plan.networks,
        plan.endpoints,
        plan.churn
    )
}

fn title(text: &str) -> String {
    format!("<text x=\"50\" y=\"16\" font-size=\"14\" font-weight=\"bold\">{text}</text>\n")
}

fn bottom() -> f64 {
    50.0 + PLOT
}

/// Place of a wait on a logarithmic axis from 0 to 1.
fn logarithmic(milliseconds: f64) -> f64 {
    (milliseconds.clamp(LEAST, MOST) / LEAST).log10() / (MOST / LEAST).log10()
}

fn across(part: f64) -> f64 {
    LEFT + (RIGHT - LEFT) * part
}

fn up(part: f64) -> f64 {
    bottom() - PLOT * part.clamp(0.0, 1.0)
}

fn line(text: &mut String, points: &[(f64, f64)], colour: &str) {
    let places = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}"));
    let _ = writeln!(
        text,
        "<polyline fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.8\" points=\"{}\"/>",
        places.collect::<Vec<_>>().join(" ")
    );
}

fn rule(text: &mut String, from: (f64, f64), to: (f64, f64), colour: &str) {
    let _ = writeln!(
        text,
        "<line x1=\"{:.1}\" y1=\"{:.1}\" x2=\"{:.1}\" y2=\"{:.1}\" stroke=\"{colour}\"/>",
        from.0, from.1, to.0, to.1
    );
}

/// `anchor`: start, middle or end.
fn label(text: &mut String, (x, y): (f64, f64), anchor: &str, colour: &str, words: &str) {
    let _ = writeln!(
        text,
        "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" font-size=\"11\" fill=\"{colour}\">{words}</text>"
    );
}

fn legend(text: &mut String, entries: &[(&str, &str)]) {
    let mut x = LEFT;
    for (name, colour) in entries {
        let _ = writeln!(
            text,
            "<rect x=\"{x:.1}\" y=\"25\" width=\"11\" height=\"11\" fill=\"{colour}\"/>"
        );
        label(text, (x + 16.0, 35.0), "start", "black", name);
        x += 34.0 + 6.4 * crate::bench::float(name.len() as u64);
    }
}

/// Which part of the endpoints waited at most so long.
fn curves(report: &Report) -> String {
    let mut text = title("Part of all that waited at most so long, under the churn");
    for part in [0.0, 0.25, 0.5, 0.75, 1.0] {
        rule(&mut text, (LEFT, up(part)), (RIGHT, up(part)), "#e2e2e2");
        label(
            &mut text,
            (LEFT - 6.0, up(part) + 4.0),
            "end",
            "#666",
            &format!("{part:.2}"),
        );
    }
    for (wait, words) in WAITS {
        let x = across(logarithmic(wait));
        rule(&mut text, (x, bottom()), (x, up(1.0)), "#e2e2e2");
        label(&mut text, (x, bottom() + 16.0), "middle", "#666", words);
    }
    let goal = across(logarithmic(GOAL_MS));
    rule(&mut text, (goal, bottom()), (goal, up(1.0)), "#c0392b");
    label(
        &mut text,
        (goal + 4.0, bottom() - 6.0),
        "start",
        "#c0392b",
        "goal of 99 %: 500 ms",
    );
    rule(&mut text, (LEFT, up(0.99)), (RIGHT, up(0.99)), "#c0392b");
    let mut entries = Vec::new();
    for (name, words, colour) in CURVES {
        let Some((_, times)) = report.times.iter().find(|(known, _)| known == name) else {
            continue;
        };
        let parts = (0..=200).map(|step| f64::from(step) / 200.0);
        let points: Vec<_> = parts
            .map(|part| (across(logarithmic(quantile(times, part))), up(part)))
            .collect();
        line(&mut text, &points, colour);
        entries.push((words, colour));
    }
    legend(&mut text, &entries);
    text
}

/// Median and worst of a hundred of those that were made in each second.
fn seconds(report: &Report, track: &Track) -> String {
    let mut text = title("Binding to Provisioned, by the second in which the pod was made");
    let mut buckets: Vec<Vec<f64>> = Vec::new();
    let begin = track.at(report.churned.start, Step::Sent).unwrap_or_default();
    for number in report.churned.clone() {
        let (Some(sent), Some(done)) = (track.at(number, Step::Sent), track.at(number, Step::Provisioned))
        else {
            continue;
        };
        // After the first one's.
        #[allow(clippy::cast_sign_loss)]
        let second = (sent - begin).max(0.0) as usize;
        if buckets.len() <= second {
            buckets.resize(second + 1, Vec::new());
        }
        buckets[second].push((done - sent) * 1000.0);
    }
    for (wait, words) in WAITS {
        let y = up(logarithmic(wait));
        rule(&mut text, (LEFT, y), (RIGHT, y), "#e2e2e2");
        label(&mut text, (LEFT - 6.0, y + 4.0), "end", "#666", words);
    }
    let goal = up(logarithmic(GOAL_MS));
    rule(&mut text, (LEFT, goal), (RIGHT, goal), "#c0392b");
    let last = crate::bench::float(buckets.len().saturating_sub(1).max(1) as u64);
    for (part, colour) in [(0.5, "#5aa9c4"), (0.99, "#1f6f8b")] {
        let mut points = Vec::new();
        for (second, bucket) in buckets.iter_mut().enumerate() {
            bucket.sort_by(f64::total_cmp);
            if !bucket.is_empty() {
                let x = across(crate::bench::float(second as u64) / last);
                points.push((x, up(logarithmic(quantile(bucket, part)))));
            }
        }
        line(&mut text, &points, colour);
    }
    label(&mut text, (LEFT, bottom() + 16.0), "middle", "#666", "0 s");
    label(
        &mut text,
        (RIGHT, bottom() + 16.0),
        "middle",
        "#666",
        &format!("{last:.0} s"),
    );
    legend(
        &mut text,
        &[
            ("median", "#5aa9c4"),
            ("99 of 100", "#1f6f8b"),
            ("goal of 99 of 100", "#c0392b"),
        ],
    );
    text
}

type Value = fn(&Point) -> f64;

/// Cores and memory over the whole run.
fn resources(report: &Report, points: &[Point]) -> String {
    let mut text = title("CPU (cores) and the operator's memory over the run");
    let end = points.last().map_or(1.0, |point| point.seconds).max(1.0);
    let most_cores = points
        .iter()
        .flat_map(|point| [point.operator_cores, point.server_cores, point.bench_cores])
        .fold(1.0, f64::max);
    let most_memory = points
        .iter()
        .map(|point| point.operator_rss_mib)
        .fold(50.0, f64::max)
        * 1.1;
    for part in [0.0, 0.25, 0.5, 0.75, 1.0] {
        rule(&mut text, (LEFT, up(part)), (RIGHT, up(part)), "#e2e2e2");
        let (cores, memory) = (most_cores * part, most_memory * part);
        label(
            &mut text,
            (LEFT - 6.0, up(part) + 4.0),
            "end",
            "#666",
            &format!("{cores:.2}"),
        );
        label(
            &mut text,
            (RIGHT + 6.0, up(part) + 4.0),
            "start",
            "#c0392b",
            &format!("{memory:.0} MiB"),
        );
    }
    for (index, (begin, name)) in report.phases.iter().enumerate() {
        let x = across(begin / end);
        rule(&mut text, (x, bottom()), (x, up(1.0)), "#bbb");
        // Three rows, so that short phases' names do not meet.
        let y = bottom() + 14.0 + 13.0 * crate::bench::float(index as u64 % 3);
        label(&mut text, (x, y), "start", "#666", name);
    }
    let series: [(&str, &str, Value); 4] = [
        ("API server", "#e09f3e", |point| point.server_cores),
        ("etcd", "#f2cc8f", |point| point.etcd_cores),
        ("bench with all droplets", "#b8b8b8", |point| point.bench_cores),
        ("operator", "#1f6f8b", |point| point.operator_cores),
    ];
    let mut entries = Vec::new();
    for (name, colour, value) in series {
        let places: Vec<_> = points
            .iter()
            .map(|point| (across(point.seconds / end), up(value(point) / most_cores)))
            .collect();
        line(&mut text, &places, colour);
        entries.push((name, colour));
    }
    let memory: Vec<_> = points
        .iter()
        .map(|point| {
            (
                across(point.seconds / end),
                up(point.operator_rss_mib / most_memory),
            )
        })
        .collect();
    line(&mut text, &memory, "#c0392b");
    entries.push(("operator's memory", "#c0392b"));
    legend(&mut text, &entries);
    text
}

#[cfg(test)]
mod tests {
    use super::logarithmic;

    #[test]
    fn waits_are_placed_by_their_logarithm_and_cut_at_the_ends() {
        assert!(logarithmic(0.1).abs() < 1e-9);
        assert!((logarithmic(100.0) - 0.5).abs() < 1e-9);
        assert!((logarithmic(1e9) - 1.0).abs() < 1e-9);
    }
}
