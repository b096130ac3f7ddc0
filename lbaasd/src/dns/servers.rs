//! The servers of DnsZones: their keys, and how many requests are under way.
//!
//! A server that is away holds up nobody but its own zone: few requests wait for it at a time, and after one that got
//! no answer the others fail at once for a while.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use data_encoding::BASE64;
use hickory_proto::rr::rdata::tsig::TsigAlgorithm;
use k8s_openapi::api::core::v1::Secret;
use kube::{Api, Client, ResourceExt};
use thuban_api::DnsZone;
use tokio::sync::{Mutex as AsyncMutex, OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

use super::etcd::{Certificates, Keys};
use super::updates::{Key, Updates};
use super::{DnsError, Record, Records};

/// The namespace of the Secrets that DnsZones name. lbaasd may read all of its Secrets.
pub const NAMESPACE: &str = "thuban-dns";
/// How long a Secret that was read is used.
const REREAD: Duration = Duration::from_mins(1);
/// How many requests a server gets at once.
const AT_ONCE: usize = 4;
/// How long a server is not asked after it did not answer.
const PAUSE: Duration = Duration::from_secs(10);

pub struct Servers {
    client: Client,
    /// By the DnsZones' UIDs.
    known: Mutex<HashMap<String, Arc<Server>>>,
}

struct Server {
    room: Arc<Semaphore>,
    away: Mutex<Option<Instant>>,
    made: AsyncMutex<Option<Made>>,
}

/// What is made of a DnsZone and its Secret.
struct Made {
    generation: Option<i64>,
    since: Instant,
    records: Arc<dyn Records>,
}

/// Room for one request after the other to a server.
pub struct Turn {
    server: Arc<Server>,
    records: Arc<dyn Records>,
    _room: OwnedSemaphorePermit,
}

impl Servers {
    pub fn new(client: Client) -> Self {
        Self {
            client,
            known: Mutex::default(),
        }
    }

    fn known(&self) -> MutexGuard<'_, HashMap<String, Arc<Server>>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets the servers of DnsZones that are gone.
    pub fn retain(&self, is_there: impl Fn(&str) -> bool) {
        self.known().retain(|uid, _| is_there(uid));
    }

    /// Returns a turn at a DnsZone's server, if there is room now.
    pub async fn turn(&self, zone: &DnsZone) -> Result<Turn, DnsError> {
        let server = {
            let mut known = self.known();
            known.entry(zone.uid().unwrap_or_default()).or_default().clone()
        };
        let room = server.room.clone().try_acquire_owned();
        let room = room.map_err(|_| DnsError::Busy)?;
        if let Some(since) = *server.away() {
            let since = since.elapsed();
            if since < PAUSE {
                return Err(DnsError::Paused(since));
            }
        }
        let records = self.records(&server, zone).await?;
        Ok(Turn {
            server,
            records,
            _room: room,
        })
    }

    async fn records(&self, server: &Server, zone: &DnsZone) -> Result<Arc<dyn Records>, DnsError> {
        let mut made = server.made.lock().await;
        if let Some(made) = &*made
            && made.generation == zone.metadata.generation
            && made.since.elapsed() < REREAD
        {
            return Ok(made.records.clone());
        }
        let records = self.make(zone).await?;
        *made = Some(Made {
            generation: zone.metadata.generation,
            since: Instant::now(),
            records: records.clone(),
        });
        Ok(records)
    }

    async fn make(&self, zone: &DnsZone) -> Result<Arc<dyn Records>, DnsError> {
        let spec = &zone.spec;
        if let Some(updates) = &spec.rfc2136 {
            let server: SocketAddr = updates
                .server
                .parse()
                .map_err(|_| DnsError::Spec("rfc2136.server"))?;
            let key = self.secret(&updates.secret).await?.key()?;
            return Ok(Arc::new(Updates::new(server, &spec.zone, key, SystemTime::now)?));
        }
        let etcd = spec.etcd.as_ref().ok_or(DnsError::Spec("etcd"))?;
        let certificates = if etcd.secret.is_empty() {
            None
        } else {
            Some(self.secret(&etcd.secret).await?.certificates()?)
        };
        Ok(Arc::new(Keys::new(etcd, &spec.zone, certificates.as_ref())?))
    }

    async fn secret(&self, name: &str) -> Result<Fields, DnsError> {
        let api: Api<Secret> = Api::namespaced(self.client.clone(), NAMESPACE);
        let secret = api.get(name).await.map_err(|error| DnsError::Secret {
            name: name.to_owned(),
            error: Box::new(error),
        })?;
        Ok(Fields(secret))
    }

    /// Has a DnsZone's records be these.
    #[cfg(test)]
    pub(crate) async fn set(&self, zone: &DnsZone, records: Arc<dyn Records>) {
        let server = Server::default();
        *server.made.lock().await = Some(Made {
            generation: zone.metadata.generation,
            since: Instant::now() + Duration::from_hours(1000),
            records,
        });
        self.known()
            .insert(zone.uid().unwrap_or_default(), Arc::new(server));
    }
}

impl Default for Server {
    fn default() -> Self {
        Self {
            room: Arc::new(Semaphore::new(AT_ONCE)),
            away: Mutex::default(),
            made: AsyncMutex::default(),
        }
    }
}

impl Server {
    fn away(&self) -> MutexGuard<'_, Option<Instant>> {
        self.away.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes whether the server answered.
    fn noted<T>(&self, answered: Result<T, DnsError>) -> Result<T, DnsError> {
        *self.away() = match &answered {
            Err(error) if error.reason() == "ServerAway" => Some(Instant::now()),
            _ => None,
        };
        answered
    }
}

impl Turn {
    pub async fn refresh(&self, owner: &str, record: &Record) -> Result<bool, DnsError> {
        self.server.noted(self.records.refresh(owner, record).await)
    }

    pub async fn claim(&self, owner: &str, record: &Record) -> Result<bool, DnsError> {
        self.server.noted(self.records.claim(owner, record).await)
    }

    pub async fn withdraw(&self, owner: &str, name: &str) -> Result<bool, DnsError> {
        self.server.noted(self.records.withdraw(owner, name).await)
    }

    pub async fn check(&self) -> Result<(), DnsError> {
        self.server.noted(self.records.check().await)
    }
}

/// A Secret, from which text is read.
struct Fields(Secret);

impl Fields {
    fn lacks(&self, field: &'static str) -> DnsError {
        DnsError::SecretField {
            name: self.0.name_any(),
            field,
        }
    }

    fn text(&self, field: &'static str) -> Result<String, DnsError> {
        let bytes = self.0.data.as_ref().and_then(|data| data.get(field));
        let text = bytes.and_then(|bytes| String::from_utf8(bytes.0.clone()).ok());
        let text = text.map(|text| text.trim().to_owned());
        text.filter(|text| !text.is_empty())
            .ok_or_else(|| self.lacks(field))
    }

    fn key(&self) -> Result<Key, DnsError> {
        let algorithm = match self.text("algorithm")?.as_str() {
            "hmac-sha256" => TsigAlgorithm::HmacSha256,
            "hmac-sha384" => TsigAlgorithm::HmacSha384,
            "hmac-sha512" => TsigAlgorithm::HmacSha512,
            _ => return Err(self.lacks("algorithm")),
        };
        let secret = BASE64.decode(self.text("secret")?.as_bytes());
        Ok(Key {
            name: self.text("name")?,
            algorithm,
            secret: secret.map_err(|_| self.lacks("secret"))?,
        })
    }

    fn certificates(&self) -> Result<Certificates, DnsError> {
        let has_client = self
            .0
            .data
            .as_ref()
            .is_some_and(|data| data.contains_key("tls.crt"));
        let client = if has_client {
            Some((self.text("tls.crt")?, self.text("tls.key")?))
        } else {
            None
        };
        Ok(Certificates {
            ca: self.text("ca.crt")?,
            client,
        })
    }
}
