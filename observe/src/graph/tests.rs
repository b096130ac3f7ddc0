//! Tests of graphs: what a reader sees, and their bounds.

use thuban_common::counters::Counter;

use super::*;
use crate::flow::tests::{flow, names};
use crate::names::tests::{pod, vpc};

fn recent(flows: Vec<Flow>) -> Recent {
    Recent {
        flows: flows.into_iter().map(Arc::new).collect(),
        seconds: 60,
    }
}

fn of(namespace: &str) -> Scope {
    Scope::Namespace(namespace.to_owned())
}

fn ids(graph: &Graph) -> Vec<&str> {
    graph.nodes.iter().map(|node| node.id.as_str()).collect()
}

fn edges<'a>(graph: &'a Graph) -> Vec<(&'a str, &'a str, u64, u64)> {
    let parts = |edge: &'a Edge| (edge.from.as_str(), edge.to.as_str(), edge.packets, edge.dropped);
    graph.edges.iter().map(parts).collect()
}

fn some_flows(names: &Names) -> Recent {
    recent(vec![
        flow(names, "10.0.1.3", "10.0.2.4", Counter::SentDirect),
        flow(names, "10.0.1.3", "10.0.2.4", Counter::Delivered),
        flow(names, "10.0.1.3", "10.0.2.4", Counter::PolicyIngress),
        flow(names, "10.0.1.4", "8.8.8.8", Counter::OutsideVpc),
        flow(names, "10.0.2.4", "9.9.9.9", Counter::OutsideVpc),
    ])
}

#[test]
fn a_reader_sees_its_own_pods_and_that_others_are_withheld() {
    let mut names = names();
    names.set_divider("red-d0", "red", Some("node-b"));
    names.set_bouncer("red-web-b0", "red", "red-web", Some("node-c"));
    names.set_bouncer("red-db-b0", "red", "red-db", Some("node-c"));
    names.set_droplet("node-a", None);
    names.set_droplet("node-z", None);
    let mode = |name: &str| (name == "node-a").then_some(Mode::Drops);
    let seen = graph(&some_flows(&names), &of("red"), &names, mode);
    let expected = [
        "droplet:node-a",
        "network:red-web",
        "outside:8.8.8.8",
        "pod:red/web-0",
        "pod:red/web-1",
        "role:red-d0",
        "role:red-web-b0",
        "withheld",
    ];
    assert_eq!(ids(&seen), expected);
    let expected = [
        ("pod:red/web-0", "withheld", 6, 6),
        ("pod:red/web-1", "outside:8.8.8.8", 0, 6),
    ];
    assert_eq!(edges(&seen), expected);
    assert_eq!(seen.vpcs[0].networks, ["red-web"]);
    let state = DropletState {
        name: "node-a".to_owned(),
        connected: true,
        mode: "drops",
    };
    assert_eq!(seen.droplets, [state]);
    let text = serde_json::to_string(&seen).unwrap();
    for trace in ["blue", "db-0", "10.0.2.4", "red-db", "9.9.9.9", "node-z"] {
        assert!(!text.contains(trace), "{trace} in {text}");
    }
}

#[test]
fn a_drop_has_its_meaning_and_remedy() {
    let names = names();
    let seen = graph(&some_flows(&names), &Scope::All, &names, |_| None);
    let drop = seen
        .edges
        .iter()
        .find(|edge| edge.to == "outside:9.9.9.9")
        .unwrap();
    assert_eq!(drop.from, "pod:blue/db-0");
    let expected = Reason {
        reason: "outside_vpc".to_owned(),
        meaning: Counter::OutsideVpc.reason(),
        remedy: Counter::OutsideVpc.remedy(),
        packets: 6,
    };
    assert_eq!(drop.reasons, [expected]);
    assert!(!seen.truncated);
}

#[test]
fn pods_of_many_networks_are_shown_as_their_networks() {
    let mut names = Names::default();
    names.set_vpc("red", vpc(7, &["10.0.0.0/8"]));
    for number in 0..=MAX_NETWORKS {
        let network = format!("net-{number}");
        names.set_network(&network, "red", None, None);
        let name = format!("pod-{number}");
        let address = format!("10.1.{number}.2");
        names.set_endpoint(
            &format!("red/{name}"),
            &pod("red", &name, "red", &network, &address),
        );
    }
    let flows = vec![
        flow(&names, "10.1.0.2", "10.1.1.2", Counter::SentDirect),
        flow(&names, "10.1.0.2", "8.8.8.8", Counter::ToHost),
    ];
    let seen = graph(&recent(flows), &of("red"), &names, |_| None);
    assert!(seen.truncated && seen.vpcs[0].truncated);
    let expected = [
        ("network:net-0", "network:net-1", 6, 0),
        ("network:net-0", "outside", 6, 0),
    ];
    assert_eq!(edges(&seen), expected);
    assert!(seen.nodes.iter().all(|node| node.kind != "pod"));
}

#[test]
fn the_size_of_a_graph_is_bounded() {
    let mut names = Names::default();
    names.set_vpc("red", vpc(7, &["10.0.0.0/8"]));
    names.set_network("net", "red", None, None);
    for number in 0..MAX_NODES {
        let (name, address) = (
            format!("pod-{number}"),
            format!("10.1.{}.{}", number / 200, number % 200),
        );
        names.set_endpoint(&format!("red/{name}"), &pod("red", &name, "red", "net", &address));
    }
    let mut flows = Vec::new();
    for number in 0..4 * MAX_NODES {
        let from = format!("10.1.{}.{}", number % MAX_NODES / 200, number % 200);
        let to = format!("203.0.{}.{}", number / 200, number % 200);
        flows.push(flow(&names, &from, &to, Counter::ToHost));
        let peer = format!("10.1.{}.{}", number * 7 % MAX_NODES / 200, number * 7 % 200);
        flows.push(flow(&names, &from, &peer, Counter::DeliveredLocal));
    }
    let seen = graph(&recent(flows), &Scope::All, &names, |_| None);
    assert!(seen.nodes.len() <= 2 * MAX_NODES);
    assert!(seen.edges.len() <= MAX_EDGES);
    let outside = seen.nodes.iter().filter(|node| node.kind == "outside").count();
    assert_eq!(outside, MAX_ADDRESSES + 1, "all others are one node");
}

#[test]
fn an_address_without_a_name_is_unknown_within_its_vpc() {
    let names = names();
    let lost = recent(vec![flow(&names, "10.0.1.3", "10.0.2.99", Counter::NoEndpoint)]);
    let seen = graph(&lost, &of("red"), &names, |_| None);
    let node = seen.nodes.iter().find(|node| node.kind == "unknown").unwrap();
    assert_eq!(node.id, "unknown:red/10.0.2.99");
    assert_eq!(node.vpc.as_deref(), Some("red"));
}
