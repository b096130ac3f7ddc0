//! Which annotations `thuban.dev/...` there are, and what to say of others. A misspelt one would silently put a pod
//! into another network.

use std::collections::BTreeMap;

use strsim::osa_distance;
use thuban_api::{
    DNS_NAME_ANNOTATION, DRAIN_SECONDS_ANNOTATION, ENDPOINT_ANNOTATION, HEALTH_CHECK_ANNOTATION,
    IP_ANNOTATION, IP_POOL_ANNOTATION, LOAD_BALANCER_IPS_ANNOTATION, LOAD_BALANCER_MODE_ANNOTATION,
    MAC_ANNOTATION, NETWORK_ANNOTATION, REPORT_DENIED_ANNOTATION, SERVICE_IP_ANNOTATION,
};

use Holder::{Namespace, Pod, Policy, Service};

/// How all annotations of Thuban begin.
const PREFIX: &str = "thuban.dev/";
/// The most unknown annotations of one object that are told.
const MAX_TOLD: usize = 8;

/// Objects that may have annotations of Thuban.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holder {
    Pod,
    Namespace,
    Service,
    Policy,
}

impl Holder {
    fn name(self) -> &'static str {
        match self {
            Pod => "pod",
            Namespace => "namespace",
            Service => "Service",
            Policy => "network policy",
        }
    }
}

/// The annotations that users may set, and the objects at which they have an effect.
static KNOWN: [(&str, &[Holder]); 12] = [
    (NETWORK_ANNOTATION, &[Pod, Namespace, Service]),
    (IP_ANNOTATION, &[Pod]),
    (MAC_ANNOTATION, &[Pod]),
    (ENDPOINT_ANNOTATION, &[Pod]),
    (SERVICE_IP_ANNOTATION, &[Service]),
    (IP_POOL_ANNOTATION, &[Service]),
    (LOAD_BALANCER_IPS_ANNOTATION, &[Service]),
    (LOAD_BALANCER_MODE_ANNOTATION, &[Service]),
    (DNS_NAME_ANNOTATION, &[Service]),
    (DRAIN_SECONDS_ANNOTATION, &[Service]),
    (HEALTH_CHECK_ANNOTATION, &[Service]),
    (REPORT_DENIED_ANNOTATION, &[Policy]),
];

/// An annotation that looks like Thuban's and has no effect where it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unknown {
    pub annotation: String,
    /// Names the annotation and the remedy.
    pub note: String,
}

/// Returns the first annotations of an object that look like Thuban's and have no effect there.
pub fn unknown(holder: Holder, annotations: &BTreeMap<String, String>) -> Vec<Unknown> {
    let own = annotations.keys().filter(|name| name.starts_with(PREFIX));
    let unknown = own.filter(|name| !known(holder).any(|known| known == name.as_str()));
    let told = unknown.take(MAX_TOLD).map(|name| Unknown {
        annotation: name.clone(),
        note: note(name, holder),
    });
    told.collect()
}

fn known(holder: Holder) -> impl Iterator<Item = &'static str> {
    let known = KNOWN.iter().filter(move |(_, holders)| holders.contains(&holder));
    known.map(|(name, _)| *name)
}

fn note(name: &str, holder: Holder) -> String {
    let place = holder.name();
    if let Some((_, holders)) = KNOWN.iter().find(|(known, _)| *known == name) {
        let places: Vec<&str> = holders.iter().map(|holder| holder.name()).collect();
        let places = places.join(" or a ");
        return format!("{name} has no effect at a {place}: it belongs at a {places}");
    }
    if let Some(known) = nearest(name, holder) {
        return format!("{name} is not known and has no effect; did you mean {known}?");
    }
    let all: Vec<&str> = known(holder).collect();
    let all = all.join(", ");
    format!("{name} is not known and has no effect: a {place} may have {all}")
}

/// Returns the annotation that is probably meant: at most every third letter of it is wrong.
fn nearest(name: &str, holder: Holder) -> Option<&'static str> {
    let name = name.to_lowercase();
    let distances = known(holder).map(|known| (osa_distance(known, &name), known));
    let is_near = |(distance, known): &(usize, &str)| distance * 3 <= known.len() - PREFIX.len() + 1;
    distances.filter(is_near).min().map(|(_, known)| known)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::{Holder, MAX_TOLD, unknown};

    fn told(holder: Holder, names: &[&str]) -> Vec<String> {
        let annotations = names.iter().map(|name| ((*name).to_owned(), "red".to_owned()));
        let unknown = unknown(holder, &annotations.collect::<BTreeMap<_, _>>());
        unknown.into_iter().map(|unknown| unknown.note).collect()
    }

    #[test]
    fn annotations_that_have_an_effect_are_not_told() {
        for (holder, names) in [
            (Holder::Pod, &["network", "ip", "mac", "endpoint"][..]),
            (Holder::Namespace, &["network"]),
            (
                Holder::Service,
                &[
                    "network",
                    "service-ip",
                    "ip-pool",
                    "load-balancer-ips",
                    "load-balancer-mode",
                    "dns-name",
                    "drain-seconds",
                    "health-check",
                ],
            ),
        ] {
            let names: Vec<String> = names.iter().map(|name| format!("thuban.dev/{name}")).collect();
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            assert!(told(holder, &names).is_empty(), "{names:?}");
            assert!(told(holder, &["example.org/networks", "networks"]).is_empty());
        }
    }

    #[test]
    fn a_misspelt_annotation_is_told_with_the_nearest_one() {
        for (holder, name, meant) in [
            (Holder::Pod, "networks", "network"),
            (Holder::Pod, "Network", "network"),
            (Holder::Pod, "mca", "mac"),
            (Holder::Pod, "ips", "ip"),
            (Holder::Namespace, "netwrok", "network"),
            (Holder::Service, "service-ips", "service-ip"),
            (Holder::Service, "loadbalancer-ip", "load-balancer-ips"),
        ] {
            assert_eq!(
                told(holder, &[&format!("thuban.dev/{name}")]),
                [format!(
                    "thuban.dev/{name} is not known and has no effect; did you mean thuban.dev/{meant}?"
                )]
            );
        }
    }

    #[test]
    fn an_annotation_that_resembles_none_is_told_with_all() {
        assert_eq!(
            told(Holder::Pod, &["thuban.dev/foo"]),
            [
                "thuban.dev/foo is not known and has no effect: a pod may have thuban.dev/network, thuban.dev/ip, \
                 thuban.dev/mac, thuban.dev/endpoint"
            ]
        );
    }

    #[test]
    fn an_annotation_of_other_objects_is_told_with_its_place() {
        assert_eq!(
            told(Holder::Namespace, &["thuban.dev/ip", "thuban.dev/report-denied"]),
            [
                "thuban.dev/ip has no effect at a namespace: it belongs at a pod",
                "thuban.dev/report-denied has no effect at a namespace: it belongs at a network policy",
            ]
        );
    }

    #[test]
    fn of_many_annotations_few_are_told() {
        let names: Vec<String> = (0..100).map(|number| format!("thuban.dev/x{number}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        assert_eq!(told(Holder::Pod, &names).len(), MAX_TOLD);
    }
}
