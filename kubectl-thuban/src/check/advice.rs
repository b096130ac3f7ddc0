//! Conditions that say what may go wrong while packets flow: roles that share a droplet, Services that are not shared.

use kube::ResourceExt;
use thuban_api::condition::{ADVICE, find};
use thuban_api::{Condition, ConditionStatus, Network, Vpc};

use super::seen;
use crate::objects::{Seen, Unseen};
use crate::report::{Line, Problem};

const PART: &str = "advice";
/// The condition of VPCs and networks some of whose roles share a droplet, or lack one.
const CROWDED: &str = "Crowded";

pub fn line(vpcs: &Seen<Vec<Vpc>>, networks: &Seen<Vec<Network>>) -> Line {
    seen(PART, judge(vpcs, networks))
}

fn judge(vpcs: &Seen<Vec<Vpc>>, networks: &Seen<Vec<Network>>) -> Result<Line, Unseen> {
    let vpcs = vpcs.as_ref().map_err(Clone::clone)?;
    let networks = networks.as_ref().map_err(Clone::clone)?;
    let mut problems = Vec::new();
    for vpc in vpcs {
        let conditions = vpc.status.as_ref().map(|status| status.conditions.as_slice());
        problems.extend(of("Vpc", &vpc.name_any(), conditions.unwrap_or_default()));
    }
    for network in networks {
        let conditions = network.status.as_ref().map(|status| status.conditions.as_slice());
        problems.extend(of("Network", &network.name_any(), conditions.unwrap_or_default()));
    }
    let summary = if problems.is_empty() { "none" } else { "" };
    Ok(Line::new(PART, summary, problems))
}

fn of(kind: &str, name: &str, conditions: &[Condition]) -> Vec<Problem> {
    let told = [(CROWDED, ConditionStatus::True), (ADVICE, ConditionStatus::False)];
    let told = told.into_iter().filter_map(|(condition, status)| {
        find(conditions, condition).filter(|condition| condition.status == status)
    });
    let problem =
        |told: &Condition| Problem::new(kind, format!("{kind} {name}"), &told.reason, &told.message);
    told.map(problem).collect()
}
