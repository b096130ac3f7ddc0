//! What `connectivity test` says: a line for each check as it ends, and a summary.

use std::fmt::Write;

use super::Style;
use super::why::coloured;
use crate::connectivity::{Finding, Report, State};
use crate::report::Verdict;

/// Where texts below the summary begin.
const TEXT_COLUMN: usize = 9;

/// Returns the line of a check.
pub fn finding(finding: &Finding, style: Style) -> String {
    let (word, colour) = match finding.state {
        State::Ok => ("ok  ", "32"),
        State::Fail => ("FAIL", "31"),
        State::Skipped => ("----", "2"),
    };
    let word = coloured(word, colour, style);
    format!(
        " {word}  {:<9}  {}: {}\n",
        finding.group, finding.check, finding.message
    )
}

/// Returns the summary, which follows the lines of the checks.
pub fn connectivity(report: &Report, style: Style) -> String {
    let (word, colour) = match report.verdict {
        Verdict::Good => ("OK     ", "32"),
        Verdict::Found => ("NO     ", "31"),
        Verdict::Unseen => ("UNKNOWN", "33"),
    };
    let [passed, failed, skipped] = [State::Ok, State::Fail, State::Skipped].map(|state| report.count(state));
    let mut text = coloured(word, colour, style);
    let _ = writeln!(
        text,
        "  {passed} checks passed, {failed} failed, {skipped} skipped"
    );
    let mut below = |what: &str| {
        let _ = writeln!(text, "{:TEXT_COLUMN$}{what}", "");
    };
    if let Some(error) = &report.error {
        below(error);
    }
    for left in &report.left {
        below(&format!("not deleted: {left}"));
    }
    if !report.remedy.is_empty() {
        below(&format!("-> {}", report.remedy));
    }
    text
}
