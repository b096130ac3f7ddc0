//! The process: listens to lbaasd and transitd, and keeps gobgpd and the answers by ARP to what follows from both.

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::{Args, Parser};
use thuban_proto::DEFAULT_CNI_SOCKET;
use thuban_speaker::deadlines::{Deadlines, now};
use thuban_speaker::gobgp::{Gobgp, NextHops};
use thuban_speaker::haproxy::config::config;
use thuban_speaker::haproxy::folder::Folder;
use thuban_speaker::haproxy::local;
use thuban_speaker::haproxy::manager::{self, Manager};
use thuban_speaker::l2::responder::ResponderError;
use thuban_speaker::l2::{L2, L2Error};
use thuban_speaker::lbaasd::{self, Client, Place};
use thuban_speaker::ledger::{Ledger, SharedLedger};
use thuban_speaker::passwords::{self, Passwords};
use thuban_speaker::reconcile::Reconciler;
use thuban_speaker::sequence::Sequence;
use thuban_speaker::{metrics, transitd};
use thuban_telemetry::{control, process};
use tokio::sync::{oneshot, watch};
use tokio::time::sleep;
use tracing::{info, warn};

/// The socket of gobgpd.
const GOBGPD_SOCKET: &str = "/run/gobgpd/api.sock";
/// The folder and the program of HAProxy.
const HAPROXY_FOLDER: &str = "/run/haproxy";
const HAPROXY: &str = "/bin/haproxy";
/// How soon it is tried again to answer ARP and neighbour discovery.
const L2_RETRY: Duration = Duration::from_secs(10);
/// The longest time between two passes.
const PASS: Duration = Duration::from_secs(1);

/// Announces the addresses of load balancers from a node by BGP, ARP and neighbour discovery.
#[derive(Debug, Parser)]
#[command(version)]
enum Command {
    /// Becomes gobgpd, with its gRPC API at a Unix socket alone
    Gobgpd {
        /// Unix socket of gobgpd.
        #[arg(long, env = "THUBAN_GOBGPD_SOCKET", default_value = GOBGPD_SOCKET)]
        gobgpd_socket: PathBuf,
        /// The program.
        #[arg(long, env = "THUBAN_GOBGPD", default_value = "/bin/gobgpd")]
        gobgpd: PathBuf,
    },
    /// Becomes HAProxy: a master, which the speaker tells what to serve, and its worker
    Haproxy {
        /// Folder that HAProxy and the speaker share, in memory.
        #[arg(long, env = "THUBAN_HAPROXY_FOLDER", default_value = HAPROXY_FOLDER)]
        haproxy_folder: PathBuf,
        /// The program.
        #[arg(long, env = "THUBAN_HAPROXY", default_value = HAPROXY)]
        haproxy: PathBuf,
    },
    /// Asks whether gobgpd answers
    Alive {
        /// Unix socket of gobgpd.
        #[arg(long, env = "THUBAN_GOBGPD_SOCKET", default_value = GOBGPD_SOCKET)]
        gobgpd_socket: PathBuf,
    },
    /// Tells gobgpd what to announce
    Run(Settings),
    #[command(flatten)]
    Control(control::Command),
}

#[derive(Debug, Args)]
struct Settings {
    /// Host and port of lbaasd.
    #[arg(long, env = "THUBAN_LBAASD_ADDRESS", value_parser = process::server_address)]
    lbaasd_address: String,
    /// File with the CAs that verify lbaasd, as PEM.
    #[arg(long, env = "THUBAN_LBAASD_CA_FILE")]
    ca_file: PathBuf,
    /// File with the token by which lbaasd knows this node.
    #[arg(long, env = "THUBAN_LBAASD_TOKEN_FILE")]
    token_file: PathBuf,
    /// Addresses of the node, separated by commas: the first IPv4 one is router id and next hop of IPv4 routes, the
    /// first IPv6 one next hop of IPv6 routes. Without IPv6, no IPv6 routes are announced.
    #[arg(long, env = "THUBAN_NODE_IPS", value_delimiter = ',', required = true)]
    node_ips: Vec<IpAddr>,
    /// Unix socket of gobgpd.
    #[arg(long, env = "THUBAN_GOBGPD_SOCKET", default_value = GOBGPD_SOCKET)]
    gobgpd_socket: PathBuf,
    /// Unix socket of transitd.
    #[arg(long, env = "THUBAN_TRANSITD_SOCKET", default_value = DEFAULT_CNI_SOCKET)]
    transitd_socket: PathBuf,
    /// Folder of what outlives the process. It must outlive reboots too.
    #[arg(long, env = "THUBAN_STATE_FOLDER", default_value = "/var/lib/thuban/speaker")]
    state_folder: PathBuf,
    /// Folder that HAProxy and the speaker share. Without it, this node has no HAProxy.
    #[arg(long, env = "THUBAN_HAPROXY_FOLDER")]
    haproxy_folder: Option<PathBuf>,
    /// The program that checks HAProxy's configurations.
    #[arg(long, env = "THUBAN_HAPROXY", default_value = HAPROXY)]
    haproxy: PathBuf,
    /// TCP port of metrics and health probes, at the node's IPv4 address. 0 turns them off.
    #[arg(long, env = "THUBAN_SPEAKER_METRICS_PORT", default_value_t = 6090)]
    metrics_port: u16,
}

