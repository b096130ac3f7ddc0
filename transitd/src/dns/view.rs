//! The names of the cluster's domain that a VPC may see.
//!
//! Pure: no sockets, no clock. The shapes of names are those that CoreDNS' plugin `kubernetes` answers
//! (`plugin/kubernetes/parse.go`), and an empty non-terminal gets the same answer as there. A name that a VPC must not
//! see is refused by the name alone, before anybody is asked: an answer can't tell whether the name exists.

use std::collections::{BTreeMap, BTreeSet};
use std::str::FromStr;

use hickory_proto::ProtoError;
use hickory_proto::rr::Name;
use thiserror::Error;
use thuban_rows::{ServiceName, Visible};

/// Kubernetes' default.
pub const DEFAULT_DOMAIN: &str = "cluster.local";

/// Labels that may stand before a Service's name: `_port._proto`, or an endpoint's.
const MAX_LABELS_BEFORE_SERVICE: usize = 2;

#[derive(Debug, Error)]
pub enum ViewError {
    #[error("the cluster's domain {domain:?} is no domain name")]
    Domain {
        domain: String,
        #[source]
        source: ProtoError,
    },
    #[error("the cluster's domain is empty: expected one like {DEFAULT_DOMAIN}")]
    NoDomain,
}

/// The domain under which the cluster's DNS has Services and pods.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Domain(Name);

impl FromStr for Domain {
    type Err = ViewError;

    fn from_str(text: &str) -> Result<Self, ViewError> {
        Self::parse(text)
    }
}

impl Domain {
    /// Parses `text`, which may end with a dot and have any case.
    pub fn parse(text: &str) -> Result<Self, ViewError> {
        let mut name = Name::from_ascii(text).map_err(|source| ViewError::Domain {
            domain: text.to_owned(),
            source,
        })?;
        if name.iter().next().is_none() {
            return Err(ViewError::NoDomain);
        }
        name.set_fqdn(true);
        Ok(Self(name.to_lowercase()))
    }

    pub fn name(&self) -> &Name {
        &self.0
    }

    /// Returns the labels of `name` before this domain; none if it is outside.
    fn labels_before<'a>(&self, name: &'a Name) -> Option<Vec<&'a [u8]>> {
        let mut labels: Vec<&[u8]> = name.iter().collect();
        for own in self.0.iter().rev() {
            if !labels.pop()?.eq_ignore_ascii_case(own) {
                return None;
            }
        }
        Some(labels)
    }
}

/// The owner of the names that a query is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Zone {
    /// The cluster's domain.
    Cluster,
    /// in-addr.arpa
    Reverse4,
    /// ip6.arpa
    Reverse6,
    /// Anything else.
    Outside,
}

/// The decision about a query.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Upstream is asked, and its answer filtered.
    Forward(Zone),
    /// The name has no records but has names below it.
    NoData,
    /// NXDOMAIN, whether the name exists or not.
    Refuse,
}

/// The names that the pods of one VPC see.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct View {
    domain: Domain,
    namespaces: BTreeSet<String>,
    services: BTreeMap<String, BTreeSet<String>>,
    hidden: BTreeMap<String, BTreeSet<String>>,
}

impl View {
    pub fn new(domain: Domain, visible: Visible) -> Self {
        let Visible {
            namespaces,
            mut services,
            hidden,
        } = visible;
        services.retain(|service| !hidden.contains(service));
        Self {
            domain,
            namespaces,
            services: by_namespace(services),
            hidden: by_namespace(hidden),
        }
    }

    pub fn domain(&self) -> &Domain {
        &self.domain
    }

    pub fn decide(&self, name: &Name) -> Verdict {
        let Some(labels) = self.domain.labels_before(name) else {
            return Verdict::Forward(zone_outside(name));
        };
        // Kubernetes has no names with other characters, and a resolver may read such names as it likes: `*`, or a dot
        // in a label.
        let labels: Option<Vec<String>> = labels.into_iter().map(lowercase).collect();
        let Some(labels) = labels else {
            return Verdict::Refuse;
        };
        let from_domain: Vec<&str> = labels.iter().rev().map(String::as_str).collect();
        match from_domain[..] {
            // The domain itself, the version of the schema, and the server's name in each SOA.
            [] | ["dns-version"] | ["dns", "ns"] => Verdict::Forward(Zone::Cluster),
            ["svc" | "pod"] => Verdict::NoData,
            ["svc", namespace] if self.has_services_of(namespace) => Verdict::NoData,
            ["svc", namespace, service, ref before @ ..]
                if before.len() <= MAX_LABELS_BEFORE_SERVICE && self.has_service(namespace, service) =>
            {
                Verdict::Forward(Zone::Cluster)
            }
            ["pod", namespace] if self.namespaces.contains(namespace) => Verdict::NoData,
            ["pod", namespace, _] if self.namespaces.contains(namespace) => Verdict::Forward(Zone::Cluster),
            _ => Verdict::Refuse,
        }
    }

