//! A policy of either kind, in the form of rules that droplets get.
//!
//! What of a policy can't be understood is told and fails closed: an Accept matches nothing, a Deny or Pass denies
//! all.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use ipnet::IpNet;
use thuban_rows::{Block, PolicyAction, PolicyPorts, PolicyRule, PolicyTier};

use super::group::{Group, Namespaces};
use super::malformed::{Malformed, Problem};
use super::selector::Selector;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    Ingress,
    Egress,
}

impl fmt::Display for Direction {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Ingress => "ingress",
            Self::Egress => "egress",
        })
    }
}

/// What a policy says to the pods that it selects.
#[derive(Debug, PartialEq, Eq)]
pub struct Policy {
    /// As in [`PolicyRule::policy`].
    pub name: Arc<str>,
    pub tier: PolicyTier,
    /// Within the tier; lower ones are asked first.
    pub priority: i32,
    pub subject: Arc<Group>,
    /// None: the policy doesn't say anything in the direction. Ports are named in rules of either direction.
    pub ingress: Option<Vec<Arc<PolicyRule>>>,
    pub egress: Option<Vec<Arc<PolicyRule>>>,
    /// What stands in the place of `egress` for pods of these VPCs.
    pub egress_in: BTreeMap<String, Option<Vec<Arc<PolicyRule>>>>,
    /// Those of all peers.
    pub groups: BTreeSet<Arc<Group>>,
}

impl Policy {
    /// Returns what the policy says to pods of a VPC.
    pub fn rules(&self, direction: Direction, vpc: &str) -> Option<&Vec<Arc<PolicyRule>>> {
        match direction {
            Direction::Ingress => self.ingress.as_ref(),
            Direction::Egress => self.egress_in.get(vpc).unwrap_or(&self.egress).as_ref(),
        }
    }

    /// Returns the names of other pods' ports that the rules name.
    pub fn names(&self) -> BTreeSet<Arc<str>> {
        let rules = self.egress_in.values().chain([&self.egress]).flatten().flatten();
        let ports = rules.flat_map(|rule| &rule.ports);
        let name = |ports: &PolicyPorts| match ports {
            PolicyPorts::Named(name, _) => Some(Arc::clone(name)),
            PolicyPorts::Range(..) => None,
        };
        ports.filter_map(name).collect()
    }

    /// Returns the policy without what it accepts.
    pub fn closed(&self) -> Self {
        Self {
            name: Arc::clone(&self.name),
            subject: Arc::clone(&self.subject),
            ingress: self.ingress.as_ref().map(|_| Vec::new()),
            egress: self.egress.as_ref().map(|_| Vec::new()),
            egress_in: BTreeMap::new(),
            groups: BTreeSet::new(),
            ..*self
        }
    }

    /// Returns a rule that accepts nobody. It says which policy isolates, if the policy has no other rule.
    pub fn naming_rule(&self) -> PolicyRule {
        PolicyRule {
            tier: self.tier,
            action: PolicyAction::Accept,
            policy: Arc::clone(&self.name),
            index: 0,
            anyone: false,
            groups: BTreeSet::new(),
            blocks: Vec::new(),
            ports: Vec::new(),
        }
    }

    /// Returns a policy that isolates all pods of a namespace, and accepts nothing.
    pub fn closing_all(name: &str, namespace: &str) -> Self {
        let all = Namespaces::Named(namespace.to_owned());
        Self {
            name: name.into(),
            tier: PolicyTier::NetworkPolicy,
            priority: 0,
            subject: Arc::new(Group::new(all, Selector::default())),
            ingress: Some(Vec::new()),
            egress: Some(Vec::new()),
            egress_in: BTreeMap::new(),
            groups: BTreeSet::new(),
        }
    }

    /// Returns the place of the policy among those that select a pod.
    pub fn place(&self) -> (PolicyTier, i32, &str) {
        (self.tier, self.priority, &self.name)
    }
}

/// A policy that was read, as far as it was understood.
#[derive(Debug, Default)]
pub struct Compiled {
    /// None: not even whom the policy selects is known, so it isn't in force.
    pub policy: Option<Policy>,
    /// The first of the problems.
    pub problem: Option<Malformed>,
}

/// The other side of a rule.
#[derive(Debug, Default)]
pub struct Peers {
    pub anyone: bool,
    pub groups: BTreeSet<Arc<Group>>,
    pub blocks: Vec<Block>,
}

/// A rule that was read.
pub struct Draft {
    pub peers: Peers,
    /// None: all packets.
    pub ports: Vec<PolicyPorts>,
}

impl Draft {
    const ALL: Self = Self {
        peers: Peers {
            anyone: true,
            groups: BTreeSet::new(),
            blocks: Vec::new(),
        },
        ports: Vec::new(),
    };
}

impl Compiled {
    pub const fn not_in_force(problem: Malformed) -> Self {
        Self {
            policy: None,
            problem: Some(problem),
        }
    }

    /// Begins with a policy that says nothing.
    pub fn new(name: String, tier: PolicyTier, priority: i32, subject: Group) -> Self {
        let policy = Policy {
            name: name.into(),
            tier,
            priority,
            subject: Arc::new(subject),
            ingress: None,
            egress: None,
            egress_in: BTreeMap::new(),
            groups: BTreeSet::new(),
        };
        Self {
            policy: Some(policy),
            problem: None,
        }
    }

