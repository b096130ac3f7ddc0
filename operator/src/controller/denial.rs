//! Handles the denial of an Endpoint: a quota, a webhook or a policy doesn't let the operator make it. An event at the
//! object that needs the Endpoint says who denied it and what to do. Nothing tells the operator when the cause is
//! fixed, so it tries again.

use std::time::Duration;

use k8s_openapi::api::core::v1::Namespace;
use kube::ResourceExt;
use kube::runtime::controller::Action;
use kube::runtime::reflector::ObjectRef;

use crate::controller::context::Context;
use crate::controller::runtime::clocks::Timed;
use crate::controller::runtime::objects::{Object, WriteError};

/// The shortest pause before the next try. The pause is as long as the time since the first try, within these bounds.
const MIN_RETRY: Duration = Duration::from_secs(5);
const MAX_RETRY: Duration = Duration::from_mins(1);
/// The API server forgets events after an hour.
const TELL_EVERY: Duration = Duration::from_mins(30);

/// Reports the denial, and returns when to try again. It reports nothing in a namespace that ends, because everything
/// in it is deleted.
pub fn tell<K: Object>(object: &K, namespace: &str, error: &WriteError, context: &Context) -> Action {
    if error.is_namespace_ending() || is_ending(namespace, context) {
        return Action::await_change();
    }
    let key = key(object);
    if context.clocks.is_due(Timed::DenialTold, &key, TELL_EVERY) {
        let message = error.message();
        if error.is_invalid() {
            let note = format!(
                "no Endpoint can be made by its annotations or its namespace's; correct them: {message}"
            );
            context.events.event(object, true, "InvalidAnnotation", &note);
        } else {
            let note = format!(
                "the API server refuses its Endpoint: {message}; raise the quota, or correct the webhook or policy \
                 that refuses it. The operator tries again within a minute"
            );
            context.events.event(object, true, "EndpointDenied", &note);
        }
    }
    let since = context.clocks.known_for(Timed::EndpointDenied, &key);
    Action::requeue(since.clamp(MIN_RETRY, MAX_RETRY))
}

/// Whether the last try was denied.
pub fn is_told<K: Object>(object: &K, context: &Context) -> bool {
    context.clocks.is_known(Timed::EndpointDenied, &key(object))
}

/// Forgets the denial: the Endpoint was let in, or the object is gone.
pub fn forget<K: Object>(object: &K, context: &Context) {
    let key = key(object);
    for timed in [Timed::EndpointDenied, Timed::DenialTold] {
        context.clocks.forget(timed, &key);
    }
}

fn key<K: Object>(object: &K) -> String {
    object.uid().unwrap_or_default()
}

fn is_ending(namespace: &str, context: &Context) -> bool {
    let space = context
        .stores
        .namespaces
        .get(&ObjectRef::<Namespace>::new(namespace));
    space.is_some_and(|space| space.metadata.deletion_timestamp.is_some())
}
