//! NetworkPolicy of Kubernetes: what it accepts, of pods that are isolated by it.

use std::sync::Arc;

use k8s_openapi::api::networking::v1::{IPBlock, NetworkPolicyPeer, NetworkPolicyPort, NetworkPolicySpec};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use thuban_rows::{PolicyAction, PolicyPorts, PolicyTier};

use super::compiled::{Compiled, Direction, Draft, Peers, block, port};
use super::group::{Group, Namespaces};
use super::malformed::{Malformed, Problem, each};
use super::selector::Selector;

pub fn compile(namespace: &str, name: &str, spec: &NetworkPolicySpec) -> Compiled {
    let subject = match Group::in_namespace(namespace, spec.pod_selector.as_ref()) {
        Ok(subject) => subject,
        Err(problem) => return Compiled::not_in_force(problem.within("spec.podSelector")),
    };
    let mut compiled = Compiled::new(
        format!("{namespace}/{name}"),
        PolicyTier::NetworkPolicy,
        0,
        subject,
    );
    let [has_ingress, has_egress] = directions(spec, &mut compiled);
    if has_ingress {
        compiled.isolate(Direction::Ingress);
        for (index, rule) in spec.ingress.iter().flatten().enumerate() {
            let read = draft(namespace, ("from", rule.from.as_deref()), rule.ports.as_deref());
            compiled.add(Direction::Ingress, index, PolicyAction::Accept, read);
        }
    }
    if has_egress {
        compiled.isolate(Direction::Egress);
        for (index, rule) in spec.egress.iter().flatten().enumerate() {
            let read = draft(namespace, ("to", rule.to.as_deref()), rule.ports.as_deref());
            compiled.add(Direction::Egress, index, PolicyAction::Accept, read);
        }
    }
    compiled
}

/// Returns whether the policy is of ingress and of egress.
fn directions(spec: &NetworkPolicySpec, compiled: &mut Compiled) -> [bool; 2] {
    let types = spec.policy_types.as_deref().unwrap_or_default();
    if types.is_empty() {
        return [true, spec.egress.iter().flatten().next().is_some()];
    }
    for (index, unknown) in types.iter().enumerate() {
        if !["Ingress", "Egress"].contains(&unknown.as_str()) {
            let problem = Problem::PolicyType(unknown.clone());
            compiled.note(Malformed::new(format!("spec.policyTypes[{index}]"), problem));
        }
    }
    ["Ingress", "Egress"].map(|direction| types.iter().any(|given| given == direction))
}

fn draft(
    namespace: &str,
    (field, given): (&str, Option<&[NetworkPolicyPeer]>),
    ports: Option<&[NetworkPolicyPort]>,
) -> Result<Draft, Malformed> {
    let given = given.unwrap_or_default();
    let mut peers = Peers {
        anyone: given.is_empty(),
        ..Peers::default()
    };
    each(field, given, |peer| add_peer(namespace, peer, &mut peers))?;
    let ports = each("ports", ports.unwrap_or_default(), read_ports)?;
    Ok(Draft { peers, ports })
}

fn add_peer(namespace: &str, peer: &NetworkPolicyPeer, peers: &mut Peers) -> Result<(), Malformed> {
    let (namespaces, pods) = match (&peer.ip_block, &peer.namespace_selector, &peer.pod_selector) {
        (Some(IPBlock { cidr, except }), None, None) => {
            let block = block(cidr, except.as_deref().unwrap_or_default());
            peers
                .blocks
                .push(block.map_err(|malformed| malformed.within("ipBlock"))?);
            return Ok(());
        }
        (None, None, Some(pods)) => (Namespaces::Named(namespace.to_owned()), Some(pods)),
        (None, Some(namespaces), pods) => (
            Namespaces::Selected(Selector::of_field(namespaces, "namespaceSelector")?),
            pods.as_ref(),
        ),
        _ => return Err(Malformed::new("", Problem::Unknown)),
    };
    let pods = pods
        .map(|pods| Selector::of_field(pods, "podSelector"))
        .transpose()?;
    peers.groups.insert(Arc::new(
        Group::new(namespaces, pods.unwrap_or_default()).into_peer(),
    ));
    Ok(())
}

