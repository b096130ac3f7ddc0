//! A running cluster as tests and the demo use it: kubectl, nodes and the reports of transitd.

use std::{
    collections::BTreeMap,
    fs::File,
    net::Ipv4Addr,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::Duration,
};

use anyhow::{Context, Result, anyhow, bail};
use nix::sys::signal::Signal;

use crate::{
    cgroups::{self, Stay},
    command::{output, output_with_input},
    control_plane::{self, kubectl},
    instance::{Instance, NODES},
    lifecycle::first_process,
    namespace::inside,
    network::{self, namespace_path},
    node::{self, group},
    wait::wait_for,
};

/// The variable that names the instance that [`Cluster::from_env`] takes.
const VARIABLE: &str = "THUBAN_CLUSTER";
const NAMESPACE: &str = "thuban-system";
const POLL: Duration = Duration::from_millis(150);
/// How long all kubelets of a cluster take to renew their leases after a pause.
const HEARTBEATS: Duration = Duration::from_secs(3);

/// A cluster that is up.
#[derive(Clone, Debug)]
pub struct Cluster {
    instance: Instance,
}

impl Cluster {
    /// Returns the cluster of the instance that the environment names, `test` by default.
    pub fn from_env() -> Result<Self> {
        Self::named(&std::env::var(VARIABLE).unwrap_or_else(|_| "test".into()))
    }

    pub fn named(name: &str) -> Result<Self> {
        let instance = Instance::named(name)?;
        if !instance.kubeconfig().exists() {
            bail!("cluster {name} is down: run `cargo xtask cluster up --name {name}`");
        }
        Ok(Self { instance })
    }

    pub fn instance(&self) -> &Instance {
        &self.instance
    }

    pub fn name(&self) -> &str {
        self.instance.name()
    }

    pub fn bridge(&self) -> &str {
        self.instance.bridge()
    }

    pub fn gateway(&self) -> Ipv4Addr {
        self.instance.gateway()
    }

    /// Returns the names of the nodes, sorted.
    #[allow(clippy::unnecessary_wraps)] // callers treat all questions to a cluster alike
    pub fn nodes(&self) -> Result<Vec<String>> {
        Ok(NODES.map(String::from).into())
    }

    pub fn node_address(&self, node: &str) -> Result<Ipv4Addr> {
        self.instance.node_address(node)
    }

    /// Ends parts of the control plane ([`COMPONENTS`](crate::COMPONENTS)) as a crash does.
    pub fn stop_control_plane(&self, components: &[&str]) -> Result<()> {
        control_plane::stop(&self.instance, components)
    }

    /// Starts parts of the control plane again and waits until the API server is ready.
    pub fn resume_control_plane(&self, components: &[&str]) -> Result<()> {
        control_plane::resume(&self.instance, components)
    }

    /// Keeps a copy of etcd's state. etcd must have ended.
    pub fn save_state(&self) -> Result<()> {
        control_plane::save_state(&self.instance)
    }

    /// Takes etcd's state back to the copy. etcd must have ended.
    pub fn restore_state(&self) -> Result<()> {
        control_plane::restore_state(&self.instance)
    }

    /// Sends a signal (`KILL`, `STOP`) to the oldest process of that name on a node.
    pub fn signal(&self, node: &str, process: &str, signal: &str) -> Result<()> {
        let command = format!("kill -{signal} $(pgrep -o -x {process})");
        self.exec_on_node(node, &["sh", "-c", &command]).map(|_| ())
    }

    /// Starts the kubelet of a node on which it has ended.
    pub fn start_kubelet(&self, node: &str) -> Result<()> {
        node::start_kubelet(&self.instance, node)
    }

    /// Starts a program on a node, with all namespaces of the node and with its output in the file `log` among the
    /// cluster's logs. The program goes on after this one. It ends with the node at the latest.
    pub fn start_on_node(&self, node: &str, log: &str, program: &Path, arguments: &[String]) -> Result<()> {
        node::start_program(&self.instance, node, log, program, arguments)
    }

