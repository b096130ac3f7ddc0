//! Asks lbaasd what this node may announce, and reports what it announces.
//!
//! One request is outstanding at a time. The answer to a request that failed, took too long or became obsolete is
//! never used.

use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes;
use hyper::header::{AUTHORIZATION, CONTENT_TYPE};
use hyper::{Method, Request};
use hyper_rustls::{FixedServerNameResolver, HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client as HttpClient;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use thiserror::Error;
use thuban_api::proxies::{Proxies, ProxiesWanted, Proxy};
use thuban_api::routes::{
    Announced, LONGEST_ANSWER_SECONDS, Report, Routes, Serving, TLS_NAME, WithoutPassword,
};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until, timeout, timeout_at};
use tracing::{info, warn};

use crate::deadlines::now;
use crate::decide::Grant;
use crate::ledger::SharedLedger;
use crate::sequence::Sequence;
use crate::transitd::Served;

/// How long an answer may take.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(LONGEST_ANSWER_SECONDS + 15);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// The time between the beginnings of two requests.
const INTERVAL: Duration = Duration::from_millis(100);
/// The longest time for which a request is not replaced while nothing else is known of it. lbaasd answers requests for
/// new routes after some 2 s at most, with what it has written until then.
const MAX_KEPT: Duration = Duration::from_secs(3);
/// The pause after the first failure.
const PAUSE: Duration = Duration::from_secs(1);
/// The longest pause after a failure.
const MAX_PAUSE: Duration = Duration::from_secs(5);
/// The longest time for which a request that renews addresses of L2 is not replaced. lbaasd answers such requests at
/// once, with what it has done within one and a half renewals or 10 s.
const RENEWING: Duration = Duration::from_secs(10);
/// How often a node that has addresses of L2 tries again at once.
const QUICK_TRIES: u32 = 8;
/// Bytes of the largest answer.
const LARGEST_ANSWER: usize = 16 << 20;

