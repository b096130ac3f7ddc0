//! The operator: its replicas, who leads, and which epoch it is.

use std::fmt::Write as _;

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;

use super::seen;
use crate::objects::{ControlPlane, Seen, Unseen};
use crate::report::{Line, Problem, STATUS};

const PART: &str = "operator";
/// A Lease that is renewed every two seconds is old after this time. The clocks of two machines are compared.
const OLD_SECONDS: i64 = 60;

pub fn line(control_plane: &ControlPlane, now: Timestamp) -> Line {
    seen(PART, judge(control_plane, now))
}

fn judge(control_plane: &ControlPlane, now: Timestamp) -> Result<Line, Unseen> {
    let Some(deployment) = control_plane.deployment.as_ref().map_err(Clone::clone)? else {
        let problem = Problem::new(STATUS, PART, "NoOperator", "");
        return Ok(Line::new(PART, "", vec![problem]));
    };
    let wanted = deployment.spec.replicas.unwrap_or(1);
    let status = deployment.status.as_ref();
    let ready = status.and_then(|status| status.ready_replicas).unwrap_or(0);
    let mut problems = Vec::new();
    if ready < wanted {
        let message = format!("{ready} of {wanted} replicas");
        problems.push(Problem::new(STATUS, PART, "OperatorNotReady", message));
    }
    let mut summary = format!("{ready}/{wanted}");
    let lease = control_plane.lease.as_ref().map_err(Clone::clone)?;
    match lease
        .as_ref()
        .and_then(|lease| leader(lease, &control_plane.pods))
    {
        Some((leader, epoch)) => {
            let _ = write!(summary, ", leader {leader}, epoch {epoch}");
        }
        None => problems.push(Problem::new(STATUS, PART, "NoLeader", "")),
    }
    if let Some(seconds) = lease.as_ref().and_then(|lease| silence(lease, now))
        && seconds > OLD_SECONDS
    {
        let message = format!("not renewed for {seconds} s");
        problems.push(Problem::new(STATUS, PART, "LeaseOld", message));
    }
    Ok(Line::new(PART, summary, problems))
}

/// Returns where the leader is, and its epoch; none if nobody leads.
fn leader(lease: &Lease, pods: &Seen<Vec<Pod>>) -> Option<(String, i32)> {
    let spec = lease.spec.as_ref()?;
    let holder = spec
        .holder_identity
        .as_deref()
        .filter(|holder| !holder.is_empty())?;
    // The identity is the pod's name and when the process began.
    let pod = holder.rsplit_once('_').map_or(holder, |(pod, _)| pod);
    let mut pods = pods.iter().flatten();
    let node = pods
        .find(|known| known.name_any() == pod)
        .and_then(|pod| pod.spec.as_ref()?.node_name.clone());
    let place = node.map_or_else(|| pod.to_owned(), |node| format!("on {node}"));
    Some((place, spec.lease_transitions.unwrap_or_default()))
}

/// Returns the seconds since the Lease was renewed.
fn silence(lease: &Lease, now: Timestamp) -> Option<i64> {
    let spec = lease.spec.as_ref()?;
    spec.holder_identity
        .as_deref()
        .filter(|holder| !holder.is_empty())?;
    Some(now.duration_since(spec.renew_time.as_ref()?.0).as_secs())
}
