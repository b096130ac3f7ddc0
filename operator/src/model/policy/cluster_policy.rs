//! ClusterNetworkPolicy: rules of administrators, before NetworkPolicies (tier Admin) and behind them (Baseline).

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use thuban_api::cluster_network_policy::{
    ClusterNetworkPolicyEgressPeer, ClusterNetworkPolicyEgressRule, ClusterNetworkPolicyIngressPeer,
    ClusterNetworkPolicyIngressRule, ClusterNetworkPolicyProtocol, ClusterNetworkPolicySpec, NamespacedPod,
    Port, PortsOfProtocol, RuleAction, Tier,
};
use thuban_rows::{Block, PolicyAction, PolicyPorts, PolicyTier};

use super::compiled::{Compiled, Direction, Draft, Peers, network, port};
use super::group::{Group, Namespaces};
use super::malformed::{Malformed, Problem, each};
use super::selector::{Labels, Selector};

/// A node, as rules see it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Node {
    pub labels: Labels,
    /// Those of its status.
    pub addresses: Vec<IpAddr>,
    /// Those of its own endpoints, by VPC. In other VPCs pods may have the same addresses.
    pub members: BTreeMap<String, Vec<IpAddr>>,
}

impl Node {
    /// Yields the addresses by which pods of a VPC reach the node; none: of a VPC where it has no endpoint.
    fn addresses_in(&self, vpc: Option<&str>) -> impl Iterator<Item = IpAddr> {
        let own = vpc.and_then(|vpc| self.members.get(vpc)).into_iter().flatten();
        self.addresses.iter().chain(own).map(IpAddr::to_canonical)
    }
}

pub fn compile(name: &str, spec: &ClusterNetworkPolicySpec, nodes: &[Node]) -> Compiled {
    let mut compiled = compile_in(None, name, spec, nodes);
    if let (Some(policy), true) = (&mut compiled.policy, is_of_nodes(spec)) {
        let vpcs: BTreeSet<&String> = nodes.iter().flat_map(|node| node.members.keys()).collect();
        for vpc in vpcs {
            let own = compile_in(Some(vpc), name, spec, nodes).policy;
            policy.egress_in.extend(own.map(|own| (vpc.clone(), own.egress)));
        }
    }
    compiled
}

/// Reads a policy for pods of a VPC; none: of a VPC in which no node has an endpoint.
fn compile_in(vpc: Option<&str>, name: &str, spec: &ClusterNetworkPolicySpec, nodes: &[Node]) -> Compiled {
    let tier = match spec.tier {
        Tier::Admin => PolicyTier::Admin,
        Tier::Baseline => PolicyTier::Baseline,
        Tier::Unknown => return Compiled::not_in_force(Malformed::new("spec.tier", Problem::Tier)),
    };
    let subject = match group(spec.subject.namespaces.as_ref(), spec.subject.pods.as_ref()) {
        Ok(subject) => subject,
        Err(problem) => return Compiled::not_in_force(problem.within("spec.subject")),
    };
    let mut compiled = Compiled::new(name.to_owned(), tier, spec.priority, subject);
    for (index, rule) in spec.ingress.iter().enumerate() {
        let action = compiled.action(Direction::Ingress, index, rule.action);
        compiled.add(Direction::Ingress, index, action, ingress(rule));
    }
    for (index, rule) in spec.egress.iter().enumerate() {
        let action = compiled.action(Direction::Egress, index, rule.action);
        let mut read = egress(rule, vpc, nodes);
        let place = rule.to.iter().position(|peer| !peer.domain_names.is_empty());
        if let Some(place) = place.filter(|_| read.is_ok()) {
            let problem = Malformed::new(format!("to[{place}].domainNames"), Problem::DomainNames);
            // The other peers of an Accept still count.
            if action == PolicyAction::Accept {
                compiled.note(problem.within(format_args!("spec.egress[{index}]")));
            } else {
                read = Err(problem);
            }
        }
        compiled.add(Direction::Egress, index, action, read);
    }
    compiled
}

/// Whether the policy changes with the nodes.
pub fn is_of_nodes(spec: &ClusterNetworkPolicySpec) -> bool {
    let mut peers = spec.egress.iter().flat_map(|rule| &rule.to);
    peers.any(|peer| peer.nodes.is_some())
}

