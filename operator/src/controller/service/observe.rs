//! Handles a change of a Service or of one of its slices: wakes other objects. The workflow of the scaled Endpoint
//! makes the rows, once for all changes in between.

use kube::ResourceExt;

use crate::controller::annotations;
use crate::controller::context::Context;
use crate::controller::denial;
use crate::controller::runtime::clocks::Timed;
use crate::controller::runtime::watch::Change;
use crate::controller::wake::wake_service;
use crate::model::annotations::Holder;
use crate::model::service::{EndpointSlice, Service};

pub fn on_service(context: &Context, change: &Change<Service>) {
    let (service, is_there) = match change {
        Change::Applied(service) => (service, true),
        Change::Gone(service) => (&**service, false),
    };
    let (namespace, name) = (service.namespace().unwrap_or_default(), service.name_any());
    context.slices.service(&namespace, &name, is_there);
    let triggers = &context.hub.triggers;
    triggers.endpoint(&(namespace.clone(), service.endpoint_name()));
    if is_there {
        triggers.service(&namespace, &name);
        annotations::tell(service, Holder::Service, context);
    } else {
        denial::forget(service, context);
        annotations::forget(service, context);
        let uid = service.uid().unwrap_or_default();
        for told in [Timed::ServiceNameTaken, Timed::ServiceInvalid] {
            context.clocks.forget(told, &uid);
        }
    }
}

pub fn on_slice(context: &Context, change: &Change<EndpointSlice>) {
    let (slice, is_there) = match change {
        Change::Applied(slice) => (slice, true),
        Change::Gone(slice) => (&**slice, false),
    };
    let namespace = slice.namespace().unwrap_or_default();
    let service = slice.service().filter(|_| is_there);
    let said = service.map(|service| (service.to_owned(), slice.addresses().collect()));
    for service in context.slices.set(&namespace, &slice.name_any(), said) {
        wake_service(&namespace, &service, context);
    }
}
