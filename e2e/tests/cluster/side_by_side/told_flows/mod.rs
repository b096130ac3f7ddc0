//! Flows as thuban-observe tells them: to administrators, to tenants and to strangers, and while thuban-observe fails.
//! Tests look at flows of their own alone, by ports or addresses that no other test uses.

mod administrator;
mod faults;
mod strangers;
mod tenant;

use std::io::{BufRead, BufReader};
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use thuban_cluster::Cluster;
use thuban_cluster::wait::wait_until;
use thuban_proto::{OBSERVE_TLS_NAME, OBSERVE_TOKEN_AUDIENCE};

use crate::scrape::TlsServer;
use crate::support::{Pod, binary, get};
use crate::tenants::tenants;

const MANIFESTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../install/observe");
const NAMESPACE: &str = "thuban-observe";
const LABEL: &str = "app.kubernetes.io/name=thuban-observe";
const VIEWER: &str = "thuban-viewer";
/// The port for droplets and readers.
const PORT: u16 = 6091;
/// From here the tests' own requests come. Strangers ask from another node, and so as another peer.
const NODE: &str = "node-a";
const POLL: Duration = Duration::from_millis(100);
/// How long rights take until the API server and thuban-observe know them, on a busy machine.
const SEEN: Duration = Duration::from_secs(20);
/// A transitd that has looked for thuban-observe in vain for long looks again within seven and a half minutes. It does
/// not wait if thuban-observe came with Thuban.
const CONNECTED: Duration = Duration::from_mins(8);
/// How many datagrams are sent in a row: more of them may not fit into the queue of a CPU.
const IN_A_ROW: usize = 100;

/// The pod of thuban-observe.
#[derive(Debug, PartialEq, Eq)]
struct Observer {
    name: String,
    node: String,
    address: Ipv4Addr,
    restarts: u64,
}

impl Observer {
    fn find(cluster: &Cluster) -> Result<Self> {
        let pods = get(cluster, &["pods", "-n", NAMESPACE, "-l", LABEL])?;
        let mut running = pods["items"].as_array().into_iter().flatten().filter(|pod| {
            pod["status"]["phase"] == "Running" && pod["metadata"]["deletionTimestamp"].is_null()
        });
        let pod = running.next().context("no pod of thuban-observe runs")?;
        let text = |value: &Value| value.as_str().map(str::to_owned).context("a field of the pod");
        Ok(Self {
            name: text(&pod["metadata"]["name"])?,
            node: text(&pod["spec"]["nodeName"])?,
            address: text(&pod["status"]["podIP"])?.parse()?,
            restarts: pod["status"]["containerStatuses"][0]["restartCount"]
                .as_u64()
                .context("a number of restarts")?,
        })
    }
}

/// Returns the cluster, on which thuban-observe is installed. It stays, because it disturbs no other test.
fn installed() -> &'static Cluster {
    static INSTALLED: OnceLock<()> = OnceLock::new();
    let cluster = &tenants().cluster;
    INSTALLED.get_or_init(|| {
        cluster.kubectl(&["apply", "-f", MANIFESTS]).unwrap();
        wait_connected(cluster, CONNECTED).unwrap();
    });
    cluster
}

/// Waits until thuban-observe is ready, and all droplets tell it of all flows.
fn wait_connected(cluster: &Cluster, patience: Duration) -> Result<()> {
    let workload = "deployment/thuban-observe";
    cluster.kubectl(&["rollout", "status", "-n", NAMESPACE, workload, "--timeout=120s"])?;
    let nodes = cluster.nodes()?.len();
    cluster.wait_for("streams of all droplets", patience, || {
        let graph: Value = serde_json::from_str(&of_all(cluster, "/v1/graph", "")?)?;
        let droplets = graph["droplets"].as_array().context("droplets")?;
        let tells = |droplet: &&Value| droplet["connected"] == true && droplet["mode"] == "all";
        Ok(droplets.iter().filter(tells).count() == nodes)
    })
}

/// An answer by HTTP.
#[derive(Debug)]
struct Answer {
    status: u16,
    /// The status line and the headers.
    head: String,
    body: String,
}

impl Answer {
    /// Reads what `curl --include` prints.
    fn read(text: &str) -> Result<Self> {
        let (head, body) = text.split_once("\r\n\r\n").context("no HTTP answer")?;
        let status = head.split_whitespace().nth(1).context("no status")?;
        Ok(Self {
            status: status.parse()?,
            head: head.to_owned(),
            body: body.to_owned(),
        })
    }
}

/// Returns the PEM of the CA that verifies thuban-observe, as readers find it.
fn authority(cluster: &Cluster) -> Result<String> {
    let map = get(cluster, &["configmap", "-n", NAMESPACE, "thuban-observe-ca"])?;
    let authority = map["data"]["ca.crt"].as_str();
    Ok(authority.context("the ConfigMap has no CA")?.to_owned())
}

