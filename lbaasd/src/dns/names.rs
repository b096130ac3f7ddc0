//! The name of each Vip: it is published, refreshed, and removed.
//!
//! Invariant: the status names each name that may be at a server. It is written before the server is asked, and cleared
//! only once the name is gone for good. A request that was given up may still be carried out by a slow server. So a
//! name that went is looked at again after [`LATE_REQUESTS`]. Nobody claims it meanwhile: a claim follows a look at the
//! API server's copy of the Vip, which must want the name.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::core::PartialObjectMeta;
use kube::runtime::controller::Action;
use kube::runtime::reflector::{ObjectRef, Store};
use kube::{Api, Client, ResourceExt};
use thuban_api::condition::find;
use thuban_api::{ConditionStatus, DnsZone, Vip};
use tokio::time::timeout;
use tracing::{debug, info, warn};

use super::servers::{Servers, Turn};
use super::{DnsError, Record, TIMEOUT, zones};
use crate::objects::change_status;
use crate::vip::{say, sum_up};

/// The condition that says what became of a Vip's name.
pub const CONDITION: &str = "DnsReady";
/// How long a server may take to carry out a request, from the look at the Vip before it: the timeouts of the look and
/// the request, and time for what is on its way.
pub const LATE_REQUESTS: Duration = Duration::from_secs(15);
/// How soon a name is looked at again.
const LOOK_INTERVAL: Duration = Duration::from_mins(1);
/// How soon a name is looked at again at a server that was away.
const SERVER_RETRY: Duration = Duration::from_secs(10);
/// How soon a Vip is looked at again that has changed meanwhile.
const RECORDS_RETRY: Duration = Duration::from_secs(2);

pub struct Context {
    pub client: Client,
    pub zones: Store<DnsZone>,
    pub namespaces: Store<PartialObjectMeta<Namespace>>,
    pub servers: Servers,
    /// The time of day.
    pub clock: Box<dyn Fn() -> Timestamp + Send + Sync>,
}

