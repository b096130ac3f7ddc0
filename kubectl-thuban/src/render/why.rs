//! The answer of `why`: the verdict, and a line for each step. With a probe also a line for each hop, and the answer.

use std::fmt::Write;

use thuban_api::{PathHop, PathStep, PathStepState, PathVerdict};

use super::Style;
use crate::why::Answer;

/// Where remedies begin: behind the word of the state and the step.
const TEXT_COLUMN: usize = 17;
/// The verdicts on a packet that its pod got begin with this.
const DELIVERED: &str = "delivered";

/// Returns the text of an answer.
pub fn answer(answer: &Answer, style: Style) -> String {
    let colour = match answer.verdict {
        PathVerdict::Ok => "32",
        PathVerdict::No => "31",
        PathVerdict::Unknown => "33",
    };
    let mut text = coloured(answer.verdict.word(), colour, style);
    let _ = writeln!(text, "  {}", answer.path);
    for step in &answer.steps {
        add(&mut text, step, style);
    }
    let width = answer.hops.iter().map(|hop| hop.node.len()).max().unwrap_or(0);
    for hop in &answer.hops {
        let _ = writeln!(text, " {}", line(hop, width));
    }
    if let Some(step) = &answer.answer {
        add(&mut text, step, style);
    }
    text
}

/// Returns a hop as a line. The time is that since its node first saw the packet.
fn line(hop: &PathHop, width: usize) -> String {
    let (millis, micros) = (hop.microseconds / 1000, hop.microseconds % 1000);
    let next = match &hop.next {
        // It goes to a pod.
        Some(next) if hop.verdict.starts_with(DELIVERED) => format!(" to {next}"),
        Some(next) => format!(", {next}"),
        None => String::new(),
    };
    let (node, program, verdict) = (&hop.node, &hop.program, &hop.verdict);
    format!("+{millis}.{micros:03} ms  {node:<width$}  {program:<8}  {verdict}{next}")
}

fn add(text: &mut String, step: &PathStep, style: Style) {
    let (word, colour) = match step.state {
        PathStepState::Ok => ("ok  ", "32"),
        PathStepState::Fail => ("FAIL", "31"),
        PathStepState::Unknown => ("----", "33"),
    };
    let word = coloured(word, colour, style);
    let reason = step.reason.as_ref().map(|reason| format!("{reason}: "));
    let reason = reason.unwrap_or_default();
    let _ = writeln!(text, " {word}  {:<8}  {reason}{}", step.name, step.message);
    if !step.remedy.is_empty() {
        let _ = writeln!(text, "{:TEXT_COLUMN$}-> {}", "", step.remedy);
    }
}

pub(super) fn coloured(word: &str, colour: &str, style: Style) -> String {
    if style.has_colour {
        format!("\x1b[{colour}m{word}\x1b[0m")
    } else {
        word.to_owned()
    }
}