    /// Returns the node's cgroup of version 2, in which its pods are.
    pub fn pods_cgroup(&self, node: &str) -> Result<PathBuf> {
        self.instance.node_address(node)?;
        cgroups::version_2(&group(&self.instance, node))
    }

    /// Moves this process among the node's pods, as programs that look at cgroups see it, until the end of the stay.
    /// The cluster must not be paused or taken down before.
    pub fn stay_among_pods(&self, node: &str) -> Result<Stay> {
        self.instance.node_address(node)?;
        Stay::begin(&format!("{}/visitor", group(&self.instance, node)))
    }

    /// Stops all processes of the cluster until [`Self::resume`]: it takes no CPU time.
    pub fn pause(&self) -> Result<()> {
        cgroups::signal_all(&self.instance.cgroup(), Signal::SIGSTOP)
    }

    /// Lets all processes of the cluster go on. The API server and the nodes come first: a controller manager that
    /// finds old heartbeats would declare nodes lost.
    pub fn resume(&self) -> Result<()> {
        let group = self.instance.cgroup();
        let late = cgroups::processes(&control_plane::group(&self.instance, "controller-manager"))?;
        cgroups::signal(cgroups::processes(&group)?.difference(&late), Signal::SIGCONT);
        thread::sleep(HEARTBEATS);
        cgroups::signal_all(&group, Signal::SIGCONT)
    }

    /// Waits until all nodes are Ready.
    pub fn wait_nodes_ready(&self, patience: Duration) -> Result<()> {
        self.wait_for("the nodes Ready", patience, || {
            let nodes: serde_json::Value =
                serde_json::from_str(&self.kubectl(&["get", "nodes", "-o", "json"])?)?;
            let nodes = nodes["items"].as_array().context("a list of nodes")?;
            let is_ready = |node: &serde_json::Value| {
                let conditions = node["status"]["conditions"].as_array();
                conditions.is_some_and(|all| {
                    all.iter()
                        .any(|is| is["type"] == "Ready" && is["status"] == "True")
                })
            };
            Ok(nodes.len() == NODES.len() && nodes.iter().all(is_ready))
        })
    }

    /// Returns the node's first process, as the root PID namespace sees it.
    pub fn node_pid(&self, node: &str) -> Result<u32> {
        first_process(&self.instance, node)
    }

    /// Ends all processes of a node at once, as a power cut does.
    pub fn kill_node(&self, node: &str) -> Result<()> {
        self.instance.node_address(node)?;
        cgroups::kill_all(&group(&self.instance, node), Duration::from_secs(30))
    }

    /// Cuts a node off from the underlay without a sign of it on the node, or connects it again.
    pub fn cut_off(&self, node: &str, is_cut: bool) -> Result<()> {
        self.instance.node_address(node)?;
        network::cut_off(&self.instance, node, is_cut)
    }

    /// Runs `work` on a thread of its own in the node's network namespace.
    pub fn in_node<T: Send>(&self, node: &str, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        self.instance.node_address(node)?;
        let path = namespace_path(&self.instance.network_namespace(node));
        let namespace = File::open(&path).with_context(|| format!("network namespace of {node}"))?;
        inside(namespace, work)
    }

    /// Runs a command in all namespaces of the node and returns its standard output.
    pub fn exec_on_node(&self, node: &str, command: &[&str]) -> Result<String> {
        output(&mut self.command_on_node(node, command)?).with_context(|| format!("on {node}"))
    }

