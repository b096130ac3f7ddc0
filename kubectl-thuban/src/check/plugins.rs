//! Other network plugins, and kube-proxy: DaemonSets that do what Thuban does.

use k8s_openapi::api::apps::v1::DaemonSet;
use kube::ResourceExt;

use super::seen;
use crate::objects::{Seen, Unseen};
use crate::report::{CHECK, Line, Problem};

const PART: &str = "other plugins";
const OWN: &str = "transitd";
/// The end of the path of the folder that runtimes read network plugins' configuration from.
const FOLDER: &str = "cni/net.d";
const KUBE_PROXY: &str = "kube-proxy";

pub fn line(daemon_sets: &Seen<Vec<DaemonSet>>, system_namespace: &str) -> Line {
    seen(PART, judge(daemon_sets, system_namespace))
}

fn judge(daemon_sets: &Seen<Vec<DaemonSet>>, system_namespace: &str) -> Result<Line, Unseen> {
    let daemon_sets = daemon_sets.as_ref().map_err(Clone::clone)?;
    let is_own =
        |set: &DaemonSet| set.name_any() == OWN && set.namespace().as_deref() == Some(system_namespace);
    let others = daemon_sets.iter().filter(|set| !is_own(set) && runs(set));
    let problems: Vec<Problem> = others.filter_map(problem).collect();
    let summary = if problems.is_empty() { "none" } else { "" };
    Ok(Line::new(PART, summary, problems))
}

fn runs(set: &DaemonSet) -> bool {
    let status = set.status.as_ref();
    status.is_none_or(|status| status.desired_number_scheduled > 0)
}

fn problem(set: &DaemonSet) -> Option<Problem> {
    let name = format!("{}/{}", set.namespace().unwrap_or_default(), set.name_any());
    if set.name_any().contains(KUBE_PROXY) {
        return Some(Problem::new(CHECK, name, "KubeProxy", ""));
    }
    let volumes = set.spec.template.spec.as_ref()?.volumes.iter().flatten();
    let mut paths = volumes.filter_map(|volume| Some(volume.host_path.as_ref()?.path.as_str()));
    let path = paths.find(|path| path.trim_end_matches('/').ends_with(FOLDER))?;
    let message = format!("mounts {path}");
    Some(Problem::new(CHECK, name, "OtherNetworkPlugin", message))
}
