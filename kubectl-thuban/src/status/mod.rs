//! `status`: one line for each part of Thuban.

mod droplets;
mod endpoints;
mod networks;
mod operator;
mod vpcs;

pub use droplets::line as droplets_line;

use k8s_openapi::jiff::Timestamp;
use thuban_api::DEFAULT_NAME;

use crate::objects::StatusObjects;
use crate::report::{Line, Report};

/// Makes the report.
pub fn report(objects: &StatusObjects, now: Timestamp) -> Report {
    let tenancy = &objects.tenancy;
    let lines = vec![
        operator::line(&objects.control_plane, now),
        droplets::line(&objects.droplets, now),
        vpcs::line(tenancy),
        networks::line(tenancy),
        networks::addresses(&tenancy.networks),
        endpoints::line(&tenancy.endpoints),
    ];
    Report::new(objects.control_plane.version(), lines)
}

/// Whether what comes with Thuban is well: the operator, the droplets, the VPC and network `default`. All else is
/// tenants'.
pub fn is_installed(report: &Report) -> bool {
    report.lines.iter().all(|line| match line.part {
        endpoints::PART | networks::ADDRESSES => true,
        vpcs::PART | networks::PART => line.problems.iter().all(|problem| problem.object != DEFAULT_NAME),
        _ => line.problems.is_empty(),
    })
}

/// Returns how many of all are well: one number if all are.
fn count(good: usize, all: usize, word: &str) -> String {
    match (good == all, all) {
        (_, 0) => "none".to_owned(),
        (true, _) => format!("{all} {word}"),
        (false, _) => format!("{good}/{all} {word}"),
    }
}

/// Makes a line of a part from lists that had to be seen.
fn seen(part: &'static str, line: Result<Line, crate::objects::Unseen>) -> Line {
    line.unwrap_or_else(|unseen| Line::unseen(part, &unseen))
}

#[cfg(test)]
mod tests;
