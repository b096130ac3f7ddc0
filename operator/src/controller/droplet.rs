//! Droplet: registered by transitd in Init, Provisioned here once it is known to be its Node's.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use kube::runtime::controller::Action;
use kube::{Api, ResourceExt};
use thuban_api::condition::set;
use thuban_api::{Condition, Droplet, DropletStatus, Phase};
use thuban_rows::is_unicast6;

use crate::controller::context::{Context, found};
use crate::controller::endpoint::host;
use crate::controller::runtime::clocks::Timed;
use crate::controller::runtime::error::ReconcileError;
use crate::controller::runtime::objects::{WriteError, condition, list, owner, update};
use crate::controller::runtime::pace::{Pace, write_in_time};
use crate::controller::wake::{wake_roles, wake_unplaced};
use crate::hub::Health;
use crate::model::cached::{internal_ips, is_node_lost};
use crate::model::droplet::is_accepted;

/// The reason and message of a droplet that is not used.
type Refusal = (&'static str, String);

/// How long the operator waits between two looks at a droplet without a stream. They cost no request.
const LOST_RETRY: Duration = Duration::from_secs(5);
/// The taint that a person sets on the Node of a machine that is certainly switched off.
const OUT_OF_SERVICE: &str = "node.kubernetes.io/out-of-service";

pub async fn reconcile(droplet: Arc<Droplet>, context: Arc<Context>) -> Result<Action, ReconcileError> {
    if droplet.metadata.deletion_timestamp.is_some() {
        return Ok(Action::await_change());
    }
    let name = droplet.name_any();
    let droplets: Api<Droplet> = Api::all(context.client.clone());
    let Some(node) = context.node(&droplet.spec.node) else {
        return Ok(Action::requeue(Duration::from_secs(5)));
    };
    if droplet.owner_references().is_empty() {
        let mut owned = (*droplet).clone();
        owned.metadata.owner_references = owner(&*node).map(|reference| vec![reference]);
        update(&droplets, &*droplet, &owned).await?;
        return Ok(Action::await_change());
    }
    let mut status = droplet.status.clone().unwrap_or_default();
    let verdict = judge(&droplet, &internal_ips(&node), &context);
    let generation = droplet.metadata.generation;
    let accepted = match &verdict {
        Ok(()) => condition(
            "Accepted",
            true,
            "Registered",
            "spec.ip is the node's; the droplet may have roles",
            generation,
        ),
        Err((reason, message)) => condition("Accepted", false, reason, message, generation),
    };
    let is_news = set(&mut status.conditions, accepted);
    if verdict.is_ok() {
        status.phase = Phase::Provisioned;
        status.address = Some(droplet.spec.ip.clone());
    }
    let (state, action) = judge_health(context.hub.health(&name), &node);
    let is_changed = state.is_some_and(|state| set(&mut status.conditions, state.condition(generation)));
    let roles = context.hub.read(|world| world.roles_on(&name));
    status.roles = roles.into_iter().map(|(_, role)| role).collect();
    status.role_count = u32::try_from(status.roles.len()).ok();
    status.observed_generation = generation;
    let mut current = (*droplet).clone();
    current.status = Some(status.clone());
    // A burst of roles changes many droplets at once.
    let pace = Pace {
        clocks: &context.clocks,
        timed: Timed::DropletRoles,
        steady,
        limit: Some(&context.counts),
    };
    let held_back = write_in_time(&droplets, &*droplet, status, &pace).await?;
    apply(&current, state, &context);
    if is_changed && state == Some(State::Connected) {
        wake_unplaced(&context);
    }
    if let (true, Err((reason, message))) = (is_news, &verdict) {
        context.events.event(&*droplet, true, reason, message);
    }
    if let (true, Some(state)) = (is_changed, state) {
        let (reason, message) = state.words();
        context
            .events
            .event(&*droplet, state != State::Connected, reason, message);
    }
    let denied = if is_accepted(&current) {
        host::ensure(&current, &context).await?
    } else {
        None
    };
    if let Some(left) = held_back {
        return Ok(Action::requeue(left));
    }
    // A droplet without a stream is looked at more often.
    Ok(if action == Action::await_change() {
        denied.unwrap_or(action)
    } else {
        action
    })
}

/// Leaves what does not pass by itself in a moment: all but the roles. A burst of roles costs one write.
fn steady(status: &mut DropletStatus) {
    (status.roles, status.role_count) = (Vec::new(), None);
}

/// The state of a droplet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Connected,
    /// No stream, or it acks too late: its roles move.
    Suspect,
    /// No stream, and Kubernetes has lost its node, too: direct paths to it end.
    NotReady,
    /// A person says that the machine is switched off: the droplet is treated as deleted.
    OutOfService,
}

