//! Vips: their leases, their status, and their end.
//!
//! Invariant: an address is released only after every node that may announce it said that it withdrew it. If a node
//! stays silent, the lease is left to end by itself, and the Vip goes without waiting for that.

mod certificate;
pub mod ending;
mod leasing;
mod terms;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use cidrd::client::{ClientError, Grant};
use cidrd::pools::admits;
use k8s_openapi::api::core::v1::{Namespace, Service};
use k8s_openapi::jiff::Timestamp;
use kube::api::{Patch, PatchParams};
use kube::core::PartialObjectMeta;
use kube::runtime::controller::Action;
use kube::runtime::reflector::{ObjectRef, Store};
use kube::{Api, Client, ResourceExt};
use serde_json::json;
use thiserror::Error;
use thuban_api::cidr::Cidr;
use thuban_api::condition::{find, set};
use thuban_api::{
    AnnounceBy, Condition, ConditionStatus, IpFamily, IpPool, PoolClass, PoolDriver, Vip, VipProfile,
    VipStatus,
};
use tracing::warn;

use self::certificate::CERTIFICATE;
pub use self::leasing::Begun;
use self::leasing::{is_anothers_turn, is_new, lease};
use self::terms::Terms;
pub use self::terms::{driver_of, is_private};
use crate::certificates::Certificates;
use crate::leases::{Leases, RENEW_EVERY};
use crate::objects::{api_of, change_status};
use crate::{derived, service};

/// The finalizer of Vips.
pub const FINALIZER: &str = "thuban.dev/vip";
/// How soon a Vip is looked at again whose end or certificate waits, or when cidrd is away.
const LEASE_RETRY: Duration = Duration::from_secs(2);
/// The longest time until a Vip that was refused something is looked at again.
const ANSWERED_RETRY: Duration = Duration::from_secs(30);

