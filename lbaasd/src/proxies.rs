//! What HAProxy on the nodes serves: computed by one task from what was accepted, and told to each node that asks.
//!
//! Everything follows from a Vip, the Service that lbaasd made for it, the EndpointSlices of that Service, and the
//! Nodes. A process that has just started tells nothing while it has not read all certificates: nodes keep what they
//! have. Later a certificate that is not read yet concerns its Vip alone, so that no tenant holds up the others.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::routing::post;
use axum::{Json, Router};
use cidrd::problem::Problem;
use k8s_openapi::api::core::v1::{Node, Service, ServicePort};
use k8s_openapi::api::discovery::v1::{Endpoint, EndpointSlice};
use kube::ResourceExt;
use kube::runtime::reflector::store::WriterDropped;
use kube::runtime::reflector::{ObjectRef, Store};
use thuban_api::proxies::{MAX_WEIGHT, Pem, Proxies, ProxiesWanted, Proxy, ProxyMember, ProxyPort, ProxyTls};
use thuban_api::routes::LONGEST_ANSWER_SECONDS;
use thuban_api::{PoolDriver, Vip, VipProfileSpec};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use crate::SERVICE_LABEL;
use crate::certificates::{Certificates, NotRead, SecretKey};
use crate::derived::protocol_of;
use crate::driver::treatment_of;
use crate::routes::Speakers;
use crate::service::is_made_for;
use crate::vip::ending::is_withdrawn;

/// How often everything is computed anew, whatever was heard.
const RECOMPUTE: Duration = Duration::from_secs(2);
/// How long a process that has just started waits for all certificates.
const FIRST_READ: Duration = Duration::from_mins(1);
/// How long changes are gathered: an answer has all Vips, and goes to all nodes.
const GATHERED: Duration = Duration::from_millis(500);

/// What the answers follow from.
pub struct Sources {
    pub vips: Store<Vip>,
    /// Those that HAProxy serves, and their EndpointSlices.
    pub services: Store<Service>,
    pub slices: Store<EndpointSlice>,
    pub nodes: Store<Node>,
    pub certificates: Arc<Certificates>,
    /// Is raised when Services, EndpointSlices or certificates change.
    pub changes: watch::Receiver<u64>,
}

/// The latest answer; `None`: it is not known yet.
pub type Latest = watch::Receiver<Option<Arc<Proxies>>>;

#[derive(Clone)]
struct Asked {
    speakers: Arc<Speakers>,
    latest: Latest,
}

/// Returns the API that nodes ask.
pub fn router(speakers: Arc<Speakers>, latest: Latest) -> Router {
    let asked = Asked { speakers, latest };
    Router::new().route("/v1/proxies", post(ask)).with_state(asked)
}

async fn ask(State(asked): State<Asked>, request: Request) -> Result<Json<Proxies>, Problem> {
    let (_, wanted): (String, ProxiesWanted) = asked.speakers.read(request).await?;
    let end = Instant::now() + Duration::from_secs(LONGEST_ANSWER_SECONDS);
    let mut latest = asked.latest;
    let is_other = |known: &Option<Arc<Proxies>>| {
        let version = known.as_ref().map(|proxies| &proxies.version);
        version.is_some_and(|version| *version != wanted.version)
    };
    let _ = timeout_at(end, latest.wait_for(is_other)).await;
    let known = latest.borrow().clone();
    let known = known.ok_or_else(|| {
        let status = StatusCode::SERVICE_UNAVAILABLE;
        Problem::new(status, "Away", "not all certificates are read yet", "")
    })?;
    Ok(Json(Proxies::clone(&known)))
}

impl Sources {
    pub async fn wait_until_ready(&self) -> Result<(), WriterDropped> {
        self.services.wait_until_ready().await?;
        self.slices.wait_until_ready().await
    }

    /// Reads the Secrets that Services name, again and again.
    pub async fn read_certificates(&self) {
        self.certificates.follow(|| self.secrets()).await;
    }

