//! An Endpoint that the API server does not let the operator make: by a quota, a webhook or a policy. An event at the object
//! that needs it says who denied it and what to do. Nobody tells the operator when that is mended, so it tries again.

use std::time::Duration;

use k8s_openapi::api::core::v1::Namespace;
use kube::ResourceExt;
use kube::runtime::controller::Action;
use kube::runtime::reflector::ObjectRef;

use crate::controller::context::Context;
use crate::controller::runtime::clocks::Timed;
use crate::controller::runtime::objects::{Object, WriteError};

/// The next try is as far away as the first one is past, within these bounds.
const MIN_RETRY: Duration = Duration::from_secs(5);
const MAX_RETRY: Duration = Duration::from_mins(1);
/// The API server forgets events after an hour.
const TELL_EVERY: Duration = Duration::from_mins(30);

/// Tells of it, and when to try again. Not in a namespace that ends: all that is in it goes.
pub fn tell<K: Object>(object: &K, namespace: &str, error: &WriteError, context: &Context) -> Action {
    if error.is_namespace_ending() || is_ending(namespace, context) {
        return Action::await_change();
    }
    let key = key(object);
    if context.clocks.is_due(Timed::DenialTold, &key, TELL_EVERY) {
        let message = error.message();
        if error.is_invalid() {
            let note = format!("its annotations, or its namespace's, make no Endpoint: {message}");
            context.events.event(object, true, "InvalidAnnotation", &note);
        } else {
            let note = format!(
                "the API server denies it an Endpoint: {message}; raise the quota, or mend the webhook or policy that denies it: \
                 the operator tries again within a minute"
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

/// It was let in, or is gone.
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
