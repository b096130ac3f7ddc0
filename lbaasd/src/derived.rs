//! The Service of a Vip that a user made: it has the Vip's name and the chosen ports of the Service that the Vip names,
//! and leads to the same pods. Nodes serve and announce it as they do any other load balancer. If the Vip's pool is
//! private, it is no load balancer: its addresses are addresses of its own in its VPC, by an annotation.
//!
//! Invariant: lbaasd writes no Service whose controller is not the Vip of its name.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{ClientIPConfig, Service, ServicePort, ServiceSpec, SessionAffinityConfig};
use kube::api::{ObjectMeta, PostParams};
use kube::runtime::reflector::ObjectRef;
use kube::{Api, Client, Resource, ResourceExt};
use thiserror::Error;
use thuban_api::{
    ConditionStatus, HEALTH_CHECK_ANNOTATION, IpFamily, NETWORK_ANNOTATION, PoolDriver,
    SERVICE_IP_ANNOTATION, Vip, VipPort, VipProfile, VipProfileSpec, VipProtocol, VipStatus,
};
use tracing::info;

use crate::driver::MAX_PORTS;
use crate::objects::api_of;
use crate::service::{MODE_ANNOTATION, is_made_for, maker};
use crate::vip::{Context, Said, driver_of, is_private};
use crate::{CLASS, driver};

/// The finalizer of an object that is deleted without the objects that it owns.
const ORPHAN_FINALIZER: &str = "orphan";

/// Why a Vip gets no Service. The messages name the field and what to do.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum Refusal {
    #[error("spec.service: there is no Service {0} in the namespace: make it")]
    ServiceNotFound(String),
    #[error("spec.service: Service {0} is that of another Vip: name the Service that Vip {0} names")]
    ServiceIsDerived(String),
    #[error("metadata.name: lbaasd did not make the Service {0} for this Vip: give the Vip another name")]
    NameTaken(String),
    #[error("spec.service: Service {0} selects no pods: name one with spec.selector")]
    NoSelector(String),
    #[error("spec.ports: Service {service} has no port {missing}: name some of {present}")]
    PortNotFound {
        service: String,
        missing: String,
        present: String,
    },
    #[error("spec.service: Service {0} has no ports: give it some")]
    NoPorts(String),
    #[error("spec.profiles: there is no VipProfile {0} in the namespace: make it")]
    ProfileNotFound(String),
    #[error("spec.ipFamilies: Service {service} has no {family}: add it to the Service's spec.ipFamilies")]
    FamilyNotServed { service: String, family: &'static str },
    #[error(
        "spec.profiles: sourceRanges are for clients outside, and only pods of a VPC reach a private pool's \
         addresses: name VipProfiles without sourceRanges, and use a NetworkPolicy"
    )]
    SourceRangesNotServed,
    #[error(
        "spec.profiles: only HAProxy serves {0}: make a Vip whose spec.pool has the driver Haproxy, or name \
         VipProfiles without {0}"
    )]
    NeedsHaproxy(&'static str),
    #[error("spec.ports: HAProxy takes TCP alone, and {0} is another protocol: list the TCP ports")]
    ProtocolNotServed(String),
    #[error(
        "spec.ports: HAProxy serves at most {MAX_PORTS} ports of a Vip, and it has {0}: list fewer, and make a Vip for \
         the others"
    )]
    TooManyPorts(usize),
    #[error("the API server refuses Service {service} of this Vip: {message}")]
    ServiceRefused { service: String, message: String },
}

impl Refusal {
    fn said(&self) -> Said {
        let reason = match self {
            Self::ServiceNotFound(_) => "ServiceNotFound",
            Self::ServiceIsDerived(_) => "ServiceIsDerived",
            Self::NameTaken(_) => "NameTaken",
            Self::NoSelector(_) => "NoSelector",
            Self::PortNotFound { .. } | Self::NoPorts(_) => "PortNotFound",
            Self::ProfileNotFound(_) => "ProfileNotFound",
            Self::FamilyNotServed { .. } => "FamilyNotServed",
            Self::SourceRangesNotServed => "SourceRangesNotServed",
            Self::NeedsHaproxy(_) => "NeedsHaproxy",
            Self::ProtocolNotServed(_) => "ProtocolNotServed",
            Self::TooManyPorts(_) => "TooManyPorts",
            Self::ServiceRefused { .. } => "ServiceRefused",
        };
        (ConditionStatus::False, reason, self.to_string())
    }
}

