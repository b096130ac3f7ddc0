//! A played API server with Vips and Leases, and the part of an lbaasd that nodes ask, for tests. Answers take a while
//! by the test's clock.

use std::collections::BTreeMap;
use std::future::pending;
use std::hash::Hash;
use std::net::IpAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use cidrd::client::Grant;
use cidrd::http::Lease as IpLease;
use http::{Method, Request, Response};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Node;
use kube::api::ObjectMeta;
use kube::client::Body;
use kube::runtime::reflector::{Lookup, Store, store};
use kube::runtime::watcher::Event;
use kube::{Client, Resource, ResourceExt};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::json;
use thuban_api::ip_lease::LeaseState;
use thuban_api::{BgpPeer, Vip};
use tokio::sync::{Semaphore, watch};
use tokio::time::{Instant, sleep};

use super::Speakers;
use super::l2::NodeLeases;
use crate::events::Warnings;
use crate::leases::Leases;

/// What it does with requests for Leases.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fault {
    #[default]
    None,
    /// It answers with an error of its own.
    Error,
    /// It never answers.
    Hang,
}

/// Returns what cidrd leased to a Vip of the namespace `red`.
pub fn granted(uid: String, pool: &str, address: IpAddr) -> Grant {
    let lease = IpLease {
        namespace: "red".into(),
        name: uid.clone(),
        uid,
        pool: pool.to_owned(),
        vpc: String::new(),
        address,
        state: LeaseState::Held,
        grant: String::new(),
        lease_seconds: 86_400,
        quarantine_seconds: 1,
    };
    Grant::new(lease, Instant::now())
}

/// What an lbaasd knows by its watches.
#[derive(Clone, Copy, Default)]
pub struct Known<'a> {
    pub vips: &'a [Vip],
    /// The names of nodes.
    pub nodes: &'a [&'a str],
    pub node_leases: &'a [Lease],
    pub peers: &'a [BgpPeer],
}

/// Returns the part of an lbaasd that nodes ask. The API server has the Vips and Leases that it knows, its watches hear
/// nothing any more, and it knows of no address that cidrd leased. Answers count for 2 s to nodes with addresses of L2.
pub fn speakers(played: &Arc<Played>, known: Known<'_>) -> Speakers {
    let (client, changes) = (played.client(), watch::Sender::new(0));
    for vip in known.vips {
        played.keep_vip(vip.clone());
    }
    for lease in known.node_leases {
        played.keep(lease.clone());
    }
    let nodes = known.nodes.iter().map(|name| Node {
        metadata: ObjectMeta {
            name: Some((*name).to_owned()),
            ..ObjectMeta::default()
        },
        ..Node::default()
    });
    let node_leases = store_of(known.node_leases.iter().cloned());
    Speakers {
        warnings: Warnings::new(client.clone()),
        leases: Arc::new(Leases::new(client.clone(), String::new(), changes.clone())),
        l2: Arc::new(NodeLeases::new(client.clone(), node_leases, 2, changes.clone())),
        client,
        vips: store_of(known.vips.iter().cloned()),
        nodes: store_of(nodes),
        peers: store_of(known.peers.iter().cloned()),
        changes: changes.subscribe(),
        reviewed: Mutex::default(),
        reviews: Semaphore::new(1),
    }
}

fn store_of<K>(objects: impl Iterator<Item = K>) -> Store<K>
where
    K: Lookup + Clone + 'static,
    K::DynamicType: Eq + Hash + Clone + Default,
{
    let (store, mut writer) = store();
    for object in objects {
        writer.apply_watcher_event(&Event::Apply(object));
    }
    store
}

type Answer = Result<Response<Body>, Box<dyn std::error::Error + Send + Sync>>;

#[derive(Default)]
pub struct Played {
    vips: Mutex<BTreeMap<String, Vip>>,
    leases: Mutex<BTreeMap<String, Lease>>,
    pause: Duration,
    fault: Mutex<Fault>,
}

impl Played {
    /// `pause`: how long each answer takes.
    pub fn slow(pause: Duration) -> Self {
        Self {
            pause,
            ..Self::default()
        }
    }

    pub fn client(self: &Arc<Self>) -> Client {
        let played = self.clone();
        let service = tower::service_fn(move |request| played.clone().serve(request));
        Client::new(service, "default")
    }

    pub fn set_fault(&self, fault: Fault) {
        *self.fault.lock().unwrap() = fault;
    }

    pub fn keep_vip(&self, vip: Vip) {
        self.vips.lock().unwrap().insert(vip.name_any(), vip);
    }

    pub fn keep(&self, lease: Lease) {
        self.leases.lock().unwrap().insert(lease.name_any(), lease);
    }

    pub fn lease(&self, node: &str) -> Option<Lease> {
        self.leases.lock().unwrap().get(node).cloned()
    }

    pub fn remove(&self, node: &str) {
        self.leases.lock().unwrap().remove(node);
    }

    async fn serve(self: Arc<Self>, request: Request<Body>) -> Answer {
        sleep(self.pause).await;
        let (method, path) = (request.method().clone(), request.uri().path().to_owned());
        let body = request.into_body().collect_bytes().await?;
        let path = path.trim_end_matches("/status");
        let name = path.rsplit('/').next().unwrap_or_default();
        if !path.contains("/leases") {
            return answer(&mut self.vips.lock().unwrap(), &method, name, &body);
        }
        let fault = *self.fault.lock().unwrap();
        match fault {
            Fault::None => answer(&mut self.leases.lock().unwrap(), &method, name, &body),
            Fault::Error => status(500, "InternalError"),
            Fault::Hang => pending().await,
        }
    }
}

/// Carries out a request for an object.
fn answer<K>(objects: &mut BTreeMap<String, K>, method: &Method, name: &str, body: &[u8]) -> Answer
where
    K: Clone + DeserializeOwned + Resource + Serialize,
{
    if *method == Method::DELETE {
        objects.remove(name);
        return status(200, "Deleted");
    }
    if *method == Method::GET {
        return match objects.get(name) {
            Some(object) => Ok(Response::new(Body::from(serde_json::to_vec(object)?))),
            None => status(404, "NotFound"),
        };
    }
    let mut written: K = serde_json::from_slice(body)?;
    let known = objects.get(&written.name_any());
    if *method == Method::POST && known.is_some() {
        return status(409, "AlreadyExists");
    }
    let version = known.and_then(ResourceExt::resource_version);
    if version != written.meta().resource_version {
        return status(409, "Conflict");
    }
    let version = version.and_then(|version| version.parse().ok()).unwrap_or(0_u64);
    written.meta_mut().resource_version = Some((version + 1).to_string());
    objects.insert(written.name_any(), written.clone());
    Ok(Response::new(Body::from(serde_json::to_vec(&written)?)))
}

fn status(code: u16, reason: &str) -> Answer {
    let result = if code == 200 { "Success" } else { "Failure" };
    let status = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": result,
        "message": reason, "reason": reason, "code": code});
    let body = Body::from(status.to_string().into_bytes());
    Ok(Response::builder().status(code).body(body)?)
}
