//! The process: runs the controllers of Services and Vips, and answers nodes.

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use cidrd::server::{Clients, Server};
use cidrd::watches::{Watches, stored, watched, watched_by, watched_with};
use clap::Parser;
use futures::StreamExt;
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::jiff::Timestamp;
use kube::runtime::controller::{Action, Config};
use kube::runtime::reflector::{ObjectRef, Store, store};
use kube::runtime::{Controller, WatchStreamExt, watcher};
use kube::{Api, Client, ResourceExt};
use lbaasd::certificates::Certificates;
use lbaasd::dns::{self, servers::Servers};
use lbaasd::driver::HAPROXY;
use lbaasd::events::Warnings;
use lbaasd::leases::Leases;
use lbaasd::proxies::{self, Sources};
use lbaasd::routes::l2::{self, NodeLeases};
use lbaasd::routes::{REVIEWS, Speakers, router};
use lbaasd::{CA_CONFIG_MAP, metrics, service, vip};
use thuban_api::routes::TLS_NAME;
use thuban_api::{DRIVER_LABEL, DnsZone, IpPool, Vip, VipProfile, system_namespace};
use thuban_authority::{Authority, Names, publish};
use thuban_telemetry::{control, process};
use tokio::sync::{Semaphore, watch};
use tokio::time::sleep;
use tracing::warn;

/// The most connections of nodes.
const CONNECTIONS: usize = 10_000;
/// How many objects of a kind are looked at together. A look waits for the API server and cidrd most of its time. Two
/// lbaasds together ask a cidrd no more at once than it takes.
const AT_ONCE: u16 = 32;
/// How many names are looked at together. A server that does not answer holds up four of them.
const NAMES_AT_ONCE: u16 = 64;
/// How long changes of an object are gathered before it is looked at.
const GATHERED: Duration = Duration::from_millis(20);
/// How often what is gone is forgotten.
const FORGET: Duration = Duration::from_mins(1);
/// The first pause after a look that failed.
const PAUSE: Duration = Duration::from_secs(2);
/// The CA that nodes verify lbaasd by.
const CA: Names = Names {
    namespace: system_namespace,
    secret: CA_CONFIG_MAP,
    server: TLS_NAME,
};

