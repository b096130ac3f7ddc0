//! The Services of the VPC `default` that a VPC shares: which are meant, and which of these are not there.

use std::collections::BTreeSet;

use kube::ResourceExt;
use kube::runtime::reflector::ObjectRef;
use thuban_api::condition::{ADVICE, set};
use thuban_api::{Condition, DEFAULT_NAME, Vpc};

use crate::controller::context::Context;
use crate::controller::runtime::objects::condition;
use crate::model::admission::network_of;
use crate::model::service::Service;

pub const REASON: &str = "ServiceNotShared";

fn pair(name: &str) -> Option<(String, String)> {
    let (namespace, name) = name.split_once('/')?;
    Some((namespace.to_owned(), name.to_owned()))
}

/// Returns the Services of other VPCs that a VPC's pods may reach, by namespace and name: those by default, and what
/// the VPC's list adds and takes away. An empty list shares none.
pub fn shared_services(by_default: &[(String, String)], listed: Option<&[String]>) -> Vec<(String, String)> {
    let listed = match listed {
        None => &[],
        Some([]) => return Vec::new(),
        Some(listed) => listed,
    };
    let taken = listed.iter().filter_map(|name| pair(name.strip_prefix('-')?));
    let taken: BTreeSet<_> = taken.collect();
    let added = listed
        .iter()
        .filter(|name| !name.starts_with('-'))
        .filter_map(|name| pair(name));
    let shared: BTreeSet<_> = by_default.iter().cloned().chain(added).collect();
    shared.difference(&taken).cloned().collect()
}

/// Has the condition say whether all Services that the VPC names can be shared. Returns the message if one can't, and
/// that is news.
pub fn judge(vpc: &Vpc, conditions: &mut Vec<Condition>, context: &Context) -> Option<String> {
    let listed = vpc.spec.shared_services.iter().flatten();
    let added: Vec<&str> = listed
        .map(String::as_str)
        .filter(|name| !name.starts_with('-'))
        .collect();
    if added.is_empty() {
        conditions.retain(|condition| condition.kind != ADVICE);
        return None;
    }
    let unfit: Vec<String> = added.iter().filter_map(|name| unfit(name, context)).collect();
    let generation = vpc.metadata.generation;
    if unfit.is_empty() {
        let message = "all Services of spec.sharedServices can be shared";
        set(conditions, condition(ADVICE, true, "Shared", message, generation));
        return None;
    }
    let message = format!(
        "spec.sharedServices: {}. Correct the entry, or create the Service in the VPC {DEFAULT_NAME}",
        unfit.join("; ")
    );
    set(conditions, condition(ADVICE, false, REASON, &message, generation)).then_some(message)
}

/// Returns why a Service can't be shared.
fn unfit(name: &str, context: &Context) -> Option<String> {
    let (space, service) = pair(name)?;
    let reference = ObjectRef::<Service>::new(&service).within(&space);
    let Some(service) = context.stores.services.get(&reference) else {
        return Some(format!("Service {name} does not exist"));
    };
    let space = context.stores.namespaces.get(&ObjectRef::new(&space));
    let of_space = space.map(|space| space.annotations().clone()).unwrap_or_default();
    let network = network_of(service.annotations(), &of_space);
    let vpc = context.network(&network).map(|network| network.spec.vpc.clone());
    if vpc.as_deref() != Some(DEFAULT_NAME) {
        return Some(format!("Service {name} is in another VPC than {DEFAULT_NAME}"));
    }
    let is_headless = service.cluster_ips().is_empty();
    is_headless.then(|| format!("Service {name} has no ClusterIP"))
}

#[cfg(test)]
mod tests {
    use super::shared_services;

    #[test]
    fn a_list_of_shared_services_adds_to_the_default() {
        let by_default = [("default", "kubernetes"), ("kube-system", "kube-dns")]
            .map(|(namespace, name)| (namespace.to_owned(), name.to_owned()));
        let shared = |listed: Option<&[&str]>| {
            let listed = listed.map(|names| names.iter().map(ToString::to_string).collect::<Vec<_>>());
            let shared = shared_services(&by_default, listed.as_deref());
            let names = shared
                .iter()
                .map(|(namespace, name)| format!("{namespace}/{name}"));
            names.collect::<Vec<_>>()
        };
        let [kubernetes, dns, metrics] = [
            "default/kubernetes",
            "kube-system/kube-dns",
            "kube-system/metrics",
        ];
        assert_eq!(shared(None), [kubernetes, dns]);
        assert_eq!(shared(Some(&[])), [""; 0]);
        assert_eq!(shared(Some(&[metrics, dns])), [kubernetes, dns, metrics]);
        assert_eq!(
            shared(Some(&["-kube-system/kube-dns", metrics])),
            [kubernetes, metrics]
        );
        assert_eq!(
            shared(Some(&["-default/kubernetes", "-kube-system/kube-dns"])),
            [""; 0]
        );
        assert_eq!(
            shared(Some(&["-default/kubernetes", "default/kubernetes"])),
            [dns]
        );
    }
}
