//! Tests of what readers see. Random flows of two namespaces show that a reader of one gets no byte of the other.

use std::sync::Arc;

use serde_json::{Value, json};
use thuban_common::counters::Counter;

use super::*;
use crate::flow::Denier;
use crate::flow::tests::{flow, names};
use crate::graph::graph;
use crate::names::Names;
use crate::names::tests::{pod, vpc};
use crate::reports::validation::Mode;
use crate::series::Series;
use crate::store::Recent;
use crate::top::{By, top};

fn of(namespace: &str) -> Scope {
    Scope::Namespace(namespace.to_owned())
}

fn line(flow: &Flow, scope: &Scope) -> Value {
    let mut text = Vec::new();
    write_line(&mut text, flow, scope);
    assert_eq!(text.pop(), Some(b'\n'));
    assert!(!text.contains(&b'\n'), "one line");
    serde_json::from_slice(&text).unwrap()
}

fn accepts(scope: &Scope, filter: Filter, flow: &Flow) -> bool {
    let query = Query {
        scope: scope.clone(),
        filter,
    };
    query.accepts(flow)
}

#[test]
fn a_reader_of_all_sees_both_ends() {
    let mut told = flow(&names(), "10.0.1.3", "10.0.2.4", Counter::SentDirect);
    told.denied_by = Some(Arc::new(Denier {
        policy: "blue/db".into(),
        rule: 2,
    }));
    let expected = json!({
        "time_unix_ms": 1000, "event": "first", "vpc": "red", "vni": 7,
        "from": {"namespace": "red", "pod": "web-0", "address": "10.0.1.3", "port": 40112, "network": "red-web"},
        "to": {"namespace": "blue", "pod": "db-0", "address": "10.0.2.4", "port": 5432, "network": "red-db"},
        "protocol": "tcp", "packets": 6, "bytes": 4200, "tcp_flags": ["SYN", "ACK"],
        "verdict": "passed", "reason": "sent_direct", "droplet": "node-a", "next": "node-c",
        "denied_by": {"policy": "blue/db", "rule": 2},
    });
    assert_eq!(line(&told, &Scope::All), expected);
}

#[test]
fn an_end_in_another_namespace_is_withheld() {
    let mut told = flow(&names(), "10.0.1.3", "10.0.2.4", Counter::PolicyIngress);
    told.denied_by = Some(Arc::new(Denier {
        policy: "blue/db".into(),
        rule: 2,
    }));
    let seen = line(&told, &of("red"));
    assert_eq!(seen["from"]["pod"], "web-0");
    assert_eq!(seen["to"], json!({"withheld": true}));
    assert_eq!((&seen["next"], &seen["denied_by"]), (&Value::Null, &Value::Null));
    assert_eq!(seen["droplet"], "node-a", "web-0 is there");
    told.droplet = "node-c".into();
    assert_eq!(
        line(&told, &of("red"))["droplet"],
        "",
        "the place of the other end"
    );
    assert_eq!(line(&told, &of("blue"))["from"], json!({"withheld": true}));
    assert!(!of("green").sees(&told), "both ends are withheld");
}

#[test]
fn what_is_in_no_namespace_is_shown_to_who_has_the_other_end() {
    let mut names = names();
    let node = crate::names::Member {
        kind: Kind::Node,
        namespace: None,
        ..pod("", "node-b", "red", "red-web", "10.0.0.2")
    };
    names.set_endpoint("thuban-system/node-b", &node);
    let outside = flow(&names, "10.0.1.3", "8.8.8.8", Counter::OutsideVpc);
    let seen = line(&outside, &of("red"));
    let expected = json!({
        "namespace": null, "pod": null, "outside": true, "address": "8.8.8.8", "port": 5432, "network": null,
    });
    assert_eq!(seen["to"], expected);
    assert_eq!(
        (&seen["verdict"], &seen["reason"]),
        (&json!("dropped"), &json!("outside_vpc"))
    );
    let nobody = line(
        &flow(&names, "10.0.1.3", "10.0.2.99", Counter::NoEndpoint),
        &of("red"),
    );
    assert_eq!(
        (&nobody["to"]["pod"], &nobody["to"]["outside"]),
        (&Value::Null, &Value::Null)
    );
    let probe = flow(&names, "10.0.0.2", "10.0.1.3", Counter::DeliveredLocal);
    assert_eq!(line(&probe, &of("red"))["from"]["node"], "node-b");
    let others = flow(&names, "10.0.0.2", "8.8.8.8", Counter::ToHost);
    assert!(!of("red").sees(&others), "no end is the namespace's");
    assert!(Scope::All.sees(&others));
}

