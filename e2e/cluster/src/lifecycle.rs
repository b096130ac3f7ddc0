//! Brings an instance up and down, and tells its status. Each operation can be repeated, and has the same result after
//! an interruption.

use std::{
    fs::{self, File},
    io::ErrorKind,
    os::{fd::AsFd, unix::fs::symlink},
    path::PathBuf,
    process::{Command, ExitStatus},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, bail};
use nix::fcntl::{Flock, FlockArg};

use crate::{
    cgroups,
    command::output,
    control_plane,
    instance::{Instance, NODES},
    mount_points, network, node, pki, relay,
    wait::wait_until,
};

/// The parts of which an instance is made.
pub struct Options {
    /// Folder with etcd, kube-apiserver, kube-controller-manager, kube-scheduler, kubelet and kubectl.
    pub binaries: PathBuf,
    /// OCI archives that every node imports before kubelet starts; the pause image must be among them.
    pub images: Vec<PathBuf>,
    /// Nodes that run the containerd of another folder, with its shim and ctr beside it.
    pub runtimes: Vec<(String, PathBuf)>,
    /// Nodes whose uplink passes GSO frames whole; the uplinks of all other nodes segment.
    pub whole_gso: Vec<String>,
    /// xtask, if the control plane and pods shall reach each other ([`relay`]).
    pub relay: Option<PathBuf>,
    /// A function that gets a line at each step.
    pub progress: fn(&str),
}

