//! A plot of three panels: how long endpoints of the churn waited, the same over the churn's time, and CPU and memory
//! over the whole run with its phases.

use super::{
    Plan,
    report::Report,
    sampler::Point,
    track::{Step, Track},
};
use crate::bench::{
    float,
    plot::{
        Axis, BLUE, Colour, Curve, Curves, GREY, Goal, LIGHT_BLUE, NAVY, ORANGE, Panel, Picture, RED, SAND,
        rounded,
    },
    stats::{quantile, sorted},
};

const GOAL_MS: f64 = 500.0;

/// Distributions: name, label, colour.
const WAITS: [(&str, &str, Colour); 5] = [
    (
        "configmap_watch",
        "ConfigMap, create to watch (API server alone)",
        GREY,
    ),
    ("pod_create", "pod, create to answer", ORANGE),
    ("provisioned", "binding to Provisioned", BLUE),
    ("ready", "binding to ready at the droplet", LIGHT_BLUE),
    ("gone", "deletion to Endpoint gone", NAVY),
];

pub fn picture(report: &Report, plan: &Plan, points: &[Point], track: &Track) -> Picture {
    let panels = [waits(report), seconds(report, track), resources(report, points)];
    Picture {
        title: format!(
            "Control plane: {} droplets, {} VPCs, {} networks, {} endpoints, churn of {}/s",
            plan.droplets, plan.vpcs, plan.networks, plan.endpoints, plan.churn
        ),
        legend: Vec::new(),
        columns: 1,
        height: 340,
        panels: panels.into_iter().map(Panel::Curves).collect(),
    }
}

/// Returns an axis of milliseconds, logarithmic.
fn waiting() -> Axis {
    Axis {
        from: 1.0,
        to: 10_000.0,
        is_logarithmic: true,
        labels: 6,
        scale: |milliseconds| {
            if milliseconds < 999.0 {
                format!("{milliseconds:.0} ms")
            } else {
                format!("{:.0} s", milliseconds / 1000.0)
            }
        },
    }
}

fn running(to: f64) -> Axis {
    Axis {
        from: 0.0,
        to,
        is_logarithmic: false,
        labels: 12,
        scale: |seconds| format!("{} s", rounded(seconds)),
    }
}

fn curve(name: &str, colour: Colour, points: Vec<(f64, f64)>) -> Curve {
    Curve {
        name: name.to_owned(),
        colour,
        points,
        is_second: false,
    }
}

/// Returns curves of the part of the endpoints that waited at most this long.
fn waits(report: &Report) -> Curves {
    let draw = |(name, words, colour): (&str, &str, Colour)| {
        let (_, times) = report.times.iter().find(|(known, _)| known == name)?;
        let parts = (0..=200).map(|step| f64::from(step) / 200.0);
        let points = parts.map(|part| (quantile(times, part), part)).collect();
        Some(curve(words, colour, points))
    };
    Curves {
        title: "Part of all that waited at most so long, under the churn".to_owned(),
        x: waiting(),
        y: Axis {
            from: 0.0,
            to: 1.0,
            is_logarithmic: false,
            labels: 6,
            scale: |part| format!("{part:.1}"),
        },
        second: None,
        curves: WAITS.into_iter().filter_map(draw).collect(),
        goals: vec![
            Goal::X(GOAL_MS, "goal of 99 %: 500 ms".to_owned()),
            Goal::Y(0.99, String::new()),
        ],
        phases: Vec::new(),
    }
}

/// Returns median and 99th percentile of the endpoints that were made in each second.
fn seconds(report: &Report, track: &Track) -> Curves {
    let mut buckets: Vec<Vec<f64>> = Vec::new();
    let begin = track.at(report.churned.start, Step::Sent).unwrap_or_default();
    for number in report.churned.clone() {
        let (Some(sent), Some(done)) = (track.at(number, Step::Sent), track.at(number, Step::Provisioned))
        else {
            continue;
        };
        // The second counts from the first endpoint.
        #[allow(clippy::cast_sign_loss)]
        let second = (sent - begin).max(0.0) as usize;
        if buckets.len() <= second {
            buckets.resize(second + 1, Vec::new());
        }
        buckets[second].push((done - sent) * 1000.0);
    }
    let last = float(buckets.len().saturating_sub(1).max(1) as u64);
    let buckets: Vec<Vec<f64>> = buckets.into_iter().map(sorted).collect();
    let points = |part| {
        let filled = buckets
            .iter()
            .enumerate()
            .filter(|(_, bucket)| !bucket.is_empty());
        filled
            .map(|(second, bucket)| (float(second as u64), quantile(bucket, part)))
            .collect()
    };
    Curves {
        title: "Binding to Provisioned, by the second in which the pod was made".to_owned(),
        x: running(last),
        y: waiting(),
        second: None,
        curves: vec![
            curve("median", LIGHT_BLUE, points(0.5)),
            curve("99 of 100", BLUE, points(0.99)),
        ],
        goals: vec![Goal::Y(GOAL_MS, "goal of 99 of 100".to_owned())],
        phases: Vec::new(),
    }
}

type Value = fn(&Point) -> f64;

/// Returns curves of cores and memory over the whole run.
fn resources(report: &Report, points: &[Point]) -> Curves {
    let end = points.last().map_or(1.0, |point| point.seconds).max(1.0);
    let cores = points
        .iter()
        .flat_map(|point| [point.operator_cores, point.server_cores, point.bench_cores])
        .fold(1.0, f64::max);
    let memory = points
        .iter()
        .map(|point| point.operator_rss_mib)
        .fold(50.0, f64::max);
    let series: [(&str, Colour, Value); 5] = [
        ("API server", ORANGE, |point| point.server_cores),
        ("etcd", SAND, |point| point.etcd_cores),
        ("bench with all droplets", GREY, |point| point.bench_cores),
        ("operator", BLUE, |point| point.operator_cores),
        ("operator's memory", RED, |point| point.operator_rss_mib),
    ];
    let draw = |(name, colour, value): (&str, Colour, Value)| Curve {
        is_second: colour == RED,
        ..curve(
            name,
            colour,
            points.iter().map(|point| (point.seconds, value(point))).collect(),
        )
    };
    Curves {
        title: "CPU (cores) and the operator's memory over the run".to_owned(),
        x: running(end),
        y: Axis {
            from: 0.0,
            to: cores,
            is_logarithmic: false,
            labels: 6,
            scale: |cores| format!("{cores:.1}"),
        },
        second: Some(Axis {
            from: 0.0,
            to: memory * 1.1,
            is_logarithmic: false,
            labels: 6,
            scale: |memory| format!("{memory:.0} MiB"),
        }),
        curves: series.into_iter().map(draw).collect(),
        goals: Vec::new(),
        phases: report.phases.clone(),
    }
}