/// Asks thuban-observe from a node. `more`: arguments of curl.
fn ask(cluster: &Cluster, from: &str, target: &str, token: Option<&str>, more: &[&str]) -> Result<Answer> {
    let authority = authority(cluster)?;
    let server = TlsServer {
        name: OBSERVE_TLS_NAME,
        address: SocketAddr::new(Observer::find(cluster)?.address.into(), PORT),
        authority: &authority,
    };
    // The target is sent as it is.
    let more = [&["--globoff", "--path-as-is"][..], more].concat();
    let answer = cluster.in_node(from, || server.ask(cluster, target, token, &more))?;
    Answer::read(&answer)
}

/// Returns a token of the viewer in a namespace, for thuban-observe.
fn token_of_viewer(cluster: &Cluster, namespace: &str) -> Result<String> {
    let audience = format!("--audience={OBSERVE_TOKEN_AUDIENCE}");
    let token = cluster.kubectl(&["create", "token", "-n", namespace, VIEWER, &audience])?;
    Ok(token.trim().to_owned())
}

/// Returns the token of the tests' administrator. All requests have the same one: thuban-observe has each new token
/// reviewed, and bounds the reviews.
fn token_of_all(cluster: &Cluster) -> Result<&'static str> {
    static TOKEN: OnceLock<String> = OnceLock::new();
    if let Some(token) = TOKEN.get() {
        return Ok(token);
    }
    let token = token_of_viewer(cluster, NAMESPACE)?;
    Ok(TOKEN.get_or_init(|| token))
}

/// Returns what thuban-observe tells an administrator of all namespaces. `more`: parameters, each after a `&`.
fn of_all(cluster: &Cluster, path: &str, more: &str) -> Result<String> {
    let token = token_of_all(cluster)?;
    let answer = ask(cluster, NODE, &format!("{path}?all=true{more}"), Some(token), &[])?;
    ensure!(answer.status == 200, "{answer:?}");
    Ok(answer.body)
}

/// Returns the arguments of the plugin with the cluster's kubectl.
fn with_kubectl(cluster: &Cluster, line: &str) -> String {
    let kubectl = cluster.instance().bin().join("kubectl");
    format!("{line} --kubectl {}", kubectl.display())
}

fn kubeconfig(cluster: &Cluster) -> PathBuf {
    cluster.instance().kubeconfig()
}

/// A plugin that runs until this is dropped, and what it has printed.
struct Running {
    plugin: Child,
    printed: Arc<Mutex<String>>,
}

impl Running {
    fn start(kubeconfig: &Path, line: &str) -> Result<Self> {
        let mut plugin = Command::new(binary("kubectl-thuban")?)
            .env("KUBECONFIG", kubeconfig)
            .args(line.split_whitespace())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .context("kubectl-thuban")?;
        let stdout = plugin.stdout.take().context("no output")?;
        let printed = Arc::<Mutex<String>>::default();
        let all = Arc::clone(&printed);
        // It ends with the plugin.
        thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                let mut all = all.lock().unwrap_or_else(PoisonError::into_inner);
                all.push_str(&line);
                all.push('\n');
            }
        });
        Ok(Self { plugin, printed })
    }

    /// Waits for a line that has all parts, and returns it.
    fn line(&self, parts: &[&str], patience: Duration) -> Result<String> {
        let what = format!("a line with {parts:?}");
        wait_until(&what, patience, POLL, || {
            let printed = self.printed.lock().unwrap_or_else(PoisonError::into_inner);
            let mut lines = printed.lines();
            let found = lines.find(|line| parts.iter().all(|part| line.contains(part)));
            Ok(found.map(str::to_owned))
        })
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // It then ends its own kubectl, which no other signal does.
        if let Ok(id) = i32::try_from(self.plugin.id()) {
            let _ = kill(Pid::from_raw(id), Signal::SIGTERM);
        }
        let _ = self.plugin.wait();
    }
}

/// Returns the first of some ports that no flow of another test has, by all odds. They are below the ports of clients,
/// so that programs take them for the server's, which flows are told apart by.
fn fresh_ports(count: u16) -> u16 {
    fastrand::u16(2_000..30_000 - count)
}

/// Returns an address in no range of any VPC. Of 150 addresses a test hardly gets that of an earlier one.
fn fresh_outside() -> Ipv4Addr {
    Ipv4Addr::new(203, 0, 113, fastrand::u8(100..250))
}

/// Has a pod send a datagram to each port of an address to which its VPC has no way. Each is a drop, and a flow of its
/// own.
fn plant_drops(pod: &Pod, address: Ipv4Addr, ports: Range<u16>) -> Result<()> {
    pod.inside(move || {
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
        for (number, port) in ports.enumerate() {
            socket.send_to(b"dropped", (address, port))?;
            if number % IN_A_ROW == IN_A_ROW - 1 {
                thread::sleep(Duration::from_millis(2));
            }
        }
        Ok(())
    })
}
