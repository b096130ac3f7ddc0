//! What the API's words say of a packet, read rule by rule from the objects, and random objects to ask it about.
//!
//! What it says is compared with what droplets get, so it shares no code with the rest of the module:
//! [`Objects::accept`] judges by objects, [`read_set`] by content of rows. It is slow and refuses nothing.

mod generator;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;
use k8s_openapi::api::networking::v1::{NetworkPolicyPeer, NetworkPolicyPort, NetworkPolicySpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use thuban_api::ClusterNetworkPolicySpec;
use thuban_api::cluster_network_policy::{
    ClusterNetworkPolicyEgressPeer, ClusterNetworkPolicyProtocol, NamespacedPod, PortsOfProtocol, RuleAction,
    Tier,
};
use thuban_rows::{NamedPort, PolicyAction, PolicyPorts, PolicyRule, PolicyTier};

use super::{ClassContent, Malformed, Member, Node, Policies, SetContent};
use crate::model::admission::selects;

pub use generator::{Generator, NAMESPACES};

type Labels = BTreeMap<String, String>;

/// The objects of a cluster.
#[derive(Clone, Debug, Default)]
pub struct Objects {
    pub namespaces: BTreeMap<String, Labels>,
    /// Labels and addresses.
    pub nodes: Vec<(Labels, Vec<IpAddr>)>,
    /// By namespace and name.
    pub network_policies: BTreeMap<(String, String), NetworkPolicySpec>,
    pub cluster_policies: BTreeMap<String, ClusterNetworkPolicySpec>,
    pub pods: Vec<Pod>,
}

#[derive(Clone, Debug)]
pub struct Pod {
    pub namespace: String,
    /// As the pod's owner gave them.
    pub labels: Labels,
    pub ports: BTreeSet<NamedPort>,
    pub vpc: String,
    pub network: String,
    /// IPv4 and IPv6.
    pub addresses: [IpAddr; 2],
    pub on_host_network: bool,
}

/// One end of a packet: a pod, or an address outside.
#[derive(Clone, Copy, Debug)]
pub struct End<'a> {
    /// None: an address in another VPC, which blocks don't hold.
    pub address: Option<IpAddr>,
    pub pod: Option<&'a Pod>,
    /// A pod of another VPC, by a Service that its VPC shares. The address is a node's.
    pub by_shared_service: bool,
}

#[derive(Clone, Copy, Debug)]
pub struct Packet<'a> {
    pub from: End<'a>,
    pub to: End<'a>,
    /// The IP protocol's number.
    pub protocol: u8,
    /// The destination's; 0 if the protocol has none.
    pub port: u16,
    /// If the destination is a service that nodes serve: its backends, each with its port.
    pub behind: &'a [(End<'a>, u16)],
}

impl Packet<'_> {
    /// Whether a rule is about the packet: about the address that the sender uses, or about all backends behind it. A
    /// rule that denies is about the packet if it is about one of them.
    fn is_of(&self, denies: bool, rule: impl Fn(&Packet) -> bool) -> bool {
        let is_behind = |(to, port): &(End, u16)| {
            rule(&Packet {
                to: *to,
                port: *port,
                behind: &[],
                ..*self
            })
        };
        let mut behind = self.behind.iter();
        rule(self)
            || if denies {
                behind.any(is_behind)
            } else {
                !self.behind.is_empty() && behind.all(is_behind)
            }
    }
}

impl Pod {
    pub fn member(&self) -> Member<'_> {
        Member {
            namespace: &self.namespace,
            labels: &self.labels,
            ports: &self.ports,
            vpc: &self.vpc,
            network: &self.network,
            on_host_network: self.on_host_network,
        }
    }
}

/// What is made of the objects.
impl Objects {
    /// Returns all policies. What is malformed is not told.
    pub fn policies(&self) -> Policies {
        let mut policies = Policies::default();
        for (name, labels) in &self.namespaces {
            policies.set_namespace(name, Some(labels.clone()));
        }
        for (namespace, name) in self.network_policies.keys() {
            let _ = self.set_policy(&mut policies, Some(namespace), name);
        }
        for name in self.cluster_policies.keys() {
            let _ = self.set_policy(&mut policies, None, name);
        }
        self.set_nodes(&mut policies);
        policies
    }

    /// Sets the policy of the name as it is here, if it is.
    pub fn set_policy(
        &self,
        policies: &mut Policies,
        namespace: Option<&str>,
        name: &str,
    ) -> Result<(), Malformed> {
        let Some(namespace) = namespace else {
            return policies.set_cluster_policy(name, self.cluster_policies.get(name));
        };
        let key = (namespace.to_owned(), name.to_owned());
        policies.set_network_policy(namespace, name, 0, self.network_policies.get(&key))
    }

