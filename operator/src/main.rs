//! The operator's process: waits for leadership, then runs the controllers and serves the droplets.

mod heap;

use std::net::{IpAddr, SocketAddr};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use clap::{Parser, Subcommand};
use ipnet::IpNet;
use kube::Client;
use thuban_api::cidr::Cidr;
use thuban_api::cluster_dns::{ClusterDns, DnsService, USUAL_DNS_SERVICE};
use thuban_api::refused_ranges::RefusedRanges;
use thuban_api::system_namespace;
use thuban_authority::{Authority, Names, ServerCertificate, publish};
use thuban_operator::controller::{defaults, run};
use thuban_operator::leader::{self, Candidate, End};
use thuban_operator::metrics::serve as metrics;
use thuban_operator::stream::door::{Door, Limits};
use thuban_operator::stream::server::{TransitService, serve};
use thuban_proto::OPERATOR_TLS_NAME;
use thuban_telemetry::{Guard, control, process};
use tikv_jemallocator::Jemalloc;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tracing::{info, warn};

/// The allocator, which gives back the memory of bursts, such as the one when all droplets dial: with glibc's allocator
/// the memory stays with the process.
#[global_allocator]
static ALLOCATOR: Jemalloc = Jemalloc;

/// The settings that jemalloc reads at the first allocation. Few arenas, because the other arenas can't use memory that
/// is free in one. For the heap's profile, the stack of one allocation in 2 MiB is kept: such an allocation takes at
/// least 16 KiB, so that the profile takes less than a hundredth of the memory. `_RJEM_MALLOC_CONF` in the environment
/// takes precedence.
// SAFETY: jemalloc declares `const char *_rjem_malloc_conf`; the text ends with a NUL and lives for ever.
#[allow(unsafe_code)]
#[unsafe(export_name = "_rjem_malloc_conf")]
pub static MALLOC_CONF: &[u8; 38] = b"narenas:2,prof:true,lg_prof_sample:21\0";

/// The CA that droplets verify operators by.
const CA: Names = Names {
    namespace: system_namespace,
    secret: "thuban-operator-ca",
    server: OPERATOR_TLS_NAME,
};

/// The operator of Thuban: gives out addresses, places roles on droplets, and sends each droplet its rows.
#[derive(Debug, Parser)]
#[command(version)]
struct Settings {
    /// Name of this pod. It stands in the leader's Lease and in events.
    #[arg(long, env = "POD_NAME", default_value = "thuban-operator")]
    pod_name: String,
    /// Address that droplets connect to. It must be the address of the node that this pod runs on.
    #[arg(long, env = "POD_IP")]
    pod_ip: IpAddr,
    /// TCP port that droplets connect to.
    #[arg(long, env = "THUBAN_LISTEN_PORT", default_value_t = 6082)]
    listen_port: u16,
    /// Ranges from which droplets may connect, besides the InternalIPs of Nodes; separated by commas. Default: none.
    /// Needed where droplets connect from other addresses, or where their addresses are translated on the way.
    #[arg(long, env = "THUBAN_STREAM_SOURCES", value_delimiter = ',')]
    stream_sources: Vec<IpNet>,
    /// TCP port of metrics and health probes, at the same address. Metrics are read by https, with a bearer token whose
    /// owner may `get` the path `/metrics`; probes by everybody. 0 turns both off.
    #[arg(long, env = "THUBAN_METRICS_PORT", default_value_t = 6083)]
    metrics_port: u16,
    /// Ranges of the cluster's Services besides those of ServiceCIDR objects, separated by commas. VPCs may not overlap
    /// them. A Service whose address is in none of them is not served.
    #[arg(long, env = "THUBAN_SERVICE_CIDRS", value_delimiter = ',')]
    service_cidrs: Vec<Cidr>,
    /// Ranges in which Services of the VPC `default` may have `externalIPs`, separated by commas. Default: none, and
    /// `externalIPs` have no effect.
    #[arg(long, env = "THUBAN_EXTERNAL_IP_CIDRS", value_delimiter = ',')]
    external_ip_cidrs: Vec<Cidr>,
    /// Ranges of nodes and of the network between them, separated by commas. VPCs may not overlap them.
    #[arg(long, env = "THUBAN_UNDERLAY_CIDRS", value_delimiter = ',')]
    underlay_cidrs: Vec<Cidr>,
    /// IPv4 range of the VPC and network `default`, which the operator creates.
    #[arg(long, env = "THUBAN_DEFAULT_VPC_CIDR", default_value = "10.244.0.0/16")]
    default_vpc_cidr: Cidr,
    /// Time in seconds that a released address or VNI stays unused, 5 to 3600. In this time others may
    /// still send to the old owner. Use less than the default for tests only.
    #[arg(long, env = "THUBAN_CLAIM_REST_SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(5..=3600))]
    claim_rest_seconds: u64,
    /// Time in seconds that droplets serve NodePorts of tenants' Services without the operator, 2 to 86400.
    /// transitd must have the same value. If a droplet is away, a NodePort that goes to another VPC waits this time and
    /// a minute more. Use less than 200 for tests only.
    #[arg(long, env = "THUBAN_NODE_PORT_LEASE_SECONDS", default_value_t = 600, value_parser = clap::value_parser!(u64).range(2..=86_400))]
    node_port_lease_seconds: u64,
    /// ClusterIPs of the cluster's DNS Service, separated by commas: at most one of each family. With it, every VPC
    /// without a list of shared Services shares the cluster's DNS Service. Without it, only the VPC `default` reaches
    /// cluster DNS.
    #[arg(long, env = "THUBAN_CLUSTER_DNS")]
    cluster_dns: Option<ClusterDns>,
    /// The cluster's DNS Service, as NAMESPACE/NAME. VPCs share it if THUBAN_CLUSTER_DNS is set.
    #[arg(long, env = "THUBAN_CLUSTER_DNS_SERVICE", default_value = USUAL_DNS_SERVICE)]
    cluster_dns_service: DnsService,
    #[command(subcommand)]
    command: Option<Ask>,
}

