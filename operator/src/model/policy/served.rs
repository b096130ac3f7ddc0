//! Services that nodes serve for the pods of a VPC, as policies of egress see them.
//!
//! The backends of such a service are outside of the VPC, and the pod's droplet judges packets by the address that the
//! pod uses. So a rule about the backends becomes one about the service's address.

use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use thuban_rows::{Block, PolicyAction, PolicyPorts, PolicyRule};

use super::sets::ClassContent;

/// An address of a service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Served {
    pub address: IpAddr,
    pub ports: Vec<ServedPort>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServedPort {
    /// The IP protocol's number.
    pub protocol: u8,
    pub port: u16,
    /// Those that policies don't tell apart are one.
    pub backends: Vec<ServedBackend>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServedBackend {
    pub kind: BackendKind,
    pub port: u16,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BackendKind {
    /// A pod of another VPC: what selects it.
    Pod(Arc<ClassContent>),
    /// An address outside of all VPCs.
    Outside(IpAddr),
}

impl Served {
    /// Returns what a rule says of the service's address because of what it says of the backends. `None`: nothing.
    ///
    /// A port is accepted if all of its backends are. It is denied if one of them is.
    pub fn rule(&self, rule: &PolicyRule) -> Option<PolicyRule> {
        let has_all = rule.anyone && rule.ports.is_empty();
        if has_all {
            return None;
        }
        let concerns = |port: &&ServedPort| {
            let mut backends = port.backends.iter();
            let is_its = |backend: &ServedBackend| backend.is_of(rule, port.protocol);
            match rule.action {
                PolicyAction::Deny => backends.any(is_its),
                PolicyAction::Accept | PolicyAction::Pass => {
                    !port.backends.is_empty() && backends.all(is_its)
                }
            }
        };
        let ports = self.ports.iter().filter(concerns);
        let ports = ports.map(|port| PolicyPorts::Range(port.protocol, port.port, port.port));
        let mut ports: Vec<_> = ports.collect();
        if ports.is_empty() {
            return None;
        }
        ports.sort_unstable();
        let block = Block {
            range: IpNet::from(self.address),
            except: Vec::new(),
        };
        Some(PolicyRule {
            tier: rule.tier,
            action: rule.action,
            policy: Arc::clone(&rule.policy),
            index: rule.index,
            anyone: false,
            groups: [].into(),
            blocks: vec![block],
            ports,
        })
    }
}

impl ServedBackend {
    /// Whether a rule is about packets of the protocol to the backend.
    fn is_of(&self, rule: &PolicyRule, protocol: u8) -> bool {
        let (is_peer, class) = match &self.kind {
            BackendKind::Pod(class) => (!class.groups.is_disjoint(&rule.groups), Some(&**class)),
            BackendKind::Outside(address) => (rule.blocks.iter().any(|block| block.holds(*address)), None),
        };
        (rule.anyone || is_peer)
            && (rule.ports.is_empty()
                || rule
                    .ports
                    .iter()
                    .any(|ports| self.has_port(ports, protocol, class)))
    }

    fn has_port(&self, ports: &PolicyPorts, protocol: u8, class: Option<&ClassContent>) -> bool {
        match ports {
            PolicyPorts::Range(of, first, last) => *of == protocol && (*first..=*last).contains(&self.port),
            PolicyPorts::Named(name, of) => {
                let mut named = class.into_iter().flat_map(|class| &class.names);
                of.is_none_or(|of| of == protocol)
                    && named.any(|named| {
                        *named.name == **name && (named.protocol, named.port) == (protocol, self.port)
                    })
            }
        }
    }
}
