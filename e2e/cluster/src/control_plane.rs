//! etcd, API server, controller manager and scheduler: each in a cgroup of its own, on the bridge's address.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::{Context, Result, bail};

use crate::{
    cgroups,
    command::{output, run},
    instance::Instance,
    relay,
    wait::wait_until,
};

/// Names in the cgroup tree, in the order in which the components start.
pub const COMPONENTS: [&str; 4] = ["etcd", "apiserver", "controller-manager", "scheduler"];
const SERVICE_RANGE: &str = "10.96.0.0/16";

/// Starts all and waits until the API server is ready.
pub fn start(instance: &Instance, binaries: &Path) -> Result<()> {
    start_api_server(instance, binaries)?;
    start_component(instance, binaries, "controller-manager")?;
    start_component(instance, binaries, "scheduler")
}

/// Starts etcd and the API server alone and waits until it is ready.
pub fn start_api_server(instance: &Instance, binaries: &Path) -> Result<()> {
    start_component(instance, binaries, "etcd")?;
    start_component(instance, binaries, "apiserver")?;
    wait_ready(instance, Duration::from_mins(1))
}

/// Ends components as a crash does; those that others need end last.
pub fn stop(instance: &Instance, components: &[&str]) -> Result<()> {
    for component in COMPONENTS.iter().rev().filter(|name| components.contains(name)) {
        cgroups::kill_all(&group(instance, component), Duration::from_secs(10))?;
    }
    Ok(())
}

/// Starts components again, on the existing state, and waits until the API server is ready.
pub fn resume(instance: &Instance, components: &[&str]) -> Result<()> {
    let binaries = binaries(instance)?;
    for component in COMPONENTS.iter().filter(|name| components.contains(name)) {
        start_component(instance, &binaries, component)?;
    }
    wait_ready(instance, Duration::from_mins(1))
}

/// Returns the folder with the instance's binaries.
pub fn binaries(instance: &Instance) -> Result<PathBuf> {
    let kubectl = instance.bin().join("kubectl");
    let kubectl = kubectl.read_link().context("the link to kubectl")?;
    let folder = kubectl.parent().context("the folder of kubectl")?;
    Ok(folder.to_owned())
}

/// Keeps a copy of etcd's state, in place of an older one. etcd must have ended.
pub fn save_state(instance: &Instance) -> Result<()> {
    copy_state(&state(instance), &saved_state(instance))
}

/// Puts the copy in the place of etcd's state: the store goes back in time. etcd must have ended.
pub fn restore_state(instance: &Instance) -> Result<()> {
    copy_state(&saved_state(instance), &state(instance))
}

fn copy_state(from: &Path, to: &Path) -> Result<()> {
    if to.exists() {
        fs::remove_dir_all(to).with_context(|| format!("removing {}", to.display()))?;
    }
    let [from, to] = [from, to].map(|path| path.display().to_string());
    run("cp", &["-a", &from, &to]).map(|_| ())
}

fn state(instance: &Instance) -> PathBuf {
    instance.state().join("etcd")
}

fn saved_state(instance: &Instance) -> PathBuf {
    instance.state().join("etcd-saved")
}

/// Returns the cgroup of a component.
pub fn group(instance: &Instance, component: &str) -> String {
    format!("{}/cp/{component}", instance.cgroup())
}

/// Returns kubectl as the administrator. Its cache is removed with the instance.
pub fn kubectl(instance: &Instance) -> Command {
    let mut command = Command::new(instance.bin().join("kubectl"));
    command
        .arg("--kubeconfig")
        .arg(instance.kubeconfig())
        .env("KUBECACHEDIR", instance.kubectl_cache());
    command
}

/// Whether the API server says that it is ready.
pub fn is_ready(instance: &Instance) -> bool {
    output(kubectl(instance).args(["get", "--raw", "/readyz", "--request-timeout=3s"])).is_ok()
}

fn wait_ready(instance: &Instance, patience: Duration) -> Result<()> {
    let what = format!(
        "the API server to be ready, see {}",
        log(instance, "apiserver").display()
    );
    wait_until(&what, patience, Duration::from_millis(100), || {
        if is_ready(instance) {
            return Ok(Some(()));
        }
        for component in ["etcd", "apiserver"] {
            if cgroups::processes(&group(instance, component))?.is_empty() {
                bail!(
                    "{component} has ended:\n{}",
                    last_lines(&log(instance, component))
                );
            }
        }
        Ok(None)
    })
}

fn log(instance: &Instance, component: &str) -> PathBuf {
    instance.logs().join(format!("{component}.log"))
}

fn last_lines(path: &Path) -> String {
    run("tail", &["-n", "5", &path.display().to_string()]).unwrap_or_default()
}

