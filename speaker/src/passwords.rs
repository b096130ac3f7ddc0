//! Reads the passwords of BgpPeers from the Secrets that they name.
//!
//! The API server is asked only while a BgpPeer of this node names a Secret. While it does not answer, what was read
//! before counts. A password is never logged, and leaves the process only for gobgpd.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

use k8s_openapi::api::core::v1::Secret;
use kube::api::GetParams;
use kube::{Api, Client};
use thiserror::Error;
use thuban_api::routes::{PASSWORD_NAMESPACE, PasswordProblem};
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tracing::warn;

/// How often Secrets are read.
const REREAD: Duration = Duration::from_secs(15);
/// How often they are read while a password is missing.
const RETRY: Duration = Duration::from_secs(5);
/// How long an answer of the API server may take.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// The key of a Secret that has the password.
const KEY: &str = "password";
/// The types that a Secret may have.
const TYPES: [&str; 2] = ["Opaque", "kubernetes.io/basic-auth"];
/// The most bytes of a password (`TCP_MD5SIG_MAXKEYLEN` of Linux).
const MAX_BYTES: usize = 80;

#[derive(Debug, Error)]
pub enum PasswordError {
    #[error("configuration of the API server's client: {0}")]
    Client(#[source] Box<kube::Error>),
    #[error("reading the Secret: {0}")]
    Read(#[source] Box<kube::Error>),
    #[error("no answer in time")]
    Silent,
}

/// The password of a session.
#[derive(Clone, PartialEq, Eq)]
pub struct Password(String);

impl Password {
    pub fn text(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Password {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Password(..)")
    }
}

/// What was read, by the Secrets' names. A Secret that was not asked for yet is not there.
pub type Passwords = BTreeMap<String, Result<Password, PasswordProblem>>;

/// Reads Secrets again and again. `names`: those that BgpPeers of this node name.
pub async fn follow(mut names: watch::Receiver<BTreeSet<String>>, passwords: watch::Sender<Passwords>) {
    let mut reader = Reader { client: None };
    loop {
        let wanted = names.borrow_and_update().clone();
        let before = passwords.borrow().clone();
        let mut known = before.clone();
        known.retain(|name, _| wanted.contains(name));
        for name in wanted {
            let read = reader.read(&name).await;
            if let Err(error) = &read {
                warn!(name, %error, "the Secret of a BgpPeer can't be read, trying again");
            }
            note(&mut known, name, read);
        }
        let pause = if known.values().all(Result::is_ok) {
            REREAD
        } else {
            RETRY
        };
        if known != before {
            passwords.send_replace(known);
        }
        tokio::select! {
            () = sleep(pause) => {}
            changed = names.changed() => {
                if changed.is_err() {
                    return;
                }
            }
        }
    }
}

struct Reader {
    client: Option<Client>,
}

impl Reader {
    /// Returns a Secret; `None`: there is none of this name.
    async fn read(&mut self, name: &str) -> Result<Option<Secret>, PasswordError> {
        let client = self.client().await?;
        let api: Api<Secret> = Api::namespaced(client, PASSWORD_NAMESPACE);
        // The API server's cache is enough: the Secret is read again soon.
        let parameters = GetParams::any();
        let read = timeout(ANSWER_TIMEOUT, api.get_with(name, &parameters)).await;
        match read.map_err(|_| PasswordError::Silent)? {
            Ok(secret) => Ok(Some(secret)),
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(None),
            Err(error) => Err(PasswordError::Read(Box::new(error))),
        }
    }

    /// Returns the API server's client. A node whose BgpPeers have no passwords needs none.
    async fn client(&mut self) -> Result<Client, PasswordError> {
        if let Some(client) = &self.client {
            return Ok(client.clone());
        }
        let client = Client::try_default().await;
        let client = client.map_err(|error| PasswordError::Client(Box::new(error)))?;
        self.client = Some(client.clone());
        Ok(client)
    }
}

/// Notes what the API server said of a Secret. If it said nothing, what is known stays.
fn note(known: &mut Passwords, name: String, read: Result<Option<Secret>, PasswordError>) {
    match read {
        Ok(Some(secret)) => {
            known.insert(name, password(&secret));
        }
        Ok(None) => {
            known.insert(name, Err(PasswordProblem::NotFound));
        }
        Err(_) => {
            known.entry(name).or_insert(Err(PasswordProblem::Unreadable));
        }
    }
}

/// Returns the password of a Secret.
fn password(secret: &Secret) -> Result<Password, PasswordProblem> {
    let has_type = secret
        .type_
        .as_deref()
        .is_none_or(|of_secret| TYPES.contains(&of_secret));
    let bytes = secret.data.as_ref().and_then(|data| data.get(KEY));
    let text = bytes.and_then(|bytes| std::str::from_utf8(&bytes.0).ok());
    text.filter(|text| has_type && is_usable(text))
        .map(|text| Password(text.to_owned()))
        .ok_or(PasswordProblem::Invalid)
}

/// A line break at the end, as editors leave it, would be part of the password.
fn is_usable(text: &str) -> bool {
    !text.is_empty() && text.len() <= MAX_BYTES && !text.contains(char::is_control)
}

#[cfg(test)]
pub mod tests {
    use k8s_openapi::ByteString;

    use super::*;

    /// Returns a password.
    pub fn of(text: &str) -> Password {
        Password(text.to_owned())
    }

    fn secret(of_type: &str, key: &str, text: &str) -> Secret {
        Secret {
            type_: Some(of_type.to_owned()),
            data: Some([(key.to_owned(), ByteString(text.into()))].into()),
            ..Secret::default()
        }
    }

    #[test]
    fn only_a_usable_password_is_taken() {
        for of_type in TYPES {
            assert_eq!(password(&secret(of_type, KEY, "s3cret")), Ok(of("s3cret")));
        }
        let longest = "x".repeat(MAX_BYTES);
        assert_eq!(password(&secret("Opaque", KEY, &longest)), Ok(of(&longest)));
        let refused = [
            secret("kubernetes.io/tls", KEY, "s3cret"),
            secret("Opaque", "secret", "s3cret"),
            secret("Opaque", KEY, ""),
            secret("Opaque", KEY, "s3cret\n"),
            secret("Opaque", KEY, &"x".repeat(MAX_BYTES + 1)),
            Secret::default(),
        ];
        for (index, secret) in refused.iter().enumerate() {
            assert_eq!(password(secret), Err(PasswordProblem::Invalid), "Secret {index}");
        }
    }

    #[test]
    fn what_was_read_stays_while_nobody_answers() {
        let mut known = Passwords::new();
        let mut read = |answer| {
            note(&mut known, "leaf".to_owned(), answer);
            known["leaf"].clone()
        };
        assert_eq!(read(Err(PasswordError::Silent)), Err(PasswordProblem::Unreadable));
        let readable = secret("Opaque", KEY, "s3cret");
        assert_eq!(read(Ok(Some(readable))), Ok(of("s3cret")));
        assert_eq!(read(Err(PasswordError::Silent)), Ok(of("s3cret")));
        assert_eq!(read(Ok(None)), Err(PasswordProblem::NotFound));
    }

    #[test]
    fn a_password_is_not_shown() {
        assert!(!format!("{:?}", of("s3cret")).contains("s3cret"));
    }
}