fn read_ports(given: &NetworkPolicyPort) -> Result<PolicyPorts, Malformed> {
    let protocol = match given.protocol.as_deref() {
        None | Some("TCP") => 6,
        Some("UDP") => 17,
        Some("SCTP") => 132,
        Some(other) => return Err(Malformed::new("protocol", Problem::Protocol(other.to_owned()))),
    };
    let last_port = || Malformed::new("endPort", Problem::LastPort);
    match (&given.port, given.end_port) {
        (None, None) => Ok(PolicyPorts::Range(protocol, 0, u16::MAX)),
        (Some(IntOrString::Int(first)), last) => {
            let first = port(*first).map_err(|malformed| malformed.within("port"))?;
            let last = last
                .map_or(Ok(first), port)
                .map_err(|malformed| malformed.within("endPort"))?;
            if last < first {
                return Err(last_port());
            }
            Ok(PolicyPorts::Range(protocol, first, last))
        }
        (Some(IntOrString::String(name)), None) if name.is_empty() => {
            Err(Malformed::new("port", Problem::EmptyName))
        }
        (Some(IntOrString::String(name)), None) => {
            Ok(PolicyPorts::Named(name.as_str().into(), Some(protocol)))
        }
        (None | Some(IntOrString::String(_)), Some(_)) => Err(last_port()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use thuban_rows::{PolicyPorts, PolicyRule};

    use super::super::compiled::{Compiled, Policy};
    use super::{Group, Namespaces, Selector, compile};

    fn read(spec: Value) -> Compiled {
        compile("red", "web", &serde_json::from_value(spec).unwrap())
    }

    fn policy(spec: Value) -> Policy {
        let compiled = read(spec);
        assert_eq!(compiled.problem, None);
        compiled.policy.unwrap()
    }

    fn ingress_rule(rule: &Value) -> PolicyRule {
        let policy = policy(json!({"ingress": [rule]}));
        (*policy.ingress.unwrap()[0]).clone()
    }

    fn selector(value: Value) -> Selector {
        Selector::read(&serde_json::from_value(value).unwrap()).unwrap()
    }

    #[test]
    fn types_default_as_kubernetes_says() {
        let of = |spec: Value| {
            let policy = policy(spec);
            [policy.ingress, policy.egress].map(|rules| rules.map(|rules| rules.len()))
        };
        assert_eq!(of(json!({})), [Some(0), None]);
        assert_eq!(of(json!({"egress": []})), [Some(0), None]);
        assert_eq!(of(json!({"egress": [{}]})), [Some(0), Some(1)]);
        assert_eq!(of(json!({"policyTypes": [], "egress": [{}]})), [Some(0), Some(1)]);
        let both = json!(["Egress", "Ingress"]);
        assert_eq!(of(json!({"policyTypes": both})), [Some(0), Some(0)]);
        let rules = json!({"policyTypes": ["Egress"], "ingress": [{}]});
        assert_eq!(of(rules), [None, Some(0)]);
        let rules = json!({"policyTypes": ["Ingress"], "egress": [{}]});
        assert_eq!(of(rules), [Some(0), None]);
    }

    #[test]
    fn peers_select_where_kubernetes_says() {
        let app = json!({"matchLabels": {"app": "web"}});
        let team = json!({"matchLabels": {"team": "red"}});
        let named = || Namespaces::Named("red".to_owned());
        let selected = || Namespaces::Selected(selector(team.clone()));
        for (peer, expected) in [
            (
                json!({"podSelector": app}),
                Group::new(named(), selector(app.clone())),
            ),
            (
                json!({"podSelector": {}}),
                Group::new(named(), Selector::default()),
            ),
            (
                json!({"namespaceSelector": team}),
                Group::new(selected(), Selector::default()),
            ),
            (
                json!({"namespaceSelector": team, "podSelector": app}),
                Group::new(selected(), selector(app.clone())),
            ),
        ] {
            let rule = ingress_rule(&json!({"from": [peer, {"ipBlock": {"cidr": "10.0.0.0/8"}}]}));
            assert_eq!(rule.groups, [expected.id()].into(), "{peer}");
            assert_eq!(rule.blocks.len(), 1);
            assert!(!rule.anyone);
        }
        for anyone in [json!({}), json!({"from": []})] {
            let rule = ingress_rule(&anyone);
            assert!(rule.anyone && rule.groups.is_empty() && rule.blocks.is_empty());
        }
    }

    #[test]
    fn ports_are_numbers_ranges_or_names() {
        let ports = |ports: Value| ingress_rule(&json!({"ports": ports})).ports;
        assert_eq!(ports(json!([])), []);
        assert_eq!(ports(json!([{}])), [PolicyPorts::Range(6, 0, 65_535)]);
        assert_eq!(
            ports(json!([{"protocol": "UDP"}])),
            [PolicyPorts::Range(17, 0, 65_535)]
        );
        assert_eq!(ports(json!([{"port": 80}])), [PolicyPorts::Range(6, 80, 80)]);
        let range = json!({"protocol": "SCTP", "port": 80, "endPort": 90});
        assert_eq!(ports(json!([range])), [PolicyPorts::Range(132, 80, 90)]);
        let name = || PolicyPorts::Named("http".into(), Some(6));
        assert_eq!(ports(json!([{"port": "http"}, {"port": "http"}])), [name()]);
    }

    #[test]
    fn a_rule_that_is_malformed_accepts_nothing_and_is_told() {
        let told = |rule: Value, field: &str| {
            let compiled = read(json!({"ingress": [{}, rule]}));
            let problem = compiled.problem.unwrap().to_string();
            assert!(
                problem.starts_with(&format!("spec.ingress[1].{field}: ")),
                "{problem}"
            );
            let rules = compiled.policy.unwrap().ingress.unwrap();
            assert_eq!(rules.iter().map(|rule| rule.index).collect::<Vec<_>>(), [0]);
        };
        told(json!({"from": [{"podSelector": {}}, {}]}), "from[1]");
        let bad = json!({"matchExpressions": [{"key": "a", "operator": "Like"}]});
        let path = "matchExpressions[0].operator";
        told(
            json!({"from": [{"podSelector": bad}]}),
            &format!("from[0].podSelector.{path}"),
        );
        told(
            json!({"from": [{"namespaceSelector": bad}]}),
            &format!("from[0].namespaceSelector.{path}"),
        );
        told(
            json!({"from": [{"ipBlock": {"cidr": "x"}}]}),
            "from[0].ipBlock.cidr",
        );
        told(
            json!({"from": [{"ipBlock": {"cidr": "10.0.0.0/8"}, "podSelector": {}}]}),
            "from[0]",
        );
        told(json!({"ports": [{"protocol": "ICMP"}]}), "ports[0].protocol");
        told(json!({"ports": [{"port": 0}]}), "ports[0].port");
        told(json!({"ports": [{"port": 65_536}]}), "ports[0].port");
        told(json!({"ports": [{"port": ""}]}), "ports[0].port");
        told(
            json!({"ports": [{"port": 80, "endPort": 79}]}),
            "ports[0].endPort",
        );
        told(
            json!({"ports": [{"port": 80, "endPort": 65_536}]}),
            "ports[0].endPort",
        );
        told(json!({"ports": [{"endPort": 79}]}), "ports[0].endPort");
        told(
            json!({"ports": [{"port": "http", "endPort": 79}]}),
            "ports[0].endPort",
        );
    }

    #[test]
    fn a_policy_of_unknown_pods_or_types_is_told() {
        let bad = json!({"matchLabels": {"/": "a"}});
        let compiled = read(json!({"podSelector": bad}));
        assert!(compiled.policy.is_none());
        assert_eq!(
            compiled.problem.unwrap().field,
            "spec.podSelector.matchLabels.key"
        );
        let compiled = read(json!({"policyTypes": ["Ingress", "Both"]}));
        assert!(compiled.policy.unwrap().ingress.is_some());
        assert_eq!(compiled.problem.unwrap().field, "spec.policyTypes[1]");
    }
}