#[tokio::main]
async fn main() -> Result<()> {
    let settings = match Command::parse() {
        Command::Run(settings) => settings,
        Command::Gobgpd {
            gobgpd_socket,
            gobgpd,
        } => return Err(become_gobgpd(&gobgpd, &gobgpd_socket)),
        Command::Haproxy {
            haproxy_folder,
            haproxy,
        } => return Err(become_haproxy(&haproxy, haproxy_folder)),
        Command::Alive { gobgpd_socket } => {
            Gobgp::new(gobgpd_socket).asn().await?;
            return Ok(());
        }
        Command::Control(command) => return Ok(command.run()?),
    };
    process::begin("info");
    tokio::spawn(control::serve(None));
    let next_hops = next_hops(&settings.node_ips)?;
    if settings.metrics_port != 0 {
        let address = SocketAddr::new(next_hops.v4.into(), settings.metrics_port);
        let setting = "THUBAN_SPEAKER_METRICS_PORT";
        tokio::spawn(thuban_telemetry::serve(address, setting, metrics::pages()));
    }
    let deadlines = Deadlines::new(&settings.state_folder)?;
    let sequence = Sequence::begin(&settings.state_folder)?;
    let ledger = SharedLedger::new(Ledger::new(deadlines, next_hops));
    let responder = start_l2(&settings.node_ips, &ledger);
    let answering = answer_l2(responder, settings.node_ips, ledger.clone());
    let gobgp = Gobgp::new(settings.gobgpd_socket);
    let reconciler = Reconciler::new(gobgp, ledger.clone(), next_hops);
    let place = Place {
        address: settings.lbaasd_address,
        ca_file: settings.ca_file,
        token_file: settings.token_file,
    };
    if let Some(folder) = settings.haproxy_folder {
        start_haproxy(Folder::new(folder)?, settings.haproxy, place.clone(), &ledger);
    }
    let client = Client::new(place);
    let transitd_socket = settings.transitd_socket;
    let work = async {
        tokio::select! {
            ended = run(reconciler, ledger, (client, sequence), transitd_socket) => ended,
            ended = answering => ended,
        }
    };
    process::until_signalled(Box::pin(work)).await?;
    // gobgpd goes on. If it ends too, it ends its sessions.
    info!("the routes stay as they are");
    Ok(())
}

fn next_hops(addresses: &[IpAddr]) -> Result<NextHops> {
    let v4 = addresses.iter().find_map(|address| match address {
        IpAddr::V4(address) => Some(*address),
        IpAddr::V6(_) => None,
    });
    let v6 = addresses.iter().find_map(|address| match address {
        IpAddr::V6(address) => Some(*address),
        IpAddr::V4(_) => None,
    });
    let v4 = v4.context("THUBAN_NODE_IPS: an IPv4 address of the node is needed, as the router id")?;
    Ok(NextHops { v4, v6 })
}

/// Runs gobgpd in place of this process. Returns only if that fails.
fn become_gobgpd(program: &Path, socket: &Path) -> anyhow::Error {
    // gobgpd goes on without an API if the file of an earlier one is there.
    if let Err(error) = std::fs::remove_file(socket)
        && error.kind() != ErrorKind::NotFound
    {
        return anyhow::Error::new(error).context(format!("removing {}", socket.display()));
    }
    let error = std::process::Command::new(program)
        .arg(format!("--api-hosts=unix://{}", socket.display()))
        // Without these it serves HTTP.
        .args(["--pprof-disable", "--metrics-path=", "--log-plain"])
        .exec();
    anyhow::Error::new(error).context(format!("starting {}", program.display()))
}

