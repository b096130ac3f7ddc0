//! Prometheus' text format, from OpenMetrics.
//!
//! OpenMetrics names a family of counters without `_total`, and an info without `_info`; the text format names what its
//! samples are called. It has neither units nor an end.

use std::collections::HashMap;
use std::fmt::Write;

/// Returns the page in the text format.
pub fn text_format(openmetrics: &str) -> String {
    let types = openmetrics
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE "));
    let types: HashMap<&str, &str> = types.filter_map(|rest| rest.split_once(' ')).collect();
    let mut text = String::with_capacity(openmetrics.len());
    for line in openmetrics.lines() {
        let Some(comment) = line.strip_prefix("# ") else {
            let _ = writeln!(text, "{line}");
            continue;
        };
        let mut words = comment.splitn(3, ' ');
        let (Some(what @ ("HELP" | "TYPE")), Some(family)) = (words.next(), words.next()) else {
            continue;
        };
        let rest = words.next().unwrap_or_default();
        let (suffix, kind) = match types.get(family) {
            Some(&"counter") => ("_total", "counter"),
            Some(&"info") => ("_info", "gauge"),
            _ => ("", rest),
        };
        let rest = if what == "TYPE" { kind } else { rest };
        let _ = writeln!(text, "# {what} {family}{suffix} {rest}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::text_format;

    #[test]
    fn families_have_the_names_of_their_samples() {
        let openmetrics = "# HELP a Some help.\n# TYPE a counter\na_total{b=\"c\"} 1\n# HELP d More.\n# TYPE d gauge\n\
                           # UNIT d seconds\nd 2\n# HELP e Info.\n# TYPE e info\ne_info{f=\"g\"} 1\n# EOF\n";
        assert_eq!(
            text_format(openmetrics),
            "# HELP a_total Some help.\n# TYPE a_total counter\na_total{b=\"c\"} 1\n# HELP d More.\n# TYPE d gauge\n\
             d 2\n# HELP e_info Info.\n# TYPE e_info gauge\ne_info{f=\"g\"} 1\n"
        );
    }
}
