//! The way from the API server to pods. The API server is outside of the pods' network, like a hosted one. Its
//! connections to pods pass the pod's node (an HTTP CONNECT proxy on a Unix socket, in the place that konnectivity has
//! elsewhere).
//!
//! There is one process for each cluster, in the control plane's cgroups. It passes bytes and knows no VPC: an address
//! that several pods have is refused.

use std::{
    collections::HashMap,
    fs,
    io::{Read, Write},
    net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr, TcpStream},
    os::unix::net::{UnixListener, UnixStream},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, bail};

use crate::{
    control_plane::{group, spawn},
    handle::Cluster,
    instance::Instance,
};

/// Name of the relay's cgroup and of its log.
const COMPONENT: &str = "relay";
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a pod's node is remembered. Shorter than an address rests between two pods.
const MEMORY: Duration = Duration::from_secs(5);
const LONGEST_REQUEST: usize = 4096;

/// Returns the path of the API server's `--egress-selector-config-file`. An instance without this file has no relay.
pub fn config(instance: &Instance) -> PathBuf {
    instance.state().join("egress.json")
}

fn socket(instance: &Instance) -> PathBuf {
    instance.state().join("relay.sock")
}

/// Starts `program cluster --name <instance> relay`, which runs [`serve`], and writes the API server's configuration.
pub fn start(instance: &Instance, program: &Path) -> Result<()> {
    let selector = serde_json::json!({
        "apiVersion": "apiserver.k8s.io/v1beta1", "kind": "EgressSelectorConfiguration",
        "egressSelections": [{"name": "cluster", "connection": {
            "proxyProtocol": "HTTPConnect",
            "transport": {"uds": {"udsName": socket(instance)}},
        }}],
    });
    let path = config(instance);
    fs::write(&path, format!("{selector:#}\n")).with_context(|| format!("writing {}", path.display()))?;
    let log = instance.logs().join("relay.log");
    let arguments = ["cluster", "--name", instance.name(), "relay"].map(String::from);
    spawn(&group(instance, COMPONENT), &log, program, &arguments).context("starting the relay")
}

/// Relays connections for ever.
pub fn serve(instance: &Instance) -> Result<()> {
    let relay = Arc::new(Relay {
        cluster: Cluster::named(instance.name())?,
        pods: Mutex::default(),
    });
    let path = socket(instance);
    let listener = UnixListener::bind(&path).with_context(|| format!("listening on {}", path.display()))?;
    loop {
        let (client, _) = listener.accept().context("accepting on the socket")?;
        let relay = Arc::clone(&relay);
        thread::spawn(move || {
            if let Err(error) = relay.serve_api_server(&client) {
                eprintln!("{error:#}");
            }
        });
    }
}

struct Relay {
    cluster: Cluster,
    /// Nodes of pods that were asked for lately, each with the time.
    pods: Mutex<HashMap<IpAddr, (String, Instant)>>,
}

impl Relay {
    /// Serves one connection of the API server: `CONNECT address:port HTTP/1.1`, an answer, then bytes.
    fn serve_api_server(&self, client: &UnixStream) -> Result<()> {
        let request = read_head(client).context("reading a request")?;
        let dialled = target(&request).and_then(|target| {
            self.dial(target)
                .with_context(|| format!("connecting to {target}"))
        });
        let answer = if dialled.is_ok() {
            "200 OK"
        } else {
            "502 Bad Gateway"
        };
        let mut writer = client;
        writer.write_all(format!("HTTP/1.1 {answer}\r\n\r\n").as_bytes())?;
        join(client, &dialled?)
    }

    fn dial(&self, target: SocketAddr) -> Result<TcpStream> {
        let connect = || TcpStream::connect_timeout(&target, ANSWER_TIMEOUT).context("connect");
        if self.is_underlay(target.ip()) {
            return connect();
        }
        let node = self.node_of(target.ip())?;
        self.cluster.in_node(&node, connect)
    }

    fn is_underlay(&self, address: IpAddr) -> bool {
        let network = |address: Ipv4Addr| address.octets()[..3].to_vec();
        matches!(address, IpAddr::V4(address) if network(address) == network(self.cluster.gateway()))
    }

