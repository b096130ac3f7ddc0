//! Pods as the tests see them: made and read by kubectl, and entered by their network namespace, so that a test
//! can send any bytes that a malicious tenant could.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream, UdpSocket};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use nix::fcntl::{Flock, FlockArg};
use serde_json::{Value, json};
use thuban_cluster::namespace::inside;
use thuban_cluster::wait::{uninterrupted, wait_until};
use thuban_cluster::{Cluster, Tasks};

pub use crate::api::get;

/// Long enough for the first packet of a flow on a busy machine (next hops, bouncers).
pub const REACHED: Duration = Duration::from_secs(5);
/// How long a packet that must not arrive is waited for.
pub const NOT_REACHED: Duration = Duration::from_millis(800);
/// The number of pods that try at a time whether they reach nothing. Each has three threads.
const PAIRS_AT_ONCE: usize = 16;
/// HTTP and UDP port of `agnhost netexec` in every test pod.
pub const PORT: u16 = 8080;

#[derive(Clone, Debug)]
pub struct Pod {
    pub namespace: String,
    pub name: String,
    pub node: String,
    pub address: Ipv4Addr,
    /// Path of the pod's network namespace, as the root namespace sees it.
    netns: PathBuf,
}

/// Returns a pod of `agnhost netexec` on `node`, in `network` (none: the network that its namespace says).
pub fn netexec_manifest(namespace: &str, name: &str, node: &str, network: Option<&str>) -> Value {
    let mut pod = serde_json::json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "labels": {"app": "netexec"}, "annotations": {}},
        "spec": {
            "nodeSelector": {"kubernetes.io/hostname": node},
            "terminationGracePeriodSeconds": 0,
            "containers": [{
                "name": "netexec", "image": "registry.k8s.io/e2e-test-images/agnhost:2.63.0",
                "args": ["netexec", "--http-port=8080", "--udp-port=8080"],
            }],
        },
    });
    if let Some(network) = network {
        pod["metadata"]["annotations"]["thuban.dev/network"] = network.into();
    }
    pod
}

/// Returns a VPC that admits the namespaces `namespaces`, with one divider: tests know the way of a packet.
pub fn vpc_manifest(name: &str, cidr: &str, namespaces: &[&str]) -> Value {
    serde_json::json!({
        "apiVersion": "thuban.dev/v1alpha1", "kind": "Vpc", "metadata": {"name": name},
        "spec": {"cidrs": [cidr], "dividers": 1, "allowedNamespaces": {"matchExpressions": [
            {"key": "kubernetes.io/metadata.name", "operator": "In", "values": namespaces}]}},
    })
}

/// Returns a network of `vpc` that admits every namespace that the VPC admits, with one bouncer.
pub fn network_manifest(name: &str, vpc: &str, cidr: &str) -> Value {
    serde_json::json!({
        "apiVersion": "thuban.dev/v1alpha1", "kind": "Network", "metadata": {"name": name},
        "spec": {"vpc": vpc, "cidrs": [cidr], "bouncers": 1, "allowedNamespaces": {}},
    })
}

pub fn namespace_manifest(name: &str, network: Option<&str>) -> Value {
    let mut namespace = serde_json::json!({
        "apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "annotations": {}},
    });
    if let Some(network) = network {
        namespace["metadata"]["annotations"]["thuban.dev/network"] = network.into();
    }
    namespace
}

/// Returns the path of a program, which `cargo xtask test` builds in the folder above this test's.
pub fn binary(name: &str) -> Result<PathBuf> {
    let test = std::env::current_exe()?;
    let folder = test
        .ancestors()
        .nth(2)
        .context("the folder of the tests' profile")?;
    let path = folder.join(name);
    ensure!(
        path.exists(),
        "{} is missing: `cargo xtask test` builds it",
        path.display()
    );
    Ok(path)
}

/// Applies all objects in one request. The API server refuses a namespace's pods until the namespace has its
/// ServiceAccount, so they are applied again.
pub fn apply(cluster: &Cluster, objects: &[Value]) -> Result<()> {
    let list = serde_json::json!({"apiVersion": "v1", "kind": "List", "items": objects}).to_string();
    let (patience, pause) = (Duration::from_secs(30), Duration::from_millis(200));
    wait_until(
        "the namespace's ServiceAccount",
        patience,
        pause,
        || match cluster.kubectl_apply(&list) {
            Ok(_) => Ok(Some(())),
            Err(refused) if refused.to_string().contains("error looking up service account") => Ok(None),
            Err(error) => Err(error),
        },
    )
}

