//! The certificates that VipProfiles name: Secrets of tenants' namespaces.
//!
//! lbaasd has no right to read them. A tenant gives it the right to one Secret, by a Role and a RoleBinding of its own
//! namespace. A certificate that was read stays until another valid one is read, so that a mistake ends no connection.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::StreamExt;
use k8s_openapi::api::core::v1::Secret;
use kube::{Api, Client};
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use thuban_api::proxies::Pem;
use thuban_api::system_namespace;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};
use tracing::{info, warn};

/// How often a Secret is read.
const REREAD: Duration = Duration::from_secs(30);
/// How often a Secret is read from which no certificate came.
const RETRY: Duration = Duration::from_secs(5);
/// How soon a Secret is read that is newly named.
const LOOK: Duration = Duration::from_secs(1);
/// How long an answer of the API server may take.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// How many Secrets are read at once.
const AT_ONCE: usize = 8;
/// Bytes of the largest certificate with its issuers and its key. One answer to a node has those of all Vips, and nodes
/// keep them in memory.
const LARGEST: usize = 32 << 10;
/// The type of the Secrets.
const TYPE: &str = "kubernetes.io/tls";

/// The namespace and name of a Secret.
pub type SecretKey = (String, String);

/// Why a Secret gives no certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Problem {
    NotFound,
    /// The API server refuses.
    Unreadable,
    Invalid,
    /// The API server does not answer.
    Away,
}

impl Problem {
    pub fn reason(self) -> &'static str {
        match self {
            Self::NotFound => "SecretNotFound",
            Self::Unreadable => "SecretUnreadable",
            Self::Invalid => "CertificateInvalid",
            Self::Away => "NotRead",
        }
    }

    /// Returns what is wrong, and what to do.
    pub fn message(self, namespace: &str, secret: &str) -> String {
        match self {
            Self::NotFound => {
                format!("there is no Secret {secret} in the namespace: create it with type {TYPE}")
            }
            Self::Unreadable => format!(
                "lbaasd may not read Secret {secret}; give it the right: kubectl -n {namespace} create role \
                 thuban-lbaasd-{secret} --verb=get --resource=secrets --resource-name={secret} && kubectl -n \
                 {namespace} create rolebinding thuban-lbaasd-{secret} --role=thuban-lbaasd-{secret} \
                 --serviceaccount={}:thuban-lbaasd",
                system_namespace()
            ),
            Self::Invalid => format!(
                "Secret {secret} must be of type {TYPE}, and its tls.crt and tls.key must be a certificate and its \
                 key, with {} KiB together at most",
                LARGEST >> 10
            ),
            Self::Away => format!("Secret {secret} can't be read yet: the API server does not answer"),
        }
    }
}

/// What is known of a Secret.
#[derive(Clone)]
struct Known {
    /// The last valid certificate.
    pem: Option<Pem>,
    problem: Option<Problem>,
    read: Instant,
}

pub struct Certificates {
    client: Client,
    known: Mutex<BTreeMap<SecretKey, Known>>,
    /// Is raised when a certificate is another one.
    changes: watch::Sender<u64>,
}

impl Certificates {
    pub fn new(client: Client, changes: watch::Sender<u64>) -> Self {
        Self {
            client,
            known: Mutex::default(),
            changes,
        }
    }

    fn known(&self) -> MutexGuard<'_, BTreeMap<SecretKey, Known>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether a Secret has a certificate. `None`: the Secret was not read yet.
    pub fn state(&self, namespace: &str, name: &str) -> Option<Result<(), Problem>> {
        let key = (namespace.to_owned(), name.to_owned());
        let problem = self.known().get(&key)?.problem;
        Some(problem.map_or(Ok(()), Err))
    }

    /// Returns the last valid certificate of a Secret; an error says that the API server has not told yet whether there
    /// is one.
    pub fn pem(&self, namespace: &str, name: &str) -> Result<Option<Pem>, NotRead> {
        let key = (namespace.to_owned(), name.to_owned());
        match self.known().get(&key) {
            None => Err(NotRead),
            Some(known) if known.pem.is_none() && known.problem == Some(Problem::Away) => Err(NotRead),
            Some(known) => Ok(known.pem.clone()),
        }
    }

    /// Reads Secrets again and again. `wanted`: those that are named now.
    pub async fn follow(&self, wanted: impl Fn() -> BTreeSet<SecretKey>) {
        loop {
            self.look(&wanted()).await;
            sleep(LOOK).await;
        }
    }

    /// Reads the Secrets for which it is time.
    async fn look(&self, wanted: &BTreeSet<SecretKey>) {
        let due: Vec<SecretKey> = {
            let mut known = self.known();
            known.retain(|key, _| wanted.contains(key));
            let is_due = |key: &&SecretKey| known.get(*key).is_none_or(Known::is_due);
            wanted.iter().filter(is_due).cloned().collect()
        };
        futures::stream::iter(due)
            .for_each_concurrent(AT_ONCE, |key| async move {
                let read = self.read(&key).await;
                self.note(key, read);
            })
            .await;
    }

    async fn read(&self, (namespace, name): &SecretKey) -> Result<Pem, Problem> {
        let api: Api<Secret> = Api::namespaced(self.client.clone(), namespace);
        match timeout(ANSWER_TIMEOUT, api.get_opt(name)).await {
            Ok(Ok(Some(secret))) => certificate(&secret).ok_or(Problem::Invalid),
            Ok(Ok(None)) => Err(Problem::NotFound),
            Ok(Err(kube::Error::Api(status))) if status.code == 403 => Err(Problem::Unreadable),
            Ok(Err(error)) => {
                warn!(namespace, name, %error, "a certificate can't be read, trying again");
                Err(Problem::Away)
            }
            Err(_) => Err(Problem::Away),
        }
    }