/// A command to the operator that runs in this pod.
#[derive(Debug, Subcommand)]
enum Ask {
    #[command(flatten)]
    Control(control::Command),
    /// Print which stacks hold how much memory, for jeprof or pprof.
    Heap(control::Socket),
}

#[tokio::main]
async fn main() -> Result<()> {
    let settings = Settings::parse();
    match &settings.command {
        Some(Ask::Control(command)) => return Ok(command.run()?),
        Some(Ask::Heap(socket)) => return Ok(socket.print_heap()?),
        None => {}
    }
    process::begin("info,kube_runtime=warn");
    thuban_telemetry::traces::begin("thuban-operator", &settings.pod_name);
    tokio::spawn(control::serve(Some(heap::dump)));
    match Box::pin(lead(&settings)).await? {
        Next::Stop => Ok(()),
        Next::Again => Err(start_again()),
    }
}

/// The step after a leadership.
enum Next {
    Stop,
    /// The process waits for the Lease again.
    Again,
}

/// Becomes a new process in place of this one: caches, streams and everything else of a lost leadership certainly end,
/// and kubelet sees no crash that it would answer by a pause. Returns only if that fails.
fn start_again() -> anyhow::Error {
    let program = match std::env::current_exe() {
        Ok(program) => program,
        Err(error) => return anyhow::Error::new(error).context("looking for this program"),
    };
    let error = Command::new(&program).args(std::env::args_os().skip(1)).exec();
    anyhow::Error::new(error).context(format!("starting {} again", program.display()))
}

/// The signals SIGTERM and SIGINT; as PID 1 the process gets no default handlers.
struct Stop(Signal, Signal);

impl Stop {
    fn new() -> Result<Self> {
        Ok(Self(
            signal(SignalKind::terminate())?,
            signal(SignalKind::interrupt())?,
        ))
    }

    async fn wait(&mut self) {
        tokio::select! {
            _ = self.0.recv() => {}
            _ = self.1.recv() => {}
        }
    }
}

