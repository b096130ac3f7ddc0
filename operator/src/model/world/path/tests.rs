//! Each fault is planted alone into a path that works, and must be named.

mod causes;
mod others;
mod policies;
mod probes;

use std::net::IpAddr;
use std::sync::Arc;

use serde_json::{Value, json};
use thuban_api::{PathStepState, PathVerdict};

use super::{AskedPod, Delivery, DropletState, Judgement, PodState, Question, RowState, Target};
use crate::model::policy::Profile;
use crate::model::rows::Key;
use crate::model::world::services::tests::service;
use crate::model::world::tests::{endpoint, network, small, vpc};
use crate::model::world::{Endpoint, EndpointName, Membership, World};

const OUTSIDE: &str = "198.51.100.9";
const SERVICE: &str = "10.96.0.10";

/// The steps of paths that work.
const WITHIN: [&str; 5] = ["source", "target", "droplets", "rows", "policies"];
const LEAVING: [&str; 6] = ["source", "target", "egress", "droplets", "rows", "policies"];
const BY_NODE: [&str; 6] = ["source", "target", "backends", "droplets", "rows", "policies"];
const TO_SERVICE: [&str; 7] = [
    "source", "target", "backends", "droplets", "rows", "policies", "service",
];

/// What droplets are played to say.
struct Played {
    suspect: Option<&'static str>,
    away: Option<&'static str>,
    /// The state of all rows of a droplet.
    row: Option<(&'static str, RowState)>,
    /// The state of all sets of policies of a droplet.
    set: Option<(&'static str, RowState)>,
    is_served: bool,
    knows: bool,
}

impl Delivery for Played {
    fn droplet(&self, droplet: &str) -> DropletState {
        if self.suspect == Some(droplet) {
            DropletState::Suspect
        } else if self.away == Some(droplet) {
            DropletState::Away
        } else {
            DropletState::Connected
        }
    }

    fn row(&self, droplet: &str, key: &Key) -> RowState {
        let played = match key {
            Key::PolicySet(..) => self.set,
            _ => self.row,
        };
        let played = played.filter(|(on, _)| *on == droplet);
        played.map_or(RowState::Acked, |(_, state)| state)
    }

    fn is_served(&self, _: &[(String, Key)]) -> bool {
        self.is_served
    }

    fn knows(&self, _: &str, _: &str) -> bool {
        self.knows
    }
}

/// A path from `client` on d2 to `server` on d3, pods of the namespace `ns` in the network `web` of VPC red. The
/// Service `ns/web` has `server` behind it. VPC blue has the same ranges.
struct Scene {
    world: World,
    question: Question,
    played: Played,
}

fn name(namespace: &str, endpoint: &str) -> EndpointName {
    (namespace.to_owned(), endpoint.to_owned())
}

fn pod(namespace: &str, pod: &str) -> AskedPod {
    AskedPod {
        namespace: namespace.to_owned(),
        name: pod.to_owned(),
        state: PodState::Bound {
            endpoint: name(namespace, pod),
            told: None,
        },
    }
}

/// Returns a pod's endpoint at 10.0.0.`host`, Provisioned.
fn member(network: &str, droplet: u64, host: u64, (namespace, pod): (&str, &str)) -> Endpoint {
    let mut made = endpoint(network, droplet, host);
    made.pod.namespace = namespace.to_owned();
    made.pod.name = pod.to_owned();
    let profile = Profile {
        labels: [("app".to_owned(), pod.to_owned())].into(),
        ..Profile::default()
    };
    made.profile = Some(Arc::new(profile));
    made.ready = true;
    made
}

impl Scene {
    fn new() -> Self {
        let mut world = small(6);
        world.set_service_ranges(vec!["10.96.0.0/12".to_owned()]);
        world.set_vpc("blue", Some(vpc(8)));
        world.set_network("shop", Some(network("blue", 1)));
        let mut scene = Self {
            world,
            question: Question {
                source: pod("ns", "client"),
                target: Target::Pod(pod("ns", "server")),
                protocol: 6,
                port: Some(8080),
            },
            played: Played {
                suspect: None,
                away: None,
                row: None,
                set: None,
                is_served: true,
                knows: true,
            },
        };
        scene.put(member("web", 2, 10, ("ns", "client")));
        scene.put(member("web", 3, 11, ("ns", "server")));
        scene
            .world
            .set_service(&name("ns", "web-1"), Some(service("web", "1", 11)));
        scene.world.flush();
        scene
    }

    fn put(&mut self, endpoint: Endpoint) {
        let name = name(&endpoint.pod.namespace, &endpoint.pod.name);
        self.world.set_endpoint(&name, Some(endpoint));
    }

    fn change(&mut self, pod: &str, change: impl FnOnce(&mut Endpoint)) {
        let mut endpoint = self.world.endpoint(&name("ns", pod)).unwrap().clone();
        change(&mut endpoint);
        self.put(endpoint);
    }

    fn vpc(&mut self, change: impl FnOnce(&mut crate::model::world::Vpc)) {
        let mut red = vpc(7);
        change(&mut red);
        self.world.set_vpc("red", Some(red));
    }

    fn policy(&mut self, namespace: &str, spec: &Value) {
        let spec = serde_json::from_value(spec.clone()).unwrap();
        self.world
            .set_network_policy(namespace, "closed", 0, Some(&spec))
            .unwrap();
        self.world.roll_out(0);
        self.world.flush();
    }

    fn ask_address(&mut self, address: &str) {
        self.question.target = Target::Address(address.parse().unwrap());
    }

    fn ask_service(&mut self, namespace: &str, service: &str) {
        self.question.target = Target::Service {
            namespace: namespace.to_owned(),
            name: service.to_owned(),
        };
        self.question.port = Some(80);
    }

    fn judge(&self) -> Judgement {
        self.world.judge_path(&self.question, &self.played)
    }
}

/// Returns the texts of all steps.
fn texts(judgement: &Judgement) -> String {
    let steps = judgement.steps.iter();
    let texts = steps.map(|step| format!("{}: {} {}", step.name, step.message, step.remedy));
    texts.collect::<Vec<_>>().join("\n")
}

/// Asserts that a fault is named in the last step, and that all steps before are ok.
fn is_named(what: &str, fault: impl FnOnce(&mut Scene), step: &str, reason: &str, word: &str) {
    let mut scene = Scene::new();
    fault(&mut scene);
    let judgement = scene.judge();
    let (last, before) = judgement.steps.split_last().unwrap();
    assert_eq!(last.name, step, "{what}: {judgement:#?}");
    assert_eq!(last.reason.as_deref(), Some(reason), "{what}: {judgement:#?}");
    assert_eq!(judgement.reason.as_deref(), Some(reason), "{what}");
    assert!(last.message.contains(word), "{what}: {judgement:#?}");
    assert!(!last.remedy.is_empty(), "{what}: {judgement:#?}");
    let is_ok = |state| state == PathStepState::Ok;
    assert!(
        before.iter().all(|step| is_ok(step.state)),
        "{what}: {judgement:#?}"
    );
    let verdict = match last.state {
        PathStepState::Fail => PathVerdict::No,
        _ => PathVerdict::Unknown,
    };
    assert_eq!(judgement.verdict, verdict, "{what}");
    assert!(!is_ok(last.state), "{what}");
}

/// Asserts that nothing is wrong, by these steps.
fn is_fine(what: &str, change: impl FnOnce(&mut Scene), steps: &[&str]) {
    let mut scene = Scene::new();
    change(&mut scene);
    let judgement = scene.judge();
    assert_eq!(judgement.verdict, PathVerdict::Ok, "{what}: {judgement:#?}");
    assert_eq!(judgement.reason, None, "{what}");
    let names: Vec<&str> = judgement.steps.iter().map(|step| &*step.name).collect();
    assert_eq!(names, steps, "{what}");
}

#[test]
fn a_path_that_works_is_ok() {
    is_fine("a pod", |_| {}, &WITHIN);
    is_fine("its address", |scene| scene.ask_address("10.0.0.11"), &WITHIN);
    is_fine("a Service", |scene| scene.ask_service("ns", "web"), &TO_SERVICE);
    let by_address = |scene: &mut Scene| {
        scene.ask_address(SERVICE);
        scene.question.port = None;
    };
    is_fine("a Service's address and only port", by_address, &TO_SERVICE);
    let outside = |scene: &mut Scene| {
        scene.vpc(|red| red.egress = true);
        scene.ask_address(OUTSIDE);
    };
    is_fine("outside", outside, &LEAVING);
    let judgement = Scene::new().judge();
    assert_eq!(
        judgement.steps[0].message,
        "VPC red, web, 10.0.0.10, d2, Provisioned"
    );
}

#[test]
fn what_is_wrong_with_a_pod_is_named() {
    for (state, reason, word) in [
        (PodState::Missing, "PodNotFound", "namespace ns"),
        (PodState::Unbound, "PodNotBound", "no node"),
        (PodState::Ended, "PodEnded", "has ended"),
        (PodState::OnHostNetwork, "HostNetwork", "node's network"),
    ] {
        let of_source = state.clone();
        is_named(
            reason,
            |scene| scene.question.source.state = of_source,
            "source",
            reason,
            word,
        );
        let mut target = pod("ns", "server");
        target.state = state;
        is_named(
            reason,
            |scene| scene.question.target = Target::Pod(target),
            "target",
            reason,
            word,
        );
    }
    let gone = |scene: &mut Scene| scene.world.set_endpoint(&name("ns", "client"), None);
    is_named("no Endpoint", gone, "source", "NoEndpoint", "client");
    let refused = |endpoint: &mut Endpoint| {
        endpoint.membership = Membership::Refused("NetworkFull".into(), "no free address".into());
    };
    is_named(
        "refused",
        |scene| scene.change("server", refused),
        "target",
        "NetworkFull",
        "no free",
    );
    let waits = |scene: &mut Scene| {
        scene.change("client", |endpoint| endpoint.ready = false);
        scene.question.source.state = PodState::Bound {
            endpoint: name("ns", "client"),
            told: Some(("WaitsForAcks".into(), "waits for d2".into())),
        };
    };
    is_named("not Provisioned", waits, "source", "WaitsForAcks", "waits for d2");
    let silent = |scene: &mut Scene| scene.change("server", |endpoint| endpoint.ready = false);
    is_named("not judged", silent, "target", "NotProvisioned", "server");
    let taken = |scene: &mut Scene| {
        scene.question.source = AskedPod {
            name: "second".into(),
            ..pod("ns", "client")
        };
    };
    is_named("another has it", taken, "source", "EndpointInUse", "client has");
}

#[test]
fn another_vpc_and_a_free_address_are_named() {
    let elsewhere = |scene: &mut Scene| {
        scene.put(member("shop", 4, 12, ("ns", "other")));
        scene.put(member("web", 4, 12, ("ns", "twin")));
        scene.question.target = Target::Pod(pod("ns", "other"));
    };
    is_named(
        "own pod",
        elsewhere,
        "target",
        "NotInVpc",
        "in VPC red pod twin has 10.0.0.12",
    );
    let free = |scene: &mut Scene| scene.ask_address("10.0.0.99");
    is_named("free", free, "target", "AddressFree", "10.0.0.99");
    let v6 = |scene: &mut Scene| scene.ask_address("fd00::1");
    is_named("family", v6, "target", "NoSuchFamily", "client");
}

#[test]
fn a_closed_way_out_is_named() {
    let outside = |scene: &mut Scene| scene.ask_address(OUTSIDE);
    is_named("egress", outside, "egress", "NoEgress", "VPC red");
    let private = |scene: &mut Scene| {
        scene.vpc(|red| red.egress = true);
        let web = crate::model::world::Network {
            private: true,
            ..network("red", 1)
        };
        scene.world.set_network("web", Some(web));
        scene.ask_address(OUTSIDE);
    };
    is_named("private", private, "egress", "NetworkPrivate", "network web");
    let closed = |scene: &mut Scene| {
        scene.vpc(|red| red.egress = true);
        scene.world.set_closed_ranges(vec!["198.51.100.0/24".into()]);
        scene.ask_address(OUTSIDE);
    };
    is_named("closed", closed, "egress", "RangeClosed", OUTSIDE);
    let denied = |scene: &mut Scene| {
        scene.vpc(|red| red.egress = true);
        scene.policy("ns", &json!({"podSelector": {}, "policyTypes": ["Egress"]}));
        scene.ask_address(OUTSIDE);
    };
    is_named(
        "policy",
        denied,
        "policies",
        "PolicyDenies",
        "NetworkPolicy ns/closed",
    );
}

#[test]
fn what_is_wrong_with_a_service_is_named() {
    let missing = |scene: &mut Scene| scene.ask_service("ns", "none");
    is_named("none", missing, "target", "ServiceNotFound", "none");
    let unshared = |scene: &mut Scene| {
        let mut other = service("shop", "2", 12);
        other.tables[0].0 = "10.96.0.11".parse().unwrap();
        other.name = "till".into();
        scene.world.set_service(&name("shop", "till-1"), Some(other));
        scene.ask_service("shop", "till");
    };
    is_named("not shared", unshared, "target", "ServiceNotReached", "shop/till");
    let port = |scene: &mut Scene| {
        scene.ask_service("ns", "web");
        scene.question.port = Some(81);
    };
    is_named("port", port, "target", "PortNotServed", "it has 80/TCP");
    let ports = |scene: &mut Scene| {
        let mut two = service("web", "1", 11);
        let mut second = two.tables[0].1[0].clone();
        second.port = 443;
        two.tables[0].1.push(second);
        scene.world.set_service(&name("ns", "web-1"), Some(two));
        scene.ask_service("ns", "web");
        scene.question.port = None;
    };
    is_named("two ports", ports, "target", "PortNeeded", "80/TCP, 443/TCP");
    let empty = |scene: &mut Scene| {
        let mut empty = service("web", "1", 11);
        empty.tables[0].1[0].backends.clear();
        scene.world.set_service(&name("ns", "web-1"), Some(empty));
        scene.ask_service("ns", "web");
    };
    is_named("no backend", empty, "backends", "NoBackends", "ns/web");
    let elsewhere = |scene: &mut Scene| {
        let mut local = service("web", "1", 11);
        local.tables[0].1[0].local = true;
        local.homes = [(IpAddr::from([10, 0, 0, 11]), "d3".to_owned())].into();
        scene.world.set_service(&name("ns", "web-1"), Some(local));
        scene.ask_service("ns", "web");
    };
    is_named(
        "not here",
        elsewhere,
        "backends",
        "NoBackends",
        "d2 has no backend",
    );
    let denied = |scene: &mut Scene| {
        scene.policy("ns", &json!({"podSelector": {"matchLabels": {"app": "server"}}}));
        scene.ask_service("ns", "web");
    };
    is_named("denied", denied, "policies", "PolicyDenies", "ns/closed");
}

#[test]
fn of_services_with_one_address_the_one_that_has_it_counts() {
    // The Service was made again with its address, and the old one is not gone yet.
    let again = |scene: &mut Scene| {
        let mut old = service("web", "0", 11);
        old.tables[0].1[0].backends.clear();
        scene.world.set_service(&name("ns", "web-0"), Some(old));
        scene.ask_service("ns", "web");
    };
    is_fine("made again", again, &TO_SERVICE);
    // Services of both VPCs have the same address of their own.
    let own = |network: &str, uid: &str| {
        let mut own = service(network, uid, 11);
        let address = IpAddr::from([10, 0, 0, 50]);
        own.tables[0].0 = address;
        own.own_addresses = vec![address];
        own
    };
    let twins = |scene: &mut Scene| {
        let mut theirs = own("shop", "9");
        theirs.tables[0].1[0].port = 81;
        scene.world.set_service(&name("far", "a"), Some(theirs));
        scene
            .world
            .set_service(&name("ns", "own-1"), Some(own("web", "3")));
        scene.ask_address("10.0.0.50");
        scene.question.port = Some(80);
    };
    is_fine("an own address", twins, &TO_SERVICE);
    let elsewhere = |scene: &mut Scene| {
        scene.world.set_service(&name("far", "a"), Some(own("shop", "9")));
        scene.ask_address("10.0.0.50");
    };
    is_named("another VPC's", elsewhere, "target", "AddressFree", "10.0.0.50");
}

#[test]
fn droplets_and_rows_that_are_missing_are_named() {
    let suspect = |scene: &mut Scene| scene.played.suspect = Some("d3");
    is_named("suspect", suspect, "droplets", "DropletSuspect", "d3");
    let away = |scene: &mut Scene| scene.played.away = Some("d2");
    is_named("away", away, "droplets", "DropletAway", "d2");
    for (state, reason) in [
        (RowState::Unacked, "RowsMissing"),
        (RowState::NoRoom, "TableFull"),
        (RowState::Outdated, "WaitsForUpgrade"),
    ] {
        let row = |scene: &mut Scene| scene.played.row = Some(("d3", state));
        is_named(reason, row, "rows", reason, "d3");
    }
    let unknown = |scene: &mut Scene| scene.played.knows = false;
    is_named("not known", unknown, "rows", "RowsMissing", "d3 does not know d2");
    let unserved = |scene: &mut Scene| scene.played.is_served = false;
    is_named("no bouncer", unserved, "rows", "RolesNotServing", "bouncer");
    // On one droplet packets need no bouncer.
    is_fine(
        "together",
        |scene| {
            scene.played.is_served = false;
            scene.played.knows = false;
            scene.change("server", |endpoint| endpoint.droplet = "d2".into());
        },
        &WITHIN,
    );
}

#[test]
fn clients_of_shared_services_are_judged_as_such() {
    // `registry` of the VPC default, which red shares; each node is a member of that VPC.
    let shared = |scene: &mut Scene| {
        let mut default = vpc(1);
        default.host_access = true;
        scene.world.set_vpc("default", Some(default));
        scene.world.set_network("default", Some(network("default", 1)));
        scene.vpc(|red| red.shared = vec![("default".into(), "registry".into())]);
        scene.put(member("default", 4, 20, ("default", "registry-0")));
        let mut node = member("default", 2, 21, ("thuban-system", "d2"));
        (node.is_host, node.profile) = (true, None);
        scene.put(node);
        let mut registry = service("default", "3", 20);
        (registry.name, registry.tables[0].0) = ("registry".into(), "10.96.0.12".parse().unwrap());
        scene
            .world
            .set_service(&name("default", "registry-1"), Some(registry));
        scene.world.flush();
        scene.ask_service("default", "registry");
    };
    is_fine("shared", shared, &BY_NODE);
    let closed = |scene: &mut Scene| {
        shared(scene);
        scene.policy("default", &json!({"podSelector": {}}));
    };
    is_named(
        "closed",
        closed,
        "policies",
        "PolicyDenies",
        "policies of the target",
    );
    let open = |scene: &mut Scene| {
        shared(scene);
        let by = json!({"matchLabels": {"thuban.dev/by": "shared-service"}});
        let clients = json!({"namespaceSelector": {}, "podSelector": by});
        scene.policy(
            "default",
            &json!({"podSelector": {}, "ingress": [{"from": [clients]}]}),
        );
    };
    is_fine("open", open, &BY_NODE);
    let full = |scene: &mut Scene| {
        open(scene);
        scene.played.set = Some(("d4", RowState::NoRoom));
    };
    is_named("full", full, "rows", "TableFull", "droplet of the target");
    let away = |scene: &mut Scene| {
        closed(scene);
        scene.played.away = Some("d4");
    };
    is_named("away", away, "droplets", "DropletAway", "droplet of the target");
}
