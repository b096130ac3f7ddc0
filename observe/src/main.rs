//! The process: watches names, listens to droplets, and answers readers.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use clap::Parser;
use thuban_authority::{Authority, Names, publish};
use thuban_observe::announcement::announce;
use thuban_observe::names::watches::watch;
use thuban_observe::relay::Relay;
use thuban_observe::reports::Reports;
use thuban_observe::server::Server;
use thuban_observe::settings::Settings;
use thuban_observe::{api, metrics, namespace};
use thuban_proto::{OBSERVE_TLS_NAME, OBSERVE_TOKEN_AUDIENCE};
use thuban_telemetry::access::Access;
use thuban_telemetry::{Guard, control, process};
use tokio::task::JoinSet;
use tonic::service::Routes;

/// The CA that droplets and readers verify thuban-observe by.
const CA: Names = Names {
    namespace,
    secret: "thuban-observe-ca",
    server: OBSERVE_TLS_NAME,
};

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
    let client = thuban_client::infer()
        .await
        .context("configuration of the API server's client")?;
    let authority = Authority::load(client.clone(), CA, process::ca_expires).await;
    let (certificate, bundle) = (authority.certificate(), authority.bundle());
    tokio::spawn(publish(client.clone(), CA, "thuban-observe", authority.bundle()));
    tokio::spawn(authority.keep());
    if settings.metrics_port != 0 {
        let address = SocketAddr::new(settings.pod_ip, settings.metrics_port);
        let guard =
            Guard::new(certificate.clone(), Some(client.clone())).context("TLS of the page of metrics")?;
        let setting = "THUBAN_OBSERVE_METRICS_PORT";
        tokio::spawn(thuban_telemetry::serve_guarded(
            address,
            setting,
            metrics::pages(),
            guard,
        ));
    }
    let relay = Arc::new(Relay::default());
    let mut watches = JoinSet::new();
    // Flows that come before would have no names.
    watch(&client, &relay.names, &mut watches).await;
    let access = Access::new(Some(client.clone()), Some(OBSERVE_TOKEN_AUDIENCE));
    let reports = Reports::service(relay.clone(), client.clone());
    let router = Routes::from(api::router(relay, access))
        .add_service(reports)
        .into_axum_router();
    let server = Server::new(certificate, router).context("TLS of the API")?;
    let announced = SocketAddr::new(settings.pod_ip, settings.port).to_string();
    tokio::spawn(announce(client, announced, bundle));
    process::set_ready(true);
    // A port-forward comes to loopback, droplets come to the pod's address.
    let any: IpAddr = match settings.pod_ip {
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    tokio::select! {
        () = server.serve(SocketAddr::new(any, settings.port), "THUBAN_OBSERVE_PORT") => bail!("the API ended"),
        _ = watches.join_next() => bail!("a watch ended"),
    }
}