impl Compiled {
    /// Reads an action. One that isn't known denies what the rule matches.
    fn action(&mut self, direction: Direction, index: usize, action: RuleAction) -> PolicyAction {
        match action {
            RuleAction::Accept => PolicyAction::Accept,
            RuleAction::Deny => PolicyAction::Deny,
            RuleAction::Pass => PolicyAction::Pass,
            RuleAction::Unknown => {
                self.note(Malformed::new(
                    format!("spec.{direction}[{index}].action"),
                    Problem::Action,
                ));
                PolicyAction::Deny
            }
        }
    }
}

fn ingress(rule: &ClusterNetworkPolicyIngressRule) -> Result<Draft, Malformed> {
    let read = |peer: &ClusterNetworkPolicyIngressPeer| {
        let group = group(peer.namespaces.as_ref(), peer.pods.as_ref())?;
        Ok(Arc::new(group.into_peer()))
    };
    let peers = Peers {
        groups: each("from", at_least_one("from", &rule.from)?, read)?
            .into_iter()
            .collect(),
        ..Peers::default()
    };
    let ports = each("protocols", &rule.protocols, read_ports)?;
    Ok(Draft { peers, ports })
}

fn egress(
    rule: &ClusterNetworkPolicyEgressRule,
    vpc: Option<&str>,
    nodes: &[Node],
) -> Result<Draft, Malformed> {
    let mut peers = Peers::default();
    each("to", at_least_one("to", &rule.to)?, |peer| {
        add_peer(peer, vpc, nodes, &mut peers)
    })?;
    let ports = each("protocols", &rule.protocols, read_ports)?;
    Ok(Draft { peers, ports })
}

fn at_least_one<'a, T>(field: &str, peers: &'a [T]) -> Result<&'a [T], Malformed> {
    if peers.is_empty() {
        return Err(Malformed::new(field, Problem::NoPeers));
    }
    Ok(peers)
}

fn add_peer(
    peer: &ClusterNetworkPolicyEgressPeer,
    vpc: Option<&str>,
    nodes: &[Node],
    peers: &mut Peers,
) -> Result<(), Malformed> {
    let ClusterNetworkPolicyEgressPeer {
        namespaces,
        pods,
        nodes: of_nodes,
        networks,
        domain_names,
    } = peer;
    match (of_nodes, networks.is_empty(), domain_names.is_empty()) {
        (None, true, true) => {
            peers
                .groups
                .insert(Arc::new(group(namespaces.as_ref(), pods.as_ref())?.into_peer()));
        }
        _ if namespaces.is_some() || pods.is_some() => return Err(Malformed::new("", Problem::Unknown)),
        (Some(selector), true, true) => {
            let selector = Selector::of_field(selector, "nodes")?;
            let selected = nodes.iter().filter(|node| selector.matches(&node.labels));
            let addresses = selected.flat_map(|node| node.addresses_in(vpc));
            peers.blocks.extend(addresses.map(|address| of(address.into())));
        }
        (None, false, true) => peers.blocks.extend(each("networks", networks, |text| {
            let malformed = || Malformed::new("", Problem::Network(text.clone()));
            network(text).map(of).ok_or_else(malformed)
        })?),
        (None, true, false) => {}
        _ => return Err(Malformed::new("", Problem::Unknown)),
    }
    Ok(())
}

const fn of(range: IpNet) -> Block {
    let except = Vec::new();
    Block { range, except }
}

/// Reads a peer or subject, which has one of the fields.
fn group(namespaces: Option<&LabelSelector>, pods: Option<&NamespacedPod>) -> Result<Group, Malformed> {
    let (namespaces, pods) = match (namespaces, pods) {
        (Some(namespaces), None) => (Selector::of_field(namespaces, "namespaces")?, Selector::default()),
        (None, Some(pods)) => (
            Selector::of_field(&pods.namespace_selector, "pods.namespaceSelector")?,
            Selector::of_field(&pods.pod_selector, "pods.podSelector")?,
        ),
        _ => return Err(Malformed::new("", Problem::Unknown)),
    };
    Ok(Group::new(Namespaces::Selected(namespaces), pods))
}

