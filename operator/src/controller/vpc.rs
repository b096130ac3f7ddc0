//! Vpc: checked, given a VNI, and served by dividers. It is deleted after its networks.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use kube::runtime::controller::Action;
use kube::{Api, ResourceExt};
use thuban_api::cidr::Cidr;
use thuban_api::condition::set;
use thuban_api::identifiers::Vni;
use thuban_api::{
    DEFAULT_NAME, Divider, DividerSpec, Network, Phase, VniClaim, VniClaimSpec, Vpc, VpcStatus,
};

use crate::controller::context::Context;
use crate::controller::deletion::{self, join_first, until_taken};
use crate::controller::parent::{Readiness, Stage, Step, View, decide, keep_ready, readiness};
use crate::controller::ranges;
use crate::controller::role::kind::roles_of;
use crate::controller::role::role_set::{self, RoleSet};
use crate::controller::runtime::clocks::Timed;
use crate::controller::runtime::error::ReconcileError;
use crate::controller::runtime::objects::{
    WriteError, add_finalizer, condition, create, get, has_finalizer, list_where, remove_finalizer,
    write_status,
};
use crate::controller::runtime::pace::{Pace, write_in_time};
use crate::controller::service::service_range;
use crate::controller::shared_services;
use crate::controller::vni_claim::holding_rows;
use crate::hub::{Barrier, WAITS_FOR_ACKS, Waiter};
use crate::model::allocation::propose_vni;
use crate::model::range_claims::{Claimant, Claims};
use crate::model::ranges::{is_accepted, parsed};
use crate::model::scaling::{Bounds, Demand};
use crate::model::validation::{self, RangeError};
use thuban_api::refused_ranges::RefusedRanges;

/// How often the operator looks whether the Services that a VPC shares are there.
const LOOK_AT_SERVICES: Duration = Duration::from_secs(30);

pub async fn reconcile(vpc: Arc<Vpc>, context: Arc<Context>) -> Result<Action, ReconcileError> {
    let vpcs: Api<Vpc> = Api::all(context.client.clone());
    if vpc.metadata.deletion_timestamp.is_some() {
        return remove(&vpc, &vpcs, &context).await;
    }
    if !has_finalizer(&*vpc) {
        add_finalizer(&vpcs, &*vpc).await?;
        return Ok(Action::await_change());
    }
    let generation = vpc.metadata.generation;
    let mut status = vpc.status.clone().unwrap_or_default();
    status.observed_generation = generation;
    let verdict = match check(&vpc, &context.stores.vpcs.state(), &context) {
        Ok(_) if !ranges::are_in_force(&*vpc) => {
            let check = |others: &[_]| check(&vpc, others, &context);
            // The default VPC's rivals are all others.
            let default = (vpc.name_any() != DEFAULT_NAME).then_some(("metadata.name", DEFAULT_NAME));
            ranges::contend(&*vpc, &vpcs, default, check).await?
        }
        verdict => verdict,
    };
    let is_news = set(&mut status.conditions, ranges::accepted(&verdict, generation));
    let step = decide(View {
        is_early: false,
        is_usable: verdict.is_ok(),
        is_in_force: status.vni.is_some(),
        has_number: status.vni.is_some(),
    });
    let Err(error) = verdict else {
        status.cidrs.clone_from(&vpc.spec.cidrs);
        status.ranges = status.cidrs.join(", ");
        if step == Step::ClaimNumber {
            status.vni = Some(claim_vni(&vpc, &context).await?);
            write_status(&vpcs, &*vpc, status).await?;
            return Ok(Action::await_change());
        }
        return serve(&vpc, &vpcs, status, &context).await;
    };
    // The refusal is stored first: it ends the claim of these ranges.
    if step == (Step::Refuse { serves_on: true }) && vpc.status.as_ref() == Some(&status) {
        serve(&vpc, &vpcs, status, &context).await?;
        return Ok(Action::requeue(ranges::retry(&error).min(role_set::LOOK_AT_LOAD)));
    }
    write_status(&vpcs, &*vpc, status).await?;
    if is_news {
        ranges::tell(&*vpc, &error, &context);
    }
    Ok(Action::requeue(ranges::retry(&error)))
}

