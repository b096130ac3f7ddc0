//! Whether network policies accept the packets, and which one does not.
//!
//! The sets are those that droplets were sent, so that the answer is what droplets do.

use std::net::IpAddr;

use thuban_rows::{PolicyRule, PolicyTier};

use super::{Cause, Fault, Found, Packet, Path, Place, no, unknown};
use crate::model::policy::{ClassContent, Decision, Direction, Peer, SetContent};

/// How many policies a message names.
const NAMED: usize = 3;

impl<'a> Path<'a> {
    /// Judges packets between endpoints of one VPC.
    pub(super) fn policies(&self, source: &Place<'a>, target: &Place<'a>, packet: Packet) -> Found<()> {
        let Some((from, to)) = source
            .address_of(packet.is_v6)
            .zip(target.address_of(packet.is_v6))
        else {
            let message = "source and target have no addresses of one family".to_owned();
            return Err(no(Cause::NoSuchFamily, message));
        };
        let is_asked = [
            self.judge(source, Direction::Egress, (&self.class_of(target), to), packet)?,
            self.judge(target, Direction::Ingress, (&self.class_of(source), from), packet)?,
        ];
        // Whether policies select another namespace's pod is not told.
        let is_told = target.is_own || is_asked[0];
        let message = if is_told {
            outcome(is_asked)
        } else {
            outcome([true; 2])
        };
        Ok(((), message))
    }

    /// Judges packets of the source to an address that is no endpoint of its VPC.
    pub(super) fn policies_of_sender(
        &self,
        source: &Place<'a>,
        address: IpAddr,
        packet: Packet,
    ) -> Found<()> {
        let plain = ClassContent::default();
        let is_asked = self.judge(source, Direction::Egress, (&plain, address), packet)?;
        Ok(((), outcome([is_asked, false])))
    }

    /// Judges what an endpoint sends or receives. Returns whether policies select it in the direction.
    pub(super) fn judge(
        &self,
        place: &Place<'a>,
        direction: Direction,
        (class, address): (&ClassContent, IpAddr),
        packet: Packet,
    ) -> Result<bool, Fault> {
        let assignment = self.world.assignment(place.name);
        let id = match direction {
            Direction::Ingress => assignment.ingress,
            Direction::Egress => assignment.egress,
        };
        let Some(id) = id else {
            return Ok(false);
        };
        let rollout = self.world.enforcement.rollouts.get(&place.network.vpc);
        let Some(set) = rollout.and_then(|rollout| rollout.set_content(id)) else {
            let message = format!("the policies of {} change", place.who());
            return Err(unknown(Cause::PolicyChanges, message));
        };
        let peer = Peer {
            class,
            address,
            protocol: packet.protocol,
            port: packet.port,
        };
        match set.decide(&peer) {
            Decision::Accepts => Ok(true),
            Decision::DependsOnPort => {
                let message = format!("{direction} policies of {} accept some ports only", place.who());
                Err(unknown(Cause::PortNeeded, message))
            }
            Decision::Denies(rule) => Err(self.denial(place, set, rule)),
        }
    }

    /// Says which policy denies packets. Of another namespace's policies nothing is told.
    fn denial(&self, place: &Place<'a>, set: &SetContent, rule: Option<&PolicyRule>) -> Fault {
        let (who, direction) = (place.who(), set.direction());
        if !place.is_own {
            let message = format!("{direction} policies of the target deny the packets");
            return no(Cause::PolicyDenies, message);
        }
        if let Some(rule) = rule {
            let message = format!(
                "{} denies the packets by spec.{direction}[{}]; it selects {who}",
                full_name(&rule.policy),
                rule.index
            );
            return no(Cause::PolicyDenies, message);
        }
        if let Some(why) = self.world.too_many_rules(place.name) {
            return no(Cause::TooManyRules, why);
        }
        let isolating = set.rules.iter();
        let isolating = isolating.filter(|rule| rule.tier == PolicyTier::NetworkPolicy);
        let mut names: Vec<&str> = isolating.map(|rule| &*rule.policy).collect();
        names.dedup();
        let more = names.len().saturating_sub(NAMED);
        let more = if more > 0 {
            format!(" and {more} more")
        } else {
            String::new()
        };
        let count = names.len();
        names.truncate(NAMED);
        let names = names.join(", ");
        let message = match count {
            0 => format!("{direction} of {who} is isolated, and no rule accepts the packets"),
            1 => format!(
                "NetworkPolicy {names} selects {who}, and no {direction} rule of it accepts the packets"
            ),
            _ => format!(
                "NetworkPolicies {names}{more} select {who}, and no {direction} rule of them accepts the packets"
            ),
        };
        no(Cause::PolicyDenies, message)
    }

    pub(super) fn class_of(&self, place: &Place<'a>) -> ClassContent {
        let rollout = self.world.enforcement.rollouts.get(&place.network.vpc);
        let id = self.world.assignment(place.name).class;
        let class = rollout.zip(id).and_then(|(rollout, id)| rollout.class(id));
        // The plain class has no row.
        class.cloned().unwrap_or_default()
    }
}

/// Says what policies say. `is_asked`: whether some select source and target.
fn outcome(is_asked: [bool; 2]) -> String {
    let text = if is_asked.contains(&true) {
        "accepted"
    } else {
        "none selects the pods in these directions"
    };
    text.to_owned()
}

/// Returns kind and name of a policy.
fn full_name(policy: &str) -> String {
    if policy.contains('/') {
        format!("NetworkPolicy {policy}")
    } else {
        format!("ClusterNetworkPolicy {policy}")
    }
}