    fn note(&self, key: SecretKey, read: Result<Pem, Problem>) {
        let is_new = {
            let mut known = self.known();
            let before = known.get(&key).cloned();
            let now = Known::after(before.as_ref(), read, Instant::now());
            let is_new = before.is_none_or(|before| before.pem != now.pem || before.problem != now.problem);
            if is_new {
                let (namespace, name) = &key;
                info!(namespace, name, problem = ?now.problem, "a certificate was read");
            }
            known.insert(key, now);
            is_new
        };
        if is_new {
            self.changes.send_modify(|number| *number += 1);
        }
    }
}

impl Known {
    /// Returns what is known after a Secret was read.
    fn after(before: Option<&Self>, read: Result<Pem, Problem>, now: Instant) -> Self {
        let had = before.and_then(|before| before.pem.clone());
        match read {
            Ok(pem) => Self {
                pem: Some(pem),
                problem: None,
                read: now,
            },
            // Nothing is wrong with the Secret, as far as is known.
            Err(Problem::Away) if had.is_some() => Self {
                pem: had,
                problem: before.and_then(|before| before.problem),
                read: now,
            },
            Err(problem) => Self {
                pem: had,
                problem: Some(problem),
                read: now,
            },
        }
    }

    fn is_due(&self) -> bool {
        let pause = if self.problem.is_none() { REREAD } else { RETRY };
        self.read.elapsed() >= pause
    }
}

/// The API server has not told yet whether there is a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotRead;

/// Returns the certificate of a Secret, with its issuers and its key; `None`: it is not usable.
fn certificate(secret: &Secret) -> Option<Pem> {
    let data = secret.data.as_ref()?;
    let text = |key: &str| std::str::from_utf8(&data.get(key)?.0).ok();
    let (chain, key) = (text("tls.crt")?, text("tls.key")?);
    let is_small = chain.len() + key.len() <= LARGEST;
    let is_usable = secret.type_.as_deref() == Some(TYPE) && is_small && fit(chain, key);
    let pem = Pem::try_from(format!("{chain}\n{key}\n"));
    pem.ok().filter(|_| is_usable)
}

/// Whether a key is that of a certificate.
fn fit(chain: &str, key: &str) -> bool {
    let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(chain.as_bytes()).collect();
    let key = PrivateKeyDer::from_pem_slice(key.as_bytes());
    let (Ok(chain), Ok(key)) = (chain, key) else {
        return false;
    };
    if chain.is_empty() {
        return false;
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    builder.is_ok_and(|builder| {
        let server = builder.with_no_client_auth().with_single_cert(chain, key);
        server.is_ok()
    })
}

#[cfg(test)]
mod tests {
    use k8s_openapi::ByteString;
    use rcgen::{CertificateParams, KeyPair};

    use super::*;

    /// Returns a certificate and its key.
    fn made() -> (String, String) {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(["shop.example".to_owned()]).unwrap();
        (params.self_signed(&key).unwrap().pem(), key.serialize_pem())
    }

    fn secret(of_type: &str, chain: &str, key: &str) -> Secret {
        let bytes = |text: &str| ByteString(text.into());
        let data = [
            ("tls.crt".to_owned(), bytes(chain)),
            ("tls.key".to_owned(), bytes(key)),
        ];
        Secret {
            type_: Some(of_type.to_owned()),
            data: Some(data.into()),
            ..Secret::default()
        }
    }

    #[test]
    fn only_a_certificate_with_its_key_is_taken() {
        let ((chain, key), (_, other)) = (made(), made());
        let taken = certificate(&secret(TYPE, &chain, &key)).unwrap();
        assert!(taken.text().starts_with("-----BEGIN CERTIFICATE-----\n"));
        for wrong in [
            secret("Opaque", &chain, &key),
            secret(TYPE, &chain, &other),
            secret(TYPE, "", &key),
            secret(TYPE, &chain, "none"),
            secret(TYPE, &chain.repeat(100), &key),
            Secret::default(),
        ] {
            assert_eq!(certificate(&wrong), None);
        }
    }

    #[test]
    fn a_certificate_stays_while_its_secret_is_wrong() {
        let pem = Pem::try_from("-----BEGIN CERTIFICATE-----\n".to_owned()).unwrap();
        let now = Instant::now();
        let first = Known::after(None, Err(Problem::Away), now);
        assert_eq!((first.pem.as_ref(), first.problem), (None, Some(Problem::Away)));
        let read = Known::after(Some(&first), Ok(pem.clone()), now);
        assert_eq!((read.pem.as_ref(), read.problem), (Some(&pem), None));
        let away = Known::after(Some(&read), Err(Problem::Away), now);
        assert_eq!((away.pem.as_ref(), away.problem), (Some(&pem), None));
        let wrong = Known::after(Some(&read), Err(Problem::Invalid), now);
        assert_eq!(
            (wrong.pem.as_ref(), wrong.problem),
            (Some(&pem), Some(Problem::Invalid))
        );
    }

    #[test]
    fn a_tenant_hears_by_which_commands_lbaasd_may_read() {
        let message = Problem::Unreadable.message("red", "shop-tls");
        assert!(message.contains("kubectl -n red create role "), "{message}");
        assert!(message.contains("--resource-name=shop-tls"), "{message}");
    }
}
