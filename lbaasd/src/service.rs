//! Services: which want a Vip, and which addresses their status tells.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use k8s_openapi::Resource as _;
use k8s_openapi::api::core::v1::{LoadBalancerIngress, LoadBalancerStatus, Service, ServiceStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, OwnerReference, Time};
use k8s_openapi::jiff::Timestamp;
use kube::api::{DeleteParams, ObjectMeta, PostParams, Preconditions};
use kube::runtime::controller::Action;
use kube::runtime::reflector::{ObjectRef, Store};
use kube::{Api, Client, Resource, ResourceExt};
pub use thuban_api::{
    DNS_NAME_ANNOTATION as NAME_ANNOTATION, DRAIN_SECONDS_ANNOTATION as DRAIN_ANNOTATION,
    IP_POOL_ANNOTATION as POOL_ANNOTATION, LOAD_BALANCER_IPS_ANNOTATION as ADDRESSES_ANNOTATION,
    LOAD_BALANCER_MODE_ANNOTATION as MODE_ANNOTATION,
};
use thuban_api::{
    DSR_MODE as DSR, FRONT_CONDITION, HEALTH_CHECK_ANNOTATION, HealthCheck, IpFamily, NODE_MODE as NODE,
    TUNNEL_MODE as TUNNEL, Vip, VipDns, VipSpec,
};
use tracing::{info, warn};

use crate::CLASS;
use crate::driver::{self, Driver};
use crate::events::Warnings;
use crate::objects::change_status;
use crate::vip::ending::is_withdrawn;

/// The most seconds of [`DRAIN_ANNOTATION`].
const LONGEST_DRAIN: u32 = 3600;
/// Nodes send a client's packets on to any backend, which answers the client from its own node (direct server return);
/// or by the node that got the client's packet; or the node that gets a packet translates it, as for other load
/// balancers.
const MODES: [&str; 3] = [DSR, TUNNEL, NODE];
/// The length of the longest name of an IpPool, and of the longest label of a name in DNS.
const LONGEST_NAME: usize = 63;
/// The length of the longest name in DNS.
const LONGEST_DOMAIN: usize = 240;
/// How soon a Service is looked at again that waits for a Vip of its name to go.
const WAITING_RETRY: Duration = Duration::from_secs(5);
/// How soon a Service with a Vip is looked at again, whatever was heard.
const AGAIN: Duration = Duration::from_mins(1);

pub struct Context {
    pub client: Client,
    /// A Vip's change is here before it wakes the Service.
    pub vips: Store<Vip>,
    pub warnings: Warnings,
    /// Whether Services without a class get a Vip, too.
    pub is_default: bool,
    /// When the API server was asked for Services' Vips, by the Services' UIDs.
    pub asked: Mutex<HashMap<String, Instant>>,
}

impl Context {
    /// Whether the API server was asked for a Service's Vip not long ago. If not, it is going to be.
    fn was_asked(&self, service: &Service) -> bool {
        let mut asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        asked.retain(|_, since| since.elapsed() < AGAIN);
        let uid = service.uid().unwrap_or_default();
        let was_asked = asked.contains_key(&uid);
        asked.entry(uid).or_insert_with(Instant::now);
        was_asked
    }
}

/// Whether the Service is a load balancer of this kind.
pub fn is_ours(service: &Service, is_default: bool) -> bool {
    let spec = service.spec.as_ref();
    spec.is_some_and(|spec| {
        let class = spec.load_balancer_class.as_deref();
        spec.type_.as_deref() == Some("LoadBalancer")
            && (class == Some(CLASS) || (class.is_none() && is_default))
    })
}

/// Whether a Vip was made for the Service.
pub fn owns(service: &Service, vip: &Vip) -> bool {
    let mut owners = vip.metadata.owner_references.iter().flatten();
    owners.any(|owner| Some(&owner.uid) == service.metadata.uid.as_ref())
}

/// Returns the Vip that lbaasd made the Service for: its controller.
pub fn maker(service: &Service) -> Option<&OwnerReference> {
    let mut owners = service.metadata.owner_references.iter().flatten();
    owners.find(|owner| {
        owner.controller == Some(true)
            && owner.kind == Vip::kind(&())
            && owner.api_version.split('/').next() == Some(&Vip::group(&()))
    })
}