/// Returns the condition of `kind` of an object, if it has one.
pub fn condition<'a>(object: &'a Value, kind: &str) -> Option<&'a Value> {
    object["status"]["conditions"]
        .as_array()?
        .iter()
        .find(|condition| condition["type"] == kind)
}

pub fn is_ready(object: &Value) -> bool {
    condition(object, "Ready").is_some_and(|ready| ready["status"] == "True")
}

/// Waits until a cluster object (`vpc/red`) is Provisioned.
pub fn wait_provisioned(cluster: &Cluster, object: &str) -> Result<()> {
    cluster.wait_for(&format!("{object} Provisioned"), Duration::from_mins(1), || {
        Ok(get(cluster, &[object])?["status"]["phase"] == "Provisioned")
    })
}

/// Returns the events of a pod, the last first, for a test that waited for the pod in vain.
fn events_of(cluster: &Cluster, namespace: &str, pod: &str) -> String {
    let selector = format!("--field-selector=involvedObject.name={pod}");
    let events = get(cluster, &["events", "-n", namespace, &selector]);
    let events = events.unwrap_or_default();
    let mut events: Vec<_> = events["items"].as_array().into_iter().flatten().collect();
    events.sort_by_key(|event| event["lastTimestamp"].as_str());
    let told = events.iter().rev().map(|event| {
        let [at, count, reason, message] =
            ["lastTimestamp", "count", "reason", "message"].map(|field| &event[field]);
        format!("{at} {count} times {reason}: {message}")
    });
    format!("events: {}", told.collect::<Vec<_>>().join("; "))
}

/// Waits until the pod runs and is ready, and finds its network namespace.
pub fn running(cluster: &Cluster, namespace: &str, name: &str) -> Result<Pod> {
    cluster
        .wait_for(
            &format!("pod {namespace}/{name} Ready"),
            Duration::from_mins(2),
            || Ok(is_ready(&get(cluster, &["pod", "-n", namespace, name])?)),
        )
        .map_err(|error| anyhow!("{error:#}; {}", events_of(cluster, namespace, name)))?;
    let pod = get(cluster, &["pod", "-n", namespace, name])?;
    let text = |value: &Value| {
        value
            .as_str()
            .map(str::to_owned)
            .ok_or_else(|| anyhow!("no such field: {value}"))
    };
    let node = text(&pod["spec"]["nodeName"])?;
    let container = text(&pod["status"]["containerStatuses"][0]["containerID"])?;
    let netns = Tasks::of(cluster, &node)?
        .network_namespace(&container)
        .with_context(|| format!("no task of container {container} on {node}"))?;
    let is_server = pod["spec"]["containers"][0]["args"][0] == "netexec";
    let pod = Pod {
        namespace: namespace.into(),
        name: name.into(),
        address: text(&pod["status"]["podIP"])?.parse()?,
        node,
        netns,
    };
    if is_server {
        // The pod has no probe, and so is ready before it listens.
        let listens = || Ok(TcpStream::connect((Ipv4Addr::LOCALHOST, PORT))?);
        cluster.wait_for(&format!("the server in {name}"), Duration::from_secs(30), || {
            Ok(pod.inside(listens).is_ok())
        })?;
    }
    Ok(pod)
}

/// Returns the addresses in the status of the pod's Endpoint, IPv4 first.
pub fn addresses(cluster: &Cluster, pod: &Pod) -> Vec<IpAddr> {
    let endpoints = get(cluster, &["endpoints.thuban.dev", "-n", &pod.namespace]).unwrap();
    let own = endpoints["items"]
        .as_array()
        .unwrap()
        .iter()
        .find(|endpoint| endpoint["spec"]["podRef"]["name"] == pod.name.as_str())
        .unwrap_or_else(|| panic!("{} has no endpoint", pod.name));
    let addresses = own["status"]["addresses"].as_array().unwrap();
    addresses
        .iter()
        .map(|address| address.as_str().unwrap().parse().unwrap())
        .collect()
}

/// A process of a node that hangs until this is dropped.
pub struct Hanging<'a> {
    cluster: &'a Cluster,
    node: String,
    process: &'static str,
}

impl<'a> Hanging<'a> {
    pub fn new(cluster: &'a Cluster, node: &str, process: &'static str) -> Result<Self> {
        cluster.signal(node, process, "STOP")?;
        Ok(Self {
            cluster,
            node: node.to_owned(),
            process,
        })
    }
}

