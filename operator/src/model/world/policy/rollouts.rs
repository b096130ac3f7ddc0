//! The rollouts of all VPCs.
//!
//! Invariant: `dirty` names exactly the VPCs in which a round can begin for something that changed. Rollouts change
//! here alone, so that nobody walks all of them to find these VPCs.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Deref;

use crate::model::policy::Rollout;
use crate::model::world::EndpointName;

type ByVpc = BTreeMap<String, Rollout<EndpointName>>;

#[derive(Debug, Default)]
pub(in super::super) struct Rollouts {
    by_vpc: ByVpc,
    dirty: BTreeSet<String>,
}

impl Deref for Rollouts {
    type Target = ByVpc;

    fn deref(&self) -> &ByVpc {
        &self.by_vpc
    }
}

impl Rollouts {
    /// Whether a round can begin in some VPC for something that changed.
    pub fn has_dirty(&self) -> bool {
        !self.dirty.is_empty()
    }

    /// Changes the rollout of a VPC. Returns what `change` returns; none: the VPC has no rollout.
    pub fn change<T>(
        &mut self,
        vpc: &str,
        change: impl FnOnce(&mut Rollout<EndpointName>) -> T,
    ) -> Option<T> {
        let rollout = self.by_vpc.get_mut(vpc)?;
        let outcome = change(rollout);
        note(&mut self.dirty, vpc, rollout);
        Some(outcome)
    }

    pub fn change_all(&mut self, mut change: impl FnMut(&str, &mut Rollout<EndpointName>)) {
        for (vpc, rollout) in &mut self.by_vpc {
            change(vpc, rollout);
            note(&mut self.dirty, vpc, rollout);
        }
    }

    pub fn insert(&mut self, vpc: &str, rollout: Rollout<EndpointName>) {
        note(&mut self.dirty, vpc, &rollout);
        self.by_vpc.insert(vpc.to_owned(), rollout);
    }

    pub fn remove(&mut self, vpc: &str) -> Option<Rollout<EndpointName>> {
        self.dirty.remove(vpc);
        self.by_vpc.remove(vpc)
    }
}

/// Notes whether the rollout of a VPC is dirty.
fn note(dirty: &mut BTreeSet<String>, vpc: &str, rollout: &Rollout<EndpointName>) {
    if !rollout.is_dirty() {
        dirty.remove(vpc);
    } else if !dirty.contains(vpc) {
        dirty.insert(vpc.to_owned());
    }
}

#[cfg(test)]
mod tests {
    use fastrand::Rng;

    use super::Rollouts;
    use crate::model::policy::{Applied, Policies, Rollout, SetContent};

    #[test]
    fn dirty_vpcs_are_those_that_a_walk_finds() {
        let (mut random, policies) = (Rng::with_seed(1), Policies::default());
        let deny_all = SetContent {
            is_egress: false,
            is_isolated: true,
            rules: Vec::new(),
        };
        let applied = Applied {
            ingress: Some(deny_all),
            ..Applied::default()
        };
        let (mut rollouts, mut seen) = (Rollouts::default(), [false; 2]);
        for now in 0..2000 {
            let vpc = ["a", "b", "c"][random.usize(..3)];
            let endpoint = ("ns".to_owned(), format!("e{}", random.u8(..3)));
            match random.u8(..8) {
                0 => drop(rollouts.remove(vpc)),
                1 => rollouts.insert(vpc, Rollout::default()),
                2 => rollouts.change_all(|_, rollout| {
                    rollout.begin(&policies, now * 1000);
                }),
                3 => {
                    rollouts.change(vpc, Rollout::enforce);
                }
                4 => {
                    rollouts.change(vpc, Rollout::acked);
                }
                5 => {
                    rollouts.change(vpc, |rollout| rollout.remove(&endpoint));
                }
                _ => {
                    rollouts.change(vpc, |rollout| {
                        let (wanted, _) = rollout.want("ns", &applied);
                        rollout.set(&endpoint, &wanted, random.bool());
                    });
                }
            }
            let walked = rollouts.iter().filter(|(_, rollout)| rollout.is_dirty());
            let walked: Vec<&String> = walked.map(|(vpc, _)| vpc).collect();
            assert_eq!(rollouts.dirty.iter().collect::<Vec<_>>(), walked);
            assert_eq!(rollouts.has_dirty(), !walked.is_empty());
            seen[usize::from(rollouts.has_dirty())] = true;
        }
        assert_eq!(seen, [true; 2]);
    }
}