/// Whether lbaasd made the Service for the Vip.
pub fn is_made_for(service: &Service, vip: &Vip) -> bool {
    maker(service).is_some_and(|maker| Some(&maker.uid) == vip.metadata.uid.as_ref())
}

/// Whether the Vip says that lbaasd made it for the Service of its name.
pub fn is_of_service(vip: &Vip) -> bool {
    let mut owners = vip.metadata.owner_references.iter().flatten();
    vip.name_any() == vip.spec.service
        && owners.any(|owner| owner.kind == Service::KIND && owner.api_version == Service::API_VERSION)
}

/// Returns the Vip that a Service wants; an error names the annotation that is wrong.
pub fn wanted(service: &Service, is_default: bool) -> Result<Option<VipSpec>, String> {
    let is_over = service.metadata.deletion_timestamp.is_some();
    if !is_ours(service, is_default) || is_over || maker(service).is_some() {
        return Ok(None);
    }
    let Some(spec) = service.spec.as_ref() else {
        return Ok(None);
    };
    let annotation = |name: &str| service.annotations().get(name).map(String::as_str);
    let pool = annotation(POOL_ANNOTATION).unwrap_or_default();
    if pool.len() > LONGEST_NAME {
        return Err(format!("{POOL_ANNOTATION}: {pool} is no name of an IpPool"));
    }
    if let Some(mode) = annotation(MODE_ANNOTATION).filter(|mode| !MODES.contains(mode)) {
        return Err(format!(
            "{MODE_ANNOTATION}: {mode} is none of {}",
            MODES.join(", ")
        ));
    }
    let asked = annotation(ADDRESSES_ANNOTATION).or(spec.load_balancer_ip.as_deref());
    let asked = asked.unwrap_or_default().split(',').map(str::trim);
    let asked: Result<Vec<IpAddr>, _> = asked.filter(|text| !text.is_empty()).map(str::parse).collect();
    let asked = asked.map_err(|error| format!("{ADDRESSES_ANNOTATION}: {error}"))?;
    let of_v4 = asked.iter().filter(|address| address.is_ipv4()).count();
    if of_v4 > 1 || asked.len() - of_v4 > 1 {
        return Err(format!(
            "{ADDRESSES_ANNOTATION}: name at most one address of each family"
        ));
    }
    let dns = annotation(NAME_ANNOTATION).map(|name| VipDns {
        name: name.to_owned(),
        ttl_seconds: None,
    });
    if let Some(dns) = dns.as_ref().filter(|dns| !is_domain(&dns.name)) {
        return Err(format!(
            "{NAME_ANNOTATION}: {} is no name in lower case without a dot at its end, such as shop.apps.example.com",
            dns.name
        ));
    }
    let drain = annotation(DRAIN_ANNOTATION).map_or(Ok(0), str::parse);
    let drain = drain.ok().filter(|drain| *drain <= LONGEST_DRAIN);
    let drain = drain.ok_or_else(|| format!("{DRAIN_ANNOTATION}: it must be 0 to {LONGEST_DRAIN}"))?;
    let health_check = health_check(service)?;
    let families = spec.ip_families.iter().flatten();
    let family = |name: &String| match name.as_str() {
        "IPv4" => Some(IpFamily::V4),
        "IPv6" => Some(IpFamily::V6),
        _ => None,
    };
    Ok(Some(VipSpec {
        service: service.name_any(),
        pool: pool.to_owned(),
        ip_families: families.filter_map(family).collect(),
        requested_ips: asked.iter().map(ToString::to_string).collect(),
        dns,
        drain_seconds: drain,
        health_check,
        ..VipSpec::default()
    }))
}

/// Returns the check that a Service's annotation asks for; an error says what is wrong.
pub fn health_check(service: &Service) -> Result<Option<HealthCheck>, String> {
    let Some(text) = service.annotations().get(HEALTH_CHECK_ANNOTATION) else {
        return Ok(None);
    };
    let mode = service.annotations().get(MODE_ANNOTATION);
    if mode.is_some_and(|mode| mode != DSR && mode != TUNNEL) {
        return Err(format!(
            "{HEALTH_CHECK_ANNOTATION}: it has no effect with {MODE_ANNOTATION} other than {DSR} and {TUNNEL}"
        ));
    }
    let check = HealthCheck::of_annotation(text);
    check
        .map(Some)
        .map_err(|error| format!("{HEALTH_CHECK_ANNOTATION}: {error}"))
}