/// What is to be done about a Vip's name.
#[derive(Debug)]
enum Step {
    /// None is wanted, and none is held.
    Nothing,
    /// One is wanted and can't be had now, for this reason.
    Lack(&'static str),
    Publish(Arc<DnsZone>, Record),
    /// What the status names goes from its server.
    Withdraw(Arc<DnsZone>),
    /// It went, and requests may still be on their way.
    Wait(Duration),
    /// The DnsZone of what the status names is gone.
    Forget,
}

/// Decides from a Vip and the DnsZones. `labels`: of the Vip's namespace.
fn step(vip: &Vip, zones: &[Arc<DnsZone>], labels: &BTreeMap<String, String>, now: Timestamp) -> Step {
    let status = vip.status.clone().unwrap_or_default();
    let addresses: Vec<IpAddr> = status
        .addresses
        .iter()
        .filter_map(|text| text.parse().ok())
        .collect();
    let condition = |kind| find(&status.conditions, kind);
    let dns = vip.spec.dns.as_ref();
    let dns = dns.filter(|_| vip.metadata.deletion_timestamp.is_none());
    let may_have = dns.filter(|_| !addresses.is_empty()).and_then(|dns| {
        let namespace = vip.namespace().unwrap_or_default();
        let all = zones.iter().map(AsRef::as_ref);
        zones::choose(all, &dns.name, &namespace, labels).map(ResourceExt::name_any)
    });
    let zone = |name: &str| zones.iter().find(|zone| zone.name_any() == name).cloned();
    let publish = |zone: Arc<DnsZone>, dns: &thuban_api::VipDns| {
        let record = Record {
            name: dns.name.clone(),
            addresses: addresses.clone(),
            ttl_seconds: dns.ttl_seconds.unwrap_or(zone.spec.ttl_seconds),
        };
        Step::Publish(zone, record)
    };
    if status.dns_name.is_empty() {
        let Some(dns) = dns else {
            return Step::Nothing;
        };
        let is_announced = condition("Announced").is_some_and(|said| said.status == ConditionStatus::True);
        return match may_have.as_deref().and_then(zone) {
            None if addresses.is_empty() => Step::Lack("NotAnnounced"),
            None => Step::Lack("NoZone"),
            Some(_) if !is_announced => Step::Lack("NotAnnounced"),
            Some(zone) => publish(zone, dns),
        };
    }
    let Some(holding) = zone(&status.dns_zone) else {
        return Step::Forget;
    };
    // Names of a namespace that is no longer admitted stay. Those that it only waits for do not.
    let is_taken = condition(CONDITION).is_some_and(|said| said.reason == "NameTaken");
    let is_admitted = !is_taken || may_have.as_ref() == Some(&status.dns_zone);
    let wanted = dns.filter(|dns| dns.name == status.dns_name && !addresses.is_empty() && is_admitted);
    match (wanted, removed_at(status.name_removed_at.as_deref())) {
        (Some(dns), None) => publish(holding, dns),
        (_, Some(at)) if at <= now && now < at + signed(LATE_REQUESTS) => {
            let left = (at + signed(LATE_REQUESTS)).duration_since(now);
            Step::Wait(Duration::try_from(left).unwrap_or(LATE_REQUESTS))
        }
        _ => Step::Withdraw(holding),
    }
}

/// Reads a time of a status.
fn removed_at(text: Option<&str>) -> Option<Timestamp> {
    text?.parse().ok()
}

fn signed(duration: Duration) -> SignedDuration {
    SignedDuration::try_from(duration).unwrap_or_default()
}

/// Writes that a name may be at a server. Returns whether anything changed.
fn note_name(vip: &mut Vip, zone: &DnsZone, record: &Record) -> bool {
    let status = vip.status.get_or_insert_default();
    let before = status.clone();
    status.dns_name.clone_from(&record.name);
    status.dns_zone = zone.name_any();
    // A resolver may have the record with the TTL that it had before.
    status.dns_ttl_seconds = status.dns_ttl_seconds.max(Some(record.ttl_seconds));
    *status != before
}

/// Writes that a name went. `removed`: whether the server had it. Returns whether anything changed.
fn note_removal(vip: &mut Vip, removed: bool, now: Timestamp) -> bool {
    let is_over = vip.metadata.deletion_timestamp.is_some();
    let Some(status) = &mut vip.status else {
        return false;
    };
    let before = removed_at(status.name_removed_at.as_deref());
    let is_second = before.is_some_and(|at| at <= now);
    // Again also when the name is gone for good: an answer that was lost may have been that of its removal.
    status.name_removed_at = Some(now.to_string());
    if is_second && !removed {
        status.dns_name.clear();
        status.dns_zone.clear();
        if !is_over {
            status.name_removed_at = None;
        }
    }
    true
}

/// Writes that a name is out of reach. Returns whether anything changed.
fn forget(vip: &mut Vip, now: Timestamp) -> bool {
    let is_over = vip.metadata.deletion_timestamp.is_some();
    let Some(status) = &mut vip.status else {
        return false;
    };
    status.dns_name.clear();
    status.dns_zone.clear();
    status.name_removed_at = is_over.then(|| now.to_string());
    true
}

/// Brings a Vip's name to what it should be.
pub async fn reconcile(vip: Arc<Vip>, context: Arc<Context>) -> Result<Action, kube::Error> {
    match context.step(&vip) {
        Step::Nothing => {
            context.say(&vip, None).await?;
            Ok(Action::await_change())
        }
        Step::Lack(reason) => {
            let message = match reason {
                "NoZone" => {
                    "spec.dns.name: no DnsZone admits the namespace and the name: ask an administrator"
                }
                _ => "the name is published once a node announces the addresses",
            };
            context.say(&vip, Some((reason, message.to_owned()))).await?;
            Ok(Action::requeue(LOOK_INTERVAL))
        }
        Step::Wait(left) => Ok(Action::requeue(left)),
        Step::Forget => {
            let name = vip.status.clone().unwrap_or_default().dns_zone;
            let zones: Api<DnsZone> = Api::all(context.client.clone());
            // The store may be late.
            if zones.get_opt(&name).await?.is_none() {
                let reference = ObjectRef::from_obj(&*vip);
                warn!(vip = %reference, zone = name, "the DnsZone of a name is gone: the name stays at its server");
                context
                    .change(&vip, |vip| {
                        matches!(context.step(vip), Step::Forget) && forget(vip, context.now())
                    })
                    .await?;
            }
            Ok(Action::requeue(RECORDS_RETRY))
        }
        Step::Publish(zone, record) => match context.servers.turn(&zone).await {
            Ok(turn) => context.publish(&vip, &zone, &record, &turn).await,
            Err(error) => context.away(&vip, &zone, &error).await,
        },
        Step::Withdraw(zone) => match context.servers.turn(&zone).await {
            Ok(turn) => context.withdraw(&vip, &zone, &turn).await,
            Err(error) => context.away(&vip, &zone, &error).await,
        },
    }
}

impl Context {
    fn now(&self) -> Timestamp {
        (self.clock)()
    }

    fn step(&self, vip: &Vip) -> Step {
        let namespace = ObjectRef::new(&vip.namespace().unwrap_or_default());
        let namespace = self.namespaces.get(&namespace);
        let labels = namespace
            .map(|namespace| namespace.labels().clone())
            .unwrap_or_default();
        step(vip, &self.zones.state(), &labels, self.now())
    }

    async fn change(
        &self,
        vip: &Vip,
        change: impl FnMut(&mut Vip) -> bool,
    ) -> Result<Option<Vip>, kube::Error> {
        change_status(&self.client, vip, change).await
    }

