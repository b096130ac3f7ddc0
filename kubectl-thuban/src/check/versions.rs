//! The versions of operator, droplets and this plugin.

use std::collections::BTreeMap;

use kube::ResourceExt;
use thuban_api::Droplet;

use super::seen;
use crate::objects::{ControlPlane, Seen, Unseen};
use crate::report::{CHECK, Line, PLUGIN, Problem};

const PART: &str = "versions";
/// How many droplets of a version are named.
const NAMED: usize = 3;

pub fn line(control_plane: &ControlPlane, droplets: &Seen<Vec<Droplet>>) -> Line {
    seen(PART, judge(control_plane, droplets))
}

fn judge(control_plane: &ControlPlane, droplets: &Seen<Vec<Droplet>>) -> Result<Line, Unseen> {
    control_plane.lease.as_ref().map_err(Clone::clone)?;
    let droplets = droplets.as_ref().map_err(Clone::clone)?;
    let Some(operator) = control_plane.version() else {
        let problem = Problem::new(CHECK, "operator", "VersionUnknown", "");
        return Ok(Line::new(PART, "", vec![problem]));
    };
    let mut problems = Vec::new();
    let mut others: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for droplet in droplets {
        let version = droplet.spec.program_version.as_str();
        if version != operator {
            others.entry(version).or_default().push(droplet.name_any());
        }
    }
    for (version, names) in others {
        let first: Vec<&str> = names.iter().take(NAMED).map(String::as_str).collect();
        let number = names.len();
        let message = format!("transitd {version} on {number} of {} droplets", droplets.len());
        problems.push(Problem::new(CHECK, first.join(","), "VersionsDiffer", message));
    }
    if operator != PLUGIN {
        let message = format!("{PLUGIN}, the operator is {operator}");
        problems.push(Problem::new(CHECK, "plugin", "PluginDiffers", message));
    }
    Ok(Line::new(PART, format!("operator {operator}"), problems))
}