#[derive(Debug, Error)]
pub enum VipError {
    #[error("the API server: {0}")]
    Api(#[from] kube::Error),
    #[error("{0}")]
    Lease(#[from] ClientError),
}

pub struct Context {
    pub client: Client,
    pub leases: Arc<Leases>,
    pub services: Store<Service>,
    pub profiles: Store<VipProfile>,
    pub pools: Store<IpPool>,
    pub namespaces: Store<PartialObjectMeta<Namespace>>,
    pub certificates: Arc<Certificates>,
    pub begun: Begun,
}

/// A condition's status, reason and message.
pub type Said = (ConditionStatus, &'static str, String);

/// Returns the public pools that may give a Vip in a namespace with these labels an address of each family, in the
/// order in which they are tried.
pub fn choose<'a>(
    pools: impl IntoIterator<Item = &'a IpPool>,
    labels: &BTreeMap<String, String>,
    families: &[IpFamily],
) -> Vec<&'a str> {
    let serves = |pool: &&IpPool| {
        let status = pool.status.as_ref();
        let accepted = status.and_then(|status| find(&status.conditions, "Accepted"));
        let has = |family: &IpFamily| {
            let cidrs = pool
                .spec
                .cidrs
                .iter()
                .filter_map(|cidr| cidr.parse::<Cidr>().ok());
            cidrs
                .into_iter()
                .any(|cidr| cidr.is_ipv4() == (*family == IpFamily::V4))
        };
        pool.spec.class == PoolClass::Public
            && pool.spec.driver == PoolDriver::Xdp
            && accepted.is_some_and(|accepted| accepted.status == ConditionStatus::True)
            && status.is_some_and(|status| status.free > 0)
            && admits(&pool.spec, labels)
            && families.iter().all(has)
    };
    let serving = pools.into_iter().filter(serves);
    let mut names: Vec<&str> = serving.filter_map(|pool| pool.metadata.name.as_deref()).collect();
    names.sort_unstable();
    names
}

/// Whether the Service that a Vip was made for can be reached by it.
pub fn accepted(vip: &Vip, service: Option<&Service>) -> Said {
    let name = &vip.spec.service;
    let Some(found) = service else {
        let message = format!("spec.service: there is no Service {name} in the namespace");
        return (ConditionStatus::False, "ServiceNotFound", message);
    };
    // A replica with another default doesn't take what a Service has.
    if !service::is_ours(found, true) || !service::owns(found, vip) || service::maker(found).is_some() {
        let message = format!(
            "spec.service: {name} is no Service of type LoadBalancer and class {} that lbaasd made this Vip for: give \
             the Vip another name",
            crate::CLASS
        );
        return (ConditionStatus::False, "ServiceNotServed", message);
    }
    (
        ConditionStatus::True,
        "Valid",
        "the Service can be served".to_owned(),
    )
}

/// What became of a Vip's leases.
pub enum Outcome {
    Granted(Vec<Grant>),
    /// cidrd or this process refuses what is lacking: reason, message, and what the Vip has.
    Refused(String, String, Vec<Grant>),
    /// Nothing is decided.
    Away,
}

/// Writes what is known into a status. `check_error`: what is wrong with the annotation that asks for a check.
pub fn describe(
    vip: &mut Vip,
    accepted: Said,
    check_error: Option<&str>,
    outcome: &Outcome,
    now: Timestamp,
) -> bool {
    let generation = vip.metadata.generation;
    let families = vip.spec.ip_families.clone();
    let is_checked = vip.spec.health_check.is_some();
    let status = vip.status.get_or_insert_with(VipStatus::default);
    let before = status.clone();
    status.observed_generation = generation;
    let held = match outcome {
        Outcome::Granted(grants) | Outcome::Refused(_, _, grants) => Some(grants),
        Outcome::Away => None,
    };
    if let Some(grants) = held {
        let of = |family: &IpFamily| {
            let is_v4 = *family == IpFamily::V4;
            let addresses = grants.iter().map(|grant| grant.lease.address);
            addresses.filter(move |address| address.is_ipv4() == is_v4)
        };
        let addresses = families.iter().flat_map(of);
        status.addresses = addresses.map(|address| address.to_string()).collect();
        let pool = grants.first().map(|grant| grant.lease.pool.clone());
        status.pool = pool.unwrap_or_default();
        let vpc = grants.first().map(|grant| grant.lease.vpc.clone());
        status.vpc = vpc.unwrap_or_default();
    }
    let leased: Option<(ConditionStatus, String, String)> = match outcome {
        Outcome::Granted(_) => Some((
            ConditionStatus::True,
            "Held".to_owned(),
            "cidrd leases the addresses to this Vip".to_owned(),
        )),
        Outcome::Refused(reason, message, _) => {
            Some((ConditionStatus::False, reason.clone(), message.clone()))
        }
        // Another lbaasd may know better.
        Outcome::Away if !status.addresses.is_empty() || find(&status.conditions, "Leased").is_some() => None,
        Outcome::Away => Some((
            ConditionStatus::False,
            "CidrdAway".to_owned(),
            "cidrd can't be reached: lbaasd's log says why".to_owned(),
        )),
    };
    let is_private = status.is_private();
    if is_private {
        status
            .conditions
            .retain(|condition| condition.kind != "Announced");
    }
    let announced = (!is_private).then(|| announced(&status.announced_by, status.announce));
    let accepted = (accepted.0, accepted.1.to_owned(), accepted.2);
    let said = [
        ("Accepted", Some(accepted)),
        ("Leased", leased),
        ("Announced", announced),
    ];
    for (kind, said) in said {
        if let Some(said) = said {
            say(&mut status.conditions, kind, said, generation, now);
        }
    }
    if is_checked || check_error.is_some() {
        let said = check_error.map_or_else(|| healthy(status), unchecked);
        say(&mut status.conditions, "Healthy", said, generation, now);
    } else {
        status.conditions.retain(|condition| condition.kind != "Healthy");
    }
    sum_up(vip, now);
    vip.status.as_ref() != Some(&before)
}

/// Returns what the condition `Healthy` says, by the members that the operator has written.
fn healthy(status: &VipStatus) -> (ConditionStatus, String, String) {
    let (count, failing) = (status.member_count, status.failing_members);
    let (is_healthy, reason, message) = if count == 0 {
        let message = "no backend is checked: none is ready, or nodes' own stacks serve the addresses";
        (ConditionStatus::False, "NoMembers", message.to_owned())
    } else if failing == 0 {
        let message = "no member is known to fail the check";
        (ConditionStatus::True, "Passing", message.to_owned())
    } else if failing == count {
        let message =
            format!("all {count} members fail the check; so all get new connections: look at status.members");
        (ConditionStatus::False, "AllMembersFail", message)
    } else {
        let message = format!("{failing} of {count} members fail the check: look at status.members");
        (ConditionStatus::False, "MembersFail", message)
    };
    (is_healthy, reason.to_owned(), message)
}

/// Returns what the condition `Healthy` says while the annotation can't be read.
fn unchecked(error: &str) -> (ConditionStatus, String, String) {
    let message = format!("no backend is checked: correct or remove the Service's annotation {error}");
    (ConditionStatus::False, "InvalidAnnotation".to_owned(), message)
}

/// Returns what is wrong with the annotation by which a Vip's Service asks for a check. The Vip keeps its former check.
fn check_error(vip: &Vip, context: &Context) -> Option<String> {
    if !service::is_of_service(vip) {
        // Its check is in its own spec.
        return None;
    }
    let reference = ObjectRef::new(&vip.spec.service).within(&vip.namespace().unwrap_or_default());
    let service = context.services.get(&reference)?;
    service::health_check(&service).err()
}

/// Sets what follows from the rest of a Vip's status: the number of nodes, and the condition `Ready`, which has the
/// reason of the first condition that is not true.
pub fn sum_up(vip: &mut Vip, now: Timestamp) {
    let is_named = vip.spec.dns.is_some();
    let Some(status) = &mut vip.status else {
        return;
    };
    status.nodes = u32::try_from(status.announced_by.len()).unwrap_or(u32::MAX);
    let kinds = [
        ("Accepted", true),
        ("Leased", true),
        ("Announced", !status.is_private()),
        ("DnsReady", is_named),
        // Only a Vip that is to have a certificate has the condition.
        (CERTIFICATE, find(&status.conditions, CERTIFICATE).is_some()),
    ];
    let is_lacking = |(_, condition): &(&str, Option<&Condition>)| {
        condition.is_none_or(|condition| condition.status != ConditionStatus::True)
    };
    let kinds = kinds.into_iter().filter(|(_, counts)| *counts);
    let mut judged = kinds.map(|(kind, _)| (kind, find(&status.conditions, kind)));
    let said = match judged.find(is_lacking) {
        Some((kind, Some(condition))) => (
            ConditionStatus::False,
            condition.reason.clone(),
            format!("{kind}: {}", condition.message),
        ),
        Some((kind, None)) => (
            ConditionStatus::False,
            "Pending".to_owned(),
            format!("{kind}: not known yet"),
        ),
        None => (
            ConditionStatus::True,
            "Ready".to_owned(),
            if status.is_private() {
                format!("the addresses are the Service's for pods of VPC {}", status.vpc)
            } else {
                "nodes that serve the Service announce the addresses".to_owned()
            },
        ),
    };
    let generation = status.observed_generation;
    say(&mut status.conditions, "Ready", said, generation, now);
}

/// Sets a condition of a Vip. `said`: its status, reason and message.
pub fn say(
    conditions: &mut Vec<Condition>,
    kind: &str,
    (status, reason, message): (ConditionStatus, String, String),
    generation: Option<i64>,
    now: Timestamp,
) {
    let condition = Condition {
        kind: kind.to_owned(),
        status,
        reason,
        message,
        last_transition_time: now.to_string(),
        observed_generation: generation,
    };
    set(conditions, condition);
}

/// Returns what the condition `Announced` says.
pub fn announced(nodes: &[String], announce: AnnounceBy) -> (ConditionStatus, String, String) {
    if nodes.is_empty() {
        let question = match announce {
            AnnounceBy::Bgp => "does a BgpPeer select nodes that serve the Service?",
            AnnounceBy::L2 => "are they of the subnet of a node that serves the Service?",
        };
        let message = format!("no node announces the addresses: {question}");
        (ConditionStatus::False, "NoNode".to_owned(), message)
    } else {
        let message = format!("announced by {}", nodes.join(", "));
        (ConditionStatus::True, "Announced".to_owned(), message)
    }
}

/// Brings a Vip's leases and status to what they should be.
pub async fn reconcile(vip: Arc<Vip>, context: Arc<Context>) -> Result<Action, VipError> {
    let uid = vip.uid().unwrap_or_default();
    if vip.metadata.deletion_timestamp.is_some() {
        context.begun.end(&uid);
        return ending::end(&vip, &context).await;
    }
    if !context.begun.has(&uid) && is_anothers_turn(&vip, Timestamp::now()) {
        return Ok(Action::requeue(LEASE_RETRY));
    }
    let (vip, is_new) = if vip.finalizers().iter().any(|name| name == FINALIZER) {
        (vip, false)
    } else {
        let finalizers = [vip.finalizers(), &[FINALIZER.to_owned()]].concat();
        match set_finalizers(&vip, &context.client, &finalizers).await {
            Ok(current) => {
                context.begun.begin(&uid);
                let is_new = is_new(&current);
                (Arc::new(current), is_new)
            }
            // Another lbaasd was first. The change of the object is the next event.
            Err(kube::Error::Api(status)) if status.code == 409 => return Ok(Action::requeue(LEASE_RETRY)),
            Err(error) => return Err(error.into()),
        }
    };
    let namespace = vip.namespace().unwrap_or_default();
    let accepted = if service::is_of_service(&vip) {
        judge(&vip, &context).await?
    } else {
        derived::reconcile(&vip, &context).await?
    };
    let outcome = lease(&vip, is_new, &accepted, &context).await?;
    if let Outcome::Refused(reason, message, _) = &outcome {
        warn!(namespace, name = vip.name_any(), reason, message, "no lease");
    }
    let terms = Terms::of(&outcome, &context.pools);
    let is_granted = matches!(&outcome, Outcome::Granted(grants) if !grants.is_empty());
    // Nodes get new addresses only after it is known how these are announced and served.
    let outcome = if is_granted && terms.is_none() && !has_addresses(&vip) {
        Outcome::Away
    } else {
        outcome
    };
    let check_error = check_error(&vip, &context);
    let certificate = certificate::said(&vip, &context);
    let now = Timestamp::now();
    let change = |vip: &mut Vip| {
        let has_new_terms = terms.is_some_and(|terms| terms.set(vip));
        let is_told = certificate::tell(vip, certificate.clone(), now);
        let check_error = check_error.as_deref();
        describe(vip, accepted.clone(), check_error, &outcome, now) || has_new_terms || is_told
    };
    if change(&mut Vip::clone(&vip)) {
        change_status(&context.client, &*vip, |current| {
            current.metadata.deletion_timestamp.is_none() && change(current)
        })
        .await?;
    }
    context.begun.end(&uid);
    let is_awaited = certificate::is_awaited(certificate.as_ref());
    let has_certificate = certificate.is_none_or(|said| said.0 == ConditionStatus::True);
    let is_accepted = accepted.0 == ConditionStatus::True && has_certificate;
    Ok(Action::requeue(match outcome {
        Outcome::Granted(_) if is_accepted => RENEW_EVERY,
        Outcome::Granted(_) if is_awaited => LEASE_RETRY,
        Outcome::Granted(_) => ANSWERED_RETRY,
        Outcome::Refused(..) => refused_retry(&vip, now),
        Outcome::Away => LEASE_RETRY,
    }))
}

/// Returns how soon a Vip is looked at again that is refused something: soon at first. lbaasd sees a pool by several
/// watches, and each cidrd by one of its own. One that was late may have refused what is there by now.
pub fn refused_retry(vip: &Vip, now: Timestamp) -> Duration {
    let status = vip.status.as_ref();
    let leased = status.and_then(|status| find(&status.conditions, "Leased"));
    let refused = leased.filter(|leased| leased.status == ConditionStatus::False);
    let since = refused.and_then(|leased| leased.last_transition_time.parse::<Timestamp>().ok());
    let lasts = since.and_then(|since| Duration::try_from(now.duration_since(since)).ok());
    lasts.unwrap_or_default().clamp(LEASE_RETRY, ANSWERED_RETRY)
}

fn has_addresses(vip: &Vip) -> bool {
    vip.status
        .as_ref()
        .is_some_and(|status| !status.addresses.is_empty())
}

/// Whether the Service of a Vip that lbaasd made can be reached by it.
async fn judge(vip: &Vip, context: &Context) -> Result<Said, kube::Error> {
    if is_private(vip, context) {
        let message = format!(
            "spec.pool: IpPool {} is private: remove the Service's annotation {}, and make a Vip that names Service \
             and pool",
            vip.spec.pool,
            service::POOL_ANNOTATION
        );
        return Ok((ConditionStatus::False, "PoolIsPrivate", message));
    }
    if driver_of(vip, context) == PoolDriver::Haproxy {
        let message = format!(
            "spec.pool: IpPool {} has the driver Haproxy: remove the Service's annotation {}, and make a Vip that \
             names Service and pool",
            vip.spec.pool,
            service::POOL_ANNOTATION
        );
        return Ok((ConditionStatus::False, "NeedsVip", message));
    }
    let namespace = vip.namespace().unwrap_or_default();
    let reference = ObjectRef::new(&vip.spec.service).within(&namespace);
    let known = accepted(vip, context.services.get(&reference).as_deref());
    if known.0 == ConditionStatus::True {
        return Ok(known);
    }
    // The store may be late.
    let services: Api<Service> = Api::namespaced(context.client.clone(), &namespace);
    Ok(accepted(vip, services.get_opt(&vip.name_any()).await?.as_ref()))
}

/// Writes a Vip's finalizers, if it is as it was read. Returns the Vip as it is then.
async fn set_finalizers(vip: &Vip, client: &Client, finalizers: &[String]) -> Result<Vip, kube::Error> {
    let metadata = json!({"metadata": {
        "finalizers": finalizers, "uid": vip.uid(), "resourceVersion": vip.resource_version(),
    }});
    api_of(client, vip)
        .patch(&vip.name_any(), &PatchParams::default(), &Patch::Merge(metadata))
        .await
}

#[cfg(test)]
mod tests;
