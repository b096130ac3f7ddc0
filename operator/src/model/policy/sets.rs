//! What applies to a pod, as content of rows: its class and its sets.
//!
//! Ids are hashes of content, so each operator gives the same ones. Content is hashed as the row that droplets get,
//! with neither VNI nor id.

use std::collections::BTreeSet;
use std::sync::Arc;

use prost::Message as _;
use sha2::{Digest, Sha256};
use thiserror::Error;
use thuban_api::identifiers::Vni;
use thuban_proto::transit as proto;
use thuban_rows::{Class, MAX_RULES, NamedPort, PolicyId, PolicyPorts, PolicyRule, PolicySet, PolicyTier};

use super::compiled::{Direction, Policy};
use super::served::Served;

/// A class: what peers of policies select the pod, and which of its ports they name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct ClassContent {
    pub groups: BTreeSet<u64>,
    pub names: BTreeSet<NamedPort>,
}

/// A set: all that applies to a pod in one direction.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SetContent {
    pub is_egress: bool,
    pub is_isolated: bool,
    /// As in [`PolicySet::rules`]. Pods that policies select alike share them.
    pub rules: Vec<Arc<PolicyRule>>,
}

#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error(
    "{count} rules apply to packets of one pod ({direction}), but {MAX_RULES} at most can: all are denied; \
     join rules, or let fewer policies select the pod"
)]
pub struct TooManyRules {
    pub direction: Direction,
    pub count: usize,
}

impl ClassContent {
    /// Returns the id in a VPC where the ids of all smaller salts belong to other classes.
    pub fn id(&self, salt: u32) -> PolicyId {
        if *self == Self::default() {
            return PolicyId::PLAIN;
        }
        id(&self.canonical(), salt)
    }

    pub fn canonical(&self) -> Vec<u8> {
        let row = proto::ClassRow::from(&self.row(Vni::MIN, PolicyId::PLAIN));
        proto::ClassRow { vni: 0, id: 0, ..row }.encode_to_vec()
    }

    pub fn row(&self, vni: Vni, id: PolicyId) -> Class {
        Class {
            vni,
            id,
            groups: self.groups.clone(),
            names: self.names.clone(),
        }
    }
}

impl SetContent {
    /// Returns the id in a VPC where the ids of all smaller salts belong to other sets.
    pub fn id(&self, salt: u32) -> PolicyId {
        id(&self.canonical(), salt)
    }

    pub fn canonical(&self) -> Vec<u8> {
        let row = proto::PolicySetRow::from(&self.row(Vni::MIN, PolicyId::PLAIN));
        proto::PolicySetRow { vni: 0, id: 0, ..row }.encode_to_vec()
    }

    pub fn row(&self, vni: Vni, id: PolicyId) -> PolicySet {
        PolicySet {
            vni,
            id,
            is_egress: self.is_egress,
            is_isolated: self.is_isolated,
            rules: self.rules.iter().map(|rule| (**rule).clone()).collect(),
        }
    }

    /// Returns how many peers with a port the rules have.
    pub fn entries(&self) -> usize {
        let rule = |rule: &Arc<PolicyRule>| {
            let blocks = rule.blocks.iter().map(|block| 1 + block.except.len());
            let peers = rule.groups.len() + blocks.sum::<usize>();
            peers.max(1) * rule.ports.len().max(1)
        };
        self.rules.iter().map(rule).sum()
    }

    /// Returns what policies, in the order in which they are asked, say to a pod of a VPC, with these ports. Nodes
    /// serve these services for the VPC. None: nothing.
    pub(super) fn of(
        direction: Direction,
        policies: &[&Policy],
        vpc: &str,
        ports: &BTreeSet<NamedPort>,
        served: &[Served],
    ) -> Result<Option<Self>, TooManyRules> {
        let speaking = policies
            .iter()
            .filter(|policy| policy.rules(direction, vpc).is_some());
        let is_isolated = speaking
            .clone()
            .any(|policy| policy.tier == PolicyTier::NetworkPolicy);
        let asked = speaking.filter(|policy| !is_isolated || policy.tier != PolicyTier::Baseline);
        let mut rules: Vec<Arc<PolicyRule>> = Vec::new();
        for policy in asked {
            let own = policy.rules(direction, vpc).into_iter().flatten();
            let count = rules.len();
            match direction {
                Direction::Ingress => rules.extend(own.filter_map(|rule| resolve(rule, ports))),
                Direction::Egress => rules.extend(own.flat_map(|rule| with_served(rule, served))),
            }
            if rules.len() == count && policy.tier == PolicyTier::NetworkPolicy {
                rules.push(Arc::new(policy.naming_rule()));
            }
        }
        if rules.len() > MAX_RULES {
            let count = rules.len();
            return Err(TooManyRules { direction, count });
        }
        let is_anything = is_isolated || !rules.is_empty();
        Ok(is_anything.then_some(Self {
            is_egress: direction == Direction::Egress,
            is_isolated,
            rules,
        }))
    }

    /// Whether the set says anything else than one that denies all.
    pub fn says_anything(&self) -> bool {
        let is_of_somebody =
            |rule: &Arc<PolicyRule>| rule.anyone || !rule.groups.is_empty() || !rule.blocks.is_empty();
        !self.is_isolated || self.rules.iter().any(is_of_somebody)
    }

    pub const fn direction(&self) -> Direction {
        if self.is_egress {
            Direction::Egress
        } else {
            Direction::Ingress
        }
    }

    pub(super) const fn deny_all(direction: Direction) -> Self {
        Self {
            is_egress: matches!(direction, Direction::Egress),
            is_isolated: true,
            rules: Vec::new(),
        }
    }
}