fn read_ports(given: &ClusterNetworkPolicyProtocol) -> Result<PolicyPorts, Malformed> {
    let ClusterNetworkPolicyProtocol {
        tcp,
        udp,
        sctp,
        destination_named_port: name,
    } = given;
    let (protocol, ports, field) = match (tcp, udp, sctp, name.as_str()) {
        (Some(ports), None, None, "") => (6, ports, "tcp"),
        (None, Some(ports), None, "") => (17, ports, "udp"),
        (None, None, Some(ports), "") => (132, ports, "sctp"),
        (None, None, None, name) if !name.is_empty() => return Ok(PolicyPorts::Named(name.into(), None)),
        _ => return Err(Malformed::new("", Problem::Unknown)),
    };
    let (first, last) =
        range(ports).map_err(|malformed| malformed.within(format_args!("{field}.destinationPort")))?;
    Ok(PolicyPorts::Range(protocol, first, last))
}

fn range(ports: &PortsOfProtocol) -> Result<(u16, u16), Malformed> {
    // The API allows no protocol without a port: what stands there instead, a later version must have added.
    let Some(Port { number, range }) = &ports.destination_port else {
        return Err(Malformed::new("", Problem::Unknown));
    };
    match (number, range) {
        (Some(number), None) => {
            let number = port(*number).map_err(|malformed| malformed.within("number"))?;
            Ok((number, number))
        }
        (None, Some(range)) => {
            let first = port(range.start).map_err(|malformed| malformed.within("range.start"))?;
            let last = port(range.end).map_err(|malformed| malformed.within("range.end"))?;
            if last < first {
                return Err(Malformed::new("range.end", Problem::LastPort));
            }
            Ok((first, last))
        }
        _ => Err(Malformed::new("", Problem::Unknown)),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use thuban_rows::{PolicyAction, PolicyPorts, PolicyRule, PolicyTier};

    use super::super::compiled::Compiled;
    use super::{Group, Namespaces, Node, Selector, compile, is_of_nodes};

    fn read(spec: Value) -> Compiled {
        let node = |zone: &str, addresses: [&str; 2]| Node {
            labels: [("zone".to_owned(), zone.to_owned())].into(),
            addresses: addresses.map(|address| address.parse().unwrap()).into(),
            ..Node::default()
        };
        let nodes = [
            node("a", ["192.0.2.1", "2001:db8::1"]),
            node("b", ["192.0.2.2", "::ffff:192.0.2.3"]),
        ];
        compile("guard", &serde_json::from_value(spec).unwrap(), &nodes)
    }

    fn spec(tier: &str, ingress: &Value, egress: &Value) -> Value {
        let subject = json!({"namespaces": {}});
        json!({"tier": tier, "priority": 7, "subject": subject, "ingress": ingress, "egress": egress})
    }

    /// Returns the rule that stands behind another one.
    fn second(
        action: &str,
        list: &str,
        peer: &Value,
        protocols: &Value,
        tier: &str,
    ) -> Result<PolicyRule, String> {
        let first = json!({"action": "Accept", list: [{"namespaces": {}}]});
        let rules = json!([first, {"action": action, list: [peer], "protocols": protocols}]);
        let (is_egress, none) = (list == "to", json!([]));
        let (ingress, egress) = if is_egress {
            (&none, &rules)
        } else {
            (&rules, &none)
        };
        let compiled = read(spec(tier, ingress, egress));
        let policy = compiled.policy.unwrap();
        let rules = if is_egress { policy.egress } else { policy.ingress }.unwrap();
        let rule = rules
            .iter()
            .find(|rule| rule.index == 1)
            .map(|rule| (**rule).clone());
        match (compiled.problem, rule) {
            (None, Some(rule)) => Ok(rule),
            (problem, rule) => Err(format!("{} {rule:?}", problem.unwrap())),
        }
    }

    fn selector(value: Value) -> Selector {
        Selector::read(&serde_json::from_value(value).unwrap()).unwrap()
    }

    #[test]
    fn peers_are_groups_or_blocks() {
        let app = json!({"matchLabels": {"app": "web"}});
        let team = json!({"matchLabels": {"team": "red"}});
        let rule = |list: &str, peer: &Value| second("Deny", list, peer, &json!([]), "Admin").unwrap();
        let selected = || Namespaces::Selected(selector(team.clone()));
        for list in ["from", "to"] {
            let all = Group::new(selected(), Selector::default());
            assert_eq!(rule(list, &json!({"namespaces": team})).groups, [all.id()].into());
            let pods = json!({"namespaceSelector": team, "podSelector": app});
            let some = Group::new(selected(), selector(app.clone()));
            assert_eq!(rule(list, &json!({"pods": pods})).groups, [some.id()].into());
        }
        let blocks = |peer: &Value| {
            let rule = rule("to", peer);
            assert!(!rule.anyone && rule.groups.is_empty());
            rule.blocks
                .iter()
                .map(|block| block.range.to_string())
                .collect::<Vec<_>>()
        };
        assert_eq!(
            blocks(&json!({"networks": ["fd00::/8", "10.1.2.3/8"]})),
            ["10.0.0.0/8", "fd00::/8"]
        );
        let node = |zone: &str| json!({"nodes": {"matchLabels": {"zone": zone}}});
        assert_eq!(blocks(&node("a")), ["192.0.2.1/32", "2001:db8::1/128"]);
        assert_eq!(blocks(&node("b")), ["192.0.2.2/32", "192.0.2.3/32"]);
        assert_eq!(blocks(&json!({"nodes": {}})).len(), 4);
    }

    #[test]
    fn protocols_are_ports_ranges_or_names() {
        let ports = |protocols: Value| {
            let peer = json!({"namespaces": {}});
            second("Deny", "from", &peer, &protocols, "Admin").unwrap().ports
        };
        assert_eq!(ports(json!([])), []);
        let number = json!({"destinationPort": {"number": 53}});
        assert_eq!(ports(json!([{"udp": number}])), [PolicyPorts::Range(17, 53, 53)]);
        let range = json!({"destinationPort": {"range": {"start": 1, "end": 9}}});
        let name = json!({"destinationNamedPort": "http"});
        assert_eq!(
            ports(json!([name, {"sctp": range}, name])),
            [
                PolicyPorts::Range(132, 1, 9),
                PolicyPorts::Named("http".into(), None)
            ]
        );
    }

    #[test]
    fn rules_stand_in_their_policys_tier() {
        let rule = |action, tier| {
            second(action, "from", &json!({"namespaces": {}}), &json!([]), tier)
                .map(|rule| (rule.tier, rule.action))
        };
        assert_eq!(
            rule("Accept", "Admin"),
            Ok((PolicyTier::Admin, PolicyAction::Accept))
        );
        assert_eq!(rule("Pass", "Admin"), Ok((PolicyTier::Admin, PolicyAction::Pass)));
        assert_eq!(
            rule("Deny", "Baseline"),
            Ok((PolicyTier::Baseline, PolicyAction::Deny))
        );
        let passed = rule("Pass", "Baseline");
        assert_eq!(
            passed,
            Ok((PolicyTier::Baseline, PolicyAction::Accept)),
            "all is accepted behind it"
        );
    }

    #[test]
    fn what_is_not_understood_fails_closed_and_is_told() {
        let told = |list: &str, peer: Value, protocols: Value, field: &str| {
            let direction = if list == "to" { "egress" } else { "ingress" };
            let field = format!("spec.{direction}[1].{field}: ");
            let error = second("Accept", list, &peer, &protocols, "Admin").unwrap_err();
            assert!(error.starts_with(&field) && error.ends_with("None"), "{error}");
            for (action, tier) in [("Deny", "Admin"), ("Pass", "Admin"), ("Pass", "Baseline")] {
                let error = second(action, list, &peer, &protocols, tier).unwrap_err();
                assert!(error.starts_with(&field), "{error}");
                let all = "index: 1, anyone: true, groups: {}, blocks: [], ports: [] })";
                assert!(error.contains("action: Deny") && error.ends_with(all), "{error}");
            }
        };
        let all = || json!({"namespaces": {}});
        let bad = json!({"matchExpressions": [{"key": "a", "operator": "Like"}]});
        let path = "matchExpressions[0].operator";
        for (list, none) in [("from", json!({"nodes": {}})), ("to", json!({"services": {}}))] {
            told(list, none, json!([]), &format!("{list}[0]"));
            told(
                list,
                json!({"namespaces": {}, "pods": {}}),
                json!([]),
                &format!("{list}[0]"),
            );
            told(
                list,
                json!({"namespaces": bad}),
                json!([]),
                &format!("{list}[0].namespaces.{path}"),
            );
            let pods = json!({"namespaceSelector": bad, "podSelector": {}});
            told(
                list,
                json!({"pods": pods}),
                json!([]),
                &format!("{list}[0].pods.namespaceSelector.{path}"),
            );
            let pods = json!({"namespaceSelector": {}, "podSelector": bad});
            told(
                list,
                json!({"pods": pods}),
                json!([]),
                &format!("{list}[0].pods.podSelector.{path}"),
            );
            told(list, all(), json!([{}]), "protocols[0]");
            told(list, all(), json!([{"tcp": {}, "udp": {}}]), "protocols[0]");
            for port in [
                json!({}),
                json!({"destinationPort": {}}),
                json!({"sourcePort": 1}),
            ] {
                told(
                    list,
                    all(),
                    json!([{"tcp": port}]),
                    "protocols[0].tcp.destinationPort",
                );
            }
            let port = json!({"destinationPort": {"number": 0}});
            told(
                list,
                all(),
                json!([{"udp": port}]),
                "protocols[0].udp.destinationPort.number",
            );
            let port = json!({"destinationPort": {"range": {"start": 9, "end": 8}}});
            told(
                list,
                all(),
                json!([{"sctp": port}]),
                "protocols[0].sctp.destinationPort.range.end",
            );
        }
        told(
            "to",
            json!({"nodes": bad}),
            json!([]),
            &format!("to[0].nodes.{path}"),
        );
        told(
            "to",
            json!({"networks": ["10.0.0.0/8", "x"]}),
            json!([]),
            "to[0].networks[1]",
        );
        for two in [
            json!({"networks": ["10.0.0.0/8"], "pods": {}}),
            json!({"networks": ["10.0.0.0/8"], "nodes": {}}),
            json!({"domainNames": ["a.b"], "nodes": {}}),
        ] {
            told("to", two, json!([]), "to[0]");
        }
    }

    #[test]
    fn rules_without_peers_fail_closed_too() {
        let rules = json!([{"action": "Deny"}, {"action": "Accept"}]);
        let compiled = read(spec("Admin", &rules, &rules));
        assert_eq!(compiled.problem.unwrap().field, "spec.ingress[0].from");
        let policy = compiled.policy.unwrap();
        for rules in [policy.ingress, policy.egress].map(Option::unwrap) {
            assert!(rules.len() == 1 && rules[0].anyone && rules[0].action == PolicyAction::Deny);
        }
    }

    #[test]
    fn domain_names_accept_nothing_deny_all_and_are_told() {
        let names = json!({"domainNames": ["*.example.com"]});
        let networks = json!({"networks": ["10.0.0.0/8"]});
        let rules =
            json!([{"action": "Accept", "to": [names]}, {"action": "Accept", "to": [networks, names]}]);
        let compiled = read(spec("Baseline", &json!([]), &rules));
        assert_eq!(
            compiled.problem.unwrap().field,
            "spec.egress[0].to[0].domainNames"
        );
        let rules = compiled.policy.unwrap().egress.unwrap();
        assert_eq!(rules.len(), 1);
        assert_eq!((rules[0].index, rules[0].blocks.len()), (1, 1));
        for action in ["Deny", "Pass"] {
            let error = second(action, "to", &names, &json!([]), "Admin").unwrap_err();
            assert!(error.starts_with("spec.egress[1].to[0].domainNames: "), "{error}");
            assert!(error.contains("any other rule denies everybody"), "{error}");
            assert!(
                error.contains("action: Deny") && error.contains("anyone: true"),
                "{error}"
            );
        }
    }

    #[test]
    fn an_unknown_action_denies_and_an_unknown_tier_is_no_policy() {
        let error = second(
            "Log",
            "to",
            &json!({"networks": ["10.0.0.0/8"]}),
            &json!([]),
            "Admin",
        )
        .unwrap_err();
        assert!(error.starts_with("spec.egress[1].action: "), "{error}");
        assert!(
            error.contains("action: Deny") && error.contains("anyone: false"),
            "{error}"
        );
        let compiled = read(spec("Middle", &json!([]), &json!([])));
        assert!(compiled.policy.is_none());
        assert_eq!(compiled.problem.unwrap().field, "spec.tier");
        let compiled = read(json!({"tier": "Admin", "subject": {"nodes": {}}}));
        assert!(compiled.policy.is_none());
        assert_eq!(compiled.problem.unwrap().field, "spec.subject");
    }

    #[test]
    fn directions_without_rules_are_not_spoken_of() {
        let rules = json!([{"action": "Deny", "to": [{"nodes": {}}]}]);
        let given = spec("Admin", &json!([]), &rules);
        assert!(is_of_nodes(&serde_json::from_value(given.clone()).unwrap()));
        let policy = read(given).policy.unwrap();
        assert!(policy.ingress.is_none() && policy.egress.is_some());
        let none = spec("Admin", &json!([]), &json!([]));
        assert!(!is_of_nodes(&serde_json::from_value(none).unwrap()));
    }
}
