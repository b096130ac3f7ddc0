//! What objects say of names: reads the few fields that are kept.

use std::net::IpAddr;

use kube::{Resource, ResourceExt};
use thuban_api::{Bouncer, Divider, Droplet, Endpoint, EndpointType, Network, Vpc};

use super::{Kind, Member, Name, Names};

/// A kind of object that has to do with names.
pub trait Named: Resource<DynamicType = ()> + Sized {
    /// Notes the object as it is now.
    fn set(&self, names: &mut Names);

    fn remove(key: &str, names: &mut Names);

    /// Returns the keys of all objects of the kind that are noted.
    fn keys(names: &Names) -> Vec<Name>;

    /// Returns what tells the object from others of its kind.
    fn key(&self) -> String {
        match self.namespace() {
            Some(namespace) => format!("{namespace}/{}", self.name_any()),
            None => self.name_any(),
        }
    }
}

impl Named for Vpc {
    fn set(&self, names: &mut Names) {
        let status = self.status.clone().unwrap_or_default();
        let vpc = super::Vpc {
            vni: status.vni,
            ranges: status
                .cidrs
                .iter()
                .filter_map(|range| range.parse().ok())
                .collect(),
            shared: self.spec.shared_services.clone(),
        };
        names.set_vpc(&self.name_any(), vpc);
    }

    fn remove(key: &str, names: &mut Names) {
        names.remove_vpc(key);
    }

    fn keys(names: &Names) -> Vec<Name> {
        names.vpcs.keys().cloned().collect()
    }
}

impl Named for Network {
    fn set(&self, names: &mut Names) {
        let status = self.status.as_ref();
        let capacity = status.and_then(|status| status.capacity);
        let allocated = status.and_then(|status| status.allocated);
        names.set_network(&self.name_any(), &self.spec.vpc, capacity, allocated);
    }

    fn remove(key: &str, names: &mut Names) {
        names.remove_network(key);
    }

    fn keys(names: &Names) -> Vec<Name> {
        names.networks.keys().cloned().collect()
    }
}

impl Named for Divider {
    fn set(&self, names: &mut Names) {
        let droplet = self.status.as_ref().and_then(|status| status.droplet.as_deref());
        names.set_divider(&self.name_any(), &self.spec.vpc, droplet);
    }

    fn remove(key: &str, names: &mut Names) {
        names.remove_divider(key);
    }

    fn keys(names: &Names) -> Vec<Name> {
        names.dividers.keys().cloned().collect()
    }
}

impl Named for Bouncer {
    fn set(&self, names: &mut Names) {
        let droplet = self.status.as_ref().and_then(|status| status.droplet.as_deref());
        names.set_bouncer(&self.name_any(), &self.spec.vpc, &self.spec.network, droplet);
    }

    fn remove(key: &str, names: &mut Names) {
        names.remove_bouncer(key);
    }

    fn keys(names: &Names) -> Vec<Name> {
        names.bouncers.keys().cloned().collect()
    }
}

impl Named for Droplet {
    fn set(&self, names: &mut Names) {
        let address = self.status.as_ref().and_then(|status| status.address.as_deref());
        let address = address.and_then(|address| address.parse().ok());
        names.set_droplet(&self.name_any(), address);
    }

    fn remove(key: &str, names: &mut Names) {
        names.remove_droplet(key);
    }

    fn keys(names: &Names) -> Vec<Name> {
        names.droplets.keys().cloned().collect()
    }
}

impl Named for Endpoint {
    fn set(&self, names: &mut Names) {
        match member(self) {
            Some(member) => names.set_endpoint(&self.key(), &member),
            None => names.remove_endpoint(&self.key()),
        }
    }

    fn remove(key: &str, names: &mut Names) {
        names.remove_endpoint(key);
    }

    fn keys(names: &Names) -> Vec<Name> {
        names.endpoints.keys().cloned().collect()
    }
}

