//! Records as keys of an etcd from which CoreDNS's plugin `etcd` serves a zone. The etcd is asked by its JSON gateway.
//!
//! CoreDNS answers a name with all keys below the name's path, also those of longer names, and with the key of the path
//! itself only if there is none below. So a Vip gets a name only if nobody has a name above or below it: its addresses
//! would be in the other name's answers, or the other's in its own.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use data_encoding::BASE64;
use futures::future::BoxFuture;
use http::Request;
use kube::{Client, Config};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::json;
use thuban_api::EtcdRecords;
use tokio::time::timeout;

use super::{DnsError, Record, Records, TIMEOUT};

/// The keys of a name's addresses, IPv4 and IPv6. No label of a Vip's name has an underscore.
const LEAVES: [&str; 2] = ["_thuban4", "_thuban6"];
/// How often a write begins anew because somebody changed the keys meanwhile.
const TRIES: usize = 3;
/// How long one member may take, so that another one can be asked in time.
const MEMBER_TIMEOUT: Duration = Duration::from_secs(2);

/// The certificates of an etcd, as PEM.
#[derive(Clone, Debug)]
pub struct Certificates {
    pub ca: String,
    /// A client's certificate and its key.
    pub client: Option<(String, String)>,
}

/// A key's value, as CoreDNS reads it. CoreDNS does not know `owner` and leaves it out.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Value {
    host: String,
    #[serde(default)]
    ttl: u32,
    #[serde(default)]
    owner: String,
}

/// A key that there is. Bytes are base64, and numbers are text.
#[derive(Debug, Deserialize)]
struct Entry {
    key: String,
    #[serde(default)]
    value: String,
    mod_revision: String,
}

#[derive(Deserialize)]
struct Range {
    #[serde(default)]
    kvs: Vec<Entry>,
}

#[derive(Deserialize)]
struct Written {
    #[serde(default)]
    succeeded: bool,
}

pub struct Keys {
    /// The members, and which of them answered last.
    members: Vec<Client>,
    current: AtomicUsize,
    path: String,
    zone: String,
}

impl Keys {
    /// Makes a client of each member. None is asked yet.
    pub fn new(
        spec: &EtcdRecords,
        zone: &str,
        certificates: Option<&Certificates>,
    ) -> Result<Self, DnsError> {
        let member = |url: &String| {
            let mut config = Config::new(url.parse().map_err(|_| DnsError::Spec("etcd.endpoints"))?);
            config.connect_timeout = Some(MEMBER_TIMEOUT);
            if config.cluster_url.scheme_str() == Some("https") {
                let certificates = certificates.ok_or(DnsError::Spec("etcd.secret"))?;
                secure(&mut config, certificates)?;
            }
            Ok(Client::try_from(config)?)
        };
        Ok(Self {
            members: spec
                .endpoints
                .iter()
                .map(member)
                .collect::<Result<_, DnsError>>()?,
            current: AtomicUsize::new(0),
            path: spec.path.clone(),
            zone: zone.to_owned(),
        })
    }

    /// Asks the member that answered last.
    async fn ask<T: DeserializeOwned>(&self, path: &str, body: &serde_json::Value) -> Result<T, DnsError> {
        let index = self.current.load(Ordering::Relaxed) % self.members.len();
        let request = Request::post(path).header("content-type", "application/json");
        let request = request.body(serde_json::to_vec(body)?)?;
        let answered = timeout(MEMBER_TIMEOUT, self.members[index].request(request)).await;
        let answered = answered
            .map_err(|_| DnsError::Late)
            .and_then(|answered| Ok(answered?));
        if answered.is_err() {
            self.current.store(index + 1, Ordering::Relaxed);
        }
        answered
    }

    /// Reads keys from the first member that answers. Writes come after a read, and are sent once: a repeat at another
    /// member would not tell what the first one did.
    async fn range(&self, body: &serde_json::Value) -> Result<Vec<Entry>, DnsError> {
        let mut asked = 1;
        loop {
            match self.ask::<Range>("/v3/kv/range", body).await {
                Err(_) if asked < self.members.len() => asked += 1,
                answered => return Ok(answered?.kvs),
            }
        }
    }

