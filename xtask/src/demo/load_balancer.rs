//! `cargo xtask demo lb`: a Service gets an address, nodes announce it to a router, and a client behind the router asks
//! while a node falls silent. The client's open connections go on by other nodes.

use std::collections::BTreeMap;
use std::fs;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use thuban_cluster::Cluster;
use thuban_cluster::router::{CLIENT, Router};

use super::{NAME, make_tenants, pods};
use crate::build::{self, root};
use crate::install::{get, wait};
use crate::{cluster, diagnostics, install, load_balancers};

const SERVICE: [&str; 4] = ["service", "-n", "red", "web"];
const VIP: [&str; 4] = ["vip", "-n", "red", "web"];
const PORT: u16 = 80;
/// How long the client waits for an answer.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(500);
const PAUSE: Duration = Duration::from_millis(10);
/// How long the client asks before, while and after a node is silent.
const PHASE: Duration = Duration::from_secs(6);
/// The node that falls silent. It has no backend.
const SILENT: &str = "node-c";
/// Connections that are opened before it does.
const HELD: usize = 60;
/// How long they wait for an answer: TCP sends again what the silent node got.
const HELD_PATIENCE: Duration = Duration::from_secs(15);

/// Runs the demo. Fails if the client has no answer where it should.
pub fn run() -> Result<()> {
    super::begin()?;
    build::step("cluster of three nodes", || cluster::up(NAME))?;
    build::step("Thuban from install/", || install::run(NAME))?;
    let cluster = Cluster::named(NAME)?;
    build::step("tenants red, blue and green", || {
        make_tenants(&cluster).inspect_err(|_| diagnostics::print(&cluster))
    })?;
    build::step("install/load-balancers/", || {
        load_balancers::install(&cluster).inspect_err(|_| diagnostics::print(&cluster))
    })?;
    let router = build::step("a router with FRR, and a client behind it", || {
        Router::start(&cluster, None)
    })?;
    let address = build::step("Service red/web", || make_service(&cluster, &router))?;
    println!("\n{}", cluster.kubectl(&["get", "vip,service", "-n", "red"])?);
    println!(
        "The router's ways to {address}: {}",
        router.next_hops(address)?.join(", ")
    );
    let server = SocketAddr::new(address, PORT);
    let mut held = router.at_client(|| open(server))?;
    let seen = router.at_client(|| {
        let mut stream = TcpStream::connect_timeout(&server, ANSWER_TIMEOUT)?;
        pods::ask_by(&mut stream, "/clientip", ANSWER_TIMEOUT)
    })?;
    println!("The client is {CLIENT}. A backend sees {seen}.");
    let result = ask_while_a_node_is_silent(&cluster, &router, server)
        .and_then(|()| router.at_client(|| ask_all(&mut held)));
    cluster.cut_off(SILENT, false)?;
    result?;
    println!(
        "
The cluster stays up, the router goes. Look around:

  eval \"$(cargo xtask cluster env)\"
  kubectl get ippools,ipleases,bgppeers
  kubectl describe vip -n red web
  kubectl delete service -n red web
  cargo xtask cluster down
"
    );
    Ok(())
}

fn open(server: SocketAddr) -> Result<Vec<TcpStream>> {
    let connections = (0..HELD).map(|_| TcpStream::connect_timeout(&server, ANSWER_TIMEOUT));
    Ok(connections.collect::<Result<_, _>>()?)
}

/// Asks by connections that were opened before.
fn ask_all(connections: &mut [TcpStream]) -> Result<()> {
    for connection in connections.iter_mut() {
        pods::ask_by(connection, "/hostname", HELD_PATIENCE)
            .with_context(|| format!("by a connection that was opened before {SILENT} fell silent"))?;
    }
    println!(
        "  {} connections were opened before, by all nodes. All of them were answered afterwards.",
        connections.len()
    );
    Ok(())
}

fn make_service(cluster: &Cluster, router: &Router) -> Result<IpAddr> {
    let backends = cluster.nodes()?.into_iter().filter(|node| node != SILENT);
    for node in backends {
        let pod = format!("red-web-{node}");
        cluster.kubectl(&["label", "pod", "-n", "red", &pod, "balanced=true", "--overwrite"])?;
    }
    let path = root().join("e2e/demo/load-balancer.yaml");
    let text = fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
    cluster.kubectl_apply(&text.replace("ROUTER", &router.address().to_string()))?;
    let mut address = None;
    wait("an address", || {
        let service = get(cluster, &SERVICE)?;
        let ip = service["status"]["loadBalancer"]["ingress"][0]["ip"].as_str();
        address = ip.and_then(|ip| ip.parse().ok());
        Ok((address.is_some(), "none".to_owned()))
    })?;
    let address = address.context("an address")?;
    let nodes = cluster.nodes()?;
    wait("announcements", || {
        let hops = router.next_hops(address)?.len();
        let vip = get(cluster, &VIP)?;
        let announcers = vip["status"]["announcedBy"].as_array().map_or(0, Vec::len);
        let all = hops.min(announcers) == nodes.len();
        Ok((all, format!("{hops} of {} at the router", nodes.len())))
    })?;
    Ok(address)
}

/// A request of the client: when it began, and who answered.
type Asked = (Instant, Option<String>);

fn ask_while_a_node_is_silent(cluster: &Cluster, router: &Router, server: SocketAddr) -> Result<()> {
    let is_over = AtomicBool::new(false);
    let (asked, cut) = thread::scope(|scope| {
        let client = scope.spawn(|| {
            router.at_client(|| {
                let mut asked: Vec<Asked> = Vec::new();
                while !is_over.load(Ordering::Relaxed) {
                    let begun = Instant::now();
                    asked.push((begun, pods::ask(server, ANSWER_TIMEOUT).ok()));
                    thread::sleep(PAUSE);
                }
                Ok(asked)
            })
        });
        thread::sleep(PHASE);
        let cut = Instant::now();
        let is_cut = cluster.cut_off(SILENT, true);
        thread::sleep(PHASE);
        is_over.store(true, Ordering::Relaxed);
        let asked = client.join().unwrap_or_else(|_| bail!("the client panicked"));
        is_cut?;
        anyhow::Ok((asked?, cut))
    })?;
    let (before, after): (Vec<&Asked>, Vec<&Asked>) = asked.iter().partition(|(begun, _)| *begun < cut);
    tell("before", &before);
    tell(&format!("after {SILENT} fell silent"), &after);
    let failed = after.iter().filter(|(_, answer)| answer.is_none());
    let last = failed.map(|(begun, _)| begun.duration_since(cut)).max();
    println!(
        "  The last request of {CLIENT} without an answer began {:.1} s after that.",
        last.unwrap_or_default().as_secs_f32()
    );
    if before.iter().any(|(_, answer)| answer.is_none()) {
        bail!("requests had no answer although all nodes were there");
    }
    if after.iter().rev().take(20).any(|(_, answer)| answer.is_none()) {
        bail!(
            "requests still have no answer {} s after {SILENT} fell silent",
            PHASE.as_secs()
        );
    }
    Ok(())
}

fn tell(when: &str, asked: &[&Asked]) {
    let mut servers: BTreeMap<&str, usize> = BTreeMap::new();
    for (_, answer) in asked {
        *servers.entry(answer.as_deref().unwrap_or("nobody")).or_default() += 1;
    }
    let told: Vec<String> = servers
        .iter()
        .map(|(name, count)| format!("{name} {count}"))
        .collect();
    println!("  {when}, requests were answered by: {}", told.join(", "));
}
