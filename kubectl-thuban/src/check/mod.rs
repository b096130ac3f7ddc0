//! `check`: what may go wrong, though it works now.

mod advice;
mod nodes;
mod plugins;
mod ranges;
mod versions;

use k8s_openapi::jiff::Timestamp;

use crate::objects::CheckObjects;
use crate::report::{Line, Report};
use crate::status::droplets_line;

/// Makes the report. `system_namespace`: where Thuban is installed.
pub fn report(objects: &CheckObjects, system_namespace: &str, now: Timestamp) -> Report {
    let mut lines = vec![
        versions::line(&objects.control_plane, &objects.droplets),
        nodes::line(&objects.surroundings.nodes, &objects.droplets),
        droplets_line(&objects.droplets, now),
    ];
    lines.extend(ranges::lines(objects));
    lines.push(plugins::line(&objects.surroundings.daemon_sets, system_namespace));
    lines.push(advice::line(&objects.vpcs, &objects.networks));
    Report::new(objects.control_plane.version(), lines)
}

/// Makes a line of a part from lists that had to be seen.
fn seen(part: &'static str, line: Result<Line, crate::objects::Unseen>) -> Line {
    line.unwrap_or_else(|unseen| Line::unseen(part, &unseen))
}

#[cfg(test)]
mod tests;