    /// Returns the keys of a name's addresses that there are.
    async fn held(&self, node: &str) -> Result<Vec<Entry>, DnsError> {
        self.range(&json!({"key": bytes(&leaf(node, 0)), "range_end": bytes(&end_of_leaves(node))}))
            .await
    }

    /// Writes the keys under the condition that they are as they were read. Returns `None` if they are not.
    async fn write(
        &self,
        node: &str,
        held: &[Entry],
        mut required: Vec<serde_json::Value>,
        changes: Vec<serde_json::Value>,
    ) -> Result<Option<bool>, DnsError> {
        for index in 0..LEAVES.len() {
            let key = bytes(&leaf(node, index));
            let revision = held.iter().find(|held| held.key == key);
            let revision = revision.map_or("0", |held| held.mod_revision.as_str());
            required.push(json!({"key": key, "target": "MOD", "result": "EQUAL", "mod_revision": revision}));
        }
        let body = json!({"compare": required, "success": changes});
        if self.ask::<Written>("/v3/kv/txn", &body).await?.succeeded {
            return Ok(Some(true));
        }
        let revisions = |held: &[Entry]| {
            held.iter()
                .map(|held| held.mod_revision.clone())
                .collect::<Vec<_>>()
        };
        let is_unchanged = revisions(&self.held(node).await?) == revisions(held);
        Ok(is_unchanged.then_some(false))
    }

    async fn refresh(&self, owner: &str, record: &Record) -> Result<bool, DnsError> {
        let node = node(&self.path, &record.name);
        let wanted = values(owner, record)?;
        for _ in 0..TRIES {
            let held = self.held(&node).await?;
            if held.is_empty() || !held.iter().all(|held| is_of(held, owner)) {
                return Ok(false);
            }
            let has = |(index, value): (usize, &Option<String>)| {
                let key = bytes(&leaf(&node, index));
                held.iter().find(|held| held.key == key).map(|held| &held.value) == value.as_ref()
            };
            if wanted.iter().enumerate().all(has) {
                return Ok(true);
            }
            let written = self
                .write(&node, &held, Vec::new(), changes(&node, &wanted))
                .await?;
            if written == Some(true) {
                return Ok(true);
            }
        }
        Err(DnsError::Contended)
    }

    async fn claim(&self, owner: &str, record: &Record) -> Result<bool, DnsError> {
        let node = node(&self.path, &record.name);
        let wanted = values(owner, record)?;
        let required = nobodys(&self.path, &self.zone, &record.name);
        let written = self.write(&node, &[], required, changes(&node, &wanted)).await?;
        Ok(written.unwrap_or(false))
    }

    async fn withdraw(&self, owner: &str, name: &str) -> Result<bool, DnsError> {
        let node = node(&self.path, name);
        for _ in 0..TRIES {
            let held = self.held(&node).await?;
            let own = held.iter().filter(|held| is_of(held, owner));
            let removed: Vec<_> = own.map(|held| removal(&held.key)).collect();
            if removed.is_empty() {
                return Ok(false);
            }
            if self.write(&node, &held, Vec::new(), removed).await? == Some(true) {
                return Ok(true);
            }
        }
        Err(DnsError::Contended)
    }

    async fn check(&self) -> Result<(), DnsError> {
        let key = bytes(&node(&self.path, &self.zone));
        self.range(&json!({"key": key, "count_only": true}))
            .await
            .map(drop)
    }
}

impl Records for Keys {
    fn refresh<'a>(&'a self, owner: &'a str, record: &'a Record) -> BoxFuture<'a, Result<bool, DnsError>> {
        Box::pin(in_time(self.refresh(owner, record)))
    }

    fn claim<'a>(&'a self, owner: &'a str, record: &'a Record) -> BoxFuture<'a, Result<bool, DnsError>> {
        Box::pin(in_time(self.claim(owner, record)))
    }

    fn withdraw<'a>(&'a self, owner: &'a str, name: &'a str) -> BoxFuture<'a, Result<bool, DnsError>> {
        Box::pin(in_time(self.withdraw(owner, name)))
    }

    fn check(&self) -> BoxFuture<'_, Result<(), DnsError>> {
        Box::pin(in_time(self.check()))
    }
}

