//! A report as lines of text.

use std::fmt::Write;

use super::Style;
use crate::report::{Line, Problem, Report};

/// The columns of the title before the plugin's version.
const TITLE_WIDTH: usize = 48;
/// The columns of a part's name.
const PART_WIDTH: usize = 14;
/// Where texts begin: behind the word of the level and the part.
const TEXT_COLUMN: usize = 6 + PART_WIDTH + 1;
/// A remedy of at most so many columns is always printed.
const SHORT_REMEDY: usize = 100;

/// Returns the text of a report: a line for each part, and below it what to do.
pub fn report(report: &Report, style: Style) -> String {
    let version = report.thuban.as_deref().unwrap_or("of unknown version");
    let title = format!("Thuban {version}");
    let mut text = format!("{title:<TITLE_WIDTH$}plugin {}\n", report.plugin);
    for line in &report.lines {
        add(&mut text, line, style);
    }
    text
}

fn add(text: &mut String, line: &Line, style: Style) {
    let word = style.word(line.level);
    let number = line.problems.len();
    // Where each problem has a line of its own, the first line has the numbers alone.
    let first = match (style.is_wide && number > 1, line.summary.as_str()) {
        (false, _) => line.text.clone(),
        (true, "") => format!("{number} problems"),
        (true, summary) => summary.to_owned(),
    };
    let _ = writeln!(text, "{word}  {:<PART_WIDTH$} {first}", line.part);
    let mut below = |what: &str| {
        let _ = writeln!(text, "{:TEXT_COLUMN$}{what}", "");
    };
    if !style.is_wide {
        let remedy = line.problems.first().and_then(Problem::further_remedy);
        let is_short = |remedy: &&str| remedy.len() <= SHORT_REMEDY;
        if let Some(remedy) = remedy.filter(is_short) {
            below(remedy);
        }
        return;
    }
    for (index, problem) in line.problems.iter().enumerate() {
        if number > 1 {
            below(&problem.text());
        }
        let remedy = problem.further_remedy();
        // What several problems in a row need is said once, below the last of them.
        let next = line.problems.get(index + 1).and_then(Problem::further_remedy);
        if let Some(remedy) = remedy.filter(|remedy| next != Some(*remedy)) {
            below(&format!("-> {remedy}"));
        }
    }
}