    /// Whether an answer may contain the name.
    pub fn shows(&self, name: &Name) -> bool {
        self.decide(name) != Verdict::Refuse
    }

    fn has_services_of(&self, namespace: &str) -> bool {
        self.namespaces.contains(namespace) || self.services.contains_key(namespace)
    }

    fn has_service(&self, namespace: &str, service: &str) -> bool {
        let is_in = |services: &BTreeMap<String, BTreeSet<String>>| {
            services
                .get(namespace)
                .is_some_and(|names| names.contains(service))
        };
        is_in(&self.services) || (self.namespaces.contains(namespace) && !is_in(&self.hidden))
    }
}

fn by_namespace(services: BTreeSet<ServiceName>) -> BTreeMap<String, BTreeSet<String>> {
    let mut sorted: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for ServiceName { namespace, name } in services {
        sorted.entry(namespace).or_default().insert(name);
    }
    sorted
}

fn zone_outside(name: &Name) -> Zone {
    let mut labels = name.iter().rev();
    let mut is_next = |label: &str| {
        labels
            .next()
            .is_some_and(|next| next.eq_ignore_ascii_case(label.as_bytes()))
    };
    if !is_next("arpa") {
        return Zone::Outside;
    }
    match labels.next() {
        Some(label) if label.eq_ignore_ascii_case(b"in-addr") => Zone::Reverse4,
        Some(label) if label.eq_ignore_ascii_case(b"ip6") => Zone::Reverse6,
        _ => Zone::Outside,
    }
}

