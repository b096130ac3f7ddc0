//! Who is who: the CA of a part of Thuban, which is kept in a Secret and replaced before it expires, its certificates
//! in a ConfigMap, the certificate of this process, and the node that a token proves.
//!
//! Every process that has the Secret may take the next step of a replacement: a step is one write of the Secret under
//! its resourceVersion. Invariant: the bundle that this process publishes has the CA that signed this process's
//! certificate.

mod certificate;
pub mod identity;
mod publication;
mod rotation;
mod server_certificate;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::api::{ObjectMeta, PostParams};
use kube::{Api, Client};
use rustls::sign::CertifiedKey;
use thiserror::Error;
use tokio::sync::watch;
use tracing::{info, warn};

pub use certificate::{Ca, CertificateError};
pub use publication::publish;
use rotation::{Step, View, decide};
pub use server_certificate::ServerCertificate;

const TYPE: &str = "kubernetes.io/tls";
/// The CA that signs. Operators that knew no rotation wrote these two alone.
const CURRENT: [&str; 2] = ["tls.crt", "tls.key"];
/// The CA that signs next.
const NEXT: [&str; 2] = ["next.crt", "next.key"];
/// The certificate of the CA that signed before.
const FORMER: &str = "former.crt";
/// How often a process looks at the Secret: somebody may have deleted it, and another process may have taken a step.
const LOOK: Duration = Duration::from_mins(1);
/// The pause before the CA is loaded again after a failure.
const LOAD_RETRY: Duration = Duration::from_secs(2);
/// How often a look begins anew because the Secret was written meanwhile.
const TRIES: usize = 5;

/// What a CA is called.
#[derive(Clone, Copy, Debug)]
pub struct Names {
    /// Returns the namespace of the Secret and of the ConfigMap.
    pub namespace: fn() -> &'static str,
    /// The Secret, the ConfigMap if the CA is [published](publish), and the CA's common name.
    pub secret: &'static str,
    /// The name by which clients verify a server.
    pub server: &'static str,
}

/// What went wrong with the Secret of a CA.
#[derive(Debug, Error)]
pub enum AuthorityError {
    #[error("the API server: {0}")]
    Secret(#[from] kube::Error),
    #[error("it lacks {0}")]
    Lacks(&'static str),
    #[error("{0}: {1}")]
    Certificate(&'static str, #[source] CertificateError),
}

impl AuthorityError {
    /// Whether another process wrote the Secret meanwhile.
    fn is_conflict(&self) -> bool {
        matches!(self, Self::Secret(kube::Error::Api(status)) if status.code == 409)
    }
}

/// The content of the Secret.
#[derive(Clone)]
struct Held {
    current: Ca,
    next: Option<Ca>,
    former: Option<String>,
}

impl Held {
    fn make(names: Names, now: u64) -> Result<Self, AuthorityError> {
        Ok(Self {
            current: make(names, now)?,
            next: None,
            former: None,
        })
    }

    /// Reads the Secret. Of a next or former CA that can't be read nothing is left: neither signs.
    fn read(secret: &Secret) -> Result<Self, AuthorityError> {
        let text = |name: &'static str| {
            let bytes = secret.data.as_ref().and_then(|data| data.get(name));
            let text = bytes.and_then(|bytes| String::from_utf8(bytes.0.clone()).ok());
            text.ok_or(AuthorityError::Lacks(name))
        };
        let ca = |[certificate, key]: [&'static str; 2]| {
            let read = Ca::read(text(certificate)?, text(key)?);
            read.map_err(|error| AuthorityError::Certificate(certificate, error))
        };
        Ok(Self {
            current: ca(CURRENT)?,
            next: ca(NEXT).ok(),
            former: text(FORMER).ok().filter(|former| certificate::is_ca(former)),
        })
    }

    fn data(&self) -> BTreeMap<String, ByteString> {
        let mut data = BTreeMap::new();
        let mut add = |name: &str, text: &str| data.insert(name.to_owned(), ByteString(text.into()));
        for (names, ca) in [(CURRENT, Some(&self.current)), (NEXT, self.next.as_ref())] {
            if let Some(ca) = ca {
                add(names[0], &ca.certificate);
                add(names[1], &ca.key);
            }
        }
        if let Some(former) = &self.former {
            add(FORMER, former);
        }
        data
    }

    fn view(&self) -> View {
        View {
            current: self.current.life,
            next: self.next.as_ref().map(|next| next.life),
            has_former: self.former.is_some(),
        }
    }

    /// Returns what the Secret has after a step.
    fn after(&self, names: Names, step: Step, now: u64) -> Result<Self, AuthorityError> {
        let mut held = self.clone();
        match step {
            Step::Keep => {}
            Step::MakeNext => held.next = Some(make(names, now)?),
            Step::Switch => {
                if let Some(next) = held.next.take() {
                    held.former = Some(std::mem::replace(&mut held.current, next).certificate);
                }
            }
            Step::Retire => held.former = None,
            Step::Replace => held = Self::make(names, now)?,
        }
        Ok(held)
    }

    /// Returns the certificates that verify what the current, the next and the former CA signed, as PEM.
    fn bundle(&self) -> String {
        let next = self.next.as_ref().map(|next| &next.certificate);
        let all = [&self.current.certificate]
            .into_iter()
            .chain(next)
            .chain(&self.former);
        all.map(|certificate| certificate.trim_end().to_owned() + "\n")
            .collect()
    }
}

fn make(names: Names, now: u64) -> Result<Ca, AuthorityError> {
    Ca::make(names.secret, now).map_err(|error| AuthorityError::Certificate(CURRENT[0], error))
}

fn sign(ca: &Ca, names: Names) -> Result<Arc<CertifiedKey>, AuthorityError> {
    ca.sign(names.server)
        .map_err(|error| AuthorityError::Certificate(CURRENT[0], error))
}

fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map(|time| time.as_secs()).unwrap_or_default()
}

/// The CA as this process knows it.
pub struct Authority {
    names: Names,
    secrets: Api<Secret>,
    /// Hears when the CA expires, in seconds since 1970.
    expires: fn(u64),
    certificate: Arc<ServerCertificate>,
    /// The certificate of the CA that signed this process's certificate.
    signer: String,
    bundle: watch::Sender<String>,
}

impl Authority {
    /// Loads the CA, or makes it, and signs a certificate for this process. Tries until that succeeds: a server can do
    /// nothing before. `expires` hears when the CA expires, in seconds since 1970.
    pub async fn load(client: Client, names: Names, expires: fn(u64)) -> Self {
        loop {
            match Self::load_at(client.clone(), names, expires, now()).await {
                Ok(authority) => return authority,
                Err(error) => warn!(secret = names.secret, %error, "no certificate yet, trying again"),
            }
            tokio::time::sleep(LOAD_RETRY).await;
        }
    }

