//! A node: containerd and kubelet in namespaces of their own, under the usual paths of a machine.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};

use crate::{
    cgroups,
    control_plane::{binaries, spawn},
    instance::Instance,
    mount_points::PRIVATE,
    network::namespace_path,
};

const INIT: &str = include_str!("init.sh");

const CONTAINERD: &str = r#"version = 2
disabled_plugins = [
  "io.containerd.internal.v1.opt",
  "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper",
  "io.containerd.snapshotter.v1.zfs",
  "io.containerd.tracing.processor.v1.otlp",
]
[metrics]
# Times of the CNI plugin are among the metrics. The address is the node's own loopback.
address = "127.0.0.1:1338"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "registry.k8s.io/pause:3.10"
# Without CAP_SYS_RESOURCE a lower score than one's own cannot be set.
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "/opt/cni/bin"
conf_dir = "/etc/cni/net.d"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
SystemdCgroup = false
"#;

/// Returns the cgroup of a node: kubelet's root for pods.
pub fn group(instance: &Instance, node: &str) -> String {
    format!("{}/{node}", instance.cgroup())
}

/// Returns the cgroup of the node's own processes (the root may hold none under cgroup v2).
fn init_group(instance: &Instance, node: &str) -> String {
    format!("{}/init", group(instance, node))
}

/// Starts the node's first process. Images are imported and kubelet is started when the API server is up. The node's
/// network namespace exists already.
pub fn start(
    instance: &Instance,
    node: &str,
    binaries: &Path,
    runtime: Option<&Path>,
    images: &[PathBuf],
) -> Result<()> {
    let state = instance.node_state(node);
    fs::create_dir_all(state.join("log"))?;
    cgroups::create(&group(instance, node))?;
    let write = |name: &str, text: &str| {
        fs::write(state.join(name), text).with_context(|| format!("writing {name} of {node}"))
    };
    write("init.sh", INIT)?;
    write("private-paths", &PRIVATE.map(|path| format!("{path}\n")).concat())?;
    write("containerd.toml", CONTAINERD)?;
    write("kubelet.yaml", &format!("{:#}\n", kubelet(instance, node)))?;
    let text = |path: &Path| path.display().to_string();
    let network = format!(
        "--net={}",
        text(&namespace_path(&instance.network_namespace(node)))
    );
    let mut arguments: Vec<String> = [
        network.as_str(),
        "unshare",
        "--mount",
        "--uts",
        "--pid",
        "--fork",
        "--mount-proc",
        "--kill-child",
        "bash",
    ]
    .map(String::from)
    .into();
    arguments.extend([
        text(&state.join("init.sh")),
        node.into(),
        instance.node_address(node)?.to_string(),
    ]);
    arguments.extend([text(&state), text(&instance.state()), text(binaries)]);
    // This folder is first in the node's PATH.
    arguments.push(text(runtime.unwrap_or(binaries)));
    arguments.extend(images.iter().map(|image| text(image)));
    spawn(
        &init_group(instance, node),
        &state.join("log/init.log"),
        Path::new("nsenter"),
        &arguments,
    )
    .with_context(|| format!("starting {node}"))
}

/// Returns true when kubelet has been started, and an error if the node's start has failed.
pub fn is_started(instance: &Instance, node: &str) -> Result<bool> {
    let state = instance.node_state(node);
    if let Ok(reason) = fs::read_to_string(state.join("failed")) {
        bail!(
            "{node} did not start: {}, see {}",
            reason.trim(),
            state.join("log").display()
        );
    }
    Ok(state.join("ready").exists())
}

/// Starts kubelet in the same way as [`INIT`], on a node on which it has ended.
pub fn start_kubelet(instance: &Instance, node: &str) -> Result<()> {
    let state = instance.node_state(node);
    let text = |path: PathBuf| path.display().to_string();
    let arguments = [
        "--config".into(),
        text(state.join("kubelet.yaml")),
        "--kubeconfig".into(),
        text(instance.state().join(format!("{node}.conf"))),
        "--hostname-override".into(),
        node.into(),
        "--node-ip".into(),
        instance.node_address(node)?.to_string(),
    ];
    let kubelet = binaries(instance)?.join("kubelet");
    enter_and_start(
        instance,
        node,
        &state.join("log/kubelet-again.log"),
        &kubelet,
        &arguments,
    )
}

/// Starts another program on a node.
pub fn start_program(
    instance: &Instance,
    node: &str,
    log: &str,
    program: &Path,
    arguments: &[String],
) -> Result<()> {
    enter_and_start(instance, node, &instance.logs().join(log), program, arguments)
}

/// Starts a program in all namespaces of a node, and in the cgroup of its own processes.
fn enter_and_start(
    instance: &Instance,
    node: &str,
    log: &Path,
    program: &Path,
    arguments: &[String],
) -> Result<()> {
    let Some(process) = first_process(instance, node)? else {
        bail!("{node} is down");
    };
    let mut all: Vec<String> = ["-t", &process.to_string(), "-a", "--"].map(String::from).into();
    all.push(program.display().to_string());
    all.extend_from_slice(arguments);
    spawn(&init_group(instance, node), log, Path::new("nsenter"), &all)
        .with_context(|| format!("starting {} on {node}", program.display()))
}

/// Returns the node's first process as this PID namespace sees it; none if the node is down.
pub fn first_process(instance: &Instance, node: &str) -> Result<Option<u32>> {
    let own_depth = namespace_ids("self").map_or(1, |ids| ids.len());
    for process in cgroups::processes(&init_group(instance, node))? {
        // A first process has id 1 in a namespace directly beneath ours; first processes of containers are one level
        // deeper.
        let ids = namespace_ids(&process.to_string()).unwrap_or_default();
        if ids.len() == own_depth + 1 && ids.last().is_some_and(|id| id == "1") {
            return Ok(u32::try_from(process).ok());
        }
    }
    Ok(None)
}

/// Returns a process's ids from this PID namespace inwards.
fn namespace_ids(process: &str) -> Option<Vec<String>> {
    let status = fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    Some(line.split_whitespace().map(String::from).collect())
}

fn kubelet(instance: &Instance, node: &str) -> serde_json::Value {
    serde_json::json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
        "failCgroupV1": false,
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": format!("/{}", group(instance, node)),
        "cgroupsPerQOS": true,
        "enforceNodeAllocatable": [],
        "clusterDNS": ["10.96.0.10"],
        "clusterDomain": "cluster.local",
        "failSwapOn": false,
        "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
        "authentication": {
            "anonymous": {"enabled": false},
            "webhook": {"enabled": false},
            "x509": {"clientCAFile": instance.pki().join("ca.crt")},
        },
        "authorization": {"mode": "AlwaysAllow"},
        "evictionHard": {"memory.available": "100Mi"},
        "imageGCHighThresholdPercent": 100,
        "resolvConf": "",
        "volumePluginDir": "/var/lib/kubelet/volume-plugins",
        // The network plugin does host ports and masquerading.
        "makeIPTablesUtilChains": false,
        "maxPods": 120,
        "serializeImagePulls": false,
        "registryPullQPS": 0,
        "eventRecordQPS": 0,
        "kubeAPIQPS": 50,
        "kubeAPIBurst": 100,
    })
}