impl Drop for Hanging<'_> {
    fn drop(&mut self) {
        let _ = self.cluster.signal(&self.node, self.process, "CONT");
    }
}

/// Deletes the object and waits until it is gone; a missing one is fine.
pub fn delete(cluster: &Cluster, arguments: &[&str]) -> Result<()> {
    let arguments: Vec<&str> = ["delete", "--ignore-not-found", "--wait", "--timeout=120s"]
        .into_iter()
        .chain(arguments.iter().copied())
        .collect();
    cluster.kubectl(&arguments).map(|_| ())
}

/// Deletes a namespace and waits until it is gone; a missing one is fine. Its pods, Services and users' Endpoints are
/// deleted at once. Kubernetes would begin with them only after 5 s, and look again 8 s later, because Endpoints have
/// finalizers (`namespaceDeletionGracePeriod` and `finalizerEstimateSeconds` in `pkg/controller/namespace`).
pub fn delete_namespace(cluster: &Cluster, name: &str) -> Result<()> {
    // From now on nothing new can be made there.
    cluster.kubectl(&["delete", "--ignore-not-found", "--wait=false", "namespace", name])?;
    for collection in [
        format!("/api/v1/namespaces/{name}/pods"),
        format!("/api/v1/namespaces/{name}/services"),
    ] {
        // One request deletes all of a collection.
        cluster.kubectl(&["delete", "--raw", &collection])?;
    }
    let endpoints = get(cluster, &["endpoints.thuban.dev", "-n", name])?;
    let endpoints = endpoints["items"].as_array().into_iter().flatten();
    // A pod's goes with the pod.
    let of_users = endpoints.filter(|endpoint| endpoint["spec"]["podRef"].is_null());
    let names: Vec<&str> = of_users
        .filter_map(|endpoint| endpoint["metadata"]["name"].as_str())
        .collect();
    if !names.is_empty() {
        let arguments = [
            "delete",
            "--ignore-not-found",
            "--wait=false",
            "endpoints.thuban.dev",
            "-n",
            name,
        ];
        cluster.kubectl(&[&arguments[..], &names].concat())?;
    }
    delete(cluster, &["namespace", name])
}

impl Pod {
    /// Runs `work` on a thread of its own inside the pod's network namespace.
    pub fn inside<T: Send>(&self, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        let netns = File::open(&self.netns)
            .with_context(|| format!("netns of {}: {}", self.name, self.netns.display()))?;
        inside(netns, work)
    }

    /// Runs a command of the node's file system inside the pod's network namespace.
    pub fn command(&self, arguments: &[&str]) -> Result<String> {
        let output = self.inside(|| {
            Ok(std::process::Command::new(arguments[0])
                .args(&arguments[1..])
                .output()?)
        })?;
        if !output.status.success() {
            bail!(
                "{arguments:?} in {}: {}",
                self.name,
                String::from_utf8_lossy(&output.stderr)
            );
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Returns the name that answers `GET /hostname` at `address`, seen from this pod.
    pub fn tcp(&self, address: impl Into<IpAddr>, patience: Duration) -> Result<String> {
        let address = address.into();
        self.inside(move || http_hostname(address, patience))
    }

    /// Returns the name that answers the UDP command `hostname` at `address`, seen from this pod; asks again until
    /// patience ends.
    pub fn udp(&self, address: Ipv4Addr, patience: Duration) -> Result<String> {
        self.inside(move || {
            let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
            socket.set_read_timeout(Some(Duration::from_millis(300)))?;
            socket.connect((address, PORT))?;
            let end = Instant::now() + patience;
            let mut buffer = [0; 512];
            loop {
                let answer = socket
                    .send(b"hostname")
                    .and_then(|_| uninterrupted(|| socket.recv(&mut buffer)));
                match answer {
                    Ok(length) => return Ok(String::from_utf8_lossy(&buffer[..length]).trim().to_owned()),
                    Err(error) if Instant::now() >= end => return Err(error).context("udp"),
                    Err(_) => {}
                }
            }
        })
    }

    /// Checks that `address` answers an ICMP echo, seen from this pod.
    pub fn ping(&self, address: Ipv4Addr, patience: Duration) -> Result<()> {
        self.inside(move || super::packets::ping(address, patience))
    }

    /// Asserts that nobody answers at `address` by TCP, UDP or ICMP.
    pub fn reaches_nothing_at(&self, address: Ipv4Addr) {
        nobody_reaches([(self, address)]);
    }
}

/// Asserts that none of the pods gets an answer at its address by TCP, UDP or ICMP. The pods try side by side, because
/// each only waits.
pub fn nobody_reaches<'a>(pairs: impl IntoIterator<Item = (&'a Pod, Ipv4Addr)>) {
    let pairs: Vec<_> = pairs.into_iter().collect();
    for pairs in pairs.chunks(PAIRS_AT_ONCE) {
        let answers: Vec<_> = std::thread::scope(|scope| {
            let trying: Vec<_> = pairs
                .iter()
                .flat_map(|&(pod, address)| {
                    let tcp = scope.spawn(move || pod.tcp(address, NOT_REACHED));
                    let udp = scope.spawn(move || pod.udp(address, NOT_REACHED));
                    let echo = move || pod.ping(address, NOT_REACHED).map(|()| "echo".to_owned());
                    let ways = [("TCP", tcp), ("UDP", udp), ("ICMP", scope.spawn(echo))];
                    ways.map(|(way, answer)| (&pod.name, address, way, answer))
                })
                .collect();
            let trying = trying.into_iter();
            trying
                .map(|(pod, address, way, answer)| (pod, address, way, answer.join().unwrap()))
                .collect()
        });
        for (pod, address, way, answer) in answers {
            assert!(
                answer.is_err(),
                "{pod} got an answer by {way} at {address}: {answer:?}"
            );
        }
    }
}