/// Gives load balancers leased addresses, and says which nodes announce them.
#[derive(Debug, Parser)]
#[command(version)]
struct Settings {
    /// Address that nodes connect to: that of this pod.
    #[arg(long, env = "POD_IP")]
    pod_ip: IpAddr,
    /// TCP port that nodes connect to.
    #[arg(long, env = "THUBAN_LBAASD_PORT", default_value_t = 6088)]
    port: u16,
    /// TCP port of metrics and health probes, at the same address. 0 turns them off.
    #[arg(long, env = "THUBAN_LBAASD_METRICS_PORT", default_value_t = 6089)]
    metrics_port: u16,
    /// Host and port of cidrd.
    #[arg(
        long,
        env = "THUBAN_CIDRD_ADDRESS",
        default_value = "cidrd.thuban-system.svc:6086",
        value_parser = process::server_address
    )]
    cidrd_address: String,
    /// Whether Services of type LoadBalancer without a class get addresses, too.
    #[arg(long, env = "THUBAN_DEFAULT_LOAD_BALANCER")]
    default_load_balancer: bool,
    /// Seconds for which a node answers for addresses of L2 without hearing from lbaasd, 2 to 300. After that time
    /// another node takes over from a silent one.
    #[arg(
        long,
        env = "THUBAN_L2_SECONDS",
        default_value_t = 2,
        value_parser = clap::value_parser!(u32).range(2..=i64::from(l2::MAX_SECONDS))
    )]
    l2_seconds: u32,
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
        let setting = "THUBAN_LBAASD_METRICS_PORT";
        tokio::spawn(thuban_telemetry::serve(address, setting, metrics::pages()));
    }
    let client = thuban_client::infer()
        .await
        .context("configuration of the API server's client")?;
    let authority = Authority::load(client.clone(), CA, process::ca_expires).await;
    let (certificate, bundle) = (authority.certificate(), authority.bundle());
    tokio::spawn(authority.keep());
    let changes = watch::Sender::new(0);
    let leases = Arc::new(Leases::new(
        client.clone(),
        settings.cidrd_address.clone(),
        changes.clone(),
    ));
    let mut watches = Watches::new();
    let node_leases = watched(Api::namespaced(client.clone(), l2::NAMESPACE), &mut watches);
    let l2 = NodeLeases::new(
        client.clone(),
        node_leases.clone(),
        settings.l2_seconds,
        changes.clone(),
    );
    let speakers = Arc::new(Speakers {
        client: client.clone(),
        leases: leases.clone(),
        l2: Arc::new(l2),
        vips: watched_by(Api::all(client.clone()), &mut watches, &changes),
        nodes: watched_by(Api::all(client.clone()), &mut watches, &changes),
        peers: watched_by(Api::all(client.clone()), &mut watches, &changes),
        changes: changes.subscribe(),
        warnings: Warnings::new(client.clone()),
        reviewed: Mutex::default(),
        reviews: Semaphore::new(REVIEWS),
    });
    let sources = sources(&client, &speakers, &mut watches);
    let context = Arc::new(vip::Context {
        client: client.clone(),
        leases,
        certificates: sources.certificates.clone(),
        services: watched(Api::all(client.clone()), &mut watches),
        profiles: watched(Api::all(client.clone()), &mut watches),
        pools: watched(Api::all(client.clone()), &mut watches),
        namespaces: watched(Api::all(client.clone()), &mut watches),
        begun: vip::Begun::default(),
    });
    let dns = Arc::new(dns::names::Context {
        client: client.clone(),
        zones: watched(Api::all(client.clone()), &mut watches),
        namespaces: context.namespaces.clone(),
        servers: Servers::new(client.clone()),
        clock: Box::new(Timestamp::now),
    });
    let filled = async {
        dns.zones.wait_until_ready().await?;
        speakers.vips.wait_until_ready().await?;
        speakers.nodes.wait_until_ready().await?;
        speakers.peers.wait_until_ready().await?;
        node_leases.wait_until_ready().await?;
        sources.wait_until_ready().await?;
        context.services.wait_until_ready().await?;
        context.profiles.wait_until_ready().await?;
        context.pools.wait_until_ready().await?;
        context.namespaces.wait_until_ready().await
    };
    tokio::select! {
        filled = filled => filled.context("reading the API server's objects")?,
        _ = watches.join_next() => bail!("a watch ended"),
    }
    let (latest_sender, latest) = watch::channel(None);
    let server = Server {
        certificate,
        clients: Clients::All,
        connections: CONNECTIONS,
        router: router(speakers.clone()).merge(proxies::router(speakers.clone(), latest)),
    };
    let address = SocketAddr::new(settings.pod_ip, settings.port);
    let forget = forget(&context.leases, &speakers.vips);
    process::set_ready(true);
    tokio::select! {
        () = server.serve(address, "THUBAN_LBAASD_PORT") => bail!("the API ended"),
        () = services(&client, settings.default_load_balancer) => bail!("the controller of Services ended"),
        () = vips(&client, context.clone(), speakers.vips.clone()) => bail!("the controller of Vips ended"),
        () = dns_names(&client, dns.clone(), speakers.vips.clone()) => bail!("the controller of names ended"),
        () = dns_zones(&client, dns.clone()) => bail!("the controller of DnsZones ended"),
        () = speakers.l2.watch(&speakers.vips) => bail!("the look at Leases of nodes ended"),
        () = forget => bail!("the look at what is gone ended"),
        () = sources.read_certificates() => bail!("the look at certificates ended"),
        () = sources.follow(latest_sender) => bail!("the look at what HAProxy serves ended"),
        () = publish(client.clone(), CA, "lbaasd", bundle) => bail!("the CA's publication ended"),
        _ = watches.join_next() => bail!("a watch ended"),
    }
}

/// Watches what HAProxy on the nodes serves.
fn sources(client: &Client, speakers: &Speakers, watches: &mut Watches) -> Sources {
    let changes = watch::Sender::new(0);
    let of_haproxy = watcher::Config::default().labels(&format!("{DRIVER_LABEL}={HAPROXY}"));
    Sources {
        vips: speakers.vips.clone(),
        services: watched_with(Api::all(client.clone()), of_haproxy.clone(), watches, &changes),
        slices: watched_with(Api::all(client.clone()), of_haproxy, watches, &changes),
        nodes: speakers.nodes.clone(),
        certificates: Arc::new(Certificates::new(client.clone(), changes.clone())),
        changes: changes.subscribe(),
    }
}

