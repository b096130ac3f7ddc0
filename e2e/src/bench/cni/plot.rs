//! Bars of medians, with marks at the 99th percentile: ADD and DEL, one and many at once.

use super::{Plan, measure::Times};
use crate::bench::plot::{
    BLUE, Bar, Bars, Colour, Entry, GREY, Group, ORANGE, Panel, Picture, RED, SAND, SLATE, rounded,
};

const WHO: [(&str, Colour); 5] = [
    ("thuban", BLUE),
    ("ptp", ORANGE),
    ("bridge", SAND),
    ("link", SLATE),
    ("ip-link", GREY),
];

pub fn picture(times: &Times, plan: &Plan) -> Picture {
    let panels = [1, plan.at_once].map(|many| ["add", "del"].map(|what| panel(times, what, many)));
    Picture {
        title: format!(
            "CNI ADD and DEL, milliseconds: medians of {} runs and 99 of 100",
            plan.runs
        ),
        legend: vec![Entry::line("99 of 100", RED)],
        columns: 2,
        height: 270,
        panels: panels.into_iter().flatten().collect(),
    }
}

fn panel(times: &Times, what: &str, many: usize) -> Panel {
    let group = |(who, colour): (&str, Colour)| {
        let (middle, worst) = (times.p50(who, what, many)?, times.p99(who, what, many)?);
        let bar = Bar {
            value: middle,
            colour,
            mark: Some(worst),
            label: format!("{middle:.1} / {worst:.1}"),
        };
        Some(Group {
            name: who.to_owned(),
            note: String::new(),
            bars: vec![bar],
        })
    };
    let groups: Vec<Group> = WHO.into_iter().filter_map(group).collect();
    let ends = groups
        .iter()
        .flat_map(|group| &group.bars)
        .map(|bar| bar.mark.unwrap_or(bar.value));
    let most = ends.fold(1.0, f64::max);
    Panel::Bars(Bars {
        title: format!("{}, {many} at once", what.to_uppercase()),
        legend: Vec::new(),
        groups,
        most: most * 1.1,
        one: None,
        scale: rounded,
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::bench::plot::svg;

    #[test]
    fn what_was_measured_is_drawn_with_its_worst() {
        let mut times = Times::default();
        times.add("ptp", "add", 1, 0, &[3, 5, 40].map(Duration::from_millis));
        let plan = Plan {
            runs: 1,
            single: 3,
            rounds: 1,
            at_once: 16,
            pods: 0,
            only: Vec::new(),
        };
        let plot = svg(&picture(&times, &plan)).unwrap();
        assert!(plot.contains("5.0 / 40.0") && !plot.contains("thuban"), "{plot}");
    }
}
