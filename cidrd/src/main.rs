//! The process: watches pools and what they must not touch, serves the API, and ends leases.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use cidrd::expiry::Expiry;
use cidrd::http::router;
use cidrd::lease::expire;
use cidrd::pools::Directory;
use cidrd::server::{Clients, Server};
use cidrd::store::ApiServer;
use cidrd::watches::{Watches, watched};
use cidrd::{TLS_NAME, metrics, status};
use clap::Parser;
use kube::{Api, Client};
use thuban_api::cidr::Cidr;
use thuban_api::ip_lease::{IpLease, LeaseState};
use thuban_api::ip_pool::IpPool;
use thuban_api::refused_ranges::RefusedRanges;
use thuban_api::system_namespace;
use thuban_authority::{Authority, Names};
use thuban_telemetry::{control, process};
use tokio::time::{Instant, MissedTickBehavior, interval};
use tracing::{info, warn};

/// How often leases and pools are looked at.
const LOOK: Duration = Duration::from_secs(1);
/// The most connections of clients: more than the requests that are worked on at once, for idle ones last a while.
const CONNECTIONS: usize = 128;
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
    #[arg(long, env = "THUBAN_CIDRD_PORT", default_value_t = 6086)]
    port: u16,
    /// TCP port of metrics and health probes, at the same address. 0 turns them off.
    #[arg(long, env = "THUBAN_CIDRD_METRICS_PORT", default_value_t = 6087)]
    metrics_port: u16,
    /// Ranges of the cluster's Services, separated by commas. IpPools may not touch them.
    #[arg(long, env = "THUBAN_SERVICE_CIDRS", value_delimiter = ',')]
    service_cidrs: Vec<Cidr>,
    /// Ranges of nodes and of the network between them, separated by commas. IpPools may not touch them.
    #[arg(long, env = "THUBAN_UNDERLAY_CIDRS", value_delimiter = ',')]
    underlay_cidrs: Vec<Cidr>,
    #[command(subcommand)]
    command: Option<control::Command>,
}

#[tokio::main]
async fn main() -> Result<()> {
    let settings = Settings::parse();
    if let Some(command) = &settings.command {
        return Ok(command.run()?);
    }
    process::begin("info,kube_runtime=warn");
    tokio::spawn(control::serve(None));
    process::until_signalled(Box::pin(run(settings))).await
}

async fn run(settings: Settings) -> Result<()> {
    if settings.metrics_port != 0 {
        let address = SocketAddr::new(settings.pod_ip, settings.metrics_port);
        let setting = "THUBAN_CIDRD_METRICS_PORT";
        tokio::spawn(thuban_telemetry::serve(address, setting, metrics::pages()));
    }
    let client = thuban_client::infer()
        .await
        .context("configuration of the API server's client")?;
    let names = Names {
        namespace: system_namespace,
        secret: "thuban-cidrd-ca",
        server: TLS_NAME,
    };
    let authority = Authority::load(client.clone(), names, process::ca_expires).await;
    let (certificate, bundle) = (authority.certificate(), authority.bundle());
    tokio::spawn(authority.keep());
    let mut watches = Watches::new();
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
    let server = Server {
        certificate,
        clients: Clients::Signed(bundle),
        connections: CONNECTIONS,
        router: router(ApiServer::new(client.clone()), directory.clone()),
    };
    let address = SocketAddr::new(settings.pod_ip, settings.port);
    process::set_ready(true);
    tokio::select! {
        () = server.serve(address, "THUBAN_CIDRD_PORT") => bail!("the API ended"),
        () = look(client, &directory) => bail!("the look at leases ended"),
        _ = watches.join_next() => bail!("a watch ended"),
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
