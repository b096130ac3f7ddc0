//! Tests of what readers see. Random flows of two namespaces show that a reader of one gets no byte of the other.

use std::sync::Arc;

use serde_json::{Value, json};
use thuban_common::counters::Counter;

use super::*;
use crate::flow::Denier;
use crate::flow::tests::{flow, names};
use crate::names::Names;
use crate::names::tests::{pod, vpc};

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

/// Endpoints of three namespaces in two VPCs with equal ranges. What is of `blue` has `blue` or `azure` in its name,
/// and addresses from 10.0.99.0/24.
fn many_names() -> Names {
    let mut names = Names::default();
    names.set_vpc("shared", vpc(7, &["10.0.0.0/16"]));
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

#[test]
fn no_byte_of_another_namespace_reaches_a_reader() {
    let names = many_names();
    let mut random = fastrand::Rng::with_seed(25);
    let (mut seen, mut withheld) = (0, 0);
    for _ in 0..20_000 {
        let mut address = || match random.u8(..4) {
            0 => format!("10.0.1.{}", random.u8(..20)),
            1 => format!("203.0.113.{}", random.u8(..)),
            _ => format!("10.0.99.{}", random.u8(..20)),
        };
        let (from, to) = (address(), address());
        let counter = Counter::ALL[random.usize(..Counter::ALL.len())];
        let mut told = flow(&names, &from, &to, counter);
        let is_blue = |end: &End| end.who.as_ref().is_some_and(|who| who.is_of("blue"));
        // A droplet tells of its own endpoints.
        told.droplet = if is_blue(&told.to) { "node-azure" } else { "node-a" }.into();
        told.next = is_blue(&told.to).then(|| "node-azure".into());
        told.denied_by = Some(Arc::new(Denier {
            policy: "blue/azure-policy".into(),
            rule: 1,
        }));
        let (scope, filter) = (of("red"), Filter::default());
        if !accepts(&scope, filter, &told) {
            continue;
        }
        let text = line(&told, &scope).to_string();
        for trace in ["blue", "azure", "10.0.99."] {
            assert!(!text.contains(trace), "{trace} in {text}");
        }
        seen += 1;
        withheld += usize::from(text.contains("withheld"));
    }
    assert!(
        seen > 1_000 && withheld > 1_000,
        "{seen} seen, {withheld} of them withheld in part"
    );
}