#[test]
fn filters_choose_by_pod_peer_verdict_and_vpc() {
    let told = flow(&names(), "10.0.1.3", "10.0.1.4", Counter::SentDirect);
    let named = |namespace: &str, name: &str| {
        Some(Peer::Named {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
        })
    };
    let at = |address: &str| Some(Peer::Address(address.parse().unwrap()));
    let pod = |name: &str| Some(name.to_owned());
    let accepted = |vpc: Option<&str>, pod, peer, is_dropped| {
        let filter = Filter {
            vpc: vpc.map(str::to_owned),
            pod,
            peer,
            is_dropped,
        };
        accepts(&of("red"), filter, &told)
    };
    assert!(accepted(None, None, None, None));
    assert!(accepted(
        Some("red"),
        pod("web-0"),
        named("red", "web-1"),
        Some(false)
    ));
    assert!(
        accepted(None, pod("web-1"), at("10.0.1.3"), None),
        "in both directions"
    );
    assert!(
        !accepted(None, pod("web-1"), at("10.0.1.4"), None),
        "it is no peer of itself"
    );
    assert!(!accepted(Some("blue"), None, None, None));
    assert!(!accepted(None, pod("web-2"), None, None));
    assert!(!accepted(None, None, named("blue", "web-1"), None));
    assert!(!accepted(None, None, None, Some(true)));
}

#[test]
fn filters_tell_nothing_of_what_is_withheld() {
    let told = flow(&names(), "10.0.1.3", "10.0.2.4", Counter::SentDirect);
    let peers = [
        Peer::Address("10.0.2.4".parse().unwrap()),
        Peer::Named {
            namespace: "blue".to_owned(),
            name: "db-0".to_owned(),
        },
    ];
    for peer in peers {
        let filter = Filter {
            peer: Some(peer),
            ..Filter::default()
        };
        assert!(accepts(&Scope::All, filter.clone(), &told));
        assert!(
            !accepts(&of("blue"), filter.clone(), &told),
            "it is the own end, not the peer"
        );
        assert!(!accepts(&of("red"), filter, &told));
    }
    let pod = Filter {
        pod: Some("db-0".to_owned()),
        ..Filter::default()
    };
    assert!(!accepts(&of("red"), pod.clone(), &told));
    assert!(accepts(&of("blue"), pod, &told));
}

#[test]
fn a_service_shows_no_vpc_that_shares_it() {
    let mut names = Names::default();
    names.set_vpc("default", vpc(1, &["10.244.0.0/16"]));
    names.set_vpc("azure", vpc(7, &["10.0.0.0/16"]));
    names.set_endpoint("blue/web", &pod("blue", "web", "azure", "azure-web", "10.0.1.3"));
    let dns = crate::names::Member {
        kind: Kind::Service,
        droplet: None,
        ..pod("kube-system", "kube-dns", "default", "default", "10.96.0.10")
    };
    names.set_endpoint("kube-system/kube-dns", &dns);
    let asked = flow(&names, "10.0.1.3", "10.96.0.10", Counter::SentDirect);
    let owner = of("kube-system");
    let seen = line(&asked, &owner);
    assert_eq!(seen["to"]["service"], "kube-system/kube-dns");
    assert_eq!((&seen["vpc"], &seen["vni"]), (&Value::Null, &Value::Null));
    assert_eq!(line(&asked, &of("blue"))["vpc"], "azure");
    let of_vpc = Filter {
        vpc: Some("azure".to_owned()),
        ..Filter::default()
    };
    assert!(!accepts(&owner, of_vpc.clone(), &asked), "no filter tells it");
    assert!(accepts(&of("blue"), of_vpc, &asked));
    let recent = Recent {
        flows: vec![Arc::new(asked)],
        seconds: 60,
    };
    let tops = By::ALL.map(|by| top(&recent, &owner, by));
    let graph = graph(&recent, &owner, &names, |_| None);
    let text = json!({"tops": tops, "graph": graph}).to_string();
    assert!(text.contains("kube-dns") && !text.contains("azure"), "{text}");
}

#[test]
fn an_end_that_may_be_anothers_is_withheld() {
    let mut told = flow(&names(), "10.0.2.99", "10.0.1.3", Counter::Delivered);
    told.from.is_doubtful = true;
    assert_eq!(line(&told, &of("red"))["from"], json!({"withheld": true}));
    assert_eq!(line(&told, &Scope::All)["from"]["address"], "10.0.2.99");
    let peer = Filter {
        peer: Some(Peer::Address("10.0.2.99".parse().unwrap())),
        ..Filter::default()
    };
    assert!(!accepts(&of("red"), peer.clone(), &told));
    assert!(accepts(&Scope::All, peer, &told));
}

