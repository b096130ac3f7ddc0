use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use fastrand::Rng;
use serde_json::{Value, json};
use thuban_api::identifiers::Vni;
use thuban_proto::transit as proto;
use thuban_rows::{Class, MAX_RULES, NamedPort, PolicyPorts, PolicySet};

use super::oracle::{End, Generator, NAMESPACES, Objects, Packet, Pod, read_set};
use super::{
    Applied, BackendKind, ClassContent, Decision, Direction, Labels, Malformed, Node, Peer, Policies,
    Problem, Served, ServedBackend, ServedPort, SetContent, Touched,
};

fn labels(pairs: &[(&str, &str)]) -> Labels {
    let owned = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
    pairs.iter().map(owned).collect()
}

fn port(name: &str, protocol: u8, port: u16) -> NamedPort {
    let name = name.to_owned();
    NamedPort { name, protocol, port }
}

/// A pod of namespace red with the label app=web and two ports named http.
fn web() -> Pod {
    Pod {
        namespace: "red".to_owned(),
        labels: labels(&[("app", "web")]),
        ports: [port("http", 6, 8080), port("http", 17, 8081)].into(),
        vpc: "green".to_owned(),
        network: "front".to_owned(),
        addresses: ["10.0.0.1", "fd00::1"].map(|address| address.parse().unwrap()),
        on_host_network: false,
    }
}

impl Policies {
    fn with_network_policy(mut self, name: &str, spec: Value) -> Self {
        let spec = serde_json::from_value(spec).unwrap();
        self.set_network_policy("red", name, 0, Some(&spec)).unwrap();
        self
    }

    fn with_cluster_policy(mut self, name: &str, tier: &str, priority: i32, rules: Value) -> Self {
        let mut spec = json!({"tier": tier, "priority": priority, "subject": {"namespaces": {}}});
        if let Value::Object(rules) = rules {
            spec.as_object_mut().unwrap().extend(rules);
        }
        self.set_cluster_policy(name, Some(&serde_json::from_value(spec).unwrap()))
            .unwrap();
        self
    }

    fn web(&self) -> Applied {
        self.apply(&web().member())
    }
}

/// Returns (policy, index of the rule) of each rule.
fn places(set: Option<&SetContent>) -> Vec<(&str, u32)> {
    let rules = set.unwrap().rules.iter();
    rules.map(|rule| (&*rule.policy, rule.index)).collect()
}

fn ports(set: Option<&SetContent>) -> Vec<Vec<PolicyPorts>> {
    set.unwrap().rules.iter().map(|rule| rule.ports.clone()).collect()
}

#[test]
fn a_pod_without_policies_is_plain_and_has_no_sets() {
    let elsewhere = json!({"podSelector": {"matchLabels": {"app": "db"}}, "ingress": [{}]});
    assert_eq!(
        Policies::default().with_network_policy("db", elsewhere).web(),
        Applied::default()
    );
    let silent = Policies::default().with_cluster_policy("silent", "Admin", 0, json!({}));
    assert_eq!(silent.web(), Applied::default());
}

#[test]
fn a_policy_without_rules_isolates() {
    let applied = Policies::default().with_network_policy("closed", json!({})).web();
    let names = |set: &SetContent| {
        set.rules
            .iter()
            .map(|rule| rule.policy.to_string())
            .collect::<Vec<_>>()
    };
    let ingress = applied.ingress.unwrap();
    assert!(ingress.is_isolated && !ingress.is_egress && !ingress.says_anything());
    assert_eq!(names(&ingress), ["red/closed"], "who isolates is named");
    assert_eq!(applied.egress, None);
    let both = json!({"policyTypes": ["Ingress", "Egress"]});
    let egress = Policies::default()
        .with_network_policy("closed", both)
        .web()
        .egress
        .unwrap();
    assert!(egress.is_isolated && egress.is_egress && !egress.says_anything());
    assert_eq!(names(&egress), ["red/closed"]);
}