/// Whether a VPC's pods reach addresses outside of it.
pub fn has_egress(vpc: &Vpc) -> bool {
    vpc.spec.egress.unwrap_or(vpc.name_any() == DEFAULT_NAME)
}

/// Creates the dividers first, then writes the status that says that they work.
async fn serve(
    vpc: &Vpc,
    vpcs: &Api<Vpc>,
    mut status: VpcStatus,
    context: &Context,
) -> Result<Action, ReconcileError> {
    let generation = vpc.metadata.generation;
    let name = vpc.name_any();
    let wanted = wanted(vpc, &status, context);
    let number = role_set::limited::<Divider>(wanted, status.dividers, &name, context);
    status.dividers = Some(number);
    let waiting = ensure_dividers(vpc, number, context).await?;
    status.working_dividers = Some(number.saturating_sub(waiting.len() as u32));
    status.egress = Some(has_egress(vpc));
    status.networks = u32::try_from(context.index.networks_of(&name).len()).ok();
    let numbers = (wanted, number);
    role_set::judge_crowded::<Divider>(&name, numbers, &mut status.conditions, generation, context);
    let unshared = shared_services::judge(vpc, &mut status.conditions, context);
    let readiness = readiness(status.phase, None, waiting.len());
    match readiness {
        Readiness::Kept => keep_ready(&mut status.conditions, generation),
        Readiness::WaitsForVpc => {}
        Readiness::WaitsForRoles => {
            let message = format!("waits for dividers: {}", waiting.join(", "));
            let ready = condition("Ready", false, "DividersNotProvisioned", &message, generation);
            set(&mut status.conditions, ready);
        }
        Readiness::Provisioned => {
            status.phase = Phase::Provisioned;
            let ready = condition("Ready", true, "Provisioned", "its dividers work", generation);
            set(&mut status.conditions, ready);
        }
    }
    let pace = Pace {
        clocks: &context.clocks,
        timed: Timed::VpcStatus,
        steady,
        limit: None,
    };
    let held_back = write_in_time(vpcs, vpc, status, &pace).await?;
    if readiness == Readiness::Provisioned {
        context
            .events
            .event(vpc, false, "Provisioned", "networks can be served");
    }
    if let Some(message) = unshared {
        context.events.event(vpc, true, shared_services::REASON, &message);
    }
    if let Some(left) = held_back {
        return Ok(Action::requeue(left));
    }
    // A droplet may join.
    Ok(if vpc.spec.autoscale.is_some() || number < wanted {
        Action::requeue(role_set::LOOK_AT_LOAD)
    } else if vpc.spec.shared_services.iter().flatten().next().is_some() {
        Action::requeue(LOOK_AT_SERVICES)
    } else {
        Action::await_change()
    })
}

/// Checks a VPC against refused ranges, nodes' addresses and these VPCs.
fn check(vpc: &Vpc, others: &[Arc<Vpc>], context: &Context) -> Result<Vec<Cidr>, RangeError> {
    // A node that joins with an address inside a VPC in force is refused itself.
    let nodes = if ranges::are_in_force(vpc) {
        Vec::new()
    } else {
        context.node_addresses()
    };
    validation::vpc(&vpc.spec.cidrs, &refused(vpc, others, context), &nodes)
}

/// Whether the VPCs must not overlap. Nodes reach the default VPC by its addresses, so no other VPC may have them, and
/// ranges that the default VPC takes later must be free. Other VPCs may be equal.
fn are_rivals(vpc: &Vpc, other: &Vpc) -> bool {
    [vpc, other].iter().any(|vpc| vpc.name_any() == DEFAULT_NAME)
}