    /// Computes the answers again and again.
    pub async fn follow(&self, latest: watch::Sender<Option<Arc<Proxies>>>) {
        let mut changes = self.changes.clone();
        let begun = Instant::now();
        loop {
            let told = latest.borrow().clone();
            let is_late = begun.elapsed() >= FIRST_READ;
            let former = told.or_else(|| is_late.then(Arc::default));
            if let Ok(proxies) = self.proxies(former.as_deref()) {
                latest.send_if_modified(|known| {
                    let version = known.as_ref().map(|known| &known.version);
                    let is_new = version != Some(&proxies.version);
                    if is_new {
                        *known = Some(Arc::new(proxies));
                    }
                    is_new
                });
            }
            let _ = timeout(RECOMPUTE, changes.changed()).await;
            sleep(GATHERED).await;
            changes.mark_unchanged();
        }
    }

    /// Returns what HAProxy serves now. `former`: the last answer, of which a Vip keeps its certificate until its next
    /// one is read. `None`: all certificates have to be read.
    fn proxies(&self, former: Option<&Proxies>) -> Result<Proxies, NotRead> {
        let mut slices: BTreeMap<(String, String), Vec<Arc<EndpointSlice>>> = BTreeMap::new();
        for slice in self.slices.state() {
            if let Some(service) = slice.labels().get(SERVICE_LABEL) {
                let key = (slice.namespace().unwrap_or_default(), service.clone());
                slices.entry(key).or_default().push(slice);
            }
        }
        let nodes = self.nodes.state();
        let mut proxies = Vec::new();
        for vip in self.vips.state() {
            let key = (vip.namespace().unwrap_or_default(), vip.name_any());
            let service = self.service_of(&vip);
            let Some((service, treatment)) = service.and_then(|service| {
                let treatment = treatment_of(&service)?;
                Some((service, treatment))
            }) else {
                continue;
            };
            let tls = match &treatment.ssl {
                None => None,
                Some(ssl) => {
                    let pem = match self.certificates.pem(&key.0, &ssl.secret) {
                        Ok(pem) => pem,
                        Err(NotRead) => former_pem(former.ok_or(NotRead)?, &key),
                    };
                    // Without a certificate nobody is served in clear text.
                    let Some(pem) = pem else {
                        continue;
                    };
                    Some(ProxyTls {
                        pem,
                        min_version: ssl.min_version,
                    })
                }
            };
            let own = slices.get(&key).map(Vec::as_slice).unwrap_or_default();
            let proxy = proxy(&vip, &service, &treatment, members(&service, own, &nodes));
            proxies.push(Proxy { tls, ..proxy });
        }
        proxies.sort_by(|one, other| (&one.namespace, &one.name).cmp(&(&other.namespace, &other.name)));
        let mut hasher = DefaultHasher::new();
        proxies.hash(&mut hasher);
        Ok(Proxies {
            version: format!("{:016x}", hasher.finish()),
            proxies,
        })
    }

    /// Returns the Service that HAProxy serves by a Vip's addresses; `None`: HAProxy serves nothing for the Vip.
    fn service_of(&self, vip: &Vip) -> Option<Arc<Service>> {
        let status = vip.status.as_ref()?;
        let is_over = is_withdrawn(vip) && status.announcers.is_empty();
        let is_served = status.driver == PoolDriver::Haproxy && !status.addresses.is_empty() && !is_over;
        let reference = ObjectRef::new(&vip.name_any()).within(&vip.namespace().unwrap_or_default());
        let service = self.services.get(&reference).filter(|_| is_served)?;
        is_made_for(&service, vip).then_some(service)
    }

    /// Returns the Secrets of Vips that HAProxy serves. Anyone can write a Service that names a Secret, but each of
    /// these Vips has an address of its own: so there are not many.
    fn secrets(&self) -> BTreeSet<SecretKey> {
        let secret = |vip: &Arc<Vip>| {
            let service = self.service_of(vip)?;
            let secret = treatment_of(&service)?.ssl?.secret;
            Some((vip.namespace().unwrap_or_default(), secret))
        };
        self.vips.state().iter().filter_map(secret).collect()
    }
}

