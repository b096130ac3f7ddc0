//! Tests of the CA's life with an API server that has one Secret.

use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::Client;
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, KeyPair};
use thuban_api::system_namespace;
use thuban_client::played::{self, Answer, Method, Request};
use tokio::sync::Barrier;

use super::rotation::{LIFE, OVERLAP};
use super::{Authority, CURRENT, Ca, FORMER, Held, NEXT, Names, TYPE, new_secret};

const NAMES: Names = Names {
    namespace: system_namespace,
    secret: "ca",
    server: "server",
};
const NOW: u64 = 1_800_000_000;
const DAY: u64 = 24 * 3600;

/// The answer to writes, besides those that the API server carries out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Writes {
    #[default]
    Answered,
    /// They are done and answered with an error.
    Lost,
    Forbidden,
}

#[derive(Default)]
struct Stored {
    secret: Option<Secret>,
    version: u64,
    writes: Writes,
}

/// An API server with one Secret, or none.
#[derive(Clone, Default)]
struct Server {
    stored: Arc<Mutex<Stored>>,
    /// The first two readers get their answers at the same time.
    together: Option<Arc<(AtomicUsize, Barrier)>>,
}

fn found(secret: &Secret) -> Answer {
    (200, serde_json::to_string(secret).unwrap())
}

fn failure(code: u16) -> Answer {
    let reason = if code == 404 { "NotFound" } else { "" };
    played::status(code, reason, "no")
}

impl Server {
    fn client(&self) -> Client {
        let server = self.clone();
        played::client(move |request| {
            let server = server.clone();
            async move { server.serve(&request).await }
        })
    }

    async fn serve(&self, request: &Request) -> Answer {
        if request.method == Method::GET {
            let secret = self.stored.lock().unwrap().secret.clone();
            if let Some(together) = &self.together
                && together.0.fetch_add(1, Relaxed) < 2
            {
                together.1.wait().await;
            }
            return secret.map_or_else(|| failure(404), |secret| found(&secret));
        }
        let stored = &mut *self.stored.lock().unwrap();
        let mut secret: Secret = serde_json::from_slice(&request.body).unwrap();
        let known = stored
            .secret
            .as_ref()
            .map(|known| known.metadata.resource_version.clone());
        let is_current = match &known {
            None => request.method == Method::POST,
            Some(version) => request.method == Method::PUT && *version == secret.metadata.resource_version,
        };
        if stored.writes == Writes::Forbidden {
            return failure(403);
        }
        if !is_current {
            return failure(409);
        }
        stored.version += 1;
        secret.metadata.resource_version = Some(stored.version.to_string());
        stored.secret = Some(secret.clone());
        if stored.writes == Writes::Lost {
            return failure(500);
        }
        found(&secret)
    }

    fn set(&self, secret: Option<Secret>) {
        let stored = &mut *self.stored.lock().unwrap();
        stored.version += 1;
        stored.secret = secret.map(|mut secret| {
            secret.metadata.resource_version = Some(stored.version.to_string());
            secret
        });
    }

    fn edit(&self, name: &str, text: &str) {
        let mut secret = self.secret();
        let data = secret.data.get_or_insert_default();
        data.insert(name.to_owned(), ByteString(text.into()));
        self.set(Some(secret));
    }

    fn answers(&self, writes: Writes) {
        self.stored.lock().unwrap().writes = writes;
    }

    fn version(&self) -> u64 {
        self.stored.lock().unwrap().version
    }

    fn secret(&self) -> Secret {
        self.stored.lock().unwrap().secret.clone().expect("a Secret")
    }

    fn held(&self) -> Held {
        Held::read(&self.secret()).unwrap_or_else(|error| panic!("{error}"))
    }
}

async fn load(server: &Server, now: u64) -> Authority {
    let loaded = Authority::load_at(server.client(), NAMES, |_| {}, now).await;
    loaded.unwrap_or_else(|error| panic!("{error}"))
}