/// Returns the name that answers `GET /hostname` at `address`, from the namespace of the calling thread.
pub fn http_hostname(address: impl Into<IpAddr>, patience: Duration) -> Result<String> {
    http_hostname_at((address.into(), PORT), patience)
}

/// Returns the same on any port.
pub fn http_hostname_at(address: impl Into<SocketAddr>, patience: Duration) -> Result<String> {
    http_get(address, "/hostname", patience)
}

/// Returns the content of a path, from the namespace of the calling thread.
pub fn http_get(address: impl Into<SocketAddr>, path: &str, patience: Duration) -> Result<String> {
    let stream = ask_slowly(address.into(), path, patience, Duration::ZERO)?;
    stream.set_read_timeout(Some(patience))?;
    http_answer(stream)
}

/// Connects and sends a request, with a pause in the middle; returns the connection with the answer unread.
pub fn ask_slowly(address: SocketAddr, path: &str, patience: Duration, pause: Duration) -> Result<TcpStream> {
    let mut stream = TcpStream::connect_timeout(&address, patience)?;
    if pause.is_zero() {
        stream.write_all(format!("GET {path} HTTP/1.0\r\n\r\n").as_bytes())?;
    } else {
        stream.write_all(format!("GET {path}").as_bytes())?;
        std::thread::sleep(pause);
        stream.write_all(b" HTTP/1.0\r\n\r\n")?;
    }
    Ok(stream)
}

/// Returns the body of an answer.
pub fn http_answer(mut stream: TcpStream) -> Result<String> {
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (head, body) = answer.split_once("\r\n\r\n").context("no HTTP answer")?;
    if !head.contains("200 OK") {
        bail!("HTTP: {head}");
    }
    Ok(body.trim().to_owned())
}

/// Returns the addresses of a namespace's running pods; an error if two have the same.
pub fn pod_addresses(cluster: &Cluster, namespace: &str) -> Result<BTreeSet<String>> {
    let pods = get(cluster, &["pods", "-n", namespace])?;
    let mut found = BTreeSet::new();
    for pod in pods["items"].as_array().into_iter().flatten() {
        if let Some(address) = pod["status"]["podIP"].as_str() {
            ensure!(found.insert(address.to_owned()), "two pods have {address}");
        }
    }
    Ok(found)
}

pub fn patch_vpc(cluster: &Cluster, vpc: &str, spec: &Value) -> Result<()> {
    let patch = json!({"spec": spec}).to_string();
    cluster.kubectl(&["patch", "vpc", vpc, "--type=merge", "-p", &patch])?;
    Ok(())
}

/// Locks a name until the result is dropped: no other test, in this or another process, changes what has this name.
pub fn lock(cluster: &Cluster, what: &str) -> Result<Flock<File>> {
    let path = cluster.instance().state().join(format!("tests-{what}.lock"));
    let file = File::create(&path).with_context(|| format!("making {}", path.display()))?;
    Flock::lock(file, FlockArg::LockExclusive)
        .map_err(|(_, error)| anyhow!("locking {}: {error}", path.display()))
}
