//! The process: watches pools and what they must not touch, serves the API, and ends leases.

use std::fmt::Debug;
use std::net::{IpAddr, SocketAddr};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use cidrd::expiry::Expiry;
use cidrd::http::router;
use cidrd::lease::expire;
use cidrd::pools::Directory;
use cidrd::store::ApiServer;
use cidrd::{TLS_NAME, metrics, server, status};
use clap::Parser;
use futures::{Stream, StreamExt};
use kube::runtime::reflector::{Store, store};
use kube::runtime::{WatchStreamExt, reflector, watcher};
use kube::{Api, Client, Resource};
use serde::de::DeserializeOwned;
use thuban_api::cidr::Cidr;
use thuban_api::ip_lease::{IpLease, LeaseState};
use thuban_api::ip_pool::IpPool;
use thuban_api::refused_ranges::RefusedRanges;
use thuban_authority::{Authority, Names};
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep};
use tracing::{info, warn};
use tracing_subscriber::EnvFilter;

/// How often leases and pools are looked at.
const LOOK: Duration = Duration::from_secs(1);
/// The states of leases, and what they are called in metrics.
const STATES: [(LeaseState, &str); 3] = [
    (LeaseState::Proposed, "proposed"),
    (LeaseState::Held, "held"),
    (LeaseState::Quarantined, "quarantined"),
];

/// Leases addresses of IpPools to load balancers.
#[derive(Debug, Parser)]
#[command(version)]
struct Settings {
    /// Address that lbaasd connects to: that of this pod.
    #[arg(long, env = "POD_IP")]
    pod_ip: IpAddr,
    /// TCP port that lbaasd connects to.
    #[arg(long, env = "THUBAN_CIDRD_PORT", default_value_t = 6084)]
    port: u16,
    /// TCP port of metrics and health probes, at the same address. 0 turns them off.
    #[arg(long, env = "THUBAN_CIDRD_METRICS_PORT", default_value_t = 6085)]
    metrics_port: u16,
    /// Ranges of the cluster's Services, separated by commas. IpPools may not touch them.
    #[arg(long, env = "THUBAN_SERVICE_CIDRS", value_delimiter = ',')]
    service_cidrs: Vec<Cidr>,
    /// Ranges of nodes and of the network between them, separated by commas. IpPools may not touch them.
    #[arg(long, env = "THUBAN_UNDERLAY_CIDRS", value_delimiter = ',')]
    underlay_cidrs: Vec<Cidr>,
}

#[tokio::main]
async fn main() -> Result<()> {
    let settings = Settings::parse();
    let filter =
        EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info,kube_runtime=warn"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(false)
        .init();
    thuban_telemetry::abort_on_panic();
    if rustls::crypto::ring::default_provider()
        .install_default()
        .is_err()
    {
        bail!("a TLS provider was installed twice");
    }
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    tokio::select! {
        result = Box::pin(run(settings)) => result,
        _ = terminate.recv() => Ok(()),
        _ = interrupt.recv() => Ok(()),
    }
}

async fn run(settings: Settings) -> Result<()> {
    if settings.metrics_port != 0 {
        let address = SocketAddr::new(settings.pod_ip, settings.metrics_port);
        let setting = "THUBAN_CIDRD_METRICS_PORT";
        tokio::spawn(thuban_telemetry::serve(address, setting, metrics::CidrdPages));
    }
    let client = Client::try_default()
        .await
        .context("configuration of the API server's client")?;
    let names = Names {
        secret: "thuban-cidrd-ca",
        server: TLS_NAME,
    };
    let authority = loop {
        match Authority::load(client.clone(), names, metrics::ca_expires).await {
            Ok(authority) => break authority,
            Err(error) => warn!(%error, "no certificate yet, trying again"),
        }
        sleep(Duration::from_secs(2)).await;
    };
    let (certificate, bundle) = (authority.certificate(), authority.bundle());
    tokio::spawn(authority.keep());
    let mut watches = JoinSet::new();
    let directory = Arc::new(Directory {
        pools: watched(Api::all(client.clone()), &mut watches),
        vpcs: watched(Api::all(client.clone()), &mut watches),
        networks: watched(Api::all(client.clone()), &mut watches),
        nodes: watched(Api::all(client.clone()), &mut watches),
        leases: watched(Api::all(client.clone()), &mut watches),
        namespaces: watched(Api::all(client.clone()), &mut watches),
        refused: RefusedRanges::new(&settings.service_cidrs, &settings.underlay_cidrs)?,
    });
    tokio::select! {
        filled = directory.wait_until_ready() => filled.context("reading the API server's objects")?,
        _ = watches.join_next() => bail!("a watch ended"),
    }
    let router = router(ApiServer::new(client.clone()), directory.clone());
    let address = SocketAddr::new(settings.pod_ip, settings.port);
    metrics::ready();
    tokio::select! {
        () = server::serve(address, certificate, bundle, router) => bail!("the API ended"),
        () = look(client, &directory) => bail!("the look at leases ended"),
        _ = watches.join_next() => bail!("a watch ended"),
    }
}

/// Watches a kind, and returns the store of its objects.
fn watched<K>(api: Api<K>, watches: &mut JoinSet<()>) -> Store<K>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
{
    let (reader, writer) = store();
    let events = watcher(api, watcher::Config::default()).default_backoff();
    watches.spawn(follow(reflector(writer, events)));
    reader
}

async fn follow<T>(events: impl Stream<Item = Result<T, watcher::Error>>) {
    let mut events = pin!(events);
    while let Some(event) = events.next().await {
        if let Err(error) = event {
            warn!(%error, "watch broke, trying again");
        }
    }
}

/// Looks at leases and pools again and again: ends leases whose time is over, and writes pools' status.
async fn look(client: Client, directory: &Directory) {
    let (api, store) = (Api::<IpPool>::all(client.clone()), ApiServer::new(client));
    let mut expiry = Expiry::default();
    let mut ticks = interval(LOOK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let known = directory.leases.state();
        for (state, name) in STATES {
            metrics::leases(name, known.iter().filter(|lease| lease.state() == state).count());
        }
        for lease in expiry.look(known.iter().map(AsRef::as_ref), Instant::now()) {
            end(&store, lease).await;
        }
        status::write(&api, &directory.surroundings(), &known).await;
    }
}

async fn end(store: &ApiServer, lease: &IpLease) {
    let (address, holder) = (&lease.spec.address, &lease.spec.holder);
    let (namespace, name) = (&holder.namespace, &holder.name);
    match expire(store, lease).await {
        Ok(false) => {}
        Ok(true) if lease.state() == LeaseState::Held => {
            metrics::expired();
            warn!(
                address,
                namespace, name, "the holder did not renew its lease: the address is in quarantine"
            );
        }
        Ok(true) => info!(address, namespace, name, state = ?lease.state(), "the state's time is over"),
        Err(error) => warn!(address, %error, "the lease could not be ended, trying again"),
    }
}
