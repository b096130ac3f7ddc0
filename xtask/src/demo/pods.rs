//! Pods of the demo, and questions asked from inside their network namespaces.

use std::{
    fs::File,
    io::{Read, Write},
    net::{Ipv4Addr, SocketAddr, TcpStream, UdpSocket},
    path::PathBuf,
    time::Duration,
};

use anyhow::{Context, Result, bail};
use thuban_cluster::{Cluster, Tasks, namespace::inside};

use crate::{build::root, install::get};

/// HTTP and UDP port of `agnhost netexec`.
const PORT: u16 = 8080;

/// A running pod. Its name is unique over all tenants, and its HTTP and UDP servers answer with it.
#[derive(Clone, Debug)]
pub struct Pod {
    pub vpc: String,
    pub network: String,
    pub node: String,
    pub name: String,
    pub address: Ipv4Addr,
    namespace_file: PathBuf,
}

/// A pod that the demo wants.
#[derive(Clone, Debug)]
pub struct Wanted {
    pub vpc: String,
    pub network: String,
    pub node: String,
    pub name: String,
}

impl Wanted {
    pub fn new(vpc: &str, network: &str, node: &str, prefix: &str) -> Self {
        Self {
            vpc: vpc.into(),
            network: network.into(),
            node: node.into(),
            name: format!("{prefix}{network}-{node}"),
        }
    }

    /// Returns the manifest made from `e2e/demo/pod.yaml`. Pods of `<vpc>-web` have no annotation of their own: their
    /// namespace has it.
    fn manifest(&self) -> Result<String> {
        let path = root().join("e2e/demo/pod.yaml");
        let template =
            std::fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
        let is_default = self.network == format!("{}-web", self.vpc);
        let lines = template
            .lines()
            .filter(|line| !(is_default && line.contains("thuban.dev/network")))
            .map(|line| {
                line.replace("NAMESPACE", &self.vpc)
                    .replace("NAME", &self.name)
                    .replace("NETWORK", &self.network)
                    .replace("NODE", &self.node)
            });
        Ok(lines.collect::<Vec<_>>().join("\n"))
    }
}

/// Returns the name that answers `GET /hostname`.
pub fn ask(server: SocketAddr, patience: Duration) -> Result<String> {
    let mut stream = TcpStream::connect_timeout(&server, patience)?;
    ask_by(&mut stream, "/hostname", patience)
}

/// Returns what the server at the other end of a connection answers.
pub fn ask_by(stream: &mut TcpStream, path: &str, patience: Duration) -> Result<String> {
    stream.set_read_timeout(Some(patience))?;
    write!(stream, "GET {path} HTTP/1.0\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let Some((head, body)) = answer.split_once("\r\n\r\n") else {
        bail!("not HTTP: {answer}")
    };
    if !head.contains(" 200 ") {
        bail!("{head}");
    }
    Ok(body.trim().to_owned())
}

/// Makes the pods that are not there yet.
pub fn apply(cluster: &Cluster, wanted: &[Wanted]) -> Result<()> {
    let manifests = wanted.iter().map(Wanted::manifest).collect::<Result<Vec<_>>>()?;
    cluster.kubectl_apply(&manifests.join("\n---\n")).map(|_| ())
}

/// Returns whether all are ready, and how many of all are.
pub fn readiness(cluster: &Cluster, wanted: &[Wanted]) -> Result<(bool, String)> {
    let list = get(
        cluster,
        &["pods", "-A", "-l", "app.kubernetes.io/part-of=thuban-demo"],
    )?;
    let items = list["items"].as_array().context("a list of pods")?;
    let is_ready = |wanted: &&Wanted| {
        items.iter().any(|pod| {
            let conditions = pod["status"]["conditions"].as_array();
            pod["metadata"]["name"] == wanted.name.as_str()
                && conditions.is_some_and(|all| {
                    all.iter()
                        .any(|condition| condition["type"] == "Ready" && condition["status"] == "True")
                })
        })
    };
    let ready = wanted.iter().filter(is_ready).count();
    Ok((
        ready == wanted.len(),
        format!("{ready} of {} Ready", wanted.len()),
    ))
}

/// Returns addresses and network namespaces of running pods.
pub fn find(cluster: &Cluster, wanted: &[Wanted]) -> Result<Vec<Pod>> {
    let list = get(
        cluster,
        &["pods", "-A", "-l", "app.kubernetes.io/part-of=thuban-demo"],
    )?;
    let items = list["items"].as_array().context("a list of pods")?;
    let nodes = cluster.nodes()?.into_iter();
    let tasks = nodes.map(|node| Ok((Tasks::of(cluster, &node)?, node)));
    let tasks = tasks.collect::<Result<Vec<_>>>()?;
    let find = |wanted: &Wanted| {
        let pod = items
            .iter()
            .find(|pod| pod["metadata"]["name"] == wanted.name.as_str())?;
        let container = pod["status"]["containerStatuses"][0]["containerID"].as_str()?;
        let (tasks, _) = tasks.iter().find(|(_, node)| *node == wanted.node)?;
        Some(Pod {
            vpc: wanted.vpc.clone(),
            network: wanted.network.clone(),
            node: wanted.node.clone(),
            name: wanted.name.clone(),
            address: pod["status"]["podIP"].as_str()?.parse().ok()?,
            namespace_file: tasks.network_namespace(container)?,
        })
    };
    wanted
        .iter()
        .map(|wanted| find(wanted).with_context(|| format!("pod {} does not run", wanted.name)))
        .collect()
}

impl Pod {
    /// Runs `work` on a thread of its own in the pod's network namespace.
    pub fn inside<T: Send>(&self, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        let namespace = File::open(&self.namespace_file)
            .with_context(|| format!("network namespace of {}", self.name))?;
        inside(namespace, work)
    }

    /// Returns the name that answers `GET /hostname` at `address`.
    pub fn ask_tcp(&self, address: Ipv4Addr, patience: Duration) -> Result<String> {
        self.inside(move || ask(SocketAddr::from((address, PORT)), patience))
    }

    /// Returns the name that answers one UDP datagram at `address`.
    pub fn ask_udp(&self, address: Ipv4Addr, patience: Duration) -> Result<String> {
        self.inside(move || {
            let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
            socket.set_read_timeout(Some(patience))?;
            socket.connect((address, PORT))?;
            socket.send(b"hostname")?;
            let mut buffer = [0; 256];
            let length = socket.recv(&mut buffer)?;
            Ok(String::from_utf8_lossy(&buffer[..length]).trim().to_owned())
        })
    }
}