/// Whether a text is a name as `spec.dns.name` of a Vip must be.
fn is_domain(text: &str) -> bool {
    let is_usual = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let is_label = |label: &str| {
        let bytes = label.as_bytes();
        let ends = [bytes.first(), bytes.last()];
        ends.iter().all(|end| end.is_some_and(|end| is_usual(*end)))
            && bytes.len() <= LONGEST_NAME
            && bytes.iter().all(|byte| is_usual(*byte) || *byte == b'-')
    };
    text.len() <= LONGEST_DOMAIN && text.contains('.') && text.split('.').all(is_label)
}

/// What is to be done about a Service's Vip.
#[derive(Debug, PartialEq, Eq)]
pub enum Step {
    Keep,
    Create(VipSpec),
    /// The Vip gets another spec.
    Change(VipSpec),
    Delete,
    /// A Vip of this name is not the Service's, or goes: the Service waits.
    Wait,
}

/// Decides from what a Service wants and the Vip of its name.
pub fn step(service: &Service, wanted: Option<VipSpec>, vip: Option<&Vip>) -> Step {
    let is_own = |vip: &Vip| owns(service, vip) && maker(service).is_none();
    let is_over = |vip: &Vip| vip.metadata.deletion_timestamp.is_some();
    match (wanted, vip) {
        // A replica with another default doesn't take what a Service has.
        (None, Some(vip)) if is_own(vip) && !is_over(vip) && !is_ours(service, true) => Step::Delete,
        (None, _) => Step::Keep,
        (Some(spec), None) => Step::Create(spec),
        (Some(_), Some(vip)) if !is_own(vip) || is_over(vip) => Step::Wait,
        (Some(spec), Some(vip)) => {
            let has = vip.status.as_ref().map(|status| &status.addresses);
            let is_met = |address: &String| has.is_some_and(|has| has.contains(address));
            let same_addresses = spec.requested_ips == vip.spec.requested_ips
                || (!spec.requested_ips.is_empty() && spec.requested_ips.iter().all(is_met));
            if spec.pool != vip.spec.pool || !same_addresses {
                // A Vip keeps its addresses until it goes.
                return Step::Delete;
            }
            let lacks = |family: &&IpFamily| !vip.spec.ip_families.contains(family);
            // A family that the Service lost stays with the Vip.
            let more: Vec<IpFamily> = spec.ip_families.iter().filter(lacks).copied().collect();
            let ttl = vip.spec.dns.as_ref().and_then(|dns| dns.ttl_seconds);
            let changed = VipSpec {
                ip_families: [vip.spec.ip_families.clone(), more].concat(),
                dns: spec.dns.map(|dns| VipDns {
                    ttl_seconds: ttl,
                    ..dns
                }),
                drain_seconds: spec.drain_seconds,
                health_check: spec.health_check,
                ..vip.spec.clone()
            };
            if changed == vip.spec {
                Step::Keep
            } else {
                Step::Change(changed)
            }
        }
    }
}

/// Whether the Vip's addresses are the Service's, which has its name: one was made for the other.
fn belong(service: &Service, vip: &Vip) -> bool {
    owns(service, vip) || is_made_for(service, vip)
}

/// Returns the addresses that a Service's status tells: those of its Vip, until nobody announces them any more. Private
/// addresses are not there, because nodes would serve them to clients outside.
pub fn ingress(service: &Service, vip: Option<&Vip>) -> Vec<String> {
    let status = vip.filter(|vip| belong(service, vip)).and_then(|vip| {
        let is_over = is_withdrawn(vip);
        let status = vip.status.as_ref().filter(|status| !status.is_private())?;
        Some(status).filter(|status| !is_over || !status.announcers.is_empty())
    });
    status.map(|status| status.addresses.clone()).unwrap_or_default()
}