/// Yields a rule, and what it says of services that nodes serve.
fn with_served<'a>(
    rule: &'a Arc<PolicyRule>,
    served: &'a [Served],
) -> impl Iterator<Item = Arc<PolicyRule>> + 'a {
    let of_services = served.iter().filter_map(|service| service.rule(rule));
    std::iter::once(Arc::clone(rule)).chain(of_services.map(Arc::new))
}

/// Puts the pod's own ports in the place of names. None: the pod has none of them, and the rule matches nothing.
fn resolve(rule: &Arc<PolicyRule>, own: &BTreeSet<NamedPort>) -> Option<Arc<PolicyRule>> {
    if !rule
        .ports
        .iter()
        .any(|ports| matches!(ports, PolicyPorts::Named(..)))
    {
        return Some(Arc::clone(rule));
    }
    let mut ports = BTreeSet::new();
    for given in &rule.ports {
        match given {
            PolicyPorts::Range(..) => ports.extend([given.clone()]),
            PolicyPorts::Named(name, protocol) => {
                let named = own.iter().filter(|port| *port.name == **name);
                let named = named.filter(|port| protocol.is_none_or(|protocol| protocol == port.protocol));
                ports.extend(named.map(|port| PolicyPorts::Range(port.protocol, port.port, port.port)));
            }
        }
    }
    if ports.is_empty() {
        return None;
    }
    Some(Arc::new(PolicyRule {
        ports: ports.into_iter().collect(),
        ..(**rule).clone()
    }))
}

/// Returns the first 24 bits of the hash; of the hash's hash, if they are no id or that of the plain class.
fn id(canonical: &[u8], salt: u32) -> PolicyId {
    let salted = Sha256::new()
        .chain_update(canonical)
        .chain_update(salt.to_be_bytes());
    let mut hash = salted.finalize();
    let rowless = [PolicyId::PLAIN, PolicyId::SHARED_SERVICE];
    loop {
        let number = u32::from_be_bytes([0, hash[0], hash[1], hash[2]]);
        if let Some(id) = PolicyId::new(number).filter(|id| !rowless.contains(id)) {
            return id;
        }
        hash = Sha256::digest(hash);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use sha2::{Digest, Sha256};
    use thuban_proto::transit as proto;
    use thuban_rows::{PolicyId, PolicyRule, PolicySet, builders};

    use super::{ClassContent, SetContent, id};

    fn set() -> SetContent {
        let row = builders::policy_set();
        SetContent {
            is_egress: row.is_egress,
            is_isolated: row.is_isolated,
            rules: row.rules.into_iter().map(Arc::new).collect(),
        }
    }

    fn class() -> ClassContent {
        let row = builders::class();
        let (groups, names) = (row.groups, row.names);
        ClassContent { groups, names }
    }

    #[test]
    fn content_is_all_of_a_row_but_its_vni_and_id() {
        let (row, given) = (builders::policy_set(), set());
        assert_eq!(given.row(row.vni, row.id), row);
        let (row, given) = (builders::class(), class());
        assert_eq!(given.row(row.vni, row.id), row);
    }

    #[test]
    fn each_part_of_the_content_is_in_the_id() {
        let rule = |change: &dyn Fn(&mut PolicyRule)| {
            let mut set = set();
            change(Arc::make_mut(&mut set.rules[1]));
            set
        };
        let sets = [
            set(),
            SetContent {
                is_egress: false,
                ..set()
            },
            SetContent {
                is_isolated: false,
                ..set()
            },
            SetContent {
                rules: set().rules.into_iter().rev().collect(),
                ..set()
            },
            rule(&|rule| rule.index += 1),
            rule(&|rule| rule.policy = "red/other".into()),
            rule(&|rule| rule.anyone = true),
            rule(&|rule| rule.groups.clear()),
            rule(&|rule| rule.blocks[0].except.clear()),
            rule(&|rule| rule.ports.clear()),
        ];
        let mut ids: Vec<PolicyId> = sets.iter().map(|set| set.id(0)).collect();
        ids.extend([1, 2, u32::MAX].map(|salt| set().id(salt)));
        let classes = [
            class(),
            ClassContent {
                groups: [11].into(),
                ..class()
            },
            ClassContent {
                names: [].into(),
                ..class()
            },
        ];
        ids.extend(classes.iter().map(|class| class.id(0)));
        let count = ids.len();
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), count);
        assert_eq!(set().id(0), set().id(0));
    }

    #[test]
    fn the_id_is_the_begin_of_the_hash() {
        let hash = Sha256::digest([&set().canonical()[..], &[0, 0, 0, 7]].concat());
        let number = u32::from_be_bytes([0, hash[0], hash[1], hash[2]]);
        assert_eq!(set().id(7).get(), number);
        // A row without VNI and id can't be read, and nothing else is missing.
        let row: proto::PolicySetRow = prost::Message::decode(&set().canonical()[..]).unwrap();
        assert_eq!((row.vni, row.id), (0, 0));
        let row = proto::PolicySetRow { vni: 7, id: 5, ..row };
        let row = PolicySet::try_from(row).unwrap();
        assert_eq!(row.rules, builders::policy_set().rules);
    }

    #[test]
    fn no_content_has_an_id_with_a_meaning() {
        assert_eq!(ClassContent::default().id(0), PolicyId::PLAIN);
        assert_eq!(ClassContent::default().id(9), PolicyId::PLAIN);
        // Its hash begins with three bytes of 0.
        let reserved = b"14710624";
        assert_eq!(Sha256::digest([&reserved[..], &[0; 4]].concat())[..3], [0; 3]);
        assert!(id(reserved, 0) > PolicyId::PLAIN);
    }
}