impl State {
    fn words(self) -> (&'static str, &'static str) {
        match self {
            Self::Connected => ("Connected", "transitd is connected to the operator"),
            Self::Suspect => (
                "Suspect",
                "transitd has had no stream to the operator for 10 s, or has not acknowledged a row for 60 s; \
                 Kubernetes has not lost the node. Roles move to other droplets. Look at transitd's log on the node",
            ),
            Self::NotReady => (
                "NotReady",
                "transitd has no stream to the operator, and Kubernetes has lost the node (its condition Ready is \
                 Unknown). Roles move to other droplets, and direct paths to this one end. Look at the node",
            ),
            Self::OutOfService => (
                "OutOfService",
                "the node has the taint out-of-service, and transitd has no stream to the operator: all that was on \
                 the node counts as gone. Remove the taint when the node is back",
            ),
        }
    }

    fn condition(self, generation: Option<i64>) -> Condition {
        let (reason, message) = self.words();
        condition("Ready", self == Self::Connected, reason, message, generation)
    }
}

/// Returns the droplet's state, if there is a verdict, and when to look again. The stream is the first witness, the
/// Node the second one.
fn judge_health(health: Health, node: &Node) -> (Option<State>, Action) {
    match health {
        Health::Connected => (Some(State::Connected), Action::await_change()),
        Health::Missing(_) | Health::Suspect if is_out_of_service(node) => {
            (Some(State::OutOfService), Action::requeue(LOST_RETRY))
        }
        Health::Missing(left) => (None, Action::requeue(left)),
        Health::Suspect if is_node_lost(node) => (Some(State::NotReady), Action::requeue(LOST_RETRY)),
        Health::Suspect => (Some(State::Suspect), Action::requeue(LOST_RETRY)),
    }
}

fn is_out_of_service(node: &Node) -> bool {
    let taints = node.spec.iter().flat_map(|spec| spec.taints.iter().flatten());
    taints.into_iter().any(|taint| taint.key == OUT_OF_SERVICE)
}

/// Returns the address of the droplet in rows; none while the droplet doesn't count as one.
pub fn address_in_force(droplet: &Droplet, context: &Context) -> Option<Ipv4Addr> {
    let name = droplet.name_any();
    context.node(&name)?;
    if is_off(&name, context) {
        return None;
    }
    verified_address(droplet).or_else(|| kept_address(droplet, context))
}

/// Returns the address that a droplet has in rows while its Droplet, which somebody deleted and transitd made again, is
/// not judged yet: pods must not lose their rows meanwhile.
fn kept_address(droplet: &Droplet, context: &Context) -> Option<Ipv4Addr> {
    let name = droplet.name_any();
    let kept = context.hub.read(|world| world.droplet_address(&name))?;
    let is_same = droplet.spec.ip.parse::<Ipv4Addr>() == Ok(kept);
    (droplet.status.is_none() && is_same).then_some(kept)
}

/// Returns the IPv6 address of the droplet's node in rows, if the node has one.
pub fn node_address6(name: &str, context: &Context) -> Option<Ipv6Addr> {
    let of_node = context.node(name).map(|node| internal_ips(&node))?;
    let mut of_family = of_node.into_iter().filter_map(|address| match address {
        IpAddr::V6(v6) => Some(v6),
        IpAddr::V4(_) => None,
    });
    of_family.find(is_unicast6)
}

fn verified_address(droplet: &Droplet) -> Option<Ipv4Addr> {
    droplet.status.as_ref()?.address.as_ref()?.parse().ok()
}

/// Whether a person says that the machine is switched off, and nothing contradicts it.
fn is_off(name: &str, context: &Context) -> bool {
    let node = context.node(name);
    node.is_some_and(|node| is_out_of_service(&node)) && !context.hub.is_connected(name)
}

/// Returns the droplets that may have rows, as the API server has them now: another leader may know droplets that this
/// one has not seen, and whose Nodes it has not seen either.
pub async fn all_in_force(context: &Context) -> Result<Vec<String>, WriteError> {
    let droplets: Api<Droplet> = Api::all(context.client.clone());
    let all = list(&droplets).await?;
    let verified = all.iter().filter(|droplet| verified_address(droplet).is_some());
    let names = verified.map(Droplet::name_any);
    Ok(names.filter(|name| !is_off(name, context)).collect())
}

