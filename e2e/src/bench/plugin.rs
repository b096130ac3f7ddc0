//! A CNI plugin as a runtime runs it, and the pods that it serves.

use std::{
    io::{Read, Write},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};

use crate::rig::namespace::Namespace;

/// A network namespace that is wired and freed again and again, with the name of its container.
#[derive(Debug)]
pub struct Pod {
    pub number: usize,
    pub namespace: Namespace,
}

impl Pod {
    pub fn new(number: usize) -> Result<Self> {
        let namespace = Namespace::new(&format!("p{number}"))?;
        Ok(Self { number, namespace })
    }

    /// Returns the name of its container, which is also the UID of its pod.
    pub fn name(&self) -> String {
        format!("bench-{}", self.number)
    }

    pub fn netns(&self) -> String {
        format!("/run/netns/{}", self.namespace.name())
    }
}

/// A binary and its configuration.
#[derive(Clone, Debug)]
pub struct Plugin {
    pub binary: PathBuf,
    pub configuration: String,
    /// The folder where the plugin finds other plugins.
    pub folder: PathBuf,
}

impl Plugin {
    pub fn new(binary: &Path, configuration: &serde_json::Value) -> Self {
        Self {
            binary: binary.to_owned(),
            configuration: configuration.to_string(),
            folder: binary.parent().unwrap_or(binary).to_owned(),
        }
    }

    /// Calls the plugin. Returns the time from before the process is made until it has ended and its whole output is
    /// read.
    pub fn call(&self, verb: &str, pod: &Pod) -> Result<Duration> {
        let name = pod.name();
        let arguments =
            format!("IgnoreUnknown=1;K8S_POD_NAMESPACE=bench;K8S_POD_NAME={name};K8S_POD_UID={name}");
        let mut command = Command::new(&self.binary);
        command
            .env_clear()
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .env("CNI_COMMAND", verb)
            .env("CNI_CONTAINERID", &name)
            .env("CNI_NETNS", pod.netns())
            .env("CNI_IFNAME", "eth0")
            .env("CNI_ARGS", arguments)
            .env("CNI_PATH", &self.folder)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit());
        let start = Instant::now();
        let mut child = command
            .spawn()
            .with_context(|| format!("starting {}", self.binary.display()))?;
        if let Some(mut stdin) = child.stdin.take() {
            stdin.write_all(self.configuration.as_bytes()).context("stdin")?;
        }
        let mut answer = String::new();
        if let Some(mut stdout) = child.stdout.take() {
            stdout.read_to_string(&mut answer).context("stdout")?;
        }
        let status = child.wait().context("waiting for the plugin")?;
        let time = start.elapsed();
        if !status.success() {
            bail!("{verb} of {name}: {status}: {answer}");
        }
        Ok(time)
    }
}
