//! `endpoints`: a row for each endpoint, and why some are not Provisioned.

use kube::ResourceExt;
use serde::Serialize;
use thuban_api::condition::find;
use thuban_api::{Endpoint, EndpointType, Phase};

use crate::conditions::problem;
use crate::objects::Endpoints;
use crate::report::{Problem, Verdict};

/// How an endpoint stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum State {
    Provisioned,
    Waits,
    /// A user made it, and no pod has it now.
    Unattached,
}

/// An endpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Row {
    pub namespace: String,
    pub name: String,
    #[serde(rename = "type")]
    pub kind: EndpointType,
    pub pod: Option<String>,
    pub service: Option<String>,
    /// Empty if the operator has not found the network yet, or a user made the endpoint.
    pub vpc: String,
    pub network: String,
    pub addresses: Vec<String>,
    pub node: Option<String>,
    pub phase: Phase,
    pub state: State,
    /// Why it waits.
    pub reason: Option<String>,
    pub message: Option<String>,
    pub remedy: Option<String>,
    /// For a Service: the number of addresses that receive new connections.
    pub backends: Option<u32>,
}

impl Row {
    pub fn of(endpoint: &Endpoint) -> Self {
        let (spec, status) = (&endpoint.spec, endpoint.status.clone().unwrap_or_default());
        let is_unattached =
            find(&status.conditions, "Ready").is_some_and(|ready| ready.reason == "Unattached");
        let name = endpoint.name_any();
        let lacks = problem("Endpoint", &name, status.phase, &status.conditions);
        let lacks = lacks.filter(|problem| problem.reason != "Unattached");
        let state = match (&lacks, is_unattached) {
            (Some(_), _) => State::Waits,
            (None, true) => State::Unattached,
            (None, false) => State::Provisioned,
        };
        let pod = status.pod_ref.as_ref().or(spec.pod_ref.as_ref());
        let place = status.droplet.clone().or_else(|| Some(spec.droplet.clone()));
        let (reason, message, remedy) = match lacks {
            Some(lacks) => (Some(lacks.reason), Some(lacks.message), Some(lacks.remedy)),
            None => (None, None, None),
        };
        Self {
            namespace: endpoint.namespace().unwrap_or_default(),
            name,
            kind: spec.kind,
            pod: pod.map(|pod| pod.name.clone()),
            service: spec.service_ref.as_ref().map(|service| service.name.clone()),
            vpc: status.vpc.unwrap_or_else(|| spec.vpc.clone()),
            network: spec.network.clone(),
            addresses: status.addresses,
            node: place.filter(|place| !place.is_empty()),
            phase: status.phase,
            state,
            reason,
            message,
            remedy,
            backends: status.backends,
        }
    }

    /// Returns what the endpoint waits for.
    pub fn problem(&self) -> Option<Problem> {
        Some(Problem {
            object: format!("{}/{}", self.namespace, self.name),
            reason: self.reason.clone()?,
            message: self.message.clone().unwrap_or_default(),
            remedy: self.remedy.clone().unwrap_or_default(),
        })
    }
}

/// What `endpoints` says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Listing {
    pub verdict: Verdict,
    pub endpoints: Vec<Row>,
    /// What could not be looked at.
    pub unseen: Vec<String>,
}

/// Makes the listing.
pub fn listing(endpoints: &Endpoints) -> Listing {
    let mut rows: Vec<Row> = endpoints.list.iter().flatten().map(Row::of).collect();
    rows.sort_by(|one, other| (&one.namespace, &one.name).cmp(&(&other.namespace, &other.name)));
    let unseen: Vec<String> = endpoints
        .list
        .as_ref()
        .err()
        .map(ToString::to_string)
        .into_iter()
        .collect();
    let is_waiting = rows.iter().any(|row| row.state == State::Waits);
    Listing {
        verdict: Verdict::from_findings(is_waiting, !unseen.is_empty()),
        endpoints: rows,
        unseen,
    }
}

#[cfg(test)]
mod tests {
    use super::{Row, State, listing};
    use crate::objects::Unseen;
    use crate::report::Verdict;
    use crate::testing;

    #[test]
    fn an_endpoint_says_why_it_waits() {
        let mut endpoints = testing::status().tenancy.endpoints;
        let list = endpoints.list.as_mut().unwrap();
        list.push(testing::endpoint_that_waits(
            "red",
            "web-2",
            "NetworkFull",
            "no free address",
        ));
        let listing = listing(&endpoints);
        assert_eq!(listing.verdict, Verdict::Found);
        let states: Vec<_> = listing
            .endpoints
            .iter()
            .map(|row| (row.name.as_str(), row.state))
            .collect();
        assert_eq!(
            states,
            [
                ("kept", State::Unattached),
                ("shop-00000000", State::Provisioned),
                ("web-1-00000000", State::Provisioned),
                ("web-2", State::Waits),
            ]
        );
        let waiting = &listing.endpoints[3];
        assert_eq!(waiting.reason.as_deref(), Some("NetworkFull"));
        assert!(waiting.remedy.as_ref().unwrap().contains("append a range"));
        let pod = &listing.endpoints[2];
        assert_eq!(pod.pod.as_deref(), Some("web-1"));
        assert_eq!(pod.node.as_deref(), Some("node-a"));
    }

    #[test]
    fn the_vpc_of_a_network_that_came_later_is_shown() {
        let mut endpoint = testing::endpoint_that_waits("red", "web-2", "NetworkFull", "no free address");
        assert_eq!(Row::of(&endpoint).vpc, "red");
        endpoint.spec.vpc.clear();
        assert_eq!(Row::of(&endpoint).vpc, "");
        endpoint.status.get_or_insert_default().vpc = Some("red".to_owned());
        assert_eq!(Row::of(&endpoint).vpc, "red");
    }

    #[test]
    fn forbidden_endpoints_are_said_to_be_so() {
        let mut endpoints = testing::status().tenancy.endpoints;
        endpoints.list = Err(Unseen::Forbidden {
            verb: "list",
            resource: "endpoints.thuban.dev",
        });
        let listing = listing(&endpoints);
        assert_eq!(listing.verdict, Verdict::Unseen);
        assert_eq!(listing.unseen, ["you may not list endpoints.thuban.dev"]);
    }
}