    pub fn set_nodes(&self, policies: &mut Policies) {
        let node = |(labels, addresses): &(Labels, Vec<IpAddr>)| Node {
            labels: labels.clone(),
            addresses: addresses.clone(),
            ..Node::default()
        };
        policies.set_nodes(self.nodes.iter().map(node).collect());
    }
}

/// What a rule, or all rules of a tier, say.
type Said = Option<RuleAction>;

/// What the API's words say.
impl Objects {
    /// Whether what applies to the sender (of egress) or the receiver (of ingress) lets the packet pass.
    pub fn accept(&self, packet: &Packet, is_egress: bool) -> bool {
        let subject = if is_egress { packet.from } else { packet.to };
        let Some(pod) = subject.pod.filter(|pod| !pod.on_host_network) else {
            return true;
        };
        match self.tier(Tier::Admin, pod, packet, is_egress) {
            Some(RuleAction::Accept) => return true,
            Some(RuleAction::Deny) => return false,
            _ => {}
        }
        let of_pod = |((namespace, _), spec): &(&(String, String), &NetworkPolicySpec)| {
            let everything = LabelSelector::default();
            *namespace == pod.namespace
                && selects(
                    Some(spec.pod_selector.as_ref().unwrap_or(&everything)),
                    &own_labels(pod),
                )
                && is_of(spec, is_egress)
        };
        let isolating: Vec<_> = self.network_policies.iter().filter(of_pod).collect();
        if !isolating.is_empty() {
            return isolating.iter().any(|((namespace, _), spec)| {
                self.network_policy_accepts(namespace, spec, packet, is_egress)
            });
        }
        self.tier(Tier::Baseline, pod, packet, is_egress) != Some(RuleAction::Deny)
    }

    /// Returns what the first rule of a tier says that matches.
    fn tier(&self, tier: Tier, pod: &Pod, packet: &Packet, is_egress: bool) -> Said {
        let mut policies: Vec<_> = self
            .cluster_policies
            .iter()
            .filter(|(_, spec)| spec.tier == tier)
            .collect();
        policies.sort_by_key(|(name, spec)| (spec.priority, *name));
        for (_, spec) in policies {
            let subject = &spec.subject;
            if !self.is_selected(pod, subject.namespaces.as_ref(), subject.pods.as_ref()) {
                continue;
            }
            let said = if is_egress {
                let mut rules = spec.egress.iter();
                rules.find_map(|rule| self.cluster_rule(rule.action, &rule.to, &rule.protocols, packet, true))
            } else {
                spec.ingress.iter().find_map(|rule| {
                    let peer =
                        |peer: &thuban_api::cluster_network_policy::ClusterNetworkPolicyIngressPeer| {
                            ClusterNetworkPolicyEgressPeer {
                                namespaces: peer.namespaces.clone(),
                                pods: peer.pods.clone(),
                                ..Default::default()
                            }
                        };
                    let from: Vec<_> = rule.from.iter().map(peer).collect();
                    self.cluster_rule(rule.action, &from, &rule.protocols, packet, false)
                })
            };
            if said.is_some() {
                return said;
            }
        }
        None
    }

    fn cluster_rule(
        &self,
        action: RuleAction,
        peers: &[ClusterNetworkPolicyEgressPeer],
        protocols: &[ClusterNetworkPolicyProtocol],
        packet: &Packet,
        is_egress: bool,
    ) -> Said {
        let is_unknown = peers
            .iter()
            .any(|peer| *peer == ClusterNetworkPolicyEgressPeer::default())
            || protocols.iter().any(|protocol| {
                let all = [&protocol.tcp, &protocol.udp, &protocol.sctp];
                let mut given = all.into_iter().flatten();
                *protocol == ClusterNetworkPolicyProtocol::default()
                    || given.any(|ports| ports.destination_port.is_none())
            });
        // They are not supported, and the API allows them for Accept only.
        let has_names = peers.iter().any(|peer| !peer.domain_names.is_empty());
        if is_unknown || has_names && action != RuleAction::Accept {
            return (action != RuleAction::Accept).then_some(RuleAction::Deny);
        }
        let is_shared_service = |pods: &NamespacedPod| {
            is_any(Some(&pods.namespace_selector)) && is_by_shared_service(&pods.pod_selector)
        };
        let is_its = |packet: &Packet, peer: &ClusterNetworkPolicyEgressPeer| {
            let other = if is_egress { packet.to } else { packet.from };
            let is_block = !peer.networks.is_empty() || peer.nodes.is_some();
            let is_peer = if !peer.networks.is_empty() {
                peer.networks.iter().any(|network| holds(network, other.address))
            } else if peer.nodes.is_some() {
                let mut nodes = self
                    .nodes
                    .iter()
                    .filter(|(labels, _)| selects(peer.nodes.as_ref(), labels));
                nodes.any(|(_, addresses)| other.address.is_some_and(|address| addresses.contains(&address)))
            } else if peer.pods.as_ref().is_some_and(is_shared_service) {
                other.by_shared_service
            } else {
                let pod = other.pod.filter(|pod| !pod.on_host_network);
                pod.is_some_and(|pod| self.is_selected(pod, peer.namespaces.as_ref(), peer.pods.as_ref()))
            };
            let names = names(packet, is_egress && is_block);
            is_peer
                && (protocols.is_empty() || protocols.iter().any(|given| is_protocol(given, packet, &names)))
        };
        let matches = |packet: &Packet| peers.iter().any(|peer| is_its(packet, peer));
        packet
            .is_of(action == RuleAction::Deny, matches)
            .then_some(action)
    }

