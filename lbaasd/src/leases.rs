//! The connection to cidrd, and what cidrd granted to this process.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cidrd::client::{Client as Cidrd, ClientError, Grant};
use cidrd::http::{Released, Wanted};
use cidrd::lease::Family;
use k8s_openapi::api::core::v1::Secret;
use kube::{Api, Client};
use thuban_api::system_namespace;
use thuban_authority::Ca;
use tokio::sync::{Mutex as AsyncMutex, watch};
use tokio::time::Instant;

/// The Secret with the CA of cidrd and its clients.
const SECRET: &str = "thuban-cidrd-ca";
/// How often a Vip's leases are renewed.
pub const RENEW_EVERY: Duration = Duration::from_mins(5);
/// How long a connection's certificate is used: cidrd's CA may have been replaced since.
const RECONNECT: Duration = Duration::from_mins(1);

/// What a Vip was granted, and when this process last heard so.
struct Held {
    grants: Vec<Grant>,
    renewed: Instant,
}

pub struct Leases {
    client: Client,
    /// `host:port` of cidrd.
    address: String,
    connection: AsyncMutex<Option<(Instant, Cidrd)>>,
    /// By the Vips' UIDs.
    held: Mutex<HashMap<String, Held>>,
    changes: watch::Sender<u64>,
}

impl Leases {
    /// `changes`: a number that is raised when grants change.
    pub fn new(client: Client, address: String, changes: watch::Sender<u64>) -> Self {
        Self {
            client,
            address,
            connection: AsyncMutex::new(None),
            held: Mutex::default(),
            changes,
        }
    }

    fn held(&self) -> MutexGuard<'_, HashMap<String, Held>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn connection(&self) -> Result<Cidrd, ClientError> {
        let mut connection = self.connection.lock().await;
        if let Some((since, client)) = &*connection
            && since.elapsed() < RECONNECT
        {
            return Ok(client.clone());
        }
        let made = self.connect().await?;
        *connection = Some((Instant::now(), made.clone()));
        Ok(made)
    }

    async fn connect(&self) -> Result<Cidrd, ClientError> {
        let away = |error: &dyn std::fmt::Display| ClientError::Away(format!("Secret {SECRET}: {error}"));
        let secrets: Api<Secret> = Api::namespaced(self.client.clone(), system_namespace());
        let secret = secrets.get(SECRET).await.map_err(|error| away(&error))?;
        let data = secret.data.unwrap_or_default();
        let text = |name: &str| {
            let bytes = data.get(name).map(|bytes| bytes.0.clone());
            String::from_utf8(bytes.unwrap_or_default()).unwrap_or_default()
        };
        let ca = Ca::read(text("tls.crt"), text("tls.key")).map_err(|error| away(&error))?;
        // A cidrd that has not seen the latest CA yet shows a certificate of the former one.
        let bundle: String = ["tls.crt", "next.crt", "former.crt"].map(text).join("\n");
        let key = ca.sign_client("lbaasd").map_err(|error| away(&error))?;
        Cidrd::new(&self.address, &bundle, key).map_err(|error| away(&error))
    }

    /// Returns what the holder has, renewed not long ago. An error leaves what it has.
    pub async fn renewed(&self, uid: &str) -> Result<Vec<Grant>, ClientError> {
        let known = {
            let held = self.held();
            held.get(uid)
                .filter(|held| held.renewed.elapsed() < RENEW_EVERY && !held.grants.is_empty())
                .map(|held| held.grants.clone())
        };
        if let Some(grants) = known {
            return Ok(grants);
        }
        let renewed = match self.connection().await?.renew(uid).await {
            Err(ClientError::Refused(problem)) if problem.reason == "NoLease" => Vec::new(),
            // Only that says that something is lost.
            Err(ClientError::Refused(problem)) => return Err(ClientError::Away(problem.detail)),
            renewed => renewed?,
        };
        self.note(uid, &renewed);
        Ok(renewed)
    }

    /// Gets a holder what it lacks.
    pub async fn put(&self, uid: &str, wanted: &Wanted) -> Result<Vec<Grant>, ClientError> {
        let granted = self.connection().await?.put(uid, wanted).await?;
        self.note(uid, &granted);
        Ok(granted)
    }

    /// Forgets the holders that are gone.
    pub fn retain(&self, is_there: impl Fn(&str) -> bool) {
        self.held().retain(|uid, _| is_there(uid));
    }

    pub(crate) fn note(&self, uid: &str, grants: &[Grant]) {
        let addresses = |grants: &[Grant]| {
            let mut addresses: Vec<IpAddr> = grants.iter().map(|grant| grant.lease.address).collect();
            addresses.sort_unstable();
            addresses
        };
        let mut held = self.held();
        let new = Held {
            grants: grants.to_vec(),
            renewed: Instant::now(),
        };
        let old = held.insert(uid.to_owned(), new);
        if old.is_none_or(|old| addresses(&old.grants) != addresses(grants)) {
            self.changes.send_modify(|number| *number += 1);
        }
    }

    /// Returns how long an address may be announced; `None` if this process does not know that it may.
    pub fn remaining(&self, uid: &str, address: IpAddr) -> Option<Duration> {
        let held = self.held();
        let grants = &held.get(uid)?.grants;
        let grant = grants.iter().find(|grant| grant.lease.address == address)?;
        let remaining = grant.deadline.checked_duration_since(Instant::now())?;
        Some(remaining).filter(|remaining| !remaining.is_zero())
    }

    /// Gives back all that a holder has.
    pub async fn release(&self, uid: &str) -> Result<(), ClientError> {
        self.forget(uid);
        let cidrd = self.connection().await?;
        // The answer of a renewal is the last one: a release must name it.
        let grants = match cidrd.renew(uid).await {
            Err(ClientError::Refused(problem)) if problem.reason == "NoLease" => return Ok(()),
            renewed => renewed?,
        };
        let released = Released {
            grants: grants.into_iter().map(|grant| grant.lease.grant).collect(),
        };
        match cidrd.release(uid, &released).await {
            Err(ClientError::Refused(problem)) if problem.reason == "NoLease" => Ok(()),
            released => released,
        }
    }

    /// Forgets a holder: its leases end by themselves, or are released.
    pub fn forget(&self, uid: &str) {
        self.held().remove(uid);
    }
}

/// Whether the grants have an address of each family that is wanted.
pub fn covers(grants: &[Grant], wanted: &Wanted) -> bool {
    let has = |family: Family| {
        grants
            .iter()
            .any(|grant| Family::from(grant.lease.address) == family)
    };
    let named = wanted.addresses.iter().map(|address| Family::from(*address));
    wanted.families.iter().copied().chain(named).all(has)
}
