//! Bars of medians with marks at the worst of a hundred: ADD and DEL, one and many at once. SVG written by hand.

use std::fmt::Write;

use super::{Plan, measure::Times};
use crate::bench::float;

const WHO: [(&str, &str); 5] = [
    ("thuban", "#1f6f8b"),
    ("ptp", "#e09f3e"),
    ("bridge", "#f2cc8f"),
    ("link", "#8d99ae"),
    ("ip-link", "#b8b8b8"),
];
const WIDTH: f64 = 1180.0;
const LEFT: f64 = 150.0;
const LONGEST: f64 = 900.0;
const ROW: f64 = 24.0;

pub fn svg(times: &Times, plan: &Plan) -> String {
    let mut body = String::new();
    let mut top = 60.0;
    for many in [1, plan.at_once] {
        for what in ["add", "del"] {
            top = panel(&mut body, times, what, many, top);
        }
    }
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{top}\" \
         font-family=\"DejaVu Sans, Helvetica, Arial, sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
         <text x=\"50\" y=\"28\" font-size=\"17\" font-weight=\"bold\">CNI ADD and DEL: medians of {} runs, marks: 99 \
         of 100</text>\n{body}</svg>\n",
        plan.runs
    )
}

/// Answers where the next one begins.
fn panel(body: &mut String, times: &Times, what: &str, many: usize, top: f64) -> f64 {
    let title = format!("{}, {many} at once", what.to_uppercase());
    // A String takes everything, here and below.
    let _ = writeln!(
        body,
        "<text x=\"50\" y=\"{top}\" font-size=\"14\" font-weight=\"bold\">{title}</text>"
    );
    let rows: Vec<_> = WHO
        .iter()
        .filter_map(|(who, colour)| {
            let (middle, worst) = (times.p50(who, what, many)?, times.p99(who, what, many)?);
            Some((who, colour, middle, worst))
        })
        .collect();
    let most = rows.iter().map(|row| row.3).fold(1.0, f64::max);
    for (index, (who, colour, middle, worst)) in rows.iter().enumerate() {
        let y = top + 10.0 + ROW * float(index as u64);
        let (length, mark) = (LONGEST * middle / most, LEFT + LONGEST * worst / most);
        let _ = writeln!(
            body,
            "<text x=\"{}\" y=\"{}\" text-anchor=\"end\">{who}</text>\
             <rect x=\"{LEFT}\" y=\"{y}\" width=\"{length:.1}\" height=\"16\" fill=\"{colour}\"/>\
             <line x1=\"{mark:.1}\" y1=\"{y}\" x2=\"{mark:.1}\" y2=\"{}\" stroke=\"#c0392b\" stroke-width=\"2\"/>\
             <text x=\"{}\" y=\"{}\" font-size=\"11\" fill=\"#444\">{middle:.1} / {worst:.1} ms</text>",
            LEFT - 8.0,
            y + 13.0,
            y + 16.0,
            mark + 8.0,
            y + 13.0,
        );
    }
    top + 40.0 + ROW * float(rows.len() as u64)
}
