//! Tables, and short lists.

use std::fmt::Write;

use comfy_table::Table;
use comfy_table::presets::NOTHING;
use thuban_api::EndpointType;

use super::Style;
use crate::arguments::TopBy;
use crate::endpoints::{Listing, Row};
use crate::explain::Explanation;
use crate::observe::Top;
use crate::version::Versions;

const TITLES: [&str; 9] = [
    "NAMESPACE",
    "NAME",
    "POD",
    "VPC",
    "NETWORK",
    "ADDRESSES",
    "NODE",
    "PHASE",
    "WHY NOT",
];
/// What stands in an empty cell.
const NONE: &str = "-";

fn table<R>(titles: &[&str], rows: impl IntoIterator<Item = R>) -> String
where
    R: IntoIterator<Item = String>,
{
    let mut table = Table::new();
    table.load_style(NOTHING);
    table.set_header(titles);
    table.add_rows(rows);
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    format!("{}\n", table.trim_fmt())
}

/// Adds a line for each list that could not be looked at.
fn add_unseen(text: &mut String, unseen: &[String]) {
    for why in unseen {
        let _ = writeln!(text, "---- {why}");
    }
}

/// Returns a table of endpoints.
pub fn endpoints(listing: &Listing, style: Style) -> String {
    let mut text = if listing.endpoints.is_empty() {
        String::new()
    } else {
        let rows = listing.endpoints.iter().map(|row| cells(row, style));
        table(&TITLES, rows)
    };
    if listing.endpoints.is_empty() && listing.unseen.is_empty() {
        text.push_str("no endpoints\n");
    }
    add_unseen(&mut text, &listing.unseen);
    text
}

fn cells(row: &Row, style: Style) -> [String; 9] {
    let or_none = |text: &str| {
        let text = if text.is_empty() { NONE } else { text };
        text.to_owned()
    };
    let why = match (&row.reason, &row.message) {
        (Some(reason), Some(message)) if style.is_wide && !message.is_empty() => {
            format!("{reason}: {message}")
        }
        (Some(reason), _) => reason.clone(),
        (None, _) => String::new(),
    };
    [
        row.namespace.clone(),
        row.name.clone(),
        or_none(&member(row)),
        or_none(&row.vpc),
        row.network.clone(),
        or_none(&row.addresses.join(",")),
        or_none(row.node.as_deref().unwrap_or_default()),
        format!("{:?}", row.phase),
        why,
    ]
}

/// Returns the pod, or what the endpoint has in place of one.
fn member(row: &Row) -> String {
    match row.kind {
        EndpointType::Simple => row.pod.clone().unwrap_or_default(),
        EndpointType::Scaled => format!("service {}", row.service.as_deref().unwrap_or(NONE)),
        EndpointType::Host => "node".to_owned(),
    }
}

/// Returns what thuban-observe has counted.
pub fn top(top: &Top, by: TopBy) -> String {
    let mut text = format!("the last {} s\n", top.window_seconds);
    if top.rows.is_empty() {
        text.push_str("nothing was seen\n");
        return text;
    }
    let name = match by {
        TopBy::Pods => "POD",
        TopBy::Networks => "NETWORK",
        TopBy::Vpcs => "VPC",
        TopBy::Reasons => "REASON",
    };
    let rows = top.rows.iter().map(|row| {
        [
            row.name.clone(),
            row.vpc.clone().unwrap_or_else(|| NONE.to_owned()),
            row.packets.to_string(),
            row.bytes.to_string(),
            row.dropped.to_string(),
        ]
    });
    text.push_str(&table(&[name, "VPC", "PACKETS", "BYTES", "DROPPED"], rows));
    text
}

/// Returns what a name means, one paragraph for each meaning.
pub fn explanations(explanations: &[Explanation]) -> String {
    let mut text = String::new();
    for explanation in explanations {
        let Explanation {
            name,
            of,
            meaning,
            remedy,
        } = explanation;
        let _ = writeln!(text, "{name} ({of})");
        let _ = writeln!(text, "  meaning   {meaning}");
        if !remedy.is_empty() {
            let _ = writeln!(text, "  to do     {remedy}");
        }
    }
    text
}

/// Returns the versions, one in each line.
pub fn versions(versions: &Versions) -> String {
    let mut text = format!("plugin    {}\n", versions.plugin);
    let operator = versions.operator.as_deref().unwrap_or("unknown");
    let _ = writeln!(text, "operator  {operator}");
    for (version, number) in &versions.droplets {
        let version = if version.is_empty() { "unknown" } else { version };
        let _ = writeln!(text, "transitd  {version} on {number} droplets");
    }
    add_unseen(&mut text, &versions.unseen);
    text
}
