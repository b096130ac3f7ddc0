//! Curves over a common axis, some of them on a second scale at the right.

use std::ops::Range;

use anyhow::Result;
use plotters::prelude::*;

use super::{AXIS, Area, Colour, Entry, FAINT, LEFT, MESH, RED, Words, axis_style, head};

pub struct Curves {
    pub title: String,
    pub x: Axis,
    pub y: Axis,
    /// The scale at the right.
    pub second: Option<Axis>,
    pub curves: Vec<Curve>,
    pub goals: Vec<Goal>,
    /// The place on the x axis where each phase begins, and its name.
    pub phases: Vec<(f64, String)>,
}

pub struct Axis {
    pub from: f64,
    pub to: f64,
    pub is_logarithmic: bool,
    /// The approximate number of labels.
    pub labels: usize,
    pub scale: fn(f64) -> String,
}

pub struct Curve {
    pub name: String,
    pub colour: Colour,
    pub points: Vec<(f64, f64)>,
    /// Whether the curve belongs to the scale at the right.
    pub is_second: bool,
}

/// A red line, and the text beside it.
pub enum Goal {
    X(f64, String),
    Y(f64, String),
}

impl Axis {
    /// Returns the place of a value. Values beyond the ends are drawn at the ends.
    fn place(&self, value: f64) -> f64 {
        let value = value.clamp(self.from, self.to);
        if self.is_logarithmic { value.log10() } else { value }
    }

    fn range(&self) -> Range<f64> {
        self.place(self.from)..self.place(self.to)
    }

    fn words(&self, place: f64) -> String {
        (self.scale)(if self.is_logarithmic {
            10_f64.powf(place)
        } else {
            place
        })
    }
}

pub(super) fn draw(area: &Area, panel: &Curves) -> Result<()> {
    let mut entries: Vec<Entry> = panel
        .curves
        .iter()
        .map(|curve| Entry::line(&curve.name, curve.colour))
        .collect();
    let goals = panel.goals.iter().filter_map(|goal| match goal {
        Goal::Y(_, words) if !words.is_empty() => Some(Entry::line(words, RED)),
        _ => None,
    });
    entries.extend(goals);
    let top = head(area, &panel.title, &entries)?;
    let (x, y) = (&panel.x, &panel.y);
    let second = panel.second.as_ref().unwrap_or(y);
    let mut chart = ChartBuilder::on(area)
        .margin_top(top)
        .margin_bottom(if panel.phases.is_empty() { 10 } else { 52 })
        .x_label_area_size(24)
        .y_label_area_size(LEFT)
        .right_y_label_area_size(70)
        .build_cartesian_2d(x.range(), y.range())?
        .set_secondary_coord(x.range(), second.range());
    chart
        .configure_mesh()
        .x_labels(x.labels)
        .y_labels(y.labels)
        .x_label_formatter(&|place| x.words(*place))
        .y_label_formatter(&|place| y.words(*place))
        .label_style(axis_style(FAINT))
        .axis_style(AXIS)
        .bold_line_style(MESH)
        .light_line_style(TRANSPARENT)
        .draw()?;
    if let Some(second) = &panel.second {
        chart
            .configure_secondary_axes()
            .y_labels(second.labels)
            .y_label_formatter(&|place| second.words(*place))
            .label_style(axis_style(RED))
            .axis_style(MESH)
            .draw()?;
    }
    let (across, up) = (x.range(), y.range());
    let base = area.get_base_pixel();
    for (index, (begin, name)) in (0..).zip(&panel.phases) {
        let begin = x.place(*begin);
        let line = PathElement::new([(begin, up.start), (begin, up.end)], MESH);
        chart.draw_series([line])?;
        // Three rows, so that short phases' names do not meet.
        let (left, bottom) = chart.backend_coord(&(begin, up.start));
        let place = (left - base.0, bottom - base.1 + 38 + 13 * (index % 3));
        Words::new(11.0).colour(FAINT).put(area, name, place)?;
    }
    for goal in &panel.goals {
        let ends = match goal {
            Goal::X(value, _) => [(x.place(*value), up.start), (x.place(*value), up.end)],
            Goal::Y(value, _) => [(across.start, y.place(*value)), (across.end, y.place(*value))],
        };
        chart.draw_series([PathElement::new(ends, RED)])?;
        if let Goal::X(value, words) = goal {
            let (left, bottom) = chart.backend_coord(&(x.place(*value), up.start));
            let place = (left - base.0 + 5, bottom - base.1 - 4);
            Words::new(11.0).colour(RED).put(area, words, place)?;
        }
    }
    for curve in &panel.curves {
        let vertical = if curve.is_second { second } else { y };
        let points = curve
            .points
            .iter()
            .map(|(one, other)| (x.place(*one), vertical.place(*other)));
        let line = LineSeries::new(points, curve.colour.stroke_width(2));
        if curve.is_second {
            chart.draw_secondary_series(line)?;
        } else {
            chart.draw_series(line)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::Axis;

    #[test]
    fn waits_are_placed_by_their_logarithm_and_cut_at_the_ends() {
        let axis = Axis {
            from: 1.0,
            to: 10_000.0,
            is_logarithmic: true,
            labels: 5,
            scale: |value| format!("{value:.0}"),
        };
        let Axis { from, to, .. } = axis;
        let part = |value| (axis.place(value) - axis.place(from)) / (axis.place(to) - axis.place(from));
        assert!(part(0.1_f64).abs() < 1e-9);
        assert!((part(100.0) - 0.5).abs() < 1e-9);
        assert!((part(1e9) - 1.0).abs() < 1e-9);
        assert_eq!(axis.words(2.0), "100");
    }
}
