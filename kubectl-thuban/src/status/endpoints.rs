//! Endpoints: how many are Provisioned, and how many wait.

use std::fmt::Write as _;

use super::seen;
use crate::endpoints::{Row, State};
use crate::objects::{Endpoints, Unseen};
use crate::report::{Line, Problem};

pub const PART: &str = "endpoints";

pub fn line(endpoints: &Endpoints) -> Line {
    seen(PART, judge(endpoints))
}

fn judge(endpoints: &Endpoints) -> Result<Line, Unseen> {
    let list = endpoints.list.as_ref().map_err(Clone::clone)?;
    let rows: Vec<Row> = list.iter().map(Row::of).collect();
    let number = |state: State| rows.iter().filter(|row| row.state == state).count();
    let problems: Vec<Problem> = rows.iter().filter_map(Row::problem).collect();
    let mut summary = format!(
        "{} Provisioned, {} wait",
        number(State::Provisioned),
        problems.len()
    );
    if number(State::Unattached) > 0 {
        let _ = write!(summary, ", {} without a pod", number(State::Unattached));
    }
    if let Some(namespace) = &endpoints.namespace {
        let _ = write!(summary, " in namespace {namespace}");
    }
    Ok(Line::new(PART, summary, problems))
}