async fn lead(settings: &Settings) -> Result<Next> {
    let mut stop = Stop::new()?;
    let refused = RefusedRanges::new(&settings.service_cidrs, &settings.underlay_cidrs)?;
    let client = thuban_client::infer()
        .await
        .context("configuration of the API server's client")?;
    let page = serve_pages(settings, client.clone())?;
    let waiting = async {
        let authority = Authority::load(client.clone(), CA, process::ca_expires).await;
        let (certificate, ca_bundle) = (authority.certificate(), authority.bundle());
        page.set(certificate.clone());
        // Scrapers verify this page by it. A standby publishes, too: its page is shown while nobody leads.
        tokio::spawn(publish(client.clone(), CA, "thuban-operator", authority.bundle()));
        tokio::spawn(authority.keep());
        let start = SystemTime::now().duration_since(UNIX_EPOCH)?.as_nanos();
        let candidate = Candidate {
            identity: format!("{}_{start:x}", settings.pod_name),
            address: SocketAddr::new(settings.pod_ip, settings.listen_port).to_string(),
            ca_bundle,
        };
        info!(identity = candidate.identity, "waiting for leadership");
        process::set_ready(true);
        anyhow::Ok((certificate, leader::acquire(client.clone(), candidate).await))
    };
    let (certificate, mut leadership) = tokio::select! {
        acquired = waiting => acquired?,
        () = stop.wait() => return Ok(Next::Stop),
    };
    process::set_ready(false);
    let (outranked, mut higher) = tokio::sync::mpsc::channel(1);
    let options = run::Options {
        epoch: leadership.epoch(),
        vacancy: leadership.vacancy(),
        refused,
        service_ranges: settings.service_cidrs.clone(),
        external_ranges: settings.external_ip_cidrs.clone(),
        underlay_ranges: settings.underlay_cidrs.clone(),
        default_range: settings.default_vpc_cidr,
        claim_rest: Duration::from_secs(settings.claim_rest_seconds),
        node_port_lease: Duration::from_secs(settings.node_port_lease_seconds),
        cluster_dns: settings.cluster_dns,
        cluster_dns_service: settings.cluster_dns_service.clone(),
    };
    let work = run(settings, client, options, certificate, outranked);
    let next = tokio::select! {
        end = leadership.hold() => match end {
            End::Lost => {
                warn!("leadership lost: another operator has it, or the API server is away");
                return Ok(Next::Again);
            }
            End::Restored => {
                warn!("the API server's state is older than what it confirmed: it was restored from a backup");
                Ok(Next::Again)
            }
        },
        result = work => result.map(|()| Next::Stop),
        Some(epoch) = higher.recv() => {
            warn!(epoch, "droplets have seen a higher epoch; the next leadership begins above it");
            leadership.raise(epoch);
            Ok(Next::Again)
        }
        () = stop.wait() => Ok(Next::Stop),
    };
    leadership.release().await;
    next
}

/// Serves metrics and probes, if they are wanted. Returns the page's certificate, which is to be set.
fn serve_pages(settings: &Settings, client: Client) -> Result<Arc<metrics::PageCertificate>> {
    let certificate = Arc::new(metrics::PageCertificate::default());
    if settings.metrics_port != 0 {
        let address = SocketAddr::new(settings.pod_ip, settings.metrics_port);
        let guard = Guard::new(certificate.clone(), Some(client)).context("TLS of the page of metrics")?;
        tokio::spawn(thuban_telemetry::serve_guarded(
            address,
            "THUBAN_METRICS_PORT",
            metrics::OperatorPages,
            guard,
        ));
    }
    Ok(certificate)
}

/// Runs controllers and stream server for as long as this process leads.
async fn run(
    settings: &Settings,
    client: Client,
    options: run::Options,
    certificate: Arc<ServerCertificate>,
    outranked: tokio::sync::mpsc::Sender<u64>,
) -> Result<()> {
    let listen = SocketAddr::new(settings.pod_ip, settings.listen_port);
    let (started, hub) = watch::channel(None);
    let service = TransitService {
        door: Door::new(hub.clone(), settings.stream_sources.clone(), Limits::default()),
        hub,
        client: client.clone(),
        outranked,
        witnesses: Mutex::default(),
    };
    let control = async {
        let mut tasks = JoinSet::new();
        started.send_replace(Some(run::start(client.clone(), options, &mut tasks).await));
        process::set_ready(true);
        let default_cidr = settings.default_vpc_cidr.to_string();
        let defaults = async {
            while let Err(error) = defaults::ensure(&client, &default_cidr).await {
                warn!(%error, "default VPC not created yet, trying again");
                tokio::time::sleep(Duration::from_secs(2)).await;
            }
            std::future::pending::<()>().await;
        };
        tokio::select! {
            () = defaults => {}
            _ = tasks.join_next() => {}
        }
    };
    tokio::select! {
        // The server starts at once, so that droplets that dial while caches are filled need not dial again.
        result = serve(listen, certificate, service) => result.context("stream server ended"),
        () = control => bail!("a watch or controller ended"),
    }
}