#[test]
fn rules_stand_by_tier_priority_name_and_index() {
    let everyone = json!([{"namespaces": {}}]);
    let rules =
        || json!({"ingress": [{"action": "Deny", "from": everyone}, {"action": "Pass", "from": everyone}]});
    let policies = Policies::default()
        .with_cluster_policy("d", "Baseline", 0, rules())
        .with_cluster_policy("c", "Admin", 2, rules())
        .with_cluster_policy("b", "Admin", 10, rules())
        .with_cluster_policy("a", "Admin", 10, rules());
    let admin = [("c", 0), ("c", 1), ("a", 0), ("a", 1), ("b", 0), ("b", 1)];
    let applied = policies.web();
    assert_eq!(
        places(applied.ingress.as_ref()),
        [&admin[..], &[("d", 0), ("d", 1)]].concat()
    );
    assert!(!applied.ingress.unwrap().is_isolated);
    let policies = policies
        .with_network_policy("y", json!({"ingress": [{}, {}]}))
        .with_network_policy("x", json!({"ingress": [{}]}));
    let applied = policies.web();
    let own = [("red/x", 0), ("red/y", 0), ("red/y", 1)];
    assert_eq!(
        places(applied.ingress.as_ref()),
        [&admin[..], &own].concat(),
        "Baseline isn't asked"
    );
    assert!(applied.ingress.unwrap().rules.is_sorted_by_key(|rule| rule.tier));
}

#[test]
fn an_ingress_rule_names_ports_of_its_own_pod() {
    let rule = |ports: Value| json!({"ports": ports});
    let policies = Policies::default().with_network_policy(
        "web",
        json!({"ingress": [
            rule(json!([{"port": "http"}, {"port": "dns"}])),
            rule(json!([{"port": "dns"}])),
            rule(json!([{"port": "http", "protocol": "SCTP"}])),
            rule(json!([{"port": "dns"}, {"port": 53}])),
        ]}),
    );
    let applied = policies.web();
    assert_eq!(places(applied.ingress.as_ref()), [("red/web", 0), ("red/web", 3)]);
    let range = |protocol, port| PolicyPorts::Range(protocol, port, port);
    assert_eq!(
        ports(applied.ingress.as_ref()),
        [vec![range(6, 8080)], vec![range(6, 53)]]
    );
    assert!(applied.class.names.is_empty(), "nobody else asks for them");
    let named = json!([{"destinationNamedPort": "http"}]);
    let named = json!({"action": "Deny", "from": [{"namespaces": {}}], "protocols": named});
    let policies = Policies::default().with_cluster_policy("guard", "Admin", 0, json!({"ingress": [named]}));
    assert_eq!(
        ports(policies.web().ingress.as_ref()),
        [vec![range(6, 8080), range(17, 8081)]]
    );
}

#[test]
fn an_egress_rule_names_ports_of_other_pods() {
    let egress = |name: &str| json!({"egress": [{"ports": [{"port": name}]}]});
    let mut policies = Policies::default()
        .with_network_policy("one", egress("http"))
        .with_network_policy("other", egress("http"))
        .with_network_policy("dns", egress("dns"));
    let applied = policies.web();
    let named = |name: &str| vec![PolicyPorts::Named(name.into(), Some(6))];
    assert_eq!(
        ports(applied.egress.as_ref()),
        [named("dns"), named("http"), named("http")]
    );
    assert_eq!(applied.class.names, web().ports);
    policies.set_network_policy("red", "one", 0, None).unwrap();
    assert_eq!(policies.web().class.names, web().ports);
    policies.set_network_policy("red", "other", 0, None).unwrap();
    assert_eq!(policies.web().class.names, BTreeSet::new());
}