    /// Makes the policy speak in the direction, if it is without rules.
    pub fn isolate(&mut self, direction: Direction) {
        if let Some(policy) = &mut self.policy {
            policy.rules_mut(direction);
        }
    }

    pub fn note(&mut self, problem: Malformed) {
        self.problem.get_or_insert(problem);
    }

    /// Adds the rule of the given place in the policy's list.
    pub fn add(
        &mut self,
        direction: Direction,
        index: usize,
        action: PolicyAction,
        read: Result<Draft, Malformed>,
    ) {
        let (action, draft) = match read {
            Ok(draft) => (action, draft),
            Err(problem) => {
                self.note(problem.within(format_args!("spec.{direction}[{index}]")));
                if action == PolicyAction::Accept {
                    return;
                }
                (PolicyAction::Deny, Draft::ALL)
            }
        };
        if let Some(policy) = &mut self.policy {
            policy.add(direction, index, action, draft);
        }
    }
}

impl Policy {
    fn add(&mut self, direction: Direction, index: usize, action: PolicyAction, draft: Draft) {
        let Draft { peers, mut ports } = draft;
        let Peers {
            anyone,
            groups,
            mut blocks,
        } = peers;
        if !anyone && groups.is_empty() && blocks.is_empty() {
            return;
        }
        // All is accepted behind Baseline, and a droplet knows no tier there to pass to.
        let is_last = self.tier == PolicyTier::Baseline && action == PolicyAction::Pass;
        let action = if is_last { PolicyAction::Accept } else { action };
        ports.sort_unstable();
        ports.dedup();
        blocks.sort_unstable_by(|one, other| (one.range, &one.except).cmp(&(other.range, &other.except)));
        blocks.dedup();
        let rule = PolicyRule {
            tier: self.tier,
            action,
            policy: Arc::clone(&self.name),
            index: index as u32,
            anyone,
            groups: groups.iter().map(|group| group.id()).collect(),
            blocks,
            ports,
        };
        self.rules_mut(direction).push(Arc::new(rule));
        self.groups.extend(groups);
    }

    fn rules_mut(&mut self, direction: Direction) -> &mut Vec<Arc<PolicyRule>> {
        let rules = match direction {
            Direction::Ingress => &mut self.ingress,
            Direction::Egress => &mut self.egress,
        };
        rules.get_or_insert_default()
    }
}

/// Reads a block of addresses. Host bits don't count, as Kubernetes says.
pub fn block(range: &str, except: &[String]) -> Result<Block, Malformed> {
    let range = network(range).ok_or_else(|| Malformed::new("cidr", Problem::Network(range.to_owned())))?;
    let mut inner = Vec::with_capacity(except.len());
    for (index, text) in except.iter().enumerate() {
        let refused = |problem: fn(String) -> Problem| {
            Malformed::new(format!("except[{index}]"), problem(text.clone()))
        };
        let except = network(text).ok_or_else(|| refused(Problem::Network))?;
        if !range.contains(&except) {
            return Err(refused(Problem::Except));
        }
        inner.push(except);
    }
    inner.sort_unstable();
    inner.dedup();
    Ok(Block { range, except: inner })
}

/// Reads a network. IPv4 that is mapped into IPv6 is none, because rows have no such ranges.
pub fn network(text: &str) -> Option<IpNet> {
    let network = text.parse::<IpNet>().ok()?.trunc();
    let is_mapped = matches!(network, IpNet::V6(v6) if v6.addr().to_ipv4_mapped().is_some());
    (!is_mapped).then_some(network)
}

/// Reads the number of a port.
pub fn port(number: i32) -> Result<u16, Malformed> {
    u16::try_from(number)
        .ok()
        .filter(|port| *port != 0)
        .ok_or_else(|| Malformed::new("", Problem::Port(number)))
}

#[cfg(test)]
mod tests {
    use super::{block, port};

    #[test]
    fn a_block_that_holds_nothing_is_refused_by_field() {
        let refused = |range: &str, except: &[&str], expected: &str| {
            let except: Vec<String> = except.iter().map(|text| (*text).to_owned()).collect();
            let error = block(range, &except).unwrap_err().to_string();
            assert!(error.starts_with(expected), "{error}");
        };
        refused("10.0.0.0", &[], "cidr: ");
        refused("10.0.0.0/33", &[], "cidr: ");
        refused("::ffff:10.0.0.0/104", &[], "cidr: ");
        refused("10.0.0.0/8", &["10.1.0.0/16", "11.0.0.0/16"], "except[1]: ");
        refused("10.0.0.0/8", &["0.0.0.0/0"], "except[0]: ");
        refused("10.0.0.0/8", &["fd00::/64"], "except[0]: ");
        refused("10.0.0.0/8", &["x"], "except[0]: ");
    }

    #[test]
    fn host_bits_of_a_block_do_not_count() {
        let except = ["10.1.2.3/16", "10.1.0.0/16"].map(str::to_owned);
        let block = block("10.9.9.9/8", &except).unwrap();
        assert_eq!(block.range, "10.0.0.0/8".parse().unwrap());
        assert_eq!(block.except, ["10.1.0.0/16".parse().unwrap()]);
    }

    #[test]
    fn a_port_is_one_to_65535() {
        assert_eq!([port(1), port(65_535)], [Ok(1), Ok(65_535)]);
        for bad in [0, -1, 65_536, i32::MIN] {
            assert!(port(bad).is_err(), "{bad}");
        }
    }
}