    async fn load_at(
        client: Client,
        names: Names,
        expires: fn(u64),
        now: u64,
    ) -> Result<Self, AuthorityError> {
        let secrets: Api<Secret> = Api::namespaced(client, (names.namespace)());
        let held = look(&secrets, names, now).await?;
        let loaded = Self {
            names,
            secrets,
            expires,
            certificate: Arc::new(ServerCertificate::new(sign(&held.current, names)?)),
            signer: held.current.certificate.clone(),
            bundle: watch::channel(held.bundle()).0,
        };
        expires(held.current.life.to);
        Ok(loaded)
    }

    /// Returns the certificate of this process, which changes with the CA.
    pub fn certificate(&self) -> Arc<ServerCertificate> {
        self.certificate.clone()
    }

    /// Returns the bundle that verifies this process's certificate, as it is now and later.
    pub fn bundle(&self) -> watch::Receiver<String> {
        self.bundle.subscribe()
    }

    /// Looks at the CA again and again, for as long as the process lives.
    pub async fn keep(mut self) {
        loop {
            tokio::time::sleep(LOOK).await;
            if let Err(error) = self.follow(now()).await {
                warn!(%error, "the CA could not be looked at; the certificate in use stays");
            }
        }
    }

    /// Takes the step that is due, and follows the steps of other processes.
    async fn follow(&mut self, now: u64) -> Result<(), AuthorityError> {
        let held = look(&self.secrets, self.names, now).await?;
        // Clients can learn the bundle before they meet a certificate that needs it.
        self.bundle.send_if_modified(|known| {
            let bundle = held.bundle();
            let is_news = *known != bundle;
            *known = bundle;
            is_news
        });
        if self.signer != held.current.certificate {
            self.certificate.exchange(sign(&held.current, self.names)?);
            self.signer.clone_from(&held.current.certificate);
            info!("this process's certificate is signed by another CA from now on");
        }
        (self.expires)(held.current.life.to);
        Ok(())
    }
}

/// Takes the step that is due, and returns what the Secret has then. If another process writes the Secret meanwhile,
/// the look begins anew.
async fn look(secrets: &Api<Secret>, names: Names, now: u64) -> Result<Held, AuthorityError> {
    let mut tries = 1;
    loop {
        match attempt(secrets, names, now).await {
            Err(error) if error.is_conflict() && tries < TRIES => tries += 1,
            result => return result,
        }
    }
}

async fn attempt(secrets: &Api<Secret>, names: Names, now: u64) -> Result<Held, AuthorityError> {
    let parameters = PostParams::default();
    let Some(secret) = secrets.get_opt(names.secret).await? else {
        warn!(secret = names.secret, "the Secret is not there; a new CA is made");
        let held = Held::make(names, now)?;
        secrets.create(&parameters, &new_secret(names, &held)).await?;
        return Ok(held);
    };
    let (known, held) = match Held::read(&secret) {
        Ok(known) => match decide(known.view(), now) {
            Step::Keep => return Ok(known),
            step => {
                info!(?step, "the CA takes a step of its replacement");
                let held = known.after(names, step, now)?;
                (Some(known), held)
            }
        },
        Err(error) => {
            warn!(%error, "the CA can't be used; a new CA is made");
            (None, Held::make(names, now)?)
        }
    };
    let changed = Secret {
        data: Some(held.data()),
        ..secret
    };
    match (secrets.replace(names.secret, &parameters, &changed).await, known) {
        (Ok(_), _) => Ok(held),
        // An installation that gives this process no right to update the Secret goes on with the CA that it has.
        (Err(kube::Error::Api(status)), Some(known)) if status.code == 403 => {
            warn!(
                secret = names.secret,
                message = status.message,
                "the CA can't be replaced: apply the manifest of this program's rights again"
            );
            Ok(known)
        }
        (Err(error), _) => Err(error.into()),
    }
}

fn new_secret(names: Names, held: &Held) -> Secret {
    Secret {
        metadata: ObjectMeta {
            name: Some(names.secret.into()),
            namespace: Some((names.namespace)().into()),
            ..ObjectMeta::default()
        },
        data: Some(held.data()),
        type_: Some(TYPE.into()),
        ..Secret::default()
    }
}

#[cfg(test)]
mod tests;
