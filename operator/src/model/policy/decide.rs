//! Says what a set decides of one packet, and by which rule: for people who ask why. Droplets decide by their tables.
//!
//! Invariant (tested): the decision is what the API's words say of the packet.

use std::net::IpAddr;

use thuban_rows::{PolicyAction, PolicyPorts, PolicyRule, PolicyTier};

use super::sets::{ClassContent, SetContent};

/// What a set says of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision<'a> {
    Accepts,
    /// By this rule; none: NetworkPolicies select the pod, and none of them accepts the packet.
    Denies(Option<&'a PolicyRule>),
    /// No port was given, and a rule has ports.
    DependsOnPort,
}

/// The other side of a packet, and the packet's protocol and port. An address outside has the plain class.
#[derive(Clone, Copy, Debug)]
pub struct Peer<'a> {
    pub class: &'a ClassContent,
    pub address: IpAddr,
    /// The IP protocol's number.
    pub protocol: u8,
    /// The destination's; none: any.
    pub port: Option<u16>,
}

/// Whether something is about a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Match {
    No,
    Yes,
    /// Only if the packet has one of some ports.
    DependsOnPort,
}

impl SetContent {
    /// Returns what the set says of a packet to or from a peer.
    pub fn decide(&self, peer: &Peer) -> Decision<'_> {
        let behind = if self.is_isolated {
            PolicyTier::NetworkPolicy
        } else {
            PolicyTier::Baseline
        };
        for tier in [PolicyTier::Admin, behind] {
            for rule in self.rules.iter().filter(|rule| rule.tier == tier) {
                match (peer.matches(rule), rule.action) {
                    (Match::No, _) => {}
                    (Match::DependsOnPort, _) => return Decision::DependsOnPort,
                    (Match::Yes, PolicyAction::Accept) => return Decision::Accepts,
                    (Match::Yes, PolicyAction::Deny) => return Decision::Denies(Some(rule)),
                    (Match::Yes, PolicyAction::Pass) => break,
                }
            }
        }
        if self.is_isolated {
            Decision::Denies(None)
        } else {
            Decision::Accepts
        }
    }
}

impl Peer<'_> {
    fn matches(&self, rule: &PolicyRule) -> Match {
        let of_class = rule.anyone || !self.class.groups.is_disjoint(&rule.groups);
        let of_block = rule.blocks.iter().any(|block| block.holds(self.address));
        if !of_class && !of_block {
            return Match::No;
        }
        if rule.ports.is_empty() {
            return Match::Yes;
        }
        let Some(port) = self.port else {
            return Match::DependsOnPort;
        };
        let mut ports = rule.ports.iter();
        let has_port = ports.any(|ports| match ports {
            PolicyPorts::Range(protocol, first, last) => {
                *protocol == self.protocol && (*first..=*last).contains(&port)
            }
            // Of an address outside no port has a name.
            PolicyPorts::Named(name, protocol) => of_class && self.has_named(name, *protocol, port),
        });
        if has_port { Match::Yes } else { Match::No }
    }

    fn has_named(&self, name: &str, protocol: Option<u8>, port: u16) -> bool {
        let mut named = self.class.names.iter().filter(|named| named.name == name);
        protocol.is_none_or(|protocol| protocol == self.protocol)
            && named.any(|named| (named.protocol, named.port) == (self.protocol, port))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use thuban_rows::{PolicyAction, PolicyPorts, PolicyRule, PolicyTier};

    use super::{ClassContent, Decision, Peer, SetContent};

    fn rule(tier: PolicyTier, action: PolicyAction, group: u64, ports: &[u16]) -> Arc<PolicyRule> {
        let ports = ports.iter().map(|port| PolicyPorts::Range(6, *port, *port));
        Arc::new(PolicyRule {
            tier,
            action,
            policy: "red/db".into(),
            index: 0,
            anyone: false,
            groups: [group].into(),
            blocks: Vec::new(),
            ports: ports.collect(),
        })
    }

    fn decide(rules: &[Arc<PolicyRule>], is_isolated: bool, port: Option<u16>) -> String {
        let set = SetContent {
            is_egress: false,
            is_isolated,
            rules: rules.to_vec(),
        };
        let class = ClassContent {
            groups: [1].into(),
            ..ClassContent::default()
        };
        let peer = Peer {
            class: &class,
            address: [10, 0, 1, 2].into(),
            protocol: 6,
            port,
        };
        match set.decide(&peer) {
            Decision::Accepts => "accepts".to_owned(),
            Decision::Denies(None) => "isolated".to_owned(),
            Decision::Denies(Some(rule)) => format!("denied by {:?}", rule.tier),
            Decision::DependsOnPort => "depends".to_owned(),
        }
    }

    #[test]
    fn tiers_are_asked_in_their_order() {
        use PolicyAction::{Accept, Deny, Pass};
        use PolicyTier::{Admin, Baseline, NetworkPolicy};
        let accept = rule(NetworkPolicy, Accept, 1, &[]);
        let deny = rule(Admin, Deny, 1, &[]);
        let pass = rule(Admin, Pass, 1, &[]);
        let last = rule(Baseline, Deny, 1, &[]);
        assert_eq!(
            decide(&[deny.clone(), accept.clone()], true, None),
            "denied by Admin"
        );
        // A rule that passes ends its tier.
        assert_eq!(decide(&[pass.clone(), deny, accept], true, None), "accepts");
        assert_eq!(decide(&[pass, last], false, None), "denied by Baseline");
        assert_eq!(decide(&[], true, None), "isolated");
        assert_eq!(
            decide(&[rule(NetworkPolicy, Accept, 2, &[])], true, None),
            "isolated"
        );
        assert_eq!(decide(&[], false, None), "accepts");
    }

    #[test]
    fn without_a_port_a_rule_with_ports_decides_nothing() {
        let rules = [rule(PolicyTier::NetworkPolicy, PolicyAction::Accept, 1, &[80])];
        assert_eq!(decide(&rules, true, Some(80)), "accepts");
        assert_eq!(decide(&rules, true, Some(81)), "isolated");
        assert_eq!(decide(&rules, true, None), "depends");
    }
}