/// Applies the state of the droplet to the objects that depend on it.
fn apply(droplet: &Droplet, state: Option<State>, context: &Context) {
    let name = &droplet.name_any();
    let address = address_in_force(droplet, context);
    let address6 = node_address6(name, context);
    let was = context.hub.update(|world| {
        let was = world.is_droplet(name);
        world.set_droplet(name, address);
        world.set_droplet6(name, address6);
        if let Some(state) = state {
            world.set_away(name, matches!(state, State::NotReady | State::OutOfService));
        }
        was
    });
    let is_lost = matches!(state, Some(state) if state != State::Connected);
    if is_lost {
        context.hub.wake_waiters(name);
    }
    if was != address.is_some() || is_lost {
        wake_roles(name, context);
    }
}

fn judge(droplet: &Droplet, node_addresses: &[IpAddr], context: &Context) -> Result<(), Refusal> {
    let name = droplet.name_any();
    if droplet.spec.node != name {
        return Err((
            "WrongNode",
            format!("spec.node: expected {name:?}, the object's own name"),
        ));
    }
    let address = droplet
        .spec
        .ip
        .parse::<Ipv4Addr>()
        .ok()
        .filter(|address| node_addresses.contains(&IpAddr::from(*address)));
    let Some(address) = address else {
        let message = format!(
            "spec.ip: {:?} is not an InternalIP of node {name}, which has {node_addresses:?}; give transitd one of \
             these as NODE_IP, or correct the Node's addresses",
            droplet.spec.ip
        );
        return Err(("WrongAddress", message));
    };
    let others = context.index.droplets_at(&droplet.spec.ip);
    let others = found(&context.stores.droplets, &others);
    if let Some(other) = others
        .iter()
        .find(|other| other.name_any() != name && other.spec.ip == droplet.spec.ip)
    {
        let is_older = |a: &Droplet, b: &Droplet| {
            (&a.metadata.creation_timestamp, a.name_any()) < (&b.metadata.creation_timestamp, b.name_any())
        };
        if is_older(other, droplet) {
            let message = format!(
                "spec.ip: droplet {} has the address {address} already; give this node another address, or delete that \
                 droplet's Node if it is gone",
                other.name_any()
            );
            return Err(("AddressTaken", message));
        }
    }
    match context.index.vpc_within(node_addresses) {
        Some((vpc, address, range)) => {
            let message = format!(
                "InternalIP {address} of the node lies in {range} of VPC {vpc}; give the node another address or remove \
                 the VPC"
            );
            Err(("AddressConflict", message))
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{Action, Duration, Health, LOST_RETRY, Node, OUT_OF_SERVICE, State, judge_health};

    fn node(ready: Option<&str>, taint: &str) -> Node {
        let conditions = ready.map(|ready| json!([{"type": "Ready", "status": ready}]));
        serde_json::from_value(json!({
            "metadata": {"name": "a"},
            "spec": {"taints": [{"key": taint, "effect": "NoExecute"}]},
            "status": {"conditions": conditions},
        }))
        .unwrap()
    }

    #[test]
    fn only_two_witnesses_make_a_droplet_not_ready() {
        let left = Duration::from_secs(3);
        let judged = |health, ready| judge_health(health, &node(ready, "other")).0;
        for ready in [None, Some("True"), Some("False"), Some("Unknown")] {
            assert_eq!(
                judged(Health::Connected, ready),
                Some(State::Connected),
                "{ready:?}"
            );
            assert_eq!(judged(Health::Missing(left), ready), None, "{ready:?}");
        }
        for ready in [None, Some("True"), Some("False")] {
            assert_eq!(judged(Health::Suspect, ready), Some(State::Suspect), "{ready:?}");
        }
        assert_eq!(judged(Health::Suspect, Some("Unknown")), Some(State::NotReady));
    }

    #[test]
    fn a_person_is_believed_unless_there_is_a_stream() {
        let judged = |health| judge_health(health, &node(Some("Unknown"), OUT_OF_SERVICE)).0;
        assert_eq!(judged(Health::Connected), Some(State::Connected));
        assert_eq!(judged(Health::Missing(LOST_RETRY)), Some(State::OutOfService));
        assert_eq!(judged(Health::Suspect), Some(State::OutOfService));
    }

    #[test]
    fn a_droplet_without_a_stream_is_looked_at_again() {
        let left = Duration::from_secs(3);
        let action = |health| judge_health(health, &node(Some("True"), "other")).1;
        assert_eq!(action(Health::Connected), Action::await_change());
        assert_eq!(action(Health::Missing(left)), Action::requeue(left));
        assert_eq!(action(Health::Suspect), Action::requeue(LOST_RETRY));
    }
}