    /// Runs a command in all namespaces of the node and does not wait for its end. Its output is piped.
    pub fn spawn_on_node(&self, node: &str, command: &[&str]) -> Result<Child> {
        self.command_on_node(node, command)?
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("starting {command:?} on {node}"))
    }

    fn command_on_node(&self, node: &str, command: &[&str]) -> Result<Command> {
        let mut nsenter = Command::new("nsenter");
        nsenter
            .args(["-t", &self.node_pid(node)?.to_string(), "-a", "--"])
            .args(command);
        Ok(nsenter)
    }

    /// Imports an OCI archive into the containerd of every node, side by side.
    pub fn import_image(&self, archive: &Path) -> Result<()> {
        let archive = archive
            .canonicalize()
            .with_context(|| format!("image {}", archive.display()))?;
        let archive = archive.display().to_string();
        std::thread::scope(|scope| {
            let import = |node: &'static str| {
                let archive = archive.as_str();
                scope.spawn(move || {
                    self.exec_on_node(node, &["ctr", "-n", "k8s.io", "images", "import", archive])
                })
            };
            for thread in NODES.map(import) {
                thread
                    .join()
                    .map_err(|_| anyhow!("the importing thread panicked"))??;
            }
            Ok(())
        })
    }

    pub fn kubectl(&self, arguments: &[&str]) -> Result<String> {
        output(kubectl(&self.instance).args(arguments))
    }

    /// Applies JSON or YAML; the error has the server's message.
    pub fn kubectl_apply(&self, manifest: &str) -> Result<String> {
        output_with_input(kubectl(&self.instance).args(["apply", "-f", "-"]), manifest)
    }

    /// Runs a command in the first container of a pod.
    pub fn pod_exec(&self, namespace: &str, pod: &str, command: &[&str]) -> Result<String> {
        output(
            kubectl(&self.instance)
                .args(["exec", "-n", namespace, pod, "--"])
                .args(command),
        )
    }

    /// Asks until the answer is yes. An error counts as a no; the last error is returned when the patience ends.
    pub fn wait_for(&self, what: &str, patience: Duration, ask: impl FnMut() -> Result<bool>) -> Result<()> {
        wait_for(what, patience, POLL, ask)
    }

    /// Returns the running transitd pod of a node.
    pub fn transitd_pod(&self, node: &str) -> Result<String> {
        let selector = format!("--field-selector=spec.nodeName={node},status.phase=Running");
        let list = self.kubectl(&[
            "get",
            "pods",
            "-n",
            NAMESPACE,
            "-l",
            "app.kubernetes.io/name=transitd",
            &selector,
            "-o",
            "json",
        ])?;
        let list: serde_json::Value = serde_json::from_str(&list)?;
        let pods = list["items"].as_array().context("a list of pods")?;
        pods.iter()
            .find(|pod| pod["metadata"]["deletionTimestamp"].is_null())
            .and_then(|pod| pod["metadata"]["name"].as_str())
            .map(str::to_owned)
            .ok_or_else(|| anyhow!("no transitd runs on {node}"))
    }

    /// Returns all counters of the node's data plane, by name.
    pub fn counters(&self, node: &str) -> Result<BTreeMap<String, u64>> {
        let text = self.pod_exec(
            NAMESPACE,
            &self.transitd_pod(node)?,
            &["/bin/transitd", "counters"],
        )?;
        serde_json::from_str(&text).with_context(|| format!("counters of {node}: {text}"))
    }

    /// Returns all rows of the node's tables, as `transitd rows` prints them.
    pub fn table_rows(&self, node: &str) -> Result<Vec<serde_json::Value>> {
        let text = self.pod_exec(NAMESPACE, &self.transitd_pod(node)?, &["/bin/transitd", "rows"])?;
        let rows = text.lines().map(serde_json::from_str::<serde_json::Value>);
        rows.collect::<Result<Vec<_>, _>>().context("rows of transitd")
    }

    /// Returns how many rows of a VPC the node's tables hold.
    pub fn rows(&self, node: &str, vni: u64) -> Result<usize> {
        let rows = self.table_rows(node)?;
        let is_of = |row: &&serde_json::Value| row["key"]["vni"] == vni || row["entry"]["vni"] == vni;
        Ok(rows.iter().filter(is_of).count())
    }
}