#[test]
fn a_class_has_the_groups_that_some_peer_names() {
    let from = |selector: Value| json!({"ingress": [{"from": [{"podSelector": selector}]}]});
    let web_alone = json!({"matchLabels": {"app": "web"}});
    let mut policies = Policies::default()
        .with_network_policy("one", from(web_alone.clone()))
        .with_network_policy("two", from(web_alone))
        .with_network_policy("db", from(json!({"matchLabels": {"app": "db"}})));
    let groups = policies.web().class.groups;
    assert_eq!(groups.len(), 1, "a peer that two policies name is one group");
    policies.set_network_policy("red", "one", 0, None).unwrap();
    assert_eq!(policies.web().class.groups, groups);
    policies.set_network_policy("red", "two", 0, None).unwrap();
    assert!(policies.web().class.groups.is_empty());
}

#[test]
fn vpc_and_network_are_labels_that_a_pod_cannot_choose() {
    let select = |key: &str, value: &str| {
        let selector = json!({"matchLabels": {key: value}});
        let spec = json!({"podSelector": selector, "ingress": [{"from": [{"podSelector": selector}]}]});
        let mut pod = web();
        pod.labels.insert(key.to_owned(), "liar".to_owned());
        let applied = Policies::default()
            .with_network_policy("web", spec)
            .apply(&pod.member());
        let (groups, is_subject) = (applied.class.groups.len(), applied.ingress.is_some());
        assert_eq!(groups == 1, is_subject);
        is_subject
    };
    assert!(select("thuban.dev/vpc", "green") && select("thuban.dev/network", "front"));
    assert!(!select("thuban.dev/vpc", "liar") && !select("thuban.dev/network", "liar"));
}

#[test]
fn namespaces_are_selected_by_their_present_labels() {
    let blue = json!({"namespaces": {"matchLabels": {"team": "blue"}}});
    let spec = json!({"tier": "Admin", "subject": blue, "ingress": [{"action": "Deny", "from": [blue]}]});
    let mut policies = Policies::default();
    policies
        .set_cluster_policy("guard", Some(&serde_json::from_value(spec).unwrap()))
        .unwrap();
    let is_blue = |policies: &Policies| {
        let applied = policies.web();
        assert_eq!(applied.ingress.is_some(), applied.class.groups.len() == 1);
        applied.ingress.is_some()
    };
    assert!(!is_blue(&policies));
    policies.set_namespace("red", Some(labels(&[("team", "blue")])));
    assert!(is_blue(&policies));
    policies.set_namespace("red", Some(labels(&[("team", "red")])));
    assert!(!is_blue(&policies));
    policies.set_namespace("red", Some(labels(&[("team", "blue")])));
    policies.set_namespace("red", None);
    assert!(!is_blue(&policies));
}

#[test]
fn rules_of_nodes_change_with_the_nodes() {
    let nodes = json!({"nodes": {"matchLabels": {"zone": "a"}}});
    let rules = json!({"egress": [{"action": "Deny", "to": [nodes]}]});
    let mut policies = Policies::default().with_cluster_policy("guard", "Admin", 0, rules);
    assert_eq!(policies.web().egress, None, "no node, no rule");
    let node = |zone: &str, address: &str| Node {
        labels: labels(&[("zone", zone)]),
        addresses: vec![address.parse().unwrap()],
        ..Node::default()
    };
    let blocks = |policies: &Policies| {
        let egress = policies.web().egress.unwrap();
        let blocks = egress.rules[0].blocks.iter();
        blocks.map(|block| block.range.to_string()).collect::<Vec<_>>()
    };
    policies.set_nodes(vec![
        node("a", "192.0.2.1"),
        node("b", "192.0.2.2"),
        node("a", "2001:db8::3"),
    ]);
    assert_eq!(blocks(&policies), ["192.0.2.1/32", "2001:db8::3/128"]);
    policies.set_nodes(vec![node("a", "192.0.2.2")]);
    assert_eq!(blocks(&policies), ["192.0.2.2/32"]);
    policies.set_cluster_policy("guard", None).unwrap();
    policies.set_nodes(vec![node("a", "192.0.2.1")]);
    assert_eq!(policies.web().egress, None, "it doesn't come back");
}

