//! Numbers as text.

use std::fmt::Write;

use super::results::Results;
use crate::bench::Sample;

/// Samples of one case and run.
pub fn line(samples: &[Sample]) -> String {
    let parts = samples
        .iter()
        .map(|sample| format!("{} {}", sample.metric, number(sample.value)));
    parts.collect::<Vec<_>>().join("  ")
}

/// Every series: least, median, most.
pub fn text(results: &Results) -> String {
    let mut text = format!(
        "{:<26}{:<16}{:>12}{:>12}{:>12}  unit\n",
        "case", "metric", "least", "median", "most"
    );
    let mut last = "";
    for series in &results.series {
        let case = if series.case == last { "" } else { &series.case };
        last = &series.case;
        // A String takes everything.
        let _ = writeln!(
            text,
            "{case:<26}{:<16}{:>12}{:>12}{:>12}  {}",
            series.metric,
            number(series.least()),
            number(series.median()),
            number(series.most()),
            series.unit
        );
    }
    text
}

/// Four digits that count, or all of a large number.
pub fn number(value: f64) -> String {
    let digits = match value.abs() {
        size if size >= 1000.0 => 0,
        size if size >= 100.0 => 1,
        size if size >= 10.0 => 2,
        _ => 3,
    };
    format!("{value:.digits$}")
}