/// Returns the certificate that a Vip had in an answer.
fn former_pem(former: &Proxies, (namespace, name): &(String, String)) -> Option<Pem> {
    let mut proxies = former.proxies.iter();
    let found = proxies.find(|proxy| proxy.namespace == *namespace && proxy.name == *name)?;
    found.tls.as_ref().map(|tls| tls.pem.clone())
}

/// Returns what HAProxy does for a Vip, without a certificate.
fn proxy(vip: &Vip, service: &Service, treatment: &VipProfileSpec, members: Vec<ProxyMember>) -> Proxy {
    let addresses = vip.status.iter().flat_map(|status| &status.addresses);
    let ports = service.spec.iter().flat_map(|spec| spec.ports.iter().flatten());
    let port = |port: &ServicePort| {
        let is_tcp = protocol_of(port) == "TCP";
        let node_port = port.node_port.filter(|node_port| is_tcp && *node_port > 0)?;
        Some(ProxyPort {
            port: u16::try_from(port.port).ok()?,
            node_port: u16::try_from(node_port).ok()?,
        })
    };
    Proxy {
        namespace: vip.namespace().unwrap_or_default(),
        name: vip.name_any(),
        addresses: addresses.filter_map(|address| address.parse().ok()).collect(),
        ports: ports.filter_map(port).collect(),
        tls: None,
        proxy_protocol: treatment.proxy_protocol,
        source_ranges: treatment.source_ranges.clone(),
        affinity_seconds: treatment.affinity_seconds,
        client_limits: treatment.client_limits.unwrap_or_default(),
        idle_seconds: treatment.idle_seconds,
        members,
    }
}

/// Returns the nodes with backends. If no backend is ready, those count that serve while they end.
fn members(service: &Service, slices: &[Arc<EndpointSlice>], nodes: &[Arc<Node>]) -> Vec<ProxyMember> {
    let families = service.spec.as_ref().and_then(|spec| spec.ip_families.as_deref());
    // Each backend has an address of each family of the Service.
    let family = families
        .and_then(<[String]>::first)
        .map_or("IPv4", String::as_str);
    let slices = slices.iter().filter(|slice| slice.address_type == family);
    let endpoints: Vec<&Endpoint> = slices
        .flat_map(|slice| slice.endpoints.iter().flatten())
        .collect();
    let is_ready = |endpoint: &Endpoint| {
        let conditions = endpoint.conditions.as_ref();
        conditions.is_none_or(|conditions| conditions.ready != Some(false))
    };
    let serves = |endpoint: &Endpoint| {
        let conditions = endpoint.conditions.as_ref();
        conditions.is_some_and(|conditions| conditions.serving == Some(true))
    };
    let any_ready = endpoints.iter().any(|endpoint| is_ready(endpoint));
    let mut counts: BTreeMap<&str, u16> = BTreeMap::new();
    for endpoint in endpoints {
        let counts_for = if any_ready {
            is_ready(endpoint)
        } else {
            serves(endpoint)
        };
        if let Some(node) = endpoint.node_name.as_deref()
            && counts_for
        {
            let count = counts.entry(node).or_default();
            *count = count.saturating_add(1).min(MAX_WEIGHT);
        }
    }
    let member = |(node, weight): (&str, u16)| {
        let known = nodes
            .iter()
            .find(|known| known.metadata.name.as_deref() == Some(node))?;
        Some(ProxyMember {
            node: node.to_owned(),
            address: address_of(known, family == "IPv4")?,
            weight,
        })
    };
    counts.into_iter().filter_map(member).collect()
}

/// Returns the first internal address of a node and a family.
fn address_of(node: &Node, is_ipv4: bool) -> Option<IpAddr> {
    let addresses = node.status.as_ref()?.addresses.as_ref()?;
    let internal = addresses.iter().filter(|address| address.type_ == "InternalIP");
    let mut parsed = internal.filter_map(|address| address.address.parse::<IpAddr>().ok());
    parsed.find(|address| address.is_ipv4() == is_ipv4)
}

#[cfg(test)]
mod tests;