/// Reads an Endpoint; none if it has no VPC yet, or no address. An Endpoint that its network does not admit has no
/// address, and anybody may make such Endpoints: they must not show the network to their makers.
fn member(endpoint: &Endpoint) -> Option<Member> {
    let (spec, status) = (&endpoint.spec, endpoint.status.as_ref());
    let vpc = status
        .and_then(|status| status.vpc.as_deref())
        .unwrap_or(&spec.vpc);
    if vpc.is_empty() {
        return None;
    }
    let given = status.map(|status| &status.addresses);
    let addresses = given.filter(|given| !given.is_empty()).unwrap_or(&spec.claimed);
    let addresses: Vec<IpAddr> = addresses
        .iter()
        .filter_map(|address| address.parse().ok())
        .collect();
    if addresses.is_empty() {
        return None;
    }
    let pod = status.and_then(|status| status.pod_ref.as_ref());
    let pod = pod.or(spec.pod_ref.as_ref()).map(|pod| pod.name.clone());
    let (kind, name) = match spec.kind {
        EndpointType::Simple => (Kind::Pod, pod),
        EndpointType::Scaled => (
            Kind::Service,
            spec.service_ref.as_ref().map(|service| service.name.clone()),
        ),
        EndpointType::Host => (Kind::Node, Some(endpoint.name_any())),
    };
    let droplet = status.and_then(|status| status.droplet.as_deref());
    let droplet = droplet
        .or(Some(spec.droplet.as_str()))
        .filter(|droplet| !droplet.is_empty());
    Some(Member {
        kind,
        namespace: endpoint.namespace().filter(|_| kind != Kind::Node),
        name,
        vpc: vpc.to_owned(),
        network: spec.network.clone(),
        droplet: droplet.map(str::to_owned),
        since: created(endpoint),
        addresses,
    })
}

/// Returns when an object was made, in milliseconds since 1970.
fn created(endpoint: &Endpoint) -> u64 {
    let created = endpoint.creation_timestamp();
    let millis = created.map_or(0, |time| time.0.as_millisecond());
    u64::try_from(millis).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn endpoint(spec: &Value, status: &Value) -> Endpoint {
        serde_json::from_value(json!({
            "apiVersion": "thuban.dev/v1alpha1", "kind": "Endpoint",
            "metadata": {"name": "web-0b1c2d3e", "namespace": "red"}, "spec": spec, "status": status,
        }))
        .unwrap()
    }

    #[test]
    fn an_endpoint_is_named_by_what_has_it() {
        let pod = json!({"name": "web-0", "uid": "u", "cniUid": "u"});
        let own = json!({"vpc": "red", "network": "red-web", "podRef": pod, "droplet": "node-a",
                         "claimed": ["10.0.1.3"]});
        let read = member(&endpoint(&own, &json!({}))).unwrap();
        assert_eq!((read.kind, read.name.as_deref()), (Kind::Pod, Some("web-0")));
        assert_eq!(read.namespace.as_deref(), Some("red"));
        assert_eq!(
            read.addresses,
            ["10.0.1.3".parse::<IpAddr>().unwrap()],
            "claimed before it has a status"
        );
        let moved = json!({"vpc": "red", "addresses": ["10.0.1.4", "no address"], "droplet": "node-b"});
        let read = member(&endpoint(&own, &moved)).unwrap();
        assert_eq!(read.addresses, ["10.0.1.4".parse::<IpAddr>().unwrap()]);
        assert_eq!(read.droplet.as_deref(), Some("node-b"));

        let service =
            json!({"type": "Scaled", "network": "red-web", "serviceRef": {"name": "web", "uid": "u"}});
        let read = member(&endpoint(
            &service,
            &json!({"vpc": "red", "addresses": ["10.96.0.9"]}),
        ))
        .unwrap();
        assert_eq!((read.kind, read.name.as_deref()), (Kind::Service, Some("web")));
        assert_eq!(read.droplet, None);

        let host = json!({"type": "Host", "vpc": "default", "network": "default", "droplet": "node-a"});
        let read = member(&endpoint(&host, &json!({"addresses": ["10.244.0.2"]}))).unwrap();
        assert_eq!((read.kind, read.namespace), (Kind::Node, None));

        let users = json!({"network": "red-web"});
        let read = member(&endpoint(
            &users,
            &json!({"vpc": "red", "addresses": ["10.0.1.5"]}),
        ))
        .unwrap();
        assert_eq!(read.name, None, "no pod has it");
        assert!(member(&endpoint(&users, &json!({}))).is_none(), "no VPC yet");
        let refused = member(&endpoint(&json!({"network": "blue-db"}), &json!({"vpc": "blue"})));
        assert!(refused.is_none(), "the network of others does not admit it");
    }
}