fn start_component(instance: &Instance, binaries: &Path, component: &str) -> Result<()> {
    let (binary, arguments) = match component {
        "etcd" => ("etcd", etcd(instance)),
        "apiserver" => ("kube-apiserver", api_server(instance)),
        "controller-manager" => ("kube-controller-manager", controller_manager(instance)),
        "scheduler" => ("kube-scheduler", scheduler(instance)),
        other => bail!("{other}: expected one of {}", COMPONENTS.join(", ")),
    };
    spawn(
        &group(instance, component),
        &log(instance, component),
        &binaries.join(binary),
        &arguments,
    )
    .with_context(|| format!("starting {component}"))
}

/// Starts a program that goes on after this one: in `group`, in a session of its own, with its output in `log`.
pub fn spawn(group: &str, log: &Path, program: &Path, arguments: &[String]) -> Result<()> {
    let script =
        "echo $$ > \"$1\" && log=$2 && shift 2 && exec setsid --fork \"$@\" > \"$log\" 2>&1 < /dev/null";
    let mut shell = Command::new("sh");
    shell
        .args(["-c", script, "sh"])
        .arg(cgroups::processes_file(group)?)
        .arg(log)
        .arg(program)
        .args(arguments);
    shell.current_dir("/");
    output(&mut shell).map(|_| ())
}

fn etcd(instance: &Instance) -> Vec<String> {
    let client = format!("http://127.0.0.1:{}", instance.etcd_port());
    let peer = format!("http://127.0.0.1:{}", instance.etcd_peer_port());
    vec![
        format!("--data-dir={}", state(instance).display()),
        format!("--listen-client-urls={client}"),
        format!("--advertise-client-urls={client}"),
        format!("--listen-peer-urls={peer}"),
        format!("--initial-advertise-peer-urls={peer}"),
        format!("--initial-cluster=default={peer}"),
        "--unsafe-no-fsync".into(),
        // Between two compactions, 5 minutes, a benchmark writes more than the default of 2 GiB.
        "--quota-backend-bytes=8589934592".into(),
        "--log-level=warn".into(),
    ]
}

fn api_server(instance: &Instance) -> Vec<String> {
    let pki = |name: &str| instance.pki().join(name).display().to_string();
    let egress = relay::config(instance);
    let egress = egress
        .exists()
        .then(|| format!("--egress-selector-config-file={}", egress.display()));
    let arguments = vec![
        format!("--etcd-servers=http://127.0.0.1:{}", instance.etcd_port()),
        format!("--service-cluster-ip-range={SERVICE_RANGE}"),
        format!("--bind-address={}", instance.gateway()),
        format!("--secure-port={}", instance.api_port()),
        format!("--advertise-address={}", instance.gateway()),
        format!("--tls-cert-file={}", pki("apiserver.crt")),
        format!("--tls-private-key-file={}", pki("apiserver.key")),
        format!("--client-ca-file={}", pki("ca.crt")),
        "--service-account-issuer=https://kubernetes.default.svc".into(),
        format!("--service-account-key-file={}", pki("service-accounts.key")),
        format!(
            "--service-account-signing-key-file={}",
            pki("service-accounts.key")
        ),
        "--authorization-mode=Node,RBAC".into(),
        "--enable-admission-plugins=NodeRestriction".into(),
        format!("--kubelet-client-certificate={}", pki("admin.crt")),
        format!("--kubelet-client-key={}", pki("admin.key")),
        "--kubelet-preferred-address-types=InternalIP".into(),
        "--allow-privileged=true".into(),
    ];
    arguments.into_iter().chain(egress).collect()
}

fn controller_manager(instance: &Instance) -> Vec<String> {
    let pki = |name: &str| instance.pki().join(name).display().to_string();
    vec![
        format!(
            "--kubeconfig={}",
            instance.state().join("controller-manager.conf").display()
        ),
        "--bind-address=127.0.0.1".into(),
        format!("--secure-port={}", instance.controller_manager_port()),
        "--use-service-account-credentials".into(),
        format!("--root-ca-file={}", pki("ca.crt")),
        format!(
            "--service-account-private-key-file={}",
            pki("service-accounts.key")
        ),
        format!("--cluster-signing-cert-file={}", pki("ca.crt")),
        format!("--cluster-signing-key-file={}", pki("ca.key")),
        "--leader-elect=false".into(),
        "--kube-api-qps=100".into(),
        "--kube-api-burst=200".into(),
        // The default folder is under /usr/libexec.
        format!(
            "--flex-volume-plugin-dir={}",
            instance.state().join("volume-plugins").display()
        ),
    ]
}

fn scheduler(instance: &Instance) -> Vec<String> {
    vec![
        format!(
            "--kubeconfig={}",
            instance.state().join("scheduler.conf").display()
        ),
        "--bind-address=127.0.0.1".into(),
        format!("--secure-port={}", instance.scheduler_port()),
        "--leader-elect=false".into(),
        "--kube-api-qps=100".into(),
        "--kube-api-burst=200".into(),
    ]
}
