//! The control plane that the operator is measured with: etcd and an API server, Thuban's objects of `install/`, and
//! clients with the rights that operator and transitd have on a cluster. It is taken down when dropped.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::{
    authentication::v1::{BoundObjectReference, TokenRequest, TokenRequestSpec},
    core::v1::ServiceAccount,
};
use kube::{
    Api, Client, Config,
    api::PostParams,
    config::{KubeConfigOptions, Kubeconfig},
};
use thuban_api::SYSTEM_NAMESPACE;
use thuban_cluster::{Cluster, Instance, bare};
use thuban_proto::OPERATOR_TOKEN_AUDIENCE;

use super::process::{Launch, Usage, usage};
use crate::bench::api_server::ApiServer;

/// The parts of a run that are built elsewhere.
#[derive(Clone, Debug)]
pub struct Parts {
    /// Folder with etcd, kube-apiserver and kubectl.
    pub binaries: PathBuf,
    /// The operator's release binary.
    pub operator: PathBuf,
    /// Folder of the manifests.
    pub install: PathBuf,
}

/// Underlay of the nodes, which exist as objects only.
pub const UNDERLAY: &str = "100.64.0.0/16";
const PORT: u16 = 16282;
/// The port of the operator's metrics, its default.
const METRICS_PORT: u16 = 6083;
/// Who reads them.
const READER: &str = "bench-metrics";

pub struct Plane {
    server: ApiServer,
    /// A client with the rights of the cluster's administrator.
    pub admin: Client,
    /// A client with the rights of transitd: reads the operator's Lease and Droplets.
    pub transitd: Client,
    pub launch: Launch,
    metrics_token: String,
}

impl Plane {
    pub async fn up(parts: &Parts) -> Result<Self> {
        let server = ApiServer::up("scale", &parts.binaries)?;
        let instance = server.instance();
        apply(&server.cluster()?, &parts.install)?;
        let admin = client(&instance.kubeconfig()).await?;
        server.cluster()?.kubectl_apply(&reader().to_string())?;
        let metrics_token = token(&admin, READER, None).await?;
        let log = instance.logs().join("operator.log");
        let operator = kubeconfig_for(&admin, instance, "thuban-operator").await?;
        let transitd = kubeconfig_for(&admin, instance, "transitd").await?;
        let launch = Launch {
            binary: parts.operator.clone(),
            kubeconfig: operator,
            log,
            address: instance.gateway().to_string(),
            port: PORT,
            underlay: format!("{UNDERLAY},{}", instance.subnet()),
        };
        let transitd = client(&transitd).await?;
        Ok(Self {
            server,
            admin,
            transitd,
            launch,
            metrics_token,
        })
    }

    /// Returns the operator's page of metrics. The process at the port is the bench's own, so that nothing verifies it.
    pub fn metrics(&self) -> Result<String> {
        let output = Command::new("curl")
            .args([
                "--silent",
                "--show-error",
                "--fail",
                "--insecure",
                "--max-time",
                "10",
            ])
            .args([
                "--header",
                &format!("Authorization: Bearer {}", self.metrics_token),
            ])
            .arg(format!("https://{}:{METRICS_PORT}/metrics", self.launch.address))
            .output()
            .context("starting curl")?;
        let told = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "the operator's metrics: {}", told.trim());
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Returns the processes of etcd or the API server.
    pub fn processes(&self, component: &str) -> Vec<i32> {
        bare::processes(self.server.instance(), component).unwrap_or_default()
    }

    /// Returns CPU and memory of all processes of etcd or the API server.
    pub fn usage(&self, component: &str) -> Usage {
        let processes = self.processes(component);
        let usages = processes
            .iter()
            .filter_map(|process| usage(u32::try_from(*process).ok()?).ok());
        usages.fold(Usage::default(), |sum, one| Usage {
            cpu_seconds: sum.cpu_seconds + one.cpu_seconds,
            rss_mib: sum.rss_mib + one.rss_mib,
            most_rss_mib: sum.most_rss_mib + one.most_rss_mib,
        })
    }

    pub fn state(&self) -> PathBuf {
        self.server.instance().state()
    }