/// The objects that a Vip's Service follows from.
#[derive(Default)]
pub struct Found {
    /// The Service that the Vip names.
    pub source: Option<Service>,
    /// The Service of the Vip's own name.
    pub existing: Option<Service>,
    /// By their names, those that the Vip names.
    pub profiles: BTreeMap<String, VipProfileSpec>,
    /// The Vip's pool is private.
    pub is_private: bool,
    /// What serves the Vip's addresses.
    pub driver: PoolDriver,
}

impl Found {
    /// Returns what watches know.
    fn cached(vip: &Vip, context: &Context) -> Self {
        let namespace = vip.namespace().unwrap_or_default();
        let service = |name: &str| {
            let reference = ObjectRef::new(name).within(&namespace);
            context
                .services
                .get(&reference)
                .map(|service| Service::clone(&service))
        };
        let profile = |name: &String| {
            let reference = ObjectRef::<VipProfile>::new(name).within(&namespace);
            Some((name.clone(), context.profiles.get(&reference)?.spec.clone()))
        };
        Self {
            source: service(&vip.spec.service),
            existing: service(&vip.name_any()),
            profiles: vip.spec.profiles.iter().filter_map(profile).collect(),
            is_private: is_private(vip, context),
            driver: driver_of(vip, context),
        }
    }

    /// Returns what the API server knows.
    async fn live(vip: &Vip, context: &Context) -> Result<Self, kube::Error> {
        let client = &context.client;
        let namespace = vip.namespace().unwrap_or_default();
        let services: Api<Service> = Api::namespaced(client.clone(), &namespace);
        let mut found = Self {
            source: services.get_opt(&vip.spec.service).await?,
            existing: services.get_opt(&vip.name_any()).await?,
            profiles: BTreeMap::new(),
            is_private: is_private(vip, context),
            driver: driver_of(vip, context),
        };
        let profiles: Api<VipProfile> = Api::namespaced(client.clone(), &namespace);
        for name in &vip.spec.profiles {
            if let Some(profile) = profiles.get_opt(name).await? {
                found.profiles.insert(name.clone(), profile.spec);
            }
        }
        Ok(found)
    }
}

/// Returns a Vip's Service as it should be. What lbaasd does not decide stays as it is.
pub fn derive(vip: &Vip, found: &Found) -> Result<Service, Refusal> {
    let name = &vip.spec.service;
    let source = found.source.as_ref();
    let source = source.ok_or_else(|| Refusal::ServiceNotFound(name.clone()))?;
    if maker(source).is_some() {
        return Err(Refusal::ServiceIsDerived(name.clone()));
    }
    if found
        .existing
        .as_ref()
        .is_some_and(|existing| !is_made_for(existing, vip))
    {
        return Err(Refusal::NameTaken(vip.name_any()));
    }
    let from = source.spec.clone().unwrap_or_default();
    let selector = from.selector.clone().filter(|selector| !selector.is_empty());
    if selector.is_none() || from.type_.as_deref() == Some("ExternalName") {
        return Err(Refusal::NoSelector(name.clone()));
    }
    let ports = ports(vip, &from)?;
    let mut families: Vec<String> = Vec::new();
    for family in vip.spec.ip_families.iter().map(|family| family_name(*family)) {
        if !from.ip_families.iter().flatten().any(|has| has == family) {
            let service = name.clone();
            return Err(Refusal::FamilyNotServed { service, family });
        }
        families.push(family.to_owned());
    }
    let treatment = treatment(vip, &found.profiles)?;
    if found.is_private && !treatment.source_ranges.is_empty() {
        return Err(Refusal::SourceRangesNotServed);
    }
    let driver = driver::of(found.driver);
    driver.admit(&treatment, &ports)?;

    let mut service = found.existing.clone().unwrap_or_else(|| Service {
        metadata: ObjectMeta {
            name: Some(vip.name_any()),
            namespace: vip.namespace(),
            owner_references: vip.controller_owner_ref(&()).map(|owner| vec![owner]),
            ..ObjectMeta::default()
        },
        ..Service::default()
    });
    annotate(vip, source, found.is_private, service.annotations_mut());
    let spec = service.spec.get_or_insert_default();
    // The first family of a Service can't be changed.
    let has = spec.ip_families.clone().unwrap_or_default();
    families.sort_by_key(|family| has.iter().position(|has| has == family).unwrap_or(has.len()));
    let policy = if families.len() > 1 {
        "RequireDualStack"
    } else {
        "SingleStack"
    };
    let is_public = !found.is_private;
    let kind = if is_public { "LoadBalancer" } else { "ClusterIP" };
    spec.type_ = Some(kind.to_owned());
    spec.load_balancer_class = is_public.then(|| CLASS.to_owned());
    spec.allocate_load_balancer_node_ports = is_public.then_some(false);
    spec.selector = selector;
    spec.ports = Some(ports);
    spec.ip_families = Some(families);
    spec.ip_family_policy = Some(policy.to_owned());
    spec.publish_not_ready_addresses = from.publish_not_ready_addresses;
    let policy = from.external_traffic_policy.or(Some("Cluster".to_owned()));
    spec.external_traffic_policy = policy.filter(|_| is_public);
    let source_ranges = treatment.source_ranges.clone();
    spec.load_balancer_source_ranges = (!source_ranges.is_empty()).then_some(source_ranges);
    let affinity = treatment.affinity_seconds;
    let kind = if affinity.is_some() { "ClientIP" } else { "None" };
    spec.session_affinity = Some(kind.to_owned());
    spec.session_affinity_config = affinity.map(|seconds| SessionAffinityConfig {
        client_ip: Some(ClientIPConfig {
            timeout_seconds: i32::try_from(seconds).ok(),
        }),
    });
    let existing = found
        .existing
        .as_ref()
        .and_then(|existing| existing.spec.as_ref());
    let has = existing.and_then(|spec| spec.ports.as_deref());
    driver.shape(&mut service, &treatment, has.unwrap_or_default());
    Ok(service)
}