    fn network_policy_accepts(
        &self,
        namespace: &str,
        spec: &NetworkPolicySpec,
        packet: &Packet,
        is_egress: bool,
    ) -> bool {
        type Peers = Option<Vec<NetworkPolicyPeer>>;
        type Ports = Option<Vec<NetworkPolicyPort>>;
        let is_its = |packet: &Packet, peers: &Peers, ports: &Ports| {
            let other = if is_egress { packet.to } else { packet.from };
            let is_port = |is_block: bool| {
                let names = names(packet, is_egress && is_block);
                ports.as_ref().is_none_or(Vec::is_empty)
                    || ports.iter().flatten().any(|port| is_port(port, packet, &names))
            };
            if peers.as_ref().is_none_or(Vec::is_empty) {
                return is_port(false);
            }
            peers.iter().flatten().any(|peer| match &peer.ip_block {
                Some(block) => {
                    let mut except = block.except.iter().flatten();
                    holds(&block.cidr, other.address)
                        && !except.any(|except| holds(except, other.address))
                        && is_port(true)
                }
                None => self.is_peer(namespace, peer, other) && is_port(false),
            })
        };
        let rule = |peers: &Peers, ports: &Ports| packet.is_of(false, |packet| is_its(packet, peers, ports));
        if is_egress {
            let mut rules = spec.egress.iter().flatten();
            rules.any(|given| rule(&given.to, &given.ports))
        } else {
            let mut rules = spec.ingress.iter().flatten();
            rules.any(|given| rule(&given.from, &given.ports))
        }
    }

    /// Whether a peer with selectors selects the other side.
    fn is_peer(&self, namespace: &str, peer: &NetworkPolicyPeer, other: End) -> bool {
        if is_any(peer.namespace_selector.as_ref())
            && peer.pod_selector.as_ref().is_some_and(is_by_shared_service)
        {
            return other.by_shared_service;
        }
        let Some(pod) = other.pod.filter(|pod| !pod.on_host_network) else {
            return false;
        };
        let is_there = match &peer.namespace_selector {
            Some(selector) => selects(Some(selector), &self.namespaces[&pod.namespace]),
            None => pod.namespace == namespace,
        };
        is_there
            && peer
                .pod_selector
                .as_ref()
                .is_none_or(|selector| selects(Some(selector), &own_labels(pod)))
    }

    fn is_selected(
        &self,
        pod: &Pod,
        namespaces: Option<&LabelSelector>,
        pods: Option<&NamespacedPod>,
    ) -> bool {
        let labels = &self.namespaces[&pod.namespace];
        selects(namespaces, labels)
            || pods.is_some_and(|pods| {
                selects(Some(&pods.namespace_selector), labels)
                    && selects(Some(&pods.pod_selector), &own_labels(pod))
            })
    }
}

/// Whether a NetworkPolicy is of the direction.
fn is_of(spec: &NetworkPolicySpec, is_egress: bool) -> bool {
    let types = spec.policy_types.clone().unwrap_or_default();
    match (types.is_empty(), is_egress) {
        (true, false) => true,
        (true, true) => spec.egress.as_ref().is_some_and(|rules| !rules.is_empty()),
        (false, true) => types.contains(&"Egress".to_owned()),
        (false, false) => types.contains(&"Ingress".to_owned()),
    }
}

fn is_any(selector: Option<&LabelSelector>) -> bool {
    let is_empty = |selector: &LabelSelector| {
        selector.match_labels.iter().flatten().next().is_none()
            && selector.match_expressions.iter().flatten().next().is_none()
    };
    selector.is_none_or(is_empty)
}

/// Whether a selector of pods means clients by a shared Service instead.
fn is_by_shared_service(selector: &LabelSelector) -> bool {
    let label = ("thuban.dev/by".to_owned(), "shared-service".to_owned());
    let expressions = LabelSelector {
        match_labels: None,
        ..selector.clone()
    };
    selector.match_labels == Some([label].into()) && is_any(Some(&expressions))
}