/// Endpoints of two namespaces in one VPC. What is of `blue` has `blue` or `azure` in its name,
/// and addresses from 10.0.99.0/24.
fn many_names() -> Names {
    let mut names = Names::default();
    names.set_vpc("shared", vpc(7, &["10.0.0.0/16"]));
    names.set_divider("shared-d0", "shared", Some("node-a"));
    for (network, droplet) in [("net-a", "node-a"), ("net-azure", "node-azure")] {
        names.set_network(network, "shared", Some(252), Some(20));
        names.set_bouncer(&format!("{network}-b0"), "shared", network, Some(droplet));
        names.set_droplet(droplet, None);
    }
    for number in 0..20 {
        let red = pod(
            "red",
            &format!("web-{number}"),
            "shared",
            "net-a",
            &format!("10.0.1.{number}"),
        );
        names.set_endpoint(&format!("red/web-{number}"), &red);
        let mut blue = pod(
            "blue",
            &format!("azure-{number}"),
            "shared",
            "net-azure",
            &format!("10.0.99.{number}"),
        );
        blue.droplet = Some("node-azure".to_owned());
        if number % 3 == 0 {
            blue.kind = Kind::Service;
            blue.droplet = None;
        }
        names.set_endpoint(&format!("blue/azure-{number}"), &blue);
    }
    names
}

/// A random flow between endpoints of both namespaces and addresses outside, as a droplet tells of it.
fn random_flow(random: &mut fastrand::Rng, names: &Names) -> Flow {
    let mut address = || match random.u8(..4) {
        0 => format!("10.0.1.{}", random.u8(..20)),
        1 => format!("203.0.113.{}", random.u8(..)),
        _ => format!("10.0.99.{}", random.u8(..20)),
    };
    let (from, to) = (address(), address());
    let counter = Counter::ALL[random.usize(..Counter::ALL.len())];
    let mut told = flow(names, &from, &to, counter);
    let is_to_blue = told.to.who.as_ref().is_some_and(|who| who.is_of("blue"));
    // A droplet tells of its own endpoints.
    let droplet = if is_to_blue { "node-azure" } else { "node-a" };
    told.droplet = droplet.into();
    told.next = is_to_blue.then(|| "node-azure".into());
    told.denied_by = Some(Arc::new(Denier {
        policy: "blue/azure-policy".into(),
        rule: 1,
    }));
    told
}

fn assert_nothing_of_blue(text: &str) {
    for trace in ["blue", "azure", "10.0.99."] {
        assert!(!text.contains(trace), "{trace} in {text}");
    }
}

#[test]
fn no_byte_of_another_namespace_reaches_a_reader() {
    let names = many_names();
    let mut random = fastrand::Rng::with_seed(25);
    let scope = of("red");
    let (mut seen, mut withheld) = (0, 0);
    for _ in 0..20_000 {
        let told = random_flow(&mut random, &names);
        if accepts(&scope, Filter::default(), &told) {
            let text = line(&told, &scope).to_string();
            assert_nothing_of_blue(&text);
            seen += 1;
            withheld += usize::from(text.contains("withheld"));
        }
    }
    assert!(
        seen > 1_000 && withheld > 1_000,
        "{seen} seen, {withheld} of them withheld in part"
    );
}

#[test]
fn no_sum_of_a_reader_has_a_byte_of_another_namespace() {
    let names = many_names();
    let mut random = fastrand::Rng::with_seed(26);
    for _ in 0..20 {
        let flows: Vec<_> = (0..500)
            .map(|_| Arc::new(random_flow(&mut random, &names)))
            .collect();
        let series = Series::default();
        series.add(flows.iter().map(AsRef::as_ref));
        let recent = Recent { flows, seconds: 60 };
        let made = |scope: &Scope| {
            let graph = graph(&recent, scope, &names, |_| Some(Mode::All));
            let tops: Vec<_> = By::ALL.into_iter().map(|by| top(&recent, scope, by)).collect();
            let json = json!({"graph": graph, "tops": tops}).to_string();
            json + &series.page(scope, &names)
        };
        assert_nothing_of_blue(&made(&of("red")));
        assert!(made(&Scope::All).contains("azure"), "the test can find it");
    }
}