fn config() -> Config {
    Config::default().concurrency(AT_ONCE).debounce(GATHERED)
}

async fn services(client: &Client, is_default: bool) {
    let controller = Controller::new(Api::<Service>::all(client.clone()), watcher::Config::default());
    let (known, writer) = store();
    let vips = watcher(Api::<Vip>::all(client.clone()), watcher::Config::default());
    let vips = stored(vips.reflect(writer));
    // A Vip and its Service have one name, whoever made the other.
    let controller = controller.watches_stream(vips, |vip: Vip| {
        vip.namespace()
            .map(|namespace| ObjectRef::new(&vip.name_any()).within(&namespace))
    });
    let context = Arc::new(service::Context {
        client: client.clone(),
        vips: known,
        warnings: Warnings::new(client.clone()),
        is_default,
        asked: Mutex::default(),
    });
    controller
        .with_config(config())
        .run(
            service::reconcile,
            |object, error, _| again("Service", &*object, error),
            context,
        )
        .for_each(|_| async {})
        .await;
}

async fn vips(client: &Client, context: Arc<vip::Context>, known: Store<Vip>) {
    let every = watcher::Config::default();
    let controller = Controller::new(Api::<Vip>::all(client.clone()), every.clone());
    let all = known.clone();
    let controller = controller.watches(
        Api::<Service>::all(client.clone()),
        every.clone(),
        move |service| {
            let name = service.name_any();
            references(&all, |vip| {
                (vip.spec.service == name || vip.name_any() == name) && vip.namespace() == service.namespace()
            })
        },
    );
    let all = known.clone();
    let profiles = Api::<VipProfile>::all(client.clone());
    let controller = controller.watches(profiles, every.clone(), move |profile| {
        references(&all, |vip| {
            vip.spec.profiles.contains(&profile.name_any()) && vip.namespace() == profile.namespace()
        })
    });
    let controller = controller.watches(Api::<IpPool>::all(client.clone()), every, move |_| {
        references(&known, |vip| {
            vip.status
                .as_ref()
                .is_none_or(|status| status.addresses.is_empty())
        })
    });
    controller
        .with_config(config())
        .run(
            vip::reconcile,
            |object, error, _| again("Vip", &*object, error),
            context,
        )
        .for_each(|_| async {})
        .await;
}

async fn dns_names(client: &Client, context: Arc<dns::names::Context>, known: Store<Vip>) {
    let every = watcher::Config::default();
    let controller = Controller::new(Api::<Vip>::all(client.clone()), every.clone());
    let controller = controller.watches(Api::<DnsZone>::all(client.clone()), every, move |_| {
        references(&known, |vip| {
            let status = vip.status.as_ref();
            vip.spec.dns.is_some() || status.is_some_and(|status| !status.dns_name.is_empty())
        })
    });
    controller
        .with_config(config().concurrency(NAMES_AT_ONCE))
        .run(
            dns::names::reconcile,
            |object, error, _| again("Vip", &*object, error),
            context,
        )
        .for_each(|_| async {})
        .await;
}

async fn dns_zones(client: &Client, context: Arc<dns::names::Context>) {
    Controller::new(Api::<DnsZone>::all(client.clone()), watcher::Config::default())
        .with_config(config())
        .run(
            dns::status::reconcile,
            |object, error, _| again("DnsZone", &*object, error),
            context,
        )
        .for_each(|_| async {})
        .await;
}

/// Returns the Vips that a change of something else concerns.
fn references(known: &Store<Vip>, is_concerned: impl Fn(&Vip) -> bool) -> Vec<ObjectRef<Vip>> {
    let vips = known.state().into_iter().filter(|vip| is_concerned(vip));
    vips.map(|vip| ObjectRef::from_obj(&*vip)).collect()
}

/// Forgets what Vips had that are gone.
async fn forget(leases: &Leases, vips: &Store<Vip>) {
    loop {
        sleep(FORGET).await;
        let uids: BTreeSet<String> = vips.state().iter().filter_map(|vip| vip.uid()).collect();
        leases.retain(|uid| uids.contains(uid));
    }
}

/// Has an object looked at again.
fn again(kind: &'static str, object: &impl ResourceExt, error: &dyn Debug) -> Action {
    metrics::failed(kind);
    warn!(
        kind,
        namespace = object.namespace(),
        name = object.name_any(),
        ?error,
        "trying again"
    );
    Action::requeue(PAUSE)
}