#[test]
fn rules_of_nodes_hold_their_own_endpoints_in_their_vpc() {
    let rules = json!({"egress": [{"action": "Deny", "to": [{"nodes": {}}]}]});
    let mut policies = Policies::default().with_cluster_policy("guard", "Admin", 0, rules);
    let node = |members: &[(&str, &str)]| {
        let member = |(vpc, address): &(&str, &str)| ((*vpc).to_owned(), vec![address.parse().unwrap()]);
        Node {
            addresses: vec!["192.0.2.1".parse().unwrap()],
            members: members.iter().map(member).collect(),
            ..Node::default()
        }
    };
    let blocks = |policies: &Policies| {
        let egress = policies.web().egress.unwrap();
        let blocks = egress.rules[0].blocks.iter();
        blocks.map(|block| block.range.to_string()).collect::<Vec<_>>()
    };
    let own = web().vpc;
    policies.set_nodes(vec![node(&[(&own, "10.244.0.3"), ("other", "10.244.0.4")])]);
    assert_eq!(blocks(&policies), ["10.244.0.3/32", "192.0.2.1/32"]);
    policies.set_nodes(vec![node(&[("other", "10.244.0.3")])]);
    assert_eq!(blocks(&policies), ["192.0.2.1/32"], "here it may be a pod's");
}

#[test]
fn a_pod_on_its_hosts_network_is_in_no_policy() {
    let spec =
        json!({"ingress": [{"from": [{"podSelector": {}}]}], "egress": [{"ports": [{"port": "http"}]}]});
    let policies = Policies::default().with_network_policy("web", spec);
    assert_ne!(policies.web(), Applied::default());
    let mut pod = web();
    pod.on_host_network = true;
    assert_eq!(policies.apply(&pod.member()), Applied::default());
}

#[test]
fn a_pod_with_too_many_rules_is_closed_and_told() {
    let policies = |count: usize| {
        let rules = vec![json!({}); count];
        Policies::default().with_network_policy("many", json!({"ingress": rules, "egress": [{}]}))
    };
    let most = policies(MAX_RULES).web();
    assert_eq!(most.ingress.unwrap().rules.len(), MAX_RULES);
    assert!(most.too_many.is_empty());
    let closed = policies(MAX_RULES + 1).web();
    let ingress = closed.ingress.unwrap();
    assert!(ingress.is_isolated && ingress.rules.is_empty());
    assert_eq!(
        closed.egress.unwrap().rules.len(),
        1,
        "the other direction is as it was"
    );
    let told = &closed.too_many[..];
    assert!(matches!(told, [one] if one.direction == Direction::Ingress && one.count == MAX_RULES + 1));
}

#[test]
fn a_retained_group_stays_in_classes_until_it_is_forgotten() {
    let mut policies = Policies::that_retain();
    let spec = serde_json::from_value(json!({
        "podSelector": {"matchLabels": {"app": "db"}},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [{"from": [{"podSelector": {"matchLabels": {"app": "web"}}}]}],
        "egress": [{"ports": [{"port": "http"}]}],
    }))
    .unwrap();
    policies.set_network_policy("red", "db", 0, Some(&spec)).unwrap();
    let class = policies.web().class;
    assert_eq!((class.groups.len(), class.names.len()), (1, 2));
    assert!(policies.take_touched().all, "a port of any pod may have the name");
    policies.set_network_policy("red", "db", 0, Some(&spec)).unwrap();
    assert!(!policies.has_touched(), "nothing has changed");
    policies.set_network_policy("red", "db", 0, None).unwrap();
    assert_eq!(policies.web().class, class);
    let red = Touched {
        all: false,
        namespaces: ["red".to_owned()].into(),
        vpcs: BTreeSet::new(),
    };
    assert_eq!(policies.take_touched(), red, "the subjects");
    policies.forget_retired(&class.groups, &["http".into()].into());
    assert_eq!(policies.web().class, class, "droplets still judge by it");
    assert!(!policies.has_touched() && !policies.is_empty());
    policies.set_network_policy("red", "db", 0, Some(&spec)).unwrap();
    assert!(!policies.take_touched().all, "classes have had it all the time");
    policies.set_network_policy("red", "db", 0, None).unwrap();
    policies.take_touched();
    policies.forget_retired(&BTreeSet::new(), &BTreeSet::new());
    assert!(policies.take_touched().all && policies.is_empty());
    assert_eq!(policies.web().class, ClassContent::default());
}