/// Returns the ranges that this VPC may not have.
fn refused(vpc: &Vpc, others: &[Arc<Vpc>], context: &Context) -> RefusedRanges {
    let is_default = vpc.name_any() == DEFAULT_NAME;
    let what = "the default VPC, which nodes reach by these addresses";
    // Ranges in force stay, whatever was taken beside them before.
    let own = parsed(vpc.in_force());
    let is_new = |range: &Cidr| !own.iter().any(|own| own.overlaps(*range));
    let mut refused = context.refused.clone();
    for (object, range) in service_range::of_objects(context) {
        let name = object.name_any();
        refused = refused.and(range, &format!("Services' addresses, by ServiceCIDR {name}"));
    }
    if !is_default {
        refused = refused.and(context.default_range, what);
    }
    let rivals = others.iter().map(AsRef::as_ref);
    let rivals = rivals.filter(|other| are_rivals(vpc, other));
    for (name, ahead) in Claims::of(vpc, rivals).ahead {
        for range in parsed(&ahead).into_iter().filter(is_new) {
            let taken = format!("VPC {name}, while nodes would reach the default VPC by these addresses");
            refused = refused.and(range, if is_default { &taken } else { what });
        }
    }
    refused
}

/// Leaves what does not pass by itself in a moment: the number of networks and of dividers that work does, and all that
/// a VPC says of dividers before it is Provisioned.
fn steady(status: &mut VpcStatus) {
    (status.networks, status.working_dividers) = (None, None);
    if status.phase == Phase::Init {
        (status.dividers, status.egress) = (None, None);
        status.conditions.retain(|condition| condition.kind != "Ready");
    }
}

/// Claims a free number by creating the object of that name: the VPC of the created object has it.
async fn claim_vni(vpc: &Vpc, context: &Context) -> Result<u32, WriteError> {
    let uid = vpc.uid().unwrap_or_default();
    let claims: Api<VniClaim> = Api::all(context.client.clone());
    let known = context.stores.vni_claims.state();
    let own = known
        .iter()
        .find(|claim| claim.spec.vpc_uid == uid)
        .and_then(|claim| claim.name_any().parse().ok());
    if let Some(vni) = own {
        return Ok(vni);
    }
    let others = context.stores.vpcs.state();
    let in_use = others.iter().filter(|other| other.uid() != vpc.uid());
    // A VPC whose claim was removed has its VNI all the same.
    let mut taken: HashSet<u32> = known
        .iter()
        .filter_map(|claim| claim.name_any().parse().ok())
        .chain(in_use.filter_map(|other| other.status.as_ref()?.vni))
        .collect();
    loop {
        let vni = context.index.pick_vni(&uid, |is_others| {
            let free = propose_vni(&uid, |vni| is_others(vni) || taken.contains(&vni));
            free.unwrap_or(Vni::MAX)
        });
        let spec = VniClaimSpec {
            vpc: vpc.name_any(),
            vpc_uid: uid.clone(),
        };
        match create(&claims, &VniClaim::new(&vni.to_string(), spec)).await {
            Ok(_) => return Ok(vni),
            Err(error) if error.is_conflict() && !taken.contains(&vni) => {
                // Another operator, or a request whose answer was lost, may have made it for this VPC.
                let claim = get(&claims, &vni.to_string()).await?;
                if claim.is_some_and(|claim| claim.spec.vpc_uid == uid) {
                    return Ok(vni);
                }
                taken.insert(vni);
            }
            Err(error) => return Err(error),
        }
    }
}

/// Returns how many dividers there should be now.
fn wanted(vpc: &Vpc, status: &VpcStatus, context: &Context) -> u32 {
    let least = vpc.spec.dividers;
    let scaling = vpc.spec.autoscale.as_ref();
    let vni = status.vni.and_then(Vni::new);
    let bounds = Bounds {
        least,
        most: scaling.map_or(least, |scaling| scaling.max_dividers),
    };
    let demands = scaling.map(|scaling| Demand {
        amount: vni.map_or(0, |vni| context.hub.load(vni, None)),
        each: scaling.packets_per_second.into(),
    });
    let name = vpc.name_any();
    let key = (Timed::FewerDividers, name.as_str());
    role_set::wanted(key, status.dividers, bounds, demands.as_slice(), context)
}

