//! Droplets: which are connected, and since when others are not.

use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use thuban_api::Droplet;

use super::{count, seen};
use crate::conditions::{age, lacking};
use crate::objects::{Seen, Unseen};
use crate::report::{Line, Problem, STATUS};

const PART: &str = "droplets";

pub fn line(droplets: &Seen<Vec<Droplet>>, now: Timestamp) -> Line {
    seen(PART, judge(droplets, now))
}

fn judge(droplets: &Seen<Vec<Droplet>>, now: Timestamp) -> Result<Line, Unseen> {
    let droplets = droplets.as_ref().map_err(Clone::clone)?;
    let problems: Vec<_> = droplets
        .iter()
        .filter_map(|droplet| problem(droplet, now))
        .collect();
    let good = droplets.len() - problems.len();
    Ok(Line::new(
        PART,
        count(good, droplets.len(), "connected"),
        problems,
    ))
}

fn problem(droplet: &Droplet, now: Timestamp) -> Option<Problem> {
    let name = droplet.name_any();
    let conditions = droplet
        .status
        .as_ref()
        .map(|status| status.conditions.as_slice())
        .unwrap_or_default();
    let Some(condition) = lacking(conditions) else {
        return conditions
            .is_empty()
            .then(|| Problem::new(STATUS, name, "NotJudged", ""));
    };
    // The message of a droplet that is away says the same as the table of reasons, and not for how long.
    let is_away = condition.kind == "Ready";
    let since = age(&condition.last_transition_time, now).filter(|_| is_away);
    let message = since.map_or_else(|| condition.message.clone(), |age| format!("for {age}"));
    Some(Problem::new("Droplet", name, &condition.reason, message))
}
