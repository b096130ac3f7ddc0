//! The daemons' client of the API server. It may know several API servers of one cluster, and tries them in turn.
//!
//! Invariant: a request goes to a second server only if no byte of it was sent to the first one, or if the first one
//! answered that the request should be sent again (429, 503, 504). A server that answered 504 may have carried out the
//! request: so a write, a POST too, may arrive twice, as it may with kube's client of one server. Each server must show
//! a certificate for the host of its own URL, signed by the cluster's CA. No request is sent again before the
//! `Retry-After` of such an answer.
//!
//! A server is left when it can't be reached, when it closes the connection instead of an answer, when the caller has
//! waited for a while and gives a request up, and when it answers nothing but errors of its own for a while. Requests
//! then go to the next server, and stay there until that one is left. So callers should limit the time of a request: a
//! server that vanished may leave a connection behind that looks open.

mod failures;
pub mod jitter;
#[cfg(feature = "testing")]
pub mod played;
mod retry;
mod servers;
mod urls;

use std::env;
use std::time::Duration;

use hyper_timeout::TimeoutConnector;
use hyper_util::client::legacy;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use kube::client::{Body, ConfigExt};
use kube::config::{InClusterError, KubeConfigOptions, KubeconfigError};
use kube::{Client, Config};
use thiserror::Error;
use tower::retry::RetryLayer;
use tower::{BoxError, ServiceBuilder, service_fn};

use retry::Retry;
use servers::Servers;
use urls::urls;

const HOST: &str = "KUBERNETES_SERVICE_HOST";
const PORT: &str = "KUBERNETES_SERVICE_PORT";
/// How long one of several servers may take for TCP and TLS. The operator's leader gives a request 3 s: time for the
/// next server must be left.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a server may say nothing while a request or a watch is open: longer than a watch lasts.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(330);
/// How long a connection may be silent before the kernel asks whether the server is there. A server that vanished
/// answers none of its questions, and the connection breaks after a minute.
const KEEPALIVE_TIME: Duration = Duration::from_secs(30);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
const KEEPALIVE_RETRIES: u32 = 3;
/// How long a server may acknowledge nothing of what was sent to it. The kernel asks nothing while a request is on its
/// way, and without this it would send that again for a quarter of an hour.
const UNACKNOWLEDGED_TIMEOUT: Duration = Duration::from_mins(1);

/// The reason why there is no client.
#[derive(Debug, Error)]
pub enum ClientError {
    #[error("{0} is not set")]
    Unset(&'static str),
    #[error("{HOST} names no API server: expected addresses or names, separated by commas")]
    NoServer,
    #[error("{HOST}: {0:?} is not an address or a name, with or without a port")]
    Server(String),
    #[error("{PORT}: {0:?} is not a port")]
    Port(String),
    #[error("the pod's account: {0}")]
    Account(#[from] InClusterError),
    #[error("TLS or the account can't be used: {0}")]
    Use(#[source] Box<kube::Error>),
    #[error("neither a kubeconfig ({kubeconfig}) nor a pod's account ({account})")]
    NoCluster {
        kubeconfig: KubeconfigError,
        account: Box<ClientError>,
    },
}

impl From<kube::Error> for ClientError {
    fn from(error: kube::Error) -> Self {
        Self::Use(Box::new(error))
    }
}

/// Makes a client of the kubeconfig's cluster, or in a pod without one of the pod's cluster.
pub async fn infer() -> Result<Client, ClientError> {
    match Config::from_kubeconfig(&KubeConfigOptions::default()).await {
        Ok(mut config) => {
            config.apply_debug_overrides();
            Ok(Client::try_from(config)?)
        }
        Err(kubeconfig) => in_cluster().map_err(|account| ClientError::NoCluster {
            kubeconfig,
            account: Box::new(account),
        }),
    }
}

/// Makes a client for a pod by its service account. `KUBERNETES_SERVICE_HOST` names the API servers.
pub fn in_cluster() -> Result<Client, ClientError> {
    let read = |name: &'static str| env::var(name).map_err(|_| ClientError::Unset(name));
    let urls = urls(&read(HOST)?, &read(PORT)?)?;
    let account = Config::incluster_dns()?;
    let config = |url| {
        let mut config = account.clone();
        config.cluster_url = url;
        config
    };
    Ok(client_of(urls.into_iter().map(config).collect())?)
}

/// Makes a client of one server, or of several that are tried in turn.
fn client_of(mut configs: Vec<Config>) -> Result<Client, kube::Error> {
    let first = configs.first();
    let namespace = first.map(|config| config.default_namespace.clone());
    let are_several = configs.len() > 1;
    let mut servers = Vec::new();
    for config in &mut configs {
        (config.read_timeout, config.reset_reader_on_write) = (Some(SILENCE_TIMEOUT), true);
        if are_several {
            config.connect_timeout = Some(CONNECT_TIMEOUT);
        }
        servers.push((config.cluster_url.to_string(), client_of_one(config)?));
    }
    let servers = Servers::new(servers);
    let send = move |request| {
        let servers = servers.clone();
        async move { retry::told(servers.send(request).await?).await }
    };
    // A request is tried again here, maybe at another server.
    let service = ServiceBuilder::new()
        .layer(RetryLayer::new(Retry::default()))
        .map_err(BoxError::from)
        .service(service_fn(send));
    Ok(Client::new(service, namespace.unwrap_or_default()))
}

/// Makes a client as kube does, except that the kernel notices a server that vanished, and that nothing is sent again.
/// Proxies are not supported: a pod's account has none.
fn client_of_one(config: &Config) -> Result<Client, kube::Error> {
    let mut tcp = HttpConnector::new();
    tcp.enforce_http(false);
    tcp.set_keepalive(Some(KEEPALIVE_TIME));
    tcp.set_keepalive_interval(Some(KEEPALIVE_INTERVAL));
    tcp.set_keepalive_retries(Some(KEEPALIVE_RETRIES));
    tcp.set_tcp_user_timeout(Some(UNACKNOWLEDGED_TIMEOUT));
    let tls = config.rustls_https_connector_with_connector(tcp)?;
    let mut connector = TimeoutConnector::new(tls);
    connector.set_connect_timeout(config.connect_timeout);
    connector.set_read_timeout(config.read_timeout);
    connector.set_write_timeout(config.write_timeout);
    connector.set_reset_reader_on_write(config.reset_reader_on_write);
    let http: legacy::Client<_, Body> = legacy::Client::builder(TokioExecutor::new()).build(connector);
    let service = ServiceBuilder::new()
        .layer(config.base_uri_layer())
        .option_layer(config.auth_layer()?)
        .layer(config.extra_headers_layer()?)
        .map_err(BoxError::from)
        .service(http);
    Ok(Client::new(service, config.default_namespace.clone()))
}

#[cfg(test)]
mod tests;
