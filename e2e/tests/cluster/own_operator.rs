//! Operators as processes of the test, beside the cluster's nodes, built with failpoints. The cluster's own operators
//! rest.

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use thuban_cluster::Cluster;

use crate::support::{binary, get};

const SYSTEM: &str = "thuban-system";
const DEPLOYMENT: &str = "deployment/thuban-operator";

/// The operator, which `cargo xtask test` builds with failpoints.
const OPERATOR: &str = "thuban-operator";

/// Keeps all of the cluster's own operators stopped until this is dropped.
pub struct Stage<'a> {
    pub cluster: &'a Cluster,
    folder: PathBuf,
}

impl<'a> Stage<'a> {
    pub fn new(cluster: &'a Cluster) -> Result<Self> {
        let folder = std::env::temp_dir().join(format!("thuban-outside-{}", std::process::id()));
        fs::create_dir_all(&folder)?;
        let stage = Self { cluster, folder };
        binary(OPERATOR)?;
        cluster.kubectl(&["scale", "-n", SYSTEM, DEPLOYMENT, "--replicas=0"])?;
        cluster.wait_for("no operator", Duration::from_mins(1), || {
            let selector = "app.kubernetes.io/name=thuban-operator";
            let pods = get(cluster, &["pods", "-n", SYSTEM, "-l", selector])?;
            Ok(pods["items"].as_array().is_some_and(Vec::is_empty))
        })?;
        // The operator gets its own account: nobody else may write what it writes.
        let token = cluster.kubectl(&[
            "create",
            "token",
            "-n",
            SYSTEM,
            "thuban-operator",
            "--duration=2h",
        ])?;
        let config = cluster.kubectl(&["config", "view", "--raw", "--flatten", "-o", "json"])?;
        let mut config: serde_json::Value = serde_json::from_str(&config)?;
        config["users"][0]["user"] = serde_json::json!({"token": token.trim()});
        fs::write(stage.folder.join("config"), config.to_string())?;
        Ok(stage)
    }

    /// Starts an operator at this port of the bridge.
    pub fn operator(&self, name: &str, port: u16, environment: &[(&str, &str)]) -> Result<Operator> {
        let config = get(self.cluster, &["configmap", "-n", SYSTEM, "thuban-config"])?;
        let log = self.folder.join(name);
        let mut command = Command::new(binary(OPERATOR)?);
        command.env_clear();
        for (key, value) in config["data"].as_object().context("thuban-config")? {
            if key.starts_with("THUBAN_") {
                command.env(key, value.as_str().unwrap_or_default());
            }
        }
        let child = command
            .envs([("POD_NAME", name), ("RUST_BACKTRACE", "0")])
            .env("KUBECONFIG", self.folder.join("config"))
            .env("POD_IP", self.cluster.gateway().to_string())
            .env("THUBAN_LISTEN_PORT", port.to_string())
            .env("THUBAN_METRICS_PORT", "0")
            .envs(environment.iter().copied())
            .stdin(Stdio::null())
            .stdout(File::create(&log)?)
            .stderr(File::options().append(true).open(&log)?)
            .spawn()
            .context("starting an operator")?;
        Ok(Operator { child, log })
    }

    /// Takes the Lease from its holder, so that the next operator need not wait for its expiry.
    pub fn free_lease(&self) -> Result<()> {
        let patch = r#"{"spec":{"holderIdentity":""}}"#;
        let lease = [
            "patch",
            "lease",
            "-n",
            SYSTEM,
            "thuban-operator",
            "--type=merge",
            "-p",
            patch,
        ];
        self.cluster.kubectl(&lease).map(|_| ())
    }
}

impl Drop for Stage<'_> {
    fn drop(&mut self) {
        let _ = self.free_lease();
        let _ = self
            .cluster
            .kubectl(&["scale", "-n", SYSTEM, DEPLOYMENT, "--replicas=2"]);
        let _ = self
            .cluster
            .kubectl(&["rollout", "status", "-n", SYSTEM, DEPLOYMENT, "--timeout=120s"]);
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// An operator that is killed when this is dropped.
pub struct Operator {
    child: Child,
    log: PathBuf,
}

impl Operator {
    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Returns how the operator ended, if it ends within this time.
    pub fn ends_within(&mut self, patience: Duration) -> Result<Option<ExitStatus>> {
        let end = Instant::now() + patience;
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(Some(status));
            }
            if Instant::now() > end {
                return Ok(None);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Waits until the operator serves that many droplets.
    pub fn wait_serving(&self, cluster: &Cluster, droplets: usize) -> Result<()> {
        cluster.wait_for("streams to it", Duration::from_secs(40), || {
            let nodes = cluster.nodes()?;
            let log = self.log();
            let opened = |node: &&String| {
                log.lines().any(|line| {
                    line.contains("stream opened") && line.contains(&format!("droplet=\"{node}\""))
                })
            };
            Ok(nodes.iter().filter(opened).count() >= droplets)
        })
    }
}

impl Drop for Operator {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