#[test]
fn a_policy_that_is_removed_leaves_nothing_behind() {
    let mut random = Generator(Rng::with_seed(7));
    let objects = random.objects();
    let mut policies = objects.policies();
    for (namespace, name) in objects.network_policies.keys() {
        policies.set_network_policy(namespace, name, 0, None).unwrap();
    }
    for name in objects.cluster_policies.keys() {
        policies.set_cluster_policy(name, None).unwrap();
    }
    let Policies {
        of_nodes,
        by_name,
        shares,
        groups,
        names,
        ..
    } = policies;
    assert!(of_nodes.is_empty() && by_name.is_empty() && shares.is_empty());
    assert!(groups.0.is_empty() && names.0.is_empty());
}

fn told(set: Result<(), Malformed>) {
    if let Err(malformed) = set {
        assert!(
            matches!(malformed.problem, Problem::Unknown | Problem::DomainNames),
            "{malformed}"
        );
    }
}

/// Changes one thing, in the objects and in what is made of them.
fn change(random: &mut Generator, objects: &mut Objects, policies: &mut Policies) {
    match random.0.u8(..10) {
        0 => {
            let name = NAMESPACES[random.0.usize(..3)];
            let labels = random.namespace(name);
            policies.set_namespace(name, Some(labels.clone()));
            objects.namespaces.insert(name.to_owned(), labels);
        }
        1 => {
            objects.nodes = random.nodes();
            objects.set_nodes(policies);
        }
        2 => {
            let number = random.0.u8(..6);
            objects.pods[usize::from(number)] = random.pod(number);
        }
        _ => {
            let (namespace, name) = random.change_policy(objects);
            told(objects.set_policy(policies, namespace.as_deref(), &name));
        }
    }
}

/// How many packets were accepted and denied, of those that some policy judged.
#[derive(Debug, Default)]
struct Judged([usize; 2]);

/// Asks for one packet what the objects say and what their rows say.
fn judge(random: &mut Generator, objects: &Objects, policies: &Policies, judged: &mut Judged) {
    let packet = random.packet(objects);
    let applied = [packet.from, packet.to].map(|end| end.pod.map(|pod| policies.apply(&pod.member())));
    for is_egress in [false, true] {
        let [own, other] = if is_egress { [0, 1] } else { [1, 0] };
        let ends = [packet.from, packet.to];
        let set = applied[own].as_ref().and_then(|applied| {
            if is_egress {
                applied.egress.as_ref()
            } else {
                applied.ingress.as_ref()
            }
        });
        let class = applied[other].as_ref().map(|applied| &applied.class);
        let given = read_set(
            set,
            class,
            ends[other].address.unwrap(),
            packet.protocol,
            packet.port,
        );
        let expected = objects.accept(&packet, is_egress);
        let report = || format!("is_egress {is_egress} {packet:#?}\n{set:#?}\n{class:#?}\n{objects:#?}");
        assert_eq!(given, expected, "{}", report());
        if let Some(set) = set {
            let plain = ClassContent::default();
            let mut peer = Peer {
                class: class.unwrap_or(&plain),
                address: ends[other].address.unwrap(),
                protocol: packet.protocol,
                port: Some(packet.port),
            };
            assert_eq!(set.decide(&peer) == Decision::Accepts, given, "{}", report());
            peer.port = None;
            let without_port = set.decide(&peer);
            let is_same = (without_port == Decision::Accepts) == given;
            assert!(without_port == Decision::DependsOnPort || is_same, "{}", report());
        }
        if set.is_some() {
            judged.0[usize::from(given)] += 1;
        }
    }
}