/// Returns what serves a Vip's addresses.
fn driver_of(vip: Option<&Vip>) -> &'static dyn Driver {
    let status = vip.and_then(|vip| vip.status.as_ref());
    driver::of(status.map(|status| status.driver).unwrap_or_default())
}

/// Whether nothing is to be done for a Service if this is its Vip.
fn is_settled(service: &Service, wanted: Option<VipSpec>, vip: Option<&Vip>, is_default: bool) -> bool {
    let tells = vip.is_some_and(|vip| belong(service, vip)) || is_ours(service, is_default);
    let driver = driver_of(vip);
    let is_told = || is_told(service, &entries(&ingress(service, vip), driver), driver);
    step(service, wanted, vip) == Step::Keep && (!tells || is_told())
}

/// Brings a Service's Vip and status to what they should be.
pub async fn reconcile(service: Arc<Service>, context: Arc<Context>) -> Result<Action, kube::Error> {
    let Context {
        client,
        vips,
        warnings,
        is_default,
        ..
    } = &*context;
    // The watch of Vips lasts as long as the process.
    let _ = vips.wait_until_ready().await;
    let namespace = service.namespace().unwrap_or_default();
    let name = service.name_any();
    let known = vips.get(&ObjectRef::new(&name).within(&namespace));
    let wanted = match wanted(&service, *is_default) {
        Ok(wanted) => wanted,
        Err(error) => {
            warn!(namespace, name, error, "the Service is left as it is");
            warnings.tell(&*service, "InvalidAnnotation", &error).await;
            return Ok(Action::requeue(AGAIN));
        }
    };
    // The store of Vips may be late, and a Vip is there that lbaasd made the Service for.
    if known.is_none() && wanted.is_none() && maker(&service).is_none() {
        return Ok(Action::await_change());
    }
    // A Vip changes often while nodes begin to announce it, and most of these changes mean nothing here.
    if is_settled(&service, wanted.clone(), known.as_deref(), *is_default) && context.was_asked(&service) {
        return Ok(Action::requeue(AGAIN));
    }
    let api: Api<Vip> = Api::namespaced(client.clone(), &namespace);
    // The store may be late. But to make a Vip shows by itself whether there is one.
    let vip = if known.is_none() && wanted.is_some() {
        None
    } else {
        api.get_opt(&name).await?
    };
    let step = step(&service, wanted, vip.as_ref());
    let waits = step == Step::Wait;
    match step {
        Step::Keep => {}
        Step::Wait => warn!(namespace, name, "waits for a Vip of the Service's name to go"),
        Step::Create(spec) => {
            let mut made = Vip::new(&name, spec);
            made.metadata = ObjectMeta {
                name: Some(name.clone()),
                owner_references: service.controller_owner_ref(&()).map(|owner| vec![owner]),
                ..ObjectMeta::default()
            };
            match api.create(&PostParams::default(), &made).await {
                Ok(_) => info!(namespace, name, "Vip made"),
                // The store will show it, and wake the Service.
                Err(kube::Error::Api(status)) if status.reason == "AlreadyExists" => {
                    return Ok(Action::requeue(WAITING_RETRY));
                }
                Err(error) => return Err(error),
            }
        }
        Step::Change(spec) => {
            let mut changed = vip.clone().unwrap_or_else(|| Vip::new(&name, spec.clone()));
            changed.spec = spec;
            api.replace(&name, &PostParams::default(), &changed).await?;
        }
        Step::Delete => {
            let uid = vip.as_ref().and_then(ResourceExt::uid);
            let parameters = DeleteParams::default().preconditions(Preconditions {
                uid,
                resource_version: None,
            });
            match api.delete(&name, &parameters).await {
                Ok(_) => info!(namespace, name, "Vip deleted"),
                Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => {}
                Err(error) => return Err(error),
            }
        }
    }
    let is_told = vip.as_ref().is_some_and(|vip| belong(&service, vip));
    if is_told || is_ours(&service, *is_default) {
        let driver = driver_of(vip.as_ref());
        tell(client, &service, &ingress(&service, vip.as_ref()), driver).await?;
    }
    Ok(Action::requeue(if waits { WAITING_RETRY } else { AGAIN }))
}