/// Sets the annotations that a Vip's Service has for the operator.
fn annotate(vip: &Vip, source: &Service, is_private: bool, annotations: &mut BTreeMap<String, String>) {
    let mut set = |name: &str, value: Option<String>| match value {
        Some(value) => annotations.insert(name.to_owned(), value),
        None => annotations.remove(name),
    };
    let mode = vip.spec.mode.name();
    set(MODE_ANNOTATION, (!is_private).then(|| mode.to_owned()));
    set(
        NETWORK_ANNOTATION,
        source.annotations().get(NETWORK_ANNOTATION).cloned(),
    );
    let check = vip.spec.health_check.as_ref();
    // A check is numbers and texts, which JSON can say.
    set(
        HEALTH_CHECK_ANNOTATION,
        check.and_then(|check| serde_json::to_string(check).ok()),
    );
    if is_private {
        let addresses = addresses(vip).join(", ");
        set(
            SERVICE_IP_ANNOTATION,
            Some(addresses).filter(|addresses| !addresses.is_empty()),
        );
    }
}

/// Returns the addresses that a Vip has.
fn addresses(vip: &Vip) -> &[String] {
    let status = vip.status.as_ref();
    status
        .map(|status| status.addresses.as_slice())
        .unwrap_or_default()
}

/// Returns the chosen ports of a Service.
fn ports(vip: &Vip, from: &ServiceSpec) -> Result<Vec<ServicePort>, Refusal> {
    let all: Vec<&ServicePort> = from.ports.iter().flatten().collect();
    let is_it = |port: &ServicePort, chosen: &VipPort| {
        port.port == i32::from(chosen.port) && protocol_of(port) == protocol_name(chosen.protocol)
    };
    let (name, chosen) = (&vip.spec.service, &vip.spec.ports);
    if all.is_empty() {
        return Err(Refusal::NoPorts(name.clone()));
    }
    let is_there = |chosen: &&VipPort| all.iter().any(|port| is_it(port, chosen));
    if let Some(missing) = chosen.iter().find(|chosen| !is_there(chosen)) {
        let text = |port: &&ServicePort| format!("{}/{}", port.port, protocol_of(port));
        return Err(Refusal::PortNotFound {
            service: name.clone(),
            missing: port_text(missing),
            present: all.iter().map(text).collect::<Vec<_>>().join(", "),
        });
    }
    let is_chosen =
        |port: &&&ServicePort| chosen.is_empty() || chosen.iter().any(|chosen| is_it(port, chosen));
    let copied = |port: &&ServicePort| ServicePort {
        node_port: None,
        ..(*port).clone()
    };
    Ok(all.iter().filter(is_chosen).map(copied).collect())
}