    /// Copies the operator's log, because it is removed with the control plane.
    pub fn save_log(&self, folder: &Path) {
        let _ = fs::copy(&self.launch.log, folder.join("scale-operator.log"));
    }
}

/// Returns an account that may read metrics.
fn reader() -> serde_json::Value {
    serde_json::json!({"apiVersion": "v1", "kind": "List", "items": [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": READER, "namespace": SYSTEM_NAMESPACE}},
        {
            "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": {"name": READER},
            "roleRef": {
                "apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "thuban-metrics-reader",
            },
            "subjects": [{"kind": "ServiceAccount", "name": READER, "namespace": SYSTEM_NAMESPACE}],
        },
    ]})
}

/// Applies the manifests, whose names begin with their order. Without controllers the workloads among them start
/// nothing.
fn apply(cluster: &Cluster, folder: &Path) -> Result<()> {
    let is_manifest = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with(|first: char| first.is_ascii_digit()) && name.ends_with(".yaml")
    };
    let entries = fs::read_dir(folder).with_context(|| format!("reading {}", folder.display()))?;
    let entries = entries.flatten().map(|entry| entry.path());
    let mut files: Vec<PathBuf> = entries.filter(is_manifest).collect();
    files.sort();
    for file in files {
        let text = fs::read_to_string(&file).with_context(|| format!("reading {}", file.display()))?;
        cluster
            .kubectl_apply(&text)
            .with_context(|| format!("applying {}", file.display()))?;
    }
    let crds = ["vpcs", "networks", "endpoints", "dividers", "bouncers"]
        .iter()
        .chain(&["droplets", "ipclaims", "vniclaims"])
        .map(|plural| format!("crd/{plural}.thuban.dev"))
        .collect::<Vec<_>>();
    let mut wait = vec!["wait", "--for=condition=Established", "--timeout=60s"];
    wait.extend(crds.iter().map(String::as_str));
    cluster.kubectl(&wait).map(|_| ())
}

async fn client(kubeconfig: &Path) -> Result<Client> {
    let read =
        Kubeconfig::read_from(kubeconfig).with_context(|| format!("reading {}", kubeconfig.display()))?;
    let config = Config::from_custom_kubeconfig(read, &KubeConfigOptions::default())
        .await
        .with_context(|| format!("reading {}", kubeconfig.display()))?;
    Client::try_from(config).with_context(|| format!("a client by {}", kubeconfig.display()))
}

/// Writes a kubeconfig with the token of one of Thuban's ServiceAccounts.
async fn kubeconfig_for(admin: &Client, instance: &Instance, account: &str) -> Result<PathBuf> {
    let token = token(admin, account, None).await?;
    let text = fs::read_to_string(instance.kubeconfig()).context("reading the administrator's kubeconfig")?;
    let mut config: serde_json::Value = serde_json::from_str(&text).context("a kubeconfig")?;
    config["users"][0]["user"] = serde_json::json!({ "token": token });
    let path = instance.state().join(format!("{account}.conf"));
    fs::write(&path, config.to_string()).with_context(|| format!("writing {}", path.display()))?;
    Ok(path)
}

/// Returns a token as kubelet projects it: for the operator's stream and bound to a pod (name, UID), or for the API
/// server.
pub async fn token(admin: &Client, account: &str, pod: Option<(String, String)>) -> Result<String> {
    let accounts: Api<ServiceAccount> = Api::namespaced(admin.clone(), SYSTEM_NAMESPACE);
    let audiences = pod.is_some().then(|| vec![OPERATOR_TOKEN_AUDIENCE.to_owned()]);
    let bound = pod.map(|(name, uid)| BoundObjectReference {
        api_version: Some("v1".into()),
        kind: Some("Pod".into()),
        name: Some(name),
        uid: Some(uid),
    });
    let request = TokenRequest {
        spec: Some(TokenRequestSpec {
            audiences,
            bound_object_ref: bound,
            expiration_seconds: Some(7200),
            ..TokenRequestSpec::default()
        }),
        ..TokenRequest::default()
    };
    let answer = accounts
        .create_token_request(account, &PostParams::default(), &request)
        .await
        .with_context(|| format!("a token of {account}"))?;
    answer
        .status
        .and_then(|status| status.token)
        .context("a token request without a token")
}