/// Returns what a Service's status says of addresses.
fn entries(addresses: &[String], driver: &dyn Driver) -> Vec<LoadBalancerIngress> {
    let entry = |address: &String| LoadBalancerIngress {
        ip: Some(address.clone()),
        ip_mode: Some(driver.ip_mode().to_owned()),
        ..LoadBalancerIngress::default()
    };
    addresses.iter().map(entry).collect()
}

/// Returns the mode of a Service's fronts, if its addresses are to be fronts and the driver has any.
fn mode<'a>(service: &'a Service, ingress: &[LoadBalancerIngress], driver: &dyn Driver) -> Option<&'a str> {
    wanted_front(service, !ingress.is_empty()).filter(|_| driver.has_fronts())
}

/// Whether a Service's status says this of its addresses.
fn is_told(service: &Service, ingress: &[LoadBalancerIngress], driver: &dyn Driver) -> bool {
    told(service) == ingress && front(service) == mode(service, ingress, driver)
}

/// Writes the addresses into a Service's status.
async fn tell(
    client: &Client,
    service: &Service,
    addresses: &[String],
    driver: &dyn Driver,
) -> Result<(), kube::Error> {
    let ingress = entries(addresses, driver);
    if is_told(service, &ingress, driver) {
        return Ok(());
    }
    change_status(client, service, |service: &mut Service| {
        if is_told(service, &ingress, driver) {
            return false;
        }
        let mode = mode(service, &ingress, driver).map(ToOwned::to_owned);
        let generation = service.metadata.generation;
        let status = service.status.get_or_insert_with(ServiceStatus::default);
        status.load_balancer = Some(LoadBalancerStatus {
            ingress: Some(ingress.clone()).filter(|ingress| !ingress.is_empty()),
        });
        let conditions = status.conditions.get_or_insert_default();
        conditions.retain(|condition| condition.type_ != FRONT_CONDITION);
        if let Some(mode) = mode {
            conditions.push(Condition {
                type_: FRONT_CONDITION.to_owned(),
                status: "True".to_owned(),
                message: meaning(&mode).to_owned(),
                reason: mode,
                observed_generation: generation,
                last_transition_time: Time(Timestamp::now()),
            });
        }
        true
    })
    .await
    .map(drop)
}

/// Returns the mode of fronts that a Service asks for, if it has addresses.
fn wanted_front(service: &Service, has_addresses: bool) -> Option<&str> {
    let mode = service.annotations().get(MODE_ANNOTATION);
    let mode = mode.map_or(DSR, String::as_str);
    Some(mode).filter(|mode| has_addresses && [DSR, TUNNEL].contains(mode))
}

/// Returns the mode if a Service's status says that they are.
fn front(service: &Service) -> Option<&str> {
    let mut conditions = service.status.as_ref()?.conditions.as_ref()?.iter();
    let front = conditions.find(|condition| condition.type_ == FRONT_CONDITION && condition.status == "True");
    front.map(|condition| condition.reason.as_str())
}

/// Returns what a mode of fronts means, for the condition.
fn meaning(mode: &str) -> &'static str {
    if mode == TUNNEL {
        "nodes send packets on to any backend, whose answers go back by the same node. While a node's transitd does \
         not know this mode, nodes' own stacks serve the addresses"
    } else {
        "nodes send packets on to any backend, which answers from its own node"
    }
}

fn told(service: &Service) -> Vec<LoadBalancerIngress> {
    let status = service
        .status
        .as_ref()
        .and_then(|status| status.load_balancer.as_ref());
    status
        .and_then(|status| status.ingress.clone())
        .unwrap_or_default()
}

/// Whether the API server's copy of a Vip's Service tells an address.
pub async fn tells(client: &Client, vip: &Vip, addresses: &[String]) -> Result<bool, kube::Error> {
    let api: Api<Service> = Api::namespaced(client.clone(), &vip.namespace().unwrap_or_default());
    // Nobody but the Service of the Vip's name tells its addresses.
    let service = api.get_opt(&vip.name_any()).await?;
    let told = service.map(|service| told(&service)).unwrap_or_default();
    let is_told = |ip: &String| addresses.contains(ip);
    Ok(told
        .iter()
        .any(|ingress| ingress.ip.as_ref().is_some_and(is_told)))
}

#[cfg(test)]
mod tests;