/// Returns the certificates of the bundle that the process publishes.
fn published(authority: &Authority) -> Vec<String> {
    let bundle = authority.bundle().borrow().clone();
    let certificates = bundle.split_inclusive("-----END CERTIFICATE-----\n");
    certificates.map(|text| text.trim_end().to_owned()).collect()
}

fn signer(authority: &Authority) -> String {
    authority.signer.trim_end().to_owned()
}

/// Makes a Secret as operators did that knew no rotation.
fn former_format() -> Secret {
    let mut parameters = CertificateParams::new(Vec::new()).unwrap();
    parameters.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    parameters
        .distinguished_name
        .push(DnType::CommonName, "thuban-operator-ca");
    let key = KeyPair::generate().unwrap();
    let certificate = parameters.self_signed(&key).unwrap().pem();
    let data = [(CURRENT[0], certificate), (CURRENT[1], key.serialize_pem())];
    Secret {
        data: Some(
            data.map(|(name, text)| (name.to_owned(), ByteString(text.into_bytes())))
                .into(),
        ),
        type_: Some(TYPE.into()),
        ..Secret::default()
    }
}

#[tokio::test]
async fn first_operator_makes_a_ca_and_the_next_one_has_it_too() {
    let server = Server::default();
    let first = load(&server, NOW).await;
    let second = load(&server, NOW + DAY).await;
    assert_eq!(signer(&first), signer(&second));
    assert_eq!(published(&first), [signer(&first)]);
    assert_eq!(server.version(), 1);
    assert_eq!(server.secret().type_.as_deref(), Some(TYPE));
}

/// Three years of daily looks.
#[tokio::test]
async fn every_bundle_of_the_last_week_verifies_the_certificate() {
    let server = Server::default();
    let mut authority = load(&server, NOW).await;
    let mut bundles: Vec<Vec<String>> = Vec::new();
    let mut signers = vec![signer(&authority)];
    for day in 0..3 * 365 {
        authority.follow(NOW + day * DAY).await.unwrap();
        let signer = signer(&authority);
        bundles.push(published(&authority));
        let last_week = bundles.iter().rev().take((OVERLAP / DAY) as usize);
        for bundle in last_week {
            assert!(bundle.contains(&signer), "day {day}");
        }
        assert!(bundles.last().is_some_and(|bundle| bundle.len() <= 2));
        if signers.last() != Some(&signer) {
            signers.push(signer);
        }
    }
    // One after 243 + 7 days, and then every 243 days from when it was made.
    assert_eq!(signers.len(), 5);
    assert!(
        signers
            .iter()
            .all(|one| signers.iter().filter(|other| *other == one).count() == 1)
    );
    let alone = bundles.iter().filter(|bundle| bundle.len() == 1).count();
    assert!(alone > 2 * 365, "the former CA leaves: {alone} days");
}

#[tokio::test]
async fn secret_of_the_former_format_works_and_gets_a_ca_that_ends() {
    let server = Server::default();
    server.set(Some(former_format()));
    let endless = String::from_utf8(server.secret().data.unwrap()[CURRENT[0]].0.clone()).unwrap();
    let endless = endless.trim_end();
    let mut authority = load(&server, NOW).await;
    assert_eq!(signer(&authority), endless);
    assert_eq!(published(&authority).len(), 2, "the next CA is published already");
    authority.follow(NOW + OVERLAP - 1).await.unwrap();
    assert_eq!(signer(&authority), endless);
    authority.follow(NOW + OVERLAP).await.unwrap();
    assert_ne!(signer(&authority), endless);
    assert_eq!(published(&authority), [&signer(&authority), endless]);
    assert_eq!(server.held().current.life.to, NOW + LIFE);
    authority.follow(NOW + 2 * OVERLAP).await.unwrap();
    assert_eq!(published(&authority), [signer(&authority)]);
    let names: Vec<String> = server.secret().data.unwrap().into_keys().collect();
    assert_eq!(names, CURRENT);
}

