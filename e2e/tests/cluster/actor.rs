//! An actor with a token and nothing else, as the API server sees it.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use thuban_cluster::Cluster;
use thuban_proto::OBSERVE_TOKEN_AUDIENCE;

pub struct Actor {
    pub name: String,
    kubectl: PathBuf,
    cache: PathBuf,
    pub kubeconfig: PathBuf,
}

impl Actor {
    pub fn new(cluster: &Cluster, name: &str, token: &str) -> Result<Self> {
        Self::with(cluster, name, Some(token))
    }

    /// Returns the administrator who made the cluster.
    pub fn administrator(cluster: &Cluster) -> Result<Self> {
        Self::with(cluster, "the administrator", None)
    }

    fn with(cluster: &Cluster, name: &str, token: Option<&str>) -> Result<Self> {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let instance = cluster.instance();
        let admin = std::fs::read_to_string(instance.kubeconfig())?;
        let mut config: Value = serde_json::from_str(&admin).context("admin.conf")?;
        if let Some(token) = token {
            config["users"][0]["user"] = json!({"token": token.trim()});
        }
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let kubeconfig = instance
            .state()
            .join(format!("actor-{}-{number}.conf", std::process::id()));
        std::fs::write(&kubeconfig, config.to_string())?;
        Ok(Self {
            name: name.to_owned(),
            kubectl: instance.bin().join("kubectl"),
            cache: instance.state().join("kubectl-cache"),
            kubeconfig,
        })
    }

    /// Returns a ServiceAccount, with a token that the API server issues (bound to no pod).
    pub fn service_account(cluster: &Cluster, namespace: &str, name: &str) -> Result<Self> {
        let token = cluster.kubectl(&["create", "token", "-n", namespace, name])?;
        Self::new(cluster, name, &token)
    }

    pub fn kubectl(&self, arguments: &[&str]) -> Result<String> {
        self.with_input(arguments, "")
    }

    pub fn with_input(&self, arguments: &[&str], input: &str) -> Result<String> {
        let mut child = Command::new(&self.kubectl)
            .arg("--kubeconfig")
            .arg(&self.kubeconfig)
            .args(arguments)
            .env("KUBECACHEDIR", &self.cache)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        if let Some(mut pipe) = child.stdin.take() {
            // kubectl that is refused may not have read all of it.
            let _ = std::io::Write::write_all(&mut pipe, input.as_bytes());
        }
        let output = child.wait_with_output()?;
        if !output.status.success() {
            bail!("{}", String::from_utf8_lossy(&output.stderr).trim());
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Returns the object as this actor reads it.
    pub fn get(&self, arguments: &[&str]) -> Result<Value> {
        let arguments: Vec<&str> = ["get", "-o", "json"].iter().chain(arguments).copied().collect();
        Ok(serde_json::from_str(&self.kubectl(&arguments)?)?)
    }

    /// Does `create` or `replace` of an object, dry.
    pub fn write(&self, verb: &str, object: &Value, more: &[&str]) -> Result<String> {
        let arguments: Vec<&str> = [verb, "--dry-run=server", "--validate=false", "-f", "-"]
            .iter()
            .chain(more)
            .copied()
            .collect();
        self.with_input(&arguments, &object.to_string())
    }

    /// Asserts that the request is refused, in words that contain all of `expected`.
    pub fn is_refused(&self, what: &str, answer: Result<String>, expected: &[&str]) {
        let error = match answer {
            Ok(text) => panic!("{} may {what}: {text}", self.name),
            Err(error) => error.to_string(),
        };
        for word in expected {
            assert!(
                error.contains(word),
                "{} may not {what}, but {error:?} does not say {word:?}",
                self.name
            );
        }
    }

    /// Returns what RBAC grants in a namespace and everywhere: `resource [names]: verbs`, without the rights that
    /// everybody has.
    pub fn grants(&self, namespace: &str) -> Result<Vec<String>> {
        let list = self.kubectl(&["auth", "can-i", "--list", "--no-headers", "-n", namespace])?;
        let mut grants: Vec<String> = list
            .lines()
            .filter(|line| !line.starts_with(' ') && !line.starts_with("selfsubject"))
            .map(|line| {
                let mut columns = line.split('[').map(|column| column.trim().trim_end_matches(']'));
                let resource = columns.next().unwrap_or_default();
                let (_, names, verbs) = (columns.next(), columns.next(), columns.next());
                let mut verbs: Vec<&str> = verbs.unwrap_or_default().split(' ').collect();
                verbs.sort_unstable();
                format!("{resource} [{}]: {}", names.unwrap_or_default(), verbs.join(" "))
            })
            .collect();
        grants.sort();
        Ok(grants)
    }
}

impl Drop for Actor {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.kubeconfig);
    }
}

/// Returns a token of the transitd on `node`, as the owner of that node finds it: that for the API server (`api`), for
/// thuban-observe, or else for the operator.
pub fn token_of_node(cluster: &Cluster, node: &str, audience: &str) -> Result<String> {
    let pod = cluster.transitd_pod(node)?;
    let uid = cluster.kubectl(&[
        "get",
        "pod",
        "-n",
        "thuban-system",
        &pod,
        "-o",
        "jsonpath={.metadata.uid}",
    ])?;
    let folder = match audience {
        "api" => "kube-api-access-*",
        OBSERVE_TOKEN_AUDIENCE => "observe-token",
        _ => "token",
    };
    let command = format!("cat /var/lib/kubelet/pods/{uid}/volumes/kubernetes.io~projected/{folder}/token");
    cluster.exec_on_node(node, &["sh", "-c", &command])
}
