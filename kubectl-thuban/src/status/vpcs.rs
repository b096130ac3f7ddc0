//! VPCs: which are Ready, and whether all of their dividers work.

use kube::ResourceExt;
use thuban_api::Vpc;

use super::{count, seen};
use crate::conditions::problem;
use crate::objects::{Tenancy, Unseen};
use crate::report::{Line, Problem, STATUS};
use crate::roles::messages;

const PART: &str = "VPCs";

pub fn line(tenancy: &Tenancy) -> Line {
    seen(PART, judge(tenancy))
}

fn judge(tenancy: &Tenancy) -> Result<Line, Unseen> {
    let vpcs = tenancy.vpcs.as_ref().map_err(Clone::clone)?;
    let problems: Vec<_> = vpcs.iter().filter_map(|vpc| lacks(vpc, tenancy)).collect();
    let good = vpcs.len() - problems.len();
    Ok(Line::new(PART, count(good, vpcs.len(), "Ready"), problems))
}

fn lacks(vpc: &Vpc, tenancy: &Tenancy) -> Option<Problem> {
    let (name, status) = (vpc.name_any(), vpc.status.clone().unwrap_or_default());
    let of_roles = || {
        let dividers = tenancy.dividers.iter().flatten();
        messages(dividers.filter(|divider| divider.spec.vpc == name))
    };
    if let Some(mut problem) = problem("Vpc", &name, status.phase, &status.conditions) {
        if let Some(messages) = of_roles().filter(|_| problem.reason == "DividersNotProvisioned") {
            problem.message = messages;
        }
        return Some(problem);
    }
    let (wanted, working) = (status.dividers?, status.working_dividers?);
    (working < wanted).then(|| {
        let message = format!("{working} of {wanted} dividers");
        let message = of_roles().map_or_else(|| message.clone(), |told| format!("{message}: {told}"));
        Problem::new(STATUS, name.as_str(), "RolesNotWorking", message)
    })
}
