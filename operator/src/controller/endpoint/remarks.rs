//! Tells people what of a pod's annotations for bandwidth has no effect.

use kube::ResourceExt;
use thuban_api::Endpoint;

use super::sync::holder;
use crate::controller::context::Context;
use crate::model::bandwidth::{self, Limits};

/// Writes an event at the pod for each remark about its annotations, once while the remark is true.
pub fn tell(endpoint: &Endpoint, context: &Context) {
    let (name, pod) = (&endpoint.spec.network, holder(endpoint, context));
    let (Some(network), Some(pod)) = (context.network(name), pod) else {
        return;
    };
    let remarks = bandwidth::remarks(pod.annotations(), &Limits::of(&network.spec), name);
    let uid = pod.uid().unwrap_or_default();
    let told = &context.last_seen.remarks;
    if remarks.is_empty() {
        told.forget(&uid);
        return;
    }
    let before = told.replace(&uid, remarks.clone()).unwrap_or_default();
    for remark in remarks.iter().filter(|remark| !before.contains(remark)) {
        context.events.event(&*pod, true, remark.reason, &remark.note);
    }
}