/// The parts of an instance that exist.
#[derive(Debug)]
pub struct Status {
    /// Control plane components, each with whether it runs.
    pub components: Vec<(&'static str, bool)>,
    pub api_ready: bool,
    /// Nodes, each with whether its first process lives, and its Ready condition (none: not registered).
    pub nodes: Vec<(&'static str, bool, Option<String>)>,
}

impl Status {
    pub fn is_up(&self) -> bool {
        self.api_ready
            && self.components.iter().all(|(_, runs)| *runs)
            && self
                .nodes
                .iter()
                .all(|(_, lives, ready)| *lives && ready.is_some())
    }
}

/// Brings the instance up, or leaves it unchanged if it is up. A half-made instance is taken down first.
pub fn up(instance: &Instance, options: &Options) -> Result<()> {
    let _lock = lock(instance)?;
    if status(instance)?.is_up() {
        (options.progress)(&format!("cluster {} is up", instance.name()));
        return Ok(());
    }
    if !leftovers(instance)?.is_empty() {
        (options.progress)(&format!(
            "cluster {}: removing what is left of an earlier one",
            instance.name()
        ));
        take_down(instance)?;
    }
    let result = build(instance, options);
    if result.is_err() {
        (options.progress)(&format!("logs are in {}", instance.state().display()));
    }
    result.with_context(|| format!("cluster {} up", instance.name()))
}

fn build(instance: &Instance, options: &Options) -> Result<()> {
    let begin = Instant::now();
    let say = |what: &str| {
        (options.progress)(&format!(
            "cluster {}: {what} ({:.1} s)",
            instance.name(),
            begin.elapsed().as_secs_f32()
        ));
    };
    for image in &options.images {
        if !image.is_absolute() || !image.exists() {
            bail!("image {}: no such file, or not an absolute path", image.display());
        }
    }
    fs::create_dir_all(instance.logs())?;
    fs::create_dir_all(instance.bin())?;
    symlink(options.binaries.join("kubectl"), instance.bin().join("kubectl")).context("linking kubectl")?;
    mount_points::create()?;
    pki::create(instance)?;
    cgroups::create(&instance.cgroup())?;
    say("certificates made");
    network::create_bridge(instance)?;
    for name in NODES {
        network::create_node(
            instance,
            name,
            options.whole_gso.iter().any(|whole| whole == name),
        )?;
        let runtime = options.runtimes.iter().find(|(node, _)| node == name);
        let runtime = runtime.map(|(_, folder)| folder.as_path());
        node::start(instance, name, &options.binaries, runtime, &options.images)?;
    }
    say("nodes started");
    if let Some(program) = &options.relay {
        relay::start(instance, program)?;
    }
    control_plane::start(instance, &options.binaries)?;
    fs::write(instance.state().join("api-ready"), "")?;
    say("API server ready");
    wait_registered(instance)?;
    say("nodes registered");
    Ok(())
}

fn wait_registered(instance: &Instance) -> Result<()> {
    let (patience, pause) = (Duration::from_mins(2), Duration::from_millis(200));
    let mut last = None;
    let waited = wait_until("all nodes to register", patience, pause, || {
        let mut started = true;
        for name in NODES {
            started &= node::is_started(instance, name)?;
        }
        let now = status(instance)?;
        let is_up = started && now.is_up();
        last = Some(now);
        Ok(is_up.then_some(()))
    });
    waited.with_context(|| format!("not all nodes have registered: {last:?}"))
}

/// Removes every trace of the instance; an error names what remains.
pub fn down(instance: &Instance) -> Result<()> {
    {
        let _lock = lock(instance)?;
        take_down(instance)?;
        let left = leftovers(instance)?;
        if !left.is_empty() {
            bail!("cluster {} left behind: {}", instance.name(), left.join(", "));
        }
        fs::remove_file(lock_path(instance)).context("removing the lock")?;
    }
    mount_points::remove_unused();
    Ok(())
}

pub(crate) fn take_down(instance: &Instance) -> Result<()> {
    let group = instance.cgroup();
    // The signal is not SIGTERM: the API server would wait a minute for its watchers.
    cgroups::kill_all(&group, Duration::from_secs(30))?;
    network::remove(instance)?;
    cgroups::remove(&group)?;
    let state = instance.state();
    if state.exists() {
        fs::remove_dir_all(&state).with_context(|| format!("removing {}", state.display()))?;
    }
    Ok(())
}

/// Returns everything of the instance that exists, described.
pub(crate) fn leftovers(instance: &Instance) -> Result<Vec<String>> {
    let group = instance.cgroup();
    let mut left = network::leftovers(instance);
    left.extend(
        cgroups::processes(&group)?
            .iter()
            .map(|process| format!("process {process}")),
    );
    left.extend(
        cgroups::leftovers(&group)?
            .iter()
            .map(|folder| format!("cgroup {}", folder.display())),
    );
    let state = instance.state();
    if state.exists() {
        left.push(state.display().to_string());
    }
    let mounts = fs::read_to_string("/proc/self/mounts")?;
    let under = format!("{}/", state.display());
    left.extend(
        mounts
            .lines()
            .filter(|line| line.contains(&under))
            .map(|line| format!("mount {line}")),
    );
    Ok(left)
}

/// Reads the instance's state; changes nothing.
pub fn status(instance: &Instance) -> Result<Status> {
    let mut components = Vec::new();
    for component in control_plane::COMPONENTS {
        components.push((
            component,
            !cgroups::processes(&control_plane::group(instance, component))?.is_empty(),
        ));
    }
    let served = components
        .iter()
        .all(|(name, runs)| *runs || !matches!(*name, "etcd" | "apiserver"));
    let api_ready = served && control_plane::is_ready(instance);
    let ready = if api_ready {
        ready_conditions(instance)?
    } else {
        serde_json::Value::Null
    };
    let mut nodes = Vec::new();
    for name in NODES {
        let condition = ready["items"]
            .as_array()
            .and_then(|items| items.iter().find(|item| item["metadata"]["name"] == name))
            .map(|item| {
                let conditions = item["status"]["conditions"].as_array();
                let ready =
                    conditions.and_then(|all| all.iter().find(|condition| condition["type"] == "Ready"));
                ready
                    .and_then(|condition| condition["status"].as_str())
                    .unwrap_or("Unknown")
                    .to_owned()
            });
        nodes.push((name, node::first_process(instance, name)?.is_some(), condition));
    }
    Ok(Status {
        components,
        api_ready,
        nodes,
    })
}

fn ready_conditions(instance: &Instance) -> Result<serde_json::Value> {
    let nodes = output(control_plane::kubectl(instance).args(["get", "nodes", "-o", "json"]))?;
    Ok(serde_json::from_str(&nodes)?)
}

/// Returns shell lines that point kubectl at the instance.
pub fn env(instance: &Instance) -> String {
    format!(
        "export KUBECONFIG={}\nexport KUBECACHEDIR={}\nexport THUBAN_CLUSTER={}\nexport PATH={}:$PATH\n",
        instance.kubeconfig().display(),
        instance.kubectl_cache().display(),
        instance.name(),
        instance.bin().display(),
    )
}

/// Runs a command in all namespaces of a node, with the caller's standard streams.
pub fn exec(instance: &Instance, node: &str, command: &[String]) -> Result<ExitStatus> {
    let process = first_process(instance, node)?;
    let mut nsenter = Command::new("nsenter");
    nsenter
        .args(["-t", &process.to_string(), "-a", "--"])
        .args(command);
    nsenter.status().context("starting nsenter")
}

/// Returns the node's first process, or an error that says what to do.
pub(crate) fn first_process(instance: &Instance, node: &str) -> Result<u32> {
    instance.node_address(node)?;
    node::first_process(instance, node)?.ok_or_else(|| {
        anyhow!(
            "{node} of cluster {} is down: run `cargo xtask cluster up`",
            instance.name()
        )
    })
}

fn lock_path(instance: &Instance) -> PathBuf {
    Instance::all_state().join(format!("{}.lock", instance.name()))
}

/// Keeps two processes from changing one instance at once.
pub(crate) fn lock(instance: &Instance) -> Result<Flock<File>> {
    if !nix::unistd::geteuid().is_root() {
        bail!("a cluster needs root");
    }
    let state = Instance::all_state();
    loop {
        fs::create_dir_all(state).with_context(|| format!("making {}", state.display()))?;
        let path = lock_path(instance);
        let file = match File::create(&path) {
            // Another instance that came down has removed the empty folder.
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            created => created.with_context(|| format!("making {}", path.display()))?,
        };
        let lock = Flock::lock(file, FlockArg::LockExclusive)
            .map_err(|(_, error)| error)
            .context("locking")?;
        // The process that held the lock may have removed the file at its end: then the lock is on nothing.
        let held = nix::sys::stat::fstat(lock.as_fd())?.st_ino;
        if nix::sys::stat::stat(&path).is_ok_and(|there| there.st_ino == held) {
            return Ok(lock);
        }
    }
}
