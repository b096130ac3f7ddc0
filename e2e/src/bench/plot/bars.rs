//! Groups of bars.

use anyhow::Result;
use plotters::prelude::*;

use super::{AXIS, Area, Colour, Entry, FAINT, LEFT, MESH, RED, Words, axis_style, head};
use crate::bench::float;

pub struct Bars {
    pub title: String,
    /// Empty where the picture's legend says all.
    pub legend: Vec<Entry>,
    pub groups: Vec<Group>,
    /// Value at the upper end. Longer bars are cut off; their label is still written there.
    pub most: f64,
    /// A value with a line of its own; other values are compared to it.
    pub one: Option<f64>,
    /// The text of values at the axis.
    pub scale: fn(f64) -> String,
}

/// Bars side by side, and the text below them.
pub struct Group {
    pub name: String,
    pub note: String,
    pub bars: Vec<Bar>,
}

pub struct Bar {
    pub value: f64,
    pub colour: Colour,
    /// A red line across the bar or above it.
    pub mark: Option<f64>,
    /// The text above bar and mark.
    pub label: String,
}

/// The widest bar in pixels.
const WIDEST: f64 = 44.0;

pub(super) fn draw(area: &Area, panel: &Bars) -> Result<()> {
    let top = head(area, &panel.title, &panel.legend)?;
    let count = float(panel.groups.len().max(1) as u64);
    let mut chart = ChartBuilder::on(area)
        .margin_top(top + 6)
        .margin_bottom(40)
        .margin_right(24)
        .y_label_area_size(LEFT)
        .build_cartesian_2d(0.0..count, 0.0..panel.most)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .disable_x_axis()
        .y_labels(6)
        .y_label_formatter(&|value| (panel.scale)(*value))
        .label_style(axis_style(FAINT))
        .axis_style(MESH)
        .bold_line_style(MESH)
        .light_line_style(TRANSPARENT)
        .draw()?;
    let base = area.get_base_pixel();
    let rules = [Some(0.0), panel.one].into_iter().flatten();
    chart.draw_series(rules.map(|value| PathElement::new([(0.0, value), (count, value)], AXIS)))?;
    let slot = f64::from(chart.plotting_area().dim_in_pixel().0) / count;
    for (place, group) in (0..).zip(&panel.groups) {
        let middle = f64::from(place) + 0.5;
        let bars = float(group.bars.len().max(1) as u64);
        let bar = (0.86 / bars).min(WIDEST / slot);
        // Labels of narrow bars must not touch.
        let label = Words::new((bar * slot * 0.38).clamp(7.5, 10.0)).centred();
        for (index, one) in (0..).zip(&group.bars) {
            let left = middle + bar * (f64::from(index) - bars / 2.0);
            let right = left + bar * 0.94;
            let height = one.value.clamp(0.0, panel.most);
            let body = Rectangle::new([(left, 0.0), (right, height)], one.colour.filled());
            chart.draw_series([body])?;
            let mark = one.mark.map(|mark| mark.clamp(0.0, panel.most));
            if let Some(mark) = mark {
                let line = PathElement::new([(left, mark), (right, mark)], RED.stroke_width(2));
                chart.draw_series([line])?;
            }
            let high = mark.map_or(height, |mark| mark.max(height));
            let (x, y) = chart.backend_coord(&(f64::midpoint(left, right), high));
            label.put_over(area, &one.label, (x - base.0, y - base.1 - 1))?;
        }
        let (x, y) = chart.backend_coord(&(middle, 0.0));
        let (x, y) = (x - base.0, y - base.1);
        Words::new(12.0).centred().put(area, &group.name, (x, y + 20))?;
        let note = Words::new(10.0).centred().colour(FAINT);
        note.put(area, &group.note, (x, y + 34))?;
    }
    Ok(())
}