/// Returns what a Vip's profiles say together: of two that set the same field, the later one counts.
fn treatment(vip: &Vip, profiles: &BTreeMap<String, VipProfileSpec>) -> Result<VipProfileSpec, Refusal> {
    let mut treatment = VipProfileSpec::default();
    for name in &vip.spec.profiles {
        let profile = profiles.get(name);
        let profile = profile.ok_or_else(|| Refusal::ProfileNotFound(name.clone()))?;
        if !profile.source_ranges.is_empty() {
            treatment.source_ranges.clone_from(&profile.source_ranges);
        }
        treatment.affinity_seconds = profile.affinity_seconds.or(treatment.affinity_seconds);
        treatment.ssl = profile.ssl.clone().or(treatment.ssl);
        treatment.proxy_protocol = profile.proxy_protocol.or(treatment.proxy_protocol);
        treatment.client_limits = profile.client_limits.or(treatment.client_limits);
        treatment.idle_seconds = profile.idle_seconds.or(treatment.idle_seconds);
    }
    Ok(treatment)
}

/// Whether a Service keeps the addresses of a private Vip that is deleted: the garbage collector does not delete the
/// Service, or has made it nobody's.
pub fn keeps_addresses(service: &Service, vip: &Vip) -> bool {
    let is_private = vip.status.as_ref().is_some_and(VipStatus::is_private);
    let annotated = service.annotations().get(SERVICE_IP_ANNOTATION);
    let has_them = annotated.is_some_and(|annotated| *annotated == addresses(vip).join(", "));
    let is_orphaning = vip.finalizers().iter().any(|name| name == ORPHAN_FINALIZER);
    let is_to_stay = maker(service).is_none() || (is_made_for(service, vip) && is_orphaning);
    is_private && has_them && is_to_stay && service.metadata.deletion_timestamp.is_none()
}

/// Whether the API server's copy of a private Vip's Service keeps the addresses. lbaasd may not write the Service of
/// which no Vip is the controller any more.
pub async fn are_addresses_kept(vip: &Vip, client: &Client) -> Result<bool, kube::Error> {
    let api: Api<Service> = Api::namespaced(client.clone(), &vip.namespace().unwrap_or_default());
    let service = api.get_opt(&vip.name_any()).await?;
    Ok(service.is_some_and(|service| keeps_addresses(&service, vip)))
}

/// Returns the name of a family as Services have it.
pub fn family_name(family: IpFamily) -> &'static str {
    match family {
        IpFamily::V4 => "IPv4",
        IpFamily::V6 => "IPv6",
    }
}

/// Returns the protocol of a Service's port.
pub fn protocol_of(port: &ServicePort) -> &str {
    port.protocol.as_deref().unwrap_or("TCP")
}

fn protocol_name(protocol: VipProtocol) -> &'static str {
    match protocol {
        VipProtocol::Tcp => "TCP",
        VipProtocol::Udp => "UDP",
        VipProtocol::Sctp => "SCTP",
    }
}

/// Returns a port as people write it, such as 443/TCP.
pub fn port_text(port: &VipPort) -> String {
    format!("{}/{}", port.port, protocol_name(port.protocol))
}

/// Brings a Vip's Service to what it should be. Returns whether the Vip is accepted.
pub async fn reconcile(vip: &Vip, context: &Context) -> Result<Said, kube::Error> {
    let valid = (
        ConditionStatus::True,
        "Valid",
        "the Vip has a Service of its name".to_owned(),
    );
    let is_settled =
        |found: &Found| derive(vip, found).map(|wanted| found.existing.as_ref() == Some(&wanted));
    if is_settled(&Found::cached(vip, context)) == Ok(true) {
        return Ok(valid);
    }
    // The watches may be late.
    let found = Found::live(vip, context).await?;
    let wanted = match derive(vip, &found) {
        Ok(wanted) if found.existing.as_ref() == Some(&wanted) => return Ok(valid),
        // The operator makes a Service's Endpoint anew when its address changes. So the Service has it from the start.
        Ok(_) if found.is_private && addresses(vip).is_empty() => {
            let message = "the Vip gets a Service of its name once it has its addresses";
            return Ok((ConditionStatus::True, "Valid", message.to_owned()));
        }
        Ok(wanted) => wanted,
        Err(refusal) => return Ok(refusal.said()),
    };
    let (api, name, parameters) = (
        api_of(&context.client, &wanted),
        wanted.name_any(),
        PostParams::default(),
    );
    let written = if found.existing.is_some() {
        api.replace(&name, &parameters, &wanted).await
    } else {
        api.create(&parameters, &wanted).await
    };
    match written {
        Ok(_) => {
            info!(namespace = vip.namespace(), name, "the Vip's Service was written");
            Ok(valid)
        }
        // A quota, or another rule of the cluster.
        Err(kube::Error::Api(status)) if matches!(status.code, 403 | 422) => Ok(Refusal::ServiceRefused {
            service: name,
            message: status.message.clone(),
        }
        .said()),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests;