/// Asks for one packet to a service that nodes serve what the objects say and what the sender's egress set says.
fn judge_served(random: &mut Generator, objects: &Objects, policies: &mut Policies, judged: &mut Judged) {
    let (protocol, behind) = random.backends(objects);
    let (pod, address) = loop {
        let packet = random.packet(objects);
        if let (Some(pod), None) = (packet.from.pod, packet.to.pod) {
            break (pod, packet.to.address.unwrap());
        }
    };
    let from = End {
        address: None,
        pod: Some(pod),
        by_shared_service: false,
    };
    let to = End {
        address: Some(address),
        pod: None,
        by_shared_service: false,
    };
    let packet = Packet {
        from,
        to,
        protocol,
        port: 1,
        behind: &behind,
    };
    let backends = behind.iter().map(|(end, port)| ServedBackend {
        kind: match end.pod {
            Some(pod) => BackendKind::Pod(Arc::new(policies.class(&pod.member()))),
            None => BackendKind::Outside(end.address.unwrap()),
        },
        port: *port,
    });
    let port = ServedPort {
        protocol: packet.protocol,
        port: packet.port,
        backends: backends.collect(),
    };
    let served = Served {
        address,
        ports: vec![port],
    };
    policies.set_served(&pod.vpc, vec![served]);
    let set = policies.apply(&pod.member()).egress;
    policies.set_served(&pod.vpc, Vec::new());
    let given = read_set(set.as_ref(), None, address, packet.protocol, packet.port);
    let expected = objects.accept(&packet, true);
    assert_eq!(given, expected, "{packet:#?}\n{set:#?}\n{objects:#?}");
    if set.is_some() {
        judged.0[usize::from(given)] += 1;
    }
}

/// Asserts that droplets read the rows as they are.
fn assert_readable(applied: &Applied) {
    let id = applied.class.id(0);
    let class = applied.class.row(Vni::MIN, id);
    assert_eq!(Class::try_from(proto::ClassRow::from(&class)), Ok(class));
    for set in [&applied.ingress, &applied.egress].into_iter().flatten() {
        let row = set.row(Vni::MIN, set.id(0));
        assert_eq!(PolicySet::try_from(proto::PolicySetRow::from(&row)), Ok(row));
    }
}

#[test]
fn rows_say_of_each_packet_what_the_objects_say() {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse().ok());
    let clock = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64;
    let seed = number("THUBAN_SEED").unwrap_or(clock);
    println!("THUBAN_SEED={seed}");
    let decisions = number("THUBAN_DECISIONS").unwrap_or(100_000);
    let mut random = Generator(Rng::with_seed(seed));
    let (mut judged, mut served) = (Judged::default(), Judged::default());
    for _ in 0..decisions / 400 {
        let mut objects = random.objects();
        let mut policies = objects.policies();
        for _ in 0..10 {
            change(&mut random, &mut objects, &mut policies);
            for _ in 0..20 {
                judge(&mut random, &objects, &policies, &mut judged);
            }
            for _ in 0..5 {
                judge_served(&mut random, &objects, &mut policies, &mut served);
            }
        }
        let scratch = objects.policies();
        for pod in &objects.pods {
            let applied = policies.apply(&pod.member());
            assert_readable(&applied);
            assert_eq!(applied, scratch.apply(&pod.member()), "{objects:#?}");
        }
    }
    println!("denied and accepted: {judged:?}; of services that nodes serve: {served:?}");
    let has_both = |judged: &Judged, least: usize| judged.0.iter().all(|count| *count > least);
    assert!(has_both(&judged, decisions as usize / 10), "{judged:?}");
    assert!(has_both(&served, decisions as usize / 100), "{served:?}");
}