/// Creates missing dividers and removes those that are too many. Returns the names of the dividers that don't work yet.
async fn ensure_dividers(vpc: &Vpc, wanted: u32, context: &Context) -> Result<Vec<String>, WriteError> {
    let make = |name: &str| {
        let spec = DividerSpec {
            vpc: vpc.name_any(),
            droplet: None,
        };
        Divider::new(name, spec)
    };
    let roles = RoleSet {
        parent: vpc,
        letter: 'd',
        make: &make,
    };
    roles.ensure(wanted, context).await
}

/// Waits for the networks first, then removes the dividers, then the rows everywhere, then the object, then its VNI.
async fn remove(vpc: &Vpc, vpcs: &Api<Vpc>, context: &Context) -> Result<Action, ReconcileError> {
    if !has_finalizer(vpc) {
        return Ok(Action::await_change());
    }
    for stage in Stage::ORDER {
        let names = look(stage, vpc, context).await?;
        if !names.is_empty() {
            return wait(stage, &names, vpc, vpcs, context).await;
        }
    }
    // The VNI rests from then on. Another operator may be accepting a network of the VPC at this moment; then this
    // write is refused.
    remove_finalizer(vpcs, vpc).await?;
    context.clocks.forget(Timed::VpcStatus, &vpc.name_any());
    Ok(Action::await_change())
}

/// Returns the names of the objects that are left at a stage of the deletion.
async fn look(stage: Stage, vpc: &Vpc, context: &Context) -> Result<Vec<String>, ReconcileError> {
    let name = vpc.name_any();
    match stage {
        Stage::Members => {
            let networks = context.networks_of(&name);
            // A network that was never accepted has nothing in the VPC.
            let accepted = networks.iter().filter(|network| is_accepted(network));
            Ok(accepted.map(|network| network.name_any()).collect())
        }
        Stage::Roles => Ok(role_set::remove_all::<_, Divider>(vpc, context).await?),
        Stage::Rows => {
            let vni = vpc.status.as_ref().and_then(|status| Vni::new(status.vni?));
            let Some(vni) = vni else {
                return Ok(Vec::new());
            };
            // Lost droplets only delay the reuse of the number, which is not given out before they are heard.
            let waiter = || Waiter::Vpc(name.clone());
            let barrier = |droplets| Barrier::new(waiter()).lacks_number(vni, droplets).keeps_number();
            Ok(holding_rows(barrier, context).await?)
        }
        // This process accepts no more networks of the VPC, but its view of those that it did accept may be old.
        Stage::Unseen => {
            let networks = Api::<Network>::all(context.client.clone());
            let networks = list_where(&networks, "spec.vpc", &name).await?.into_iter();
            let served = networks.filter(is_accepted);
            Ok(served.map(|network| network.name_any()).collect())
        }
    }
}

/// Reports what the VPC waits for.
async fn wait(
    stage: Stage,
    names: &[String],
    vpc: &Vpc,
    vpcs: &Api<Vpc>,
    context: &Context,
) -> Result<Action, ReconcileError> {
    let seconds = match stage {
        Stage::Members => {
            let message = format!("waits until these networks are deleted: {}", join_first(names));
            deletion::wait(vpc, vpcs, ("WaitsForNetworks", &message), context).await?;
            // Networks that arrived while the VPC's deletion began are served to their end.
            if roles_of::<Divider>(&vpc.name_any(), context).is_empty() {
                ensure_dividers(vpc, 1, context).await?;
            }
            10
        }
        Stage::Roles => {
            let message = format!("waits until these dividers are gone: {}", join_first(names));
            deletion::wait_long(vpc, vpcs, ("WaitsForDividers", &message), context).await?;
            1
        }
        Stage::Rows => {
            deletion::wait_long(vpc, vpcs, (WAITS_FOR_ACKS, &until_taken(names)), context).await?;
            3
        }
        Stage::Unseen => 1,
    };
    Ok(Action::requeue(Duration::from_secs(seconds)))
}
