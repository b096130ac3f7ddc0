//! VPCs: which are Ready, and whether all of their dividers work.

use kube::ResourceExt;
use thuban_api::Vpc;

use super::{count, seen};
use crate::conditions::problem;
use crate::objects::{Tenancy, Unseen};
use crate::report::{Line, Problem};
use crate::roles::{lacks_roles, messages};

pub const PART: &str = "VPCs";

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
    let dividers = tenancy.dividers.iter().flatten();
    let told = || messages(dividers.filter(|divider| divider.spec.vpc == name));
    let numbers = status.dividers.zip(status.working_dividers);
    let own = problem("Vpc", &name, status.phase, &status.conditions);
    lacks_roles(&name, own, ("dividers", "DividersNotProvisioned"), numbers, told)
}