/// Runs HAProxy in place of this process. Returns only if that fails.
fn become_haproxy(program: &Path, folder: PathBuf) -> anyhow::Error {
    let begin = || -> Result<Folder> {
        let folder = Folder::new(folder)?;
        // A configuration of before may have a port that another process took meanwhile. The speaker writes the next
        // one at once.
        let config = config(&[], folder.path());
        folder.write(&folder.config(), config.text.as_bytes())?;
        Ok(folder)
    };
    let folder = match begin() {
        Ok(folder) => folder,
        Err(error) => return error,
    };
    let error = std::process::Command::new(program)
        .arg("-W")
        .arg("-S")
        .arg(format!("{},mode,600", folder.socket().display()))
        .arg("-f")
        .arg(folder.config())
        .exec();
    anyhow::Error::new(error).context(format!("starting {}", program.display()))
}

/// Has HAProxy serve what lbaasd says. Its tasks end with the process.
fn start_haproxy(folder: Folder, program: PathBuf, place: Place, ledger: &SharedLedger) {
    ledger.lock().expect_haproxy();
    let (sender, wanted) = watch::channel(None);
    tokio::spawn(lbaasd::follow_proxies(Client::new(place), sender));
    let manager = Manager::new(folder, program);
    tokio::spawn(manager::follow(manager, wanted, ledger.clone()));
    tokio::spawn(local::follow(ledger.clone()));
}

/// Has the node answer for addresses of L2. What is received is why it does no longer.
fn start_l2(
    node_ips: &[IpAddr],
    ledger: &SharedLedger,
) -> Result<oneshot::Receiver<ResponderError>, L2Error> {
    let (l2, ended) = L2::start(node_ips)?;
    ledger.lock().set_l2(l2);
    Ok(ended)
}

/// Waits until nobody answers ARP any more. If nobody does yet, for the uplink was not there, it is tried again.
async fn answer_l2(
    mut started: Result<oneshot::Receiver<ResponderError>, L2Error>,
    node_ips: Vec<IpAddr>,
    ledger: SharedLedger,
) -> Result<()> {
    let mut is_told = false;
    let responder = loop {
        match started {
            Ok(responder) => break responder,
            Err(error) if !is_told => {
                is_told = true;
                warn!(%error, "this node answers for no addresses of L2 yet, trying again");
            }
            Err(_) => {}
        }
        sleep(L2_RETRY).await;
        started = start_l2(&node_ips, &ledger);
    };
    match responder.await {
        Ok(error) => Err(error).context("answering ARP and neighbour discovery"),
        Err(_) => bail!("the thread that answers ARP and neighbour discovery ended"),
    }
}

/// Works for ever. A task of its own asks lbaasd, so that it waits for no gobgpd.
async fn run(
    mut reconciler: Reconciler,
    ledger: SharedLedger,
    (client, sequence): (Client, Sequence),
    transitd_socket: PathBuf,
) -> Result<()> {
    let (served_sender, mut served) = watch::channel(None);
    tokio::spawn(transitd::follow(transitd_socket, served_sender));
    let mut answers = ledger.lock().answers();
    let asking = lbaasd::follow(client, sequence, ledger.clone(), served.clone());
    let mut asking = tokio::spawn(asking);
    let (names, wanted_names) = watch::channel(BTreeSet::new());
    let (passwords_sender, mut passwords) = watch::channel(Passwords::new());
    tokio::spawn(passwords::follow(wanted_names, passwords_sender));
    let mut is_failing = false;
    loop {
        let next = ledger.lock().next();
        let wait = next.map_or(PASS, |next| next.saturating_sub(now()).min(PASS));
        tokio::select! {
            () = sleep(wait) => {}
            changed = served.changed() => {
                if changed.is_err() {
                    bail!("the look at transitd ended");
                }
            }
            _ = answers.changed() => {}
            ended = &mut asking => bail!("the look at lbaasd ended: {ended:?}"),
            changed = passwords.changed() => {
                if changed.is_err() {
                    bail!("the look at Secrets ended");
                }
            }
        }
        let heard = served.borrow_and_update().clone();
        let read = passwords.borrow_and_update().clone();
        {
            let mut ledger = ledger.lock();
            if let Some(heard) = heard {
                ledger.served(heard);
            }
            ledger.read_passwords(read);
        }
        match reconciler.reconcile().await {
            Ok(()) => is_failing = false,
            Err(error) if !is_failing => {
                is_failing = true;
                warn!(%error, "trying again");
            }
            Err(_) => {}
        }
        let (secrets, since_answer) = {
            let ledger = ledger.lock();
            (ledger.password_secrets(), ledger.since_answer())
        };
        names.send_if_modified(|known| update(known, secrets));
        metrics::since_answer(since_answer);
    }
}

/// Replaces what is known. Returns whether it has changed.
fn update<T: PartialEq>(known: &mut T, new: T) -> bool {
    let is_new = *known != new;
    *known = new;
    is_new
}