async fn in_time<T>(work: impl Future<Output = Result<T, DnsError>>) -> Result<T, DnsError> {
    timeout(TIMEOUT, work).await.unwrap_or(Err(DnsError::Late))
}

fn secure(config: &mut Config, certificates: &Certificates) -> Result<(), DnsError> {
    let unusable = |_| DnsError::Spec("etcd.secret");
    let roots = CertificateDer::pem_slice_iter(certificates.ca.as_bytes());
    let roots = roots.map(|root| root.map(|root| root.to_vec()));
    config.root_cert = Some(roots.collect::<Result<_, _>>().map_err(unusable)?);
    if let Some((certificate, key)) = &certificates.client {
        config.auth_info.client_certificate_data = Some(bytes(certificate));
        config.auth_info.client_key_data = Some(bytes(key).into());
    }
    Ok(())
}

/// Returns bytes as the gateway takes them.
fn bytes(text: &str) -> String {
    BASE64.encode(text.as_bytes())
}

/// Returns the path of a name: its labels from the last to the first.
pub fn node(path: &str, name: &str) -> String {
    let mut node = path.to_owned();
    for label in name.rsplit('.') {
        node.push('/');
        node.push_str(label);
    }
    node
}

fn leaf(node: &str, index: usize) -> String {
    format!("{node}/{}", LEAVES[index])
}

/// Returns the end of the range that begins with a name's first leaf.
fn end_of_leaves(node: &str) -> String {
    format!("{}\0", leaf(node, LEAVES.len() - 1))
}

/// Returns what must hold for a name that nobody has, above which and below which nobody has a name.
fn nobodys(path: &str, zone: &str, name: &str) -> Vec<serde_json::Value> {
    let absent = |from: &str, end: Option<String>| {
        let mut compare =
            json!({"key": bytes(from), "target": "CREATE", "result": "EQUAL", "create_revision": "0"});
        if let Some(end) = end {
            compare["range_end"] = bytes(&end).into();
        }
        compare
    };
    let own = node(path, name);
    // 0 follows the slash.
    let mut required = vec![
        absent(&own, None),
        absent(&format!("{own}/"), Some(format!("{own}0"))),
    ];
    let mut above = name;
    while let Some((_, rest)) = above.split_once('.') {
        above = rest;
        let node = node(path, above);
        required.push(absent(&leaf(&node, 0), Some(end_of_leaves(&node))));
        // The zone's own records are its administrator's.
        if above.len() > zone.len() {
            required.push(absent(&node, None));
        }
    }
    required
}

/// Whether a key is the owner's.
fn is_of(key: &Entry, owner: &str) -> bool {
    let value = BASE64.decode(key.value.as_bytes()).unwrap_or_default();
    let value = serde_json::from_slice::<Value>(&value);
    value.is_ok_and(|value| value.owner == mark(owner))
}

fn mark(owner: &str) -> String {
    format!("thuban/vip/{owner}")
}

/// Returns the value of each leaf.
fn values(owner: &str, record: &Record) -> Result<[Option<String>; 2], DnsError> {
    let mut values = [None, None];
    for address in &record.addresses {
        let value = Value {
            host: address.to_string(),
            ttl: record.ttl_seconds,
            owner: mark(owner),
        };
        values[usize::from(address.is_ipv6())] = Some(bytes(&serde_json::to_string(&value)?));
    }
    Ok(values)
}

fn changes(node: &str, values: &[Option<String>]) -> Vec<serde_json::Value> {
    let change = |(index, value): (usize, &Option<String>)| {
        let key = bytes(&leaf(node, index));
        match value {
            Some(value) => json!({"request_put": {"key": key, "value": value}}),
            None => removal(&key),
        }
    };
    values.iter().enumerate().map(change).collect()
}

fn removal(key: &str) -> serde_json::Value {
    json!({"request_delete_range": {"key": key}})
}

#[cfg(test)]
mod tests;