/// Returns the labels of a pod with the two that it can't choose.
fn own_labels(pod: &Pod) -> Labels {
    let mut labels = pod.labels.clone();
    labels.extend([
        ("thuban.dev/vpc".to_owned(), pod.vpc.clone()),
        ("thuban.dev/network".to_owned(), pod.network.clone()),
    ]);
    labels
}

/// Returns the destination's named ports, as a rule knows them: one of egress to addresses knows none.
fn names(packet: &Packet, is_of_addresses: bool) -> BTreeSet<NamedPort> {
    let pod = packet
        .to
        .pod
        .filter(|pod| !pod.on_host_network && !is_of_addresses);
    pod.map(|pod| pod.ports.clone()).unwrap_or_default()
}

fn holds(network: &str, address: Option<IpAddr>) -> bool {
    let network = network.parse::<IpNet>().ok();
    network
        .zip(address)
        .is_some_and(|(network, address)| network.contains(&address))
}

fn is_port(given: &NetworkPolicyPort, packet: &Packet, names: &BTreeSet<NamedPort>) -> bool {
    let protocol = match given.protocol.as_deref() {
        Some("UDP") => 17,
        Some("SCTP") => 132,
        _ => 6,
    };
    if packet.protocol != protocol {
        return false;
    }
    match &given.port {
        None => true,
        Some(IntOrString::Int(first)) => {
            let last = given.end_port.unwrap_or(*first);
            (*first..=last).contains(&i32::from(packet.port))
        }
        Some(IntOrString::String(name)) => names
            .iter()
            .any(|port| port.name == *name && port.protocol == protocol && port.port == packet.port),
    }
}

fn is_protocol(given: &ClusterNetworkPolicyProtocol, packet: &Packet, names: &BTreeSet<NamedPort>) -> bool {
    let is_among = |ports: &Option<PortsOfProtocol>, number: u8| {
        let Some(ports) = ports else { return false };
        let is_there = ports.destination_port.as_ref().is_some_and(|port| {
            port.number == Some(packet.port.into())
                || port.range.as_ref().is_some_and(|range| {
                    range.start <= packet.port.into() && i32::from(packet.port) <= range.end
                })
        });
        packet.protocol == number && is_there
    };
    let is_named = |port: &NamedPort| {
        port.name == given.destination_named_port
            && (port.protocol, port.port) == (packet.protocol, packet.port)
    };
    is_among(&given.tcp, 6)
        || is_among(&given.udp, 17)
        || is_among(&given.sctp, 132)
        || names.iter().any(is_named)
}

/// Reads what a set says of a packet to or from the other side. An address outside has no class.
pub fn read_set(
    set: Option<&SetContent>,
    class: Option<&ClassContent>,
    address: IpAddr,
    protocol: u8,
    port: u16,
) -> bool {
    let Some(set) = set else { return true };
    let is_port = |ports: &[PolicyPorts], class: Option<&ClassContent>| {
        ports.is_empty()
            || ports.iter().any(|given| match given {
                PolicyPorts::Range(number, first, last) => {
                    *number == protocol && (*first..=*last).contains(&port)
                }
                PolicyPorts::Named(name, number) => class.is_some_and(|class| {
                    let mut named = class.names.iter().filter(|named| *named.name == **name);
                    named.any(|named| {
                        number.is_none_or(|number| number == protocol)
                            && (named.protocol, named.port) == (protocol, port)
                    })
                }),
            })
    };
    let matches = |rule: &PolicyRule| {
        let of_class = class.is_some_and(|class| !class.groups.is_disjoint(&rule.groups));
        let of_block = rule.blocks.iter().any(|block| {
            block.range.contains(&address) && !block.except.iter().any(|except| except.contains(&address))
        });
        (rule.anyone || of_class) && is_port(&rule.ports, class) || of_block && is_port(&rule.ports, None)
    };
    let first = |is_tier: &dyn Fn(PolicyTier) -> bool| {
        let rule = set.rules.iter().find(|rule| is_tier(rule.tier) && matches(rule));
        rule.map(|rule| rule.action)
    };
    let admin = first(&|tier| tier == PolicyTier::Admin).filter(|action| *action != PolicyAction::Pass);
    let behind = |tier| match tier {
        PolicyTier::Admin => false,
        PolicyTier::NetworkPolicy => set.is_isolated,
        PolicyTier::Baseline => !set.is_isolated,
    };
    match admin.or_else(|| first(&behind)) {
        Some(action) => action == PolicyAction::Accept,
        None => !set.is_isolated,
    }
}
