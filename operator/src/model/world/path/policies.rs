//! Whether network policies accept the packets, and which one does not.
//!
//! The sets are those that droplets were sent, so that the answer is what droplets do.

use std::net::IpAddr;

use thuban_rows::{Kept, PolicyRule, PolicyTier};

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
        if source.name == target.name {
            return Ok(((), "a pod always reaches itself".to_owned()));
        }
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
        let peer = (&plain, address);
        let asked = self.decide(source, Direction::Egress, peer, packet)?;
        let is_isolated = matches!(asked, Some((_, Decision::Denies(None))));
        if is_isolated && self.is_own_node(source, address, packet) {
            let message = "only rules of ClusterNetworkPolicies keep a pod from its own node, and none does";
            return Ok(((), message.to_owned()));
        }
        let is_asked = self.judge(source, Direction::Egress, peer, packet)?;
        Ok(((), outcome([is_asked, false])))
    }

    /// Whether packets are for the source's own node itself, and not for a NodePort there.
    fn is_own_node(&self, source: &Place<'a>, address: IpAddr, packet: Packet) -> bool {
        let (world, droplet) = (self.world, &source.endpoint.droplet);
        let v4 = world.droplets.get(droplet).copied().map(IpAddr::V4);
        let v6 = world.droplets6.get(droplet).copied().map(IpAddr::V6);
        let mut port = packet.port.into_iter();
        let is_for_service = port.any(|port| world.is_node_port((packet.protocol, port)));
        source.vpc.host_access && [v4, v6].contains(&Some(address)) && !is_for_service
    }

    /// Judges what an endpoint sends or receives. Returns whether policies select it in the direction.
    pub(super) fn judge(
        &self,
        place: &Place<'a>,
        direction: Direction,
        peer: (&ClassContent, IpAddr),
        packet: Packet,
    ) -> Result<bool, Fault> {
        let Some((set, decision)) = self.decide(place, direction, peer, packet)? else {
            return Ok(false);
        };
        match decision {
            Decision::Accepts => Ok(true),
            Decision::DependsOnPort => {
                let message = format!("{direction} policies of {} accept some ports only", place.who());
                Err(unknown(Cause::PortNeeded, message))
            }
            Decision::Denies(rule) => Err(self.denial(place, set, rule)),
        }
    }

    /// Returns the set by which packets are judged, and what it says of them; none: policies do not select the endpoint
    /// in the direction.
    fn decide(
        &self,
        place: &Place<'a>,
        direction: Direction,
        (class, address): (&ClassContent, IpAddr),
        packet: Packet,
    ) -> Result<Option<(&'a SetContent, Decision<'a>)>, Fault> {
        let changes = || {
            let message = format!("the policies of {} change", place.who());
            unknown(Cause::PolicyChanges, message)
        };
        // Droplets judge by what an earlier leader told them.
        if self.world.kept_of(&place.network.vpc) != Kept::Nothing {
            return Err(changes());
        }
        let assignment = self.world.assignment(place.name);
        let id = match direction {
            Direction::Ingress => assignment.ingress,
            Direction::Egress => assignment.egress,
        };
        let Some(id) = id else {
            return Ok(None);
        };
        let rollout = self.world.enforcement.rollouts.get(&place.network.vpc);
        let set = rollout.and_then(|rollout| rollout.set_content(id));
        let set = set.ok_or_else(changes)?;
        let peer = Peer {
            class,
            address,
            protocol: packet.protocol,
            port: packet.port,
        };
        Ok(Some((set, set.decide(&peer))))
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