#[tokio::test]
async fn deleted_or_garbled_secret_is_made_anew() {
    let server = Server::default();
    let mut authority = load(&server, NOW).await;
    let another = Ca::make(NAMES.secret, NOW).unwrap();
    let garble: [&dyn Fn(); 4] = [
        &|| server.set(None),
        &|| server.edit(CURRENT[0], "not a certificate"),
        &|| server.edit(CURRENT[1], "not a key"),
        &|| server.edit(CURRENT[1], &another.key),
    ];
    for (number, garble) in garble.iter().enumerate() {
        let was = signer(&authority);
        garble();
        authority.follow(NOW + 1).await.unwrap();
        assert_ne!(signer(&authority), was, "{number}");
        assert_eq!(published(&authority), [signer(&authority)]);
        assert_eq!(server.held().current.certificate.trim_end(), signer(&authority));
    }
    // A process that starts finds the same CA.
    assert_eq!(signer(&load(&server, NOW + 2).await), signer(&authority));
}

#[tokio::test]
async fn a_garbled_next_or_former_ca_costs_only_itself() {
    let server = Server::default();
    let mut authority = load(&server, NOW).await;
    let due = NOW + LIFE * 2 / 3;
    authority.follow(due).await.unwrap();
    let (was, current) = (server.held().next.expect("a next CA"), signer(&authority));
    server.edit(NEXT[0], "not a certificate");
    authority.follow(due + DAY).await.unwrap();
    let next = server.held().next.expect("another next CA");
    assert_ne!(next.certificate, was.certificate);
    assert_eq!(signer(&authority), current);
    authority.follow(due + DAY + OVERLAP).await.unwrap();
    assert_eq!(signer(&authority), next.certificate.trim_end());
    server.edit(FORMER, "not a certificate");
    authority.follow(due + DAY + OVERLAP).await.unwrap();
    assert_eq!(published(&authority), [signer(&authority)]);
}

#[tokio::test]
async fn two_operators_that_take_one_step_at_once_agree() {
    let server = Server::default();
    drop(load(&server, NOW).await);
    let together = Server {
        together: Some(Arc::new((AtomicUsize::new(0), Barrier::new(2)))),
        ..server.clone()
    };
    let due = NOW + LIFE * 2 / 3;
    let version = server.version();
    let (first, second) = tokio::join!(load(&together, due), load(&together, due));
    assert_eq!(published(&first), published(&second));
    assert_eq!(published(&first).len(), 2);
    assert_eq!(server.version(), version + 1, "one of them took the step");
}

#[tokio::test]
async fn a_step_whose_answer_is_lost_is_taken_once() {
    let server = Server::default();
    let mut authority = load(&server, NOW).await;
    let mut now = NOW + LIFE * 2 / 3;
    for (after, expected) in [(0, 2), (OVERLAP, 2), (OVERLAP, 1)] {
        now += after;
        let version = server.version();
        server.answers(Writes::Lost);
        assert!(authority.follow(now).await.is_err());
        server.answers(Writes::Answered);
        let held = server.held();
        authority.follow(now).await.unwrap();
        assert_eq!(server.version(), version + 1);
        assert_eq!(published(&authority).len(), expected);
        assert_eq!(signer(&authority), held.current.certificate.trim_end());
    }
}

#[tokio::test]
async fn without_the_right_to_update_the_ca_stays_in_use() {
    let server = Server::default();
    server.set(Some(former_format()));
    server.answers(Writes::Forbidden);
    let mut authority = load(&server, NOW).await;
    let was = signer(&authority);
    authority.follow(NOW + 10 * LIFE).await.unwrap();
    assert_eq!(signer(&authority), was);
    assert_eq!(published(&authority), [was]);
}

#[test]
fn a_secret_is_read_back_as_it_was_written() {
    let ca = |at: u64| Ca::make(NAMES.secret, at).unwrap();
    let held = Held {
        current: ca(NOW),
        next: Some(ca(NOW + DAY)),
        former: Some(ca(NOW - DAY).certificate),
    };
    let again = Held::read(&new_secret(NAMES, &held)).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(again.data(), held.data());
    assert_eq!(again.view(), held.view());
    assert_eq!(held.bundle().matches("BEGIN CERTIFICATE").count(), 3);
}
