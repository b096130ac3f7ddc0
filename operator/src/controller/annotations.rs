//! Tells people which of an object's annotations `thuban.dev/...` have no effect.

use std::collections::BTreeSet;

use kube::{Resource, ResourceExt};

use crate::controller::context::Context;
use crate::model::annotations::{Holder, unknown};

/// Writes an event at the object for each annotation without effect, once while the object has it.
pub fn tell<K: Resource<DynamicType = ()>>(object: &K, holder: Holder, context: &Context) {
    let uid = object.uid().unwrap_or_default();
    let unknown = unknown(holder, object.annotations());
    let told = &context.last_seen.unknown_annotations;
    if unknown.is_empty() {
        told.forget(&uid);
        return;
    }
    let names: BTreeSet<String> = unknown.iter().map(|unknown| unknown.annotation.clone()).collect();
    let before = told.replace(&uid, names).unwrap_or_default();
    let mut about = object.object_ref(&());
    if holder == Holder::Namespace {
        // Who uses the namespace reads its events.
        about.namespace.clone_from(&about.name);
    }
    for unknown in unknown
        .iter()
        .filter(|unknown| !before.contains(&unknown.annotation))
    {
        // Events that differ in nothing else would be counted as one.
        let (action, note) = (&unknown.annotation, &unknown.note);
        context
            .events
            .warn_about(about.clone(), action, "UnknownAnnotation", note);
    }
}

/// Forgets an object that is gone.
pub fn forget<K: Resource<DynamicType = ()>>(object: &K, context: &Context) {
    let uid = object.uid().unwrap_or_default();
    context.last_seen.unknown_annotations.forget(&uid);
}