/// Returns the label in lowercase, if it has letters, digits, `-` and `_` only.
fn lowercase(label: &[u8]) -> Option<String> {
    let is_plain = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
    if !label.iter().all(is_plain) {
        return None;
    }
    let text = label.iter().map(|byte| char::from(byte.to_ascii_lowercase()));
    Some(text.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Namespace `red` without its Service `moved`, and of others `blue/shared` and `dns/dns`.
    fn view(domain: &str) -> View {
        let visible = Visible {
            namespaces: ["red".into()].into(),
            services: [
                ServiceName::new("blue", "shared"),
                ServiceName::new("dns", "dns"),
                ServiceName::new("red", "moved"),
            ]
            .into(),
            hidden: [ServiceName::new("red", "moved")].into(),
        };
        View::new(Domain::parse(domain).unwrap(), visible)
    }

    fn name(labels: &str) -> Name {
        // The labels are not made from text: `*`, `\.` and capitals must arrive as they would by the wire.
        let labels = labels
            .split('.')
            .filter(|label| !label.is_empty())
            .map(|label| label.replace('#', ".").into_bytes());
        let mut name = Name::from_labels(labels).unwrap();
        name.set_fqdn(true);
        name
    }

    const FORWARD: Verdict = Verdict::Forward(Zone::Cluster);
    const OUTSIDE: Verdict = Verdict::Forward(Zone::Outside);

    #[test]
    fn a_vpc_sees_its_namespaces_and_what_is_shared() {
        use Verdict::{NoData, Refuse};
        let table = [
            // Names in no namespace.
            ("cluster.local", FORWARD),
            ("dns-version.cluster.local", FORWARD),
            ("ns.dns.cluster.local", FORWARD),
            ("dns.cluster.local", Refuse),
            ("x.dns-version.cluster.local", Refuse),
            ("svc.cluster.local", NoData),
            ("pod.cluster.local", NoData),
            ("nodes.cluster.local", Refuse),
            // A namespace of the VPC.
            ("red.svc.cluster.local", NoData),
            ("web.red.svc.cluster.local", FORWARD),
            ("wEb.Red.SVC.cluSter.loCal", FORWARD),
            ("10-0-1-2.web.red.svc.cluster.local", FORWARD),
            ("web-0.web.red.svc.cluster.local", FORWARD),
            ("_tcp.web.red.svc.cluster.local", FORWARD),
            ("_http._tcp.web.red.svc.cluster.local", FORWARD),
            ("a._http._tcp.web.red.svc.cluster.local", Refuse),
            ("red.pod.cluster.local", NoData),
            ("10-0-1-2.red.pod.cluster.local", FORWARD),
            ("a.10-0-1-2.red.pod.cluster.local", Refuse),
            // A Service of it that is in another VPC.
            ("moved.red.svc.cluster.local", Refuse),
            ("MOVED.red.svc.cluster.local", Refuse),
            ("a.moved.red.svc.cluster.local", Refuse),
            ("_http._tcp.moved.red.svc.cluster.local", Refuse),
            // A Service of another namespace.
            ("blue.svc.cluster.local", NoData),
            ("shared.blue.svc.cluster.local", FORWARD),
            ("10-0-1-2.shared.blue.svc.cluster.local", FORWARD),
            ("_http._tcp.Shared.blue.svc.cluster.local", FORWARD),
            ("secret.blue.svc.cluster.local", Refuse),
            ("shared.secret.blue.svc.cluster.local", Refuse),
            ("blue.pod.cluster.local", Refuse),
            ("10-0-1-2.blue.pod.cluster.local", Refuse),
            ("dns.dns.svc.cluster.local", FORWARD),
            // Another's namespace.
            ("green.svc.cluster.local", Refuse),
            ("web.green.svc.cluster.local", Refuse),
            ("green.pod.cluster.local", Refuse),
            ("10-0-1-2.green.pod.cluster.local", Refuse),
            // A visible one in the wrong place.
            ("red.green.svc.cluster.local", Refuse),
            ("web.red.green.svc.cluster.local", Refuse),
            ("red.cluster.local", Refuse),
            ("web.red.cluster.local", Refuse),
            ("svc.svc.cluster.local", Refuse),
            // Names that could be read as several names, or as another one.
            ("*.red.svc.cluster.local", Refuse),
            ("*.*.svc.cluster.local", Refuse),
            ("web.*.svc.cluster.local", Refuse),
            ("we*.red.svc.cluster.local", Refuse),
            ("web#red.svc.cluster.local", Refuse),
            ("web#green.red.svc.cluster.local", Refuse),
            ("web.red#svc.cluster.local", Refuse),
            ("a b.red.svc.cluster.local", Refuse),
            ("\u{e9}.red.svc.cluster.local", Refuse),
            ("web.red.svc#cluster#local", OUTSIDE),
            // Outside.
            ("", OUTSIDE),
            ("local", OUTSIDE),
            ("cluster.local.example.com", OUTSIDE),
            ("web.green.svc.cluster.local.example.com", OUTSIDE),
            ("web.green.svc.notcluster.local", OUTSIDE),
            ("*.example.com", OUTSIDE),
            ("arpa", OUTSIDE),
            ("e164.arpa", OUTSIDE),
            ("1.0.96.10.in-addr.arpa", Verdict::Forward(Zone::Reverse4)),
            ("in-addr.arpa", Verdict::Forward(Zone::Reverse4)),
            ("1.0.0.0.IP6.Arpa", Verdict::Forward(Zone::Reverse6)),
        ];
        let view = view("cluster.local");
        for (asked, verdict) in table {
            assert_eq!(view.decide(&name(asked)), verdict, "{asked}");
        }
    }

    #[test]
    fn the_domain_is_a_setting() {
        for domain in ["k8s.example", "K8S.example.", "k8s.EXAMPLE"] {
            let view = view(domain);
            assert_eq!(view.decide(&name("web.red.svc.k8s.example")), FORWARD);
            assert_eq!(view.decide(&name("web.green.svc.k8s.example")), Verdict::Refuse);
            assert_eq!(view.decide(&name("web.green.svc.cluster.local")), OUTSIDE);
        }
        assert!(matches!(Domain::parse("."), Err(ViewError::NoDomain)));
        assert!(matches!(Domain::parse(""), Err(ViewError::NoDomain)));
        assert!(matches!(Domain::parse("a..b"), Err(ViewError::Domain { .. })));
    }

    #[test]
    fn nothing_is_visible_by_default() {
        let view = View::new(Domain::parse(DEFAULT_DOMAIN).unwrap(), Visible::default());
        for asked in ["red.svc", "web.red.svc", "red.pod", "10-0-1-2.red.pod"] {
            let asked = name(&format!("{asked}.cluster.local"));
            assert_eq!(view.decide(&asked), Verdict::Refuse, "{asked}");
        }
    }
}