    /// Writes the name into the status. Returns whether the API server's copy of the Vip wants the name.
    async fn note(&self, vip: &Vip, zone: &DnsZone, record: &Record) -> Result<bool, kube::Error> {
        let mut is_wanted = false;
        let written = self.change(vip, |vip| {
            is_wanted = matches!(self.step(vip), Step::Publish(its, wanted)
                if its.name_any() == zone.name_any() && wanted == *record);
            is_wanted && note_name(vip, zone, record)
        });
        // An answer that is late is no longer true.
        match timeout(TIMEOUT, written).await {
            Ok(written) => Ok(written?.is_some() && is_wanted),
            Err(_) => Ok(false),
        }
    }

    async fn publish(
        &self,
        vip: &Vip,
        zone: &DnsZone,
        record: &Record,
        turn: &Turn,
    ) -> Result<Action, kube::Error> {
        let uid = vip.uid().unwrap_or_default();
        let is_noted = !note_name(&mut vip.clone(), zone, record);
        if !is_noted && !self.note(vip, zone, record).await? {
            return Ok(Action::requeue(RECORDS_RETRY));
        }
        let has = match turn.refresh(&uid, record).await {
            Ok(true) => Ok(true),
            Ok(false) => {
                if !self.note(vip, zone, record).await? {
                    return Ok(Action::requeue(RECORDS_RETRY));
                }
                match turn.claim(&uid, record).await {
                    // Another request of this Vip may have been faster.
                    Ok(false) => turn.refresh(&uid, record).await,
                    claimed => claimed,
                }
            }
            Err(error) => Err(error),
        };
        match has {
            Ok(true) => {
                let message = format!("{} has the addresses", record.name);
                self.say(vip, Some(("Published", message))).await?;
                Ok(Action::requeue(LOOK_INTERVAL))
            }
            Ok(false) => {
                let message =
                    "spec.dns.name: the name, or one above or below it, is another's: choose another one";
                self.say(vip, Some(("NameTaken", message.to_owned()))).await?;
                Ok(Action::requeue(LOOK_INTERVAL))
            }
            Err(error) => self.away(vip, zone, &error).await,
        }
    }

    async fn withdraw(&self, vip: &Vip, zone: &DnsZone, turn: &Turn) -> Result<Action, kube::Error> {
        let status = vip.status.clone().unwrap_or_default();
        let removed = match turn
            .withdraw(&vip.uid().unwrap_or_default(), &status.dns_name)
            .await
        {
            Ok(removed) => removed,
            Err(error) => return self.away(vip, zone, &error).await,
        };
        let is_same = |current: &Vip| {
            let current = current.status.clone().unwrap_or_default();
            current.dns_name == status.dns_name && current.name_removed_at == status.name_removed_at
        };
        self.change(vip, |vip| {
            let is_unwanted = matches!(self.step(vip), Step::Withdraw(_));
            is_unwanted && is_same(vip) && note_removal(vip, removed, self.now())
        })
        .await?;
        if removed {
            info!(vip = %ObjectRef::from_obj(vip), name = status.dns_name, "name removed from DNS");
        }
        // The change of the object is the next event.
        Ok(Action::requeue(RECORDS_RETRY))
    }

    /// Says that a server can't be used now, and has the Vip looked at again.
    async fn away(&self, vip: &Vip, zone: &DnsZone, error: &DnsError) -> Result<Action, kube::Error> {
        let name = zone.name_any();
        match error {
            // Not all at once.
            DnsError::Busy => return Ok(Action::requeue(RECORDS_RETRY + spread(vip))),
            DnsError::Paused(_) => {
                debug!(vip = %ObjectRef::from_obj(vip), zone = name, %error, "no name yet");
            }
            error => {
                warn!(vip = %ObjectRef::from_obj(vip), zone = name, %error, "the DNS server can't be used");
            }
        }
        let message = format!("the server of DnsZone {name} can't be used: its condition Ready says why");
        self.say(vip, Some(("ServerAway", message))).await?;
        Ok(Action::requeue(SERVER_RETRY + spread(vip)))
    }

    /// Sets the condition, to reason and message, or removes it.
    async fn say(&self, vip: &Vip, said: Option<(&'static str, String)>) -> Result<(), kube::Error> {
        let now = self.now();
        let set = |vip: &mut Vip| {
            let generation = vip.metadata.generation;
            let status = vip.status.get_or_insert_default();
            let before = status.clone();
            match &said {
                None => status.conditions.retain(|condition| condition.kind != CONDITION),
                Some((reason, message)) => {
                    let is_ready = if *reason == "Published" {
                        ConditionStatus::True
                    } else {
                        ConditionStatus::False
                    };
                    let said = (is_ready, (*reason).to_owned(), message.clone());
                    say(&mut status.conditions, CONDITION, said, generation, now);
                }
            }
            if *status == before {
                return false;
            }
            sum_up(vip, now);
            true
        };
        if set(&mut vip.clone()) {
            self.change(vip, set).await?;
        }
        Ok(())
    }
}

/// Returns a part of some seconds that differs from Vip to Vip.
fn spread(vip: &Vip) -> Duration {
    let mut hasher = DefaultHasher::new();
    vip.metadata.uid.hash(&mut hasher);
    Duration::from_millis(hasher.finish() % 4096)
}

#[cfg(test)]
mod tests;