#[derive(Debug, Error)]
pub enum LbaasdError {
    #[error("reading {}: {source}", path.display())]
    File { path: PathBuf, source: io::Error },
    #[error("the CA bundle is no PEM text of certificates: {0}")]
    Bundle(#[from] pem::Error),
    #[error("TLS: {0}")]
    Tls(#[from] rustls::Error),
    #[error("no valid request: check the address and the token: {0}")]
    Request(#[from] hyper::http::Error),
    #[error("lbaasd can't be reached: {0}")]
    Away(#[from] hyper_util::client::legacy::Error),
    #[error("the answer broke off: {0}")]
    Body(#[source] Box<dyn std::error::Error + Send + Sync>),
    #[error("no answer of this version: {0}")]
    Json(#[from] serde_json::Error),
    #[error("lbaasd answers with status {status}: {detail}")]
    Refused { status: u16, detail: String },
    #[error("no answer in time")]
    Silent,
}

impl LbaasdError {
    /// Whether nothing of the request can have come to lbaasd.
    fn reached_nobody(&self) -> bool {
        matches!(self, Self::Away(error) if error.is_connect()) || matches!(self, Self::File { .. })
    }
}

/// What lbaasd says of a request that it refuses.
#[derive(Deserialize)]
struct Problem {
    detail: String,
}

type Http = HttpClient<HttpsConnector<HttpConnector>, Full<Bytes>>;

/// Where lbaasd is, and the files by which the two know each other. The files may change.
#[derive(Clone, Debug)]
pub struct Place {
    /// `host:port`
    pub address: String,
    pub ca_file: PathBuf,
    pub token_file: PathBuf,
}

/// A connection to lbaasd.
pub struct Client {
    place: Place,
    /// With the CA bundle by which it verifies lbaasd.
    http: Option<(String, Http)>,
}

impl Client {
    pub fn new(place: Place) -> Self {
        Self { place, http: None }
    }

    /// Sends a report, and returns the answer, if it comes in time. The caller may drop the future, which abandons the
    /// request.
    pub async fn ask(&mut self, report: &Report, limit: Duration) -> Result<Routes, LbaasdError> {
        let exchange = timeout(limit, self.exchange("routes", report)).await;
        exchange.unwrap_or(Err(LbaasdError::Silent))
    }

    /// Asks what HAProxy is to serve, in the same way.
    pub async fn ask_proxies(&mut self, wanted: &ProxiesWanted) -> Result<Proxies, LbaasdError> {
        let exchange = timeout(REQUEST_TIMEOUT, self.exchange("proxies", wanted)).await;
        exchange.unwrap_or(Err(LbaasdError::Silent))
    }

    async fn exchange<T: DeserializeOwned>(
        &mut self,
        path: &str,
        said: &impl Serialize,
    ) -> Result<T, LbaasdError> {
        let token = read(&self.place.token_file).await?;
        let request = Request::builder()
            .method(Method::POST)
            .uri(format!("https://{}/v1/{path}", self.place.address))
            .header(CONTENT_TYPE, "application/json")
            .header(AUTHORIZATION, format!("Bearer {}", token.trim()))
            .body(Full::from(serde_json::to_vec(said)?))?;
        let response = self.http().await?.request(request).await?;
        let status = response.status();
        let body = Limited::new(response.into_body(), LARGEST_ANSWER).collect().await;
        let body = body.map_err(LbaasdError::Body)?.to_bytes();
        if status != hyper::StatusCode::OK {
            let problem = serde_json::from_slice::<Problem>(&body);
            return Err(LbaasdError::Refused {
                status: status.as_u16(),
                detail: problem.map(|problem| problem.detail).unwrap_or_default(),
            });
        }
        Ok(serde_json::from_slice(&body)?)
    }

    /// Returns the client for the CA bundle as it is now.
    async fn http(&mut self) -> Result<Http, LbaasdError> {
        let bundle = read(&self.place.ca_file).await?;
        if let Some((known, http)) = &self.http
            && *known == bundle
        {
            return Ok(http.clone());
        }
        let http = client(&bundle)?;
        self.http = Some((bundle, http.clone()));
        Ok(http)
    }
}

async fn read(path: &PathBuf) -> Result<String, LbaasdError> {
    let content = tokio::fs::read_to_string(path).await;
    content.map_err(|source| LbaasdError::File {
        path: path.clone(),
        source,
    })
}

fn client(bundle: &str) -> Result<Http, LbaasdError> {
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(bundle.as_bytes()) {
        roots.add(certificate?)?;
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
    let config = builder.with_root_certificates(roots).with_no_client_auth();
    let name = ServerName::try_from(TLS_NAME).map_err(|_| rustls::Error::UnsupportedNameType)?;
    let mut tcp = HttpConnector::new();
    tcp.enforce_http(false);
    tcp.set_connect_timeout(Some(CONNECT_TIMEOUT));
    let connector = HttpsConnectorBuilder::new()
        .with_tls_config(config)
        .https_only()
        .with_server_name_resolver(FixedServerNameResolver::new(name))
        .enable_http1()
        .wrap_connector(tcp);
    Ok(HttpClient::builder(TokioExecutor::new()).build(connector))
}

/// What a node says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Said {
    pub announced: Vec<Announced>,
    pub serves: Vec<Serving>,
    pub without_password: Vec<WithoutPassword>,
}

impl Said {
    /// Returns a request that says this. `version`: that of the last answer, if the node still has what it gave.
    fn report(&self, sequence: u64, version: &str) -> Report {
        Report {
            sequence,
            announced: self.announced.clone(),
            serves: self.serves.clone(),
            version: version.to_owned(),
            without_password: self.without_password.clone(),
        }
    }
}

/// What a request says, and what is no longer granted because of that.
#[derive(Debug)]
pub struct Told {
    pub said: Said,
    pub renounced: BTreeMap<IpAddr, Grant>,
}

/// How long a request is not replaced, whatever changes. Tenants change what nodes serve as often as they like: that
/// must not keep renewals from their ends, nor new routes. `replaced`: how many requests in a row were replaced.
fn kept(renewal: Option<Duration>, replaced: u32) -> Duration {
    match renewal {
        Some(renewal) => (renewal * 3 / 2).min(RENEWING),
        None => INTERVAL
            .saturating_mul(2_u32.saturating_pow(replaced))
            .min(MAX_KEPT),
    }
}

/// Returns how many requests in a row were replaced after another one was, which had lasted this long. lbaasd had the
/// time to answer a request that lasted much longer than any that is kept. So changes that come seldom delay nothing.
fn replacements(before: u32, lasted: Duration) -> u32 {
    if lasted >= MAX_KEPT * 2 {
        0
    } else {
        before.saturating_add(1)
    }
}

/// Asks lbaasd what HAProxy is to serve, again and again. While lbaasd is away, its last answer counts.
pub async fn follow_proxies(mut client: Client, proxies: watch::Sender<Option<Vec<Proxy>>>) {
    let mut wanted = ProxiesWanted::default();
    let mut pause = PAUSE;
    loop {
        let begun = Instant::now();
        match client.ask_proxies(&wanted).await {
            Ok(answer) => {
                pause = PAUSE;
                if answer.version != wanted.version {
                    info!(
                        vips = answer.proxies.len(),
                        "lbaasd told what HAProxy is to serve"
                    );
                    wanted.version = answer.version;
                    proxies.send_replace(Some(answer.proxies));
                }
                sleep_until(begun + INTERVAL).await;
            }
            Err(error) => {
                if pause == PAUSE {
                    warn!(%error, "lbaasd does not say what HAProxy is to serve, trying again");
                }
                sleep(pause).await;
                pause = (pause * 2).min(MAX_PAUSE);
            }
        }
    }
}

/// Asks lbaasd again and again. When what a report would say changes, another request replaces the one that is under
/// way. Addresses of L2 are asked for again without a look at gobgpd.
pub async fn follow(
    mut client: Client,
    mut sequence: Sequence,
    ledger: SharedLedger,
    served: watch::Receiver<Option<Served>>,
) {
    let (mut said, mut applied) = {
        let ledger = ledger.lock();
        (ledger.reports(), ledger.applied())
    };
    let mut version = String::new();
    let mut pause = PAUSE;
    // How soon addresses of L2 are asked for again, and how often that failed.
    let mut renewal: Option<Duration> = None;
    let mut failures = 0;
    // How many requests in a row were replaced.
    let mut replaced = 0_u32;
    loop {
        let begun = Instant::now();
        // The other task may not come to it.
        let heard = served.borrow().clone();
        let told = {
            let mut ledger = ledger.lock();
            if let Some(heard) = heard {
                ledger.served(heard);
            }
            ledger.renounce()
        };
        let Some(told) = told else {
            sleep(INTERVAL).await;
            continue;
        };
        let (known, renounced) = (told.said, told.renounced);
        if !renounced.is_empty() {
            // The node has less than the last answer gave.
            version.clear();
        }
        let report = known.report(sequence.number(), &version);
        let sent = now();
        let kept_until = begun + kept(renewal, replaced);
        let obsolete = async {
            sleep_until(kept_until).await;
            let _ = said.wait_for(|now| now.as_ref() != Some(&known)).await;
        };
        let limit = renewal.map_or(REQUEST_TIMEOUT, |renewal| renewal * 2);
        let asked = tokio::select! {
            asked = client.ask(&report, limit) => asked,
            () = obsolete => {
                replaced = replacements(replaced, begun.elapsed());
                continue;
            }
        };
        replaced = 0;
        match asked {
            Ok(routes) => {
                if pause != PAUSE || version.is_empty() {
                    info!("lbaasd answers");
                }
                pause = PAUSE;
                failures = 0;
                renewal = routes.renew_after_ms.map(Duration::from_millis);
                version.clone_from(&routes.version);
                if let Err(error) = sequence.raise(routes.sequence) {
                    warn!(%error, "the numbers of requests are not kept");
                }
                let number = ledger.lock().answered(routes, sent);
                let changed = async {
                    // The next request reports what the answer has led to.
                    let _ = applied.wait_for(|applied| *applied >= number).await;
                    sleep_until(begun + INTERVAL).await;
                    if renewal.is_some() {
                        let _ = said.wait_for(|now| now.as_ref() != Some(&known)).await;
                    }
                };
                if let Some(renewal) = renewal {
                    // If gobgpd takes longer, the next request says that it has all that was granted.
                    let _ = timeout_at(begun + renewal, changed).await;
                } else {
                    changed.await;
                }
            }
            Err(error) => {
                if error.reached_nobody() {
                    ledger.lock().take_back(renounced);
                }
                if pause == PAUSE && failures == 0 {
                    warn!(%error, "lbaasd gives no answer, trying again");
                }
                failures += 1;
                renewal = renewal.filter(|_| failures < QUICK_TRIES);
                if renewal.is_some() {
                    sleep(INTERVAL).await;
                    continue;
                }
                sleep(pause).await;
                pause = (pause * 2).min(MAX_PAUSE);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_renewal_is_not_replaced_before_lbaasd_answers() {
        // With 2 and 300 s of `THUBAN_L2_SECONDS`.
        for replaced in [0, 9] {
            let kept = |renewal| kept(Some(renewal), replaced);
            assert_eq!(kept(Duration::from_millis(500)), Duration::from_millis(750));
            assert_eq!(kept(Duration::from_secs(75)), RENEWING);
        }
    }

    #[test]
    fn changes_without_end_do_not_replace_every_request() {
        assert_eq!(kept(None, 0), INTERVAL, "the first change goes out at once");
        assert_eq!(kept(None, 1), INTERVAL * 2);
        assert_eq!(kept(None, 4), INTERVAL * 16);
        for replaced in [5, 40, u32::MAX] {
            assert_eq!(kept(None, replaced), MAX_KEPT);
        }
    }

    #[test]
    fn changes_that_come_seldom_delay_no_request() {
        let mut replaced = 0;
        for _ in 0..9 {
            replaced = replacements(replaced, kept(None, replaced));
        }
        assert_eq!(kept(None, replaced), MAX_KEPT, "changes without end");
        replaced = replacements(replaced, MAX_KEPT * 2);
        assert_eq!(kept(None, replaced), INTERVAL, "nothing changed for a while");
    }
}