    /// Returns the node of the one pod that has the address.
    fn node_of(&self, address: IpAddr) -> Result<String> {
        let known = self.pods.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((node, when)) = known.get(&address)
            && when.elapsed() < MEMORY
        {
            return Ok(node.clone());
        }
        drop(known);
        let selector = format!("--field-selector=status.podIP={address},status.phase=Running");
        let path = "-o=jsonpath={.items[*].spec.nodeName}";
        let nodes = self.cluster.kubectl(&["get", "pods", "-A", &selector, path])?;
        let node = match nodes.split_whitespace().collect::<Vec<_>>()[..] {
            [node] => node.to_owned(),
            [] => bail!("no running pod has this address"),
            _ => bail!("pods of several VPCs have this address"),
        };
        let mut known = self.pods.lock().unwrap_or_else(PoisonError::into_inner);
        known.retain(|_, (_, when)| when.elapsed() < MEMORY);
        known.insert(address, (node.clone(), Instant::now()));
        Ok(node)
    }
}

/// Reads the bytes to the end of the request's head. The API server sends nothing after it until it has an answer.
fn read_head(mut client: &UnixStream) -> Result<String> {
    let mut head = Vec::new();
    let mut piece = [0; 512];
    while !head.ends_with(b"\r\n\r\n") {
        let read = client.read(&mut piece)?;
        if read == 0 || head.len() + read > LONGEST_REQUEST {
            bail!("no end of the head in {} bytes", head.len() + read);
        }
        head.extend_from_slice(&piece[..read]);
    }
    String::from_utf8(head).context("not text")
}

fn target(head: &str) -> Result<SocketAddr> {
    let line = head.lines().next().unwrap_or_default();
    match line.split(' ').collect::<Vec<_>>()[..] {
        ["CONNECT", target, "HTTP/1.1"] => target.parse().map_err(|_| anyhow!("{target}: not address:port")),
        _ => bail!("{line:?} is no CONNECT"),
    }
}

/// One end of a connection.
trait End: Read + Write + Send + Sized {
    fn another(&self) -> std::io::Result<Self>;
    fn close(&self, side: Shutdown) -> std::io::Result<()>;
}

impl End for TcpStream {
    fn another(&self) -> std::io::Result<Self> {
        self.try_clone()
    }
    fn close(&self, side: Shutdown) -> std::io::Result<()> {
        self.shutdown(side)
    }
}

impl End for UnixStream {
    fn another(&self) -> std::io::Result<Self> {
        self.try_clone()
    }
    fn close(&self, side: Shutdown) -> std::io::Result<()> {
        self.shutdown(side)
    }
}

/// Passes bytes both ways until both have ended. A side that breaks ends both.
fn join(client: &impl End, server: &impl End) -> Result<()> {
    let (mut from_client, mut to_server) = (client.another()?, server.another()?);
    let (mut from_server, mut to_client) = (server.another()?, client.another()?);
    thread::scope(|scope| {
        scope.spawn(move || pass(&mut from_client, &mut to_server));
        pass(&mut from_server, &mut to_client);
    });
    Ok(())
}

fn pass(from: &mut impl End, to: &mut impl End) {
    if std::io::copy(from, to).is_ok() {
        // This fails when the other side is gone already.
        let _ = to.close(Shutdown::Write);
    } else {
        let _ = from.close(Shutdown::Both);
        let _ = to.close(Shutdown::Both);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_connect_to_an_address_is_a_request() {
        let asked = |line: &str| target(&format!("{line}\r\nHost: 127.0.0.1\r\n\r\n"));
        assert_eq!(
            asked("CONNECT 10.244.0.5:80 HTTP/1.1").unwrap(),
            "10.244.0.5:80".parse().unwrap()
        );
        assert!(asked("GET 10.244.0.5:80 HTTP/1.1").is_err());
        assert!(asked("CONNECT some.where:80 HTTP/1.1").is_err());
    }

    #[test]
    fn a_side_that_has_ended_still_gets_the_answer() {
        let (client, inner) = UnixStream::pair().unwrap();
        let (outer, server) = UnixStream::pair().unwrap();
        let relay = thread::spawn(move || join(&inner, &outer));
        (&client).write_all(b"question").unwrap();
        client.shutdown(Shutdown::Write).unwrap();
        let mut text = String::new();
        (&server).read_to_string(&mut text).unwrap();
        assert_eq!(text, "question");
        (&server).write_all(b"answer").unwrap();
        drop(server);
        text.clear();
        (&client).read_to_string(&mut text).unwrap();
        assert_eq!(text, "answer");
        relay.join().unwrap().unwrap();
    }
}
