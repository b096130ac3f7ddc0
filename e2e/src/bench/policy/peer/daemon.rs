//! The program of kube-network-policies at one node. It ends with its owner, and with this process however it ends.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use anyhow::{Context, Result};
use thuban_cluster::{Instance, wait::wait_for};

use super::{POLL, Parts, queue::QUEUE};
use crate::{bench::process::end_with_owner, rig::namespace::Namespace};

/// Where a pod finds its token and the certificate of the API server. The script gets both files and the program with
/// its arguments. `ip netns exec` has a mount namespace of its own, so nobody else sees the mounts. The program goes
/// before other work of the machine, because every new connection waits for it. Real-time priority is no choice: the
/// threads of a Go program then wait for each other without end.
const SCRIPT: &str = "folder=/run/secrets/kubernetes.io/serviceaccount && \
                      mount -t tmpfs none /run && mkdir -p $folder && \
                      cp \"$1\" $folder/token && cp \"$2\" $folder/ca.crt && shift 2 && \
                      exec nice -n -10 \"$@\"";
/// How long the program takes at most to list all objects and to open its queue.
const START_TIMEOUT: Duration = Duration::from_mins(1);

pub struct Daemon {
    child: Child,
    log: PathBuf,
}

impl Daemon {
    /// Starts the program in the namespace of a node. The calling thread must outlive it.
    pub fn start(
        parts: &Parts,
        instance: &Instance,
        node: &str,
        namespace: &Namespace,
        token: &Path,
        log: PathBuf,
    ) -> Result<Self> {
        let output = File::create(&log).with_context(|| format!("making {}", log.display()))?;
        let mut command = Command::new("ip");
        command
            .args(["netns", "exec", namespace.name(), "sh", "-c", SCRIPT, "sh"])
            .args([token, &instance.authority(), &parts.program])
            .arg(format!("--hostname-override={node}"))
            .arg(format!("--nfqueue-id={QUEUE}"))
            // Its help says that kernels from 6.12 on don't need the rules for it.
            .arg("--netfilter-bug-1766-fix=false")
            .env("KUBERNETES_SERVICE_HOST", instance.gateway().to_string())
            .env("KUBERNETES_SERVICE_PORT", instance.api_port().to_string())
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output);
        end_with_owner(&mut command);
        let child = command.spawn().context("starting kube-network-policies")?;
        Ok(Self { child, log })
    }

    /// Waits until the program listens to its queue.
    pub fn await_queue(&self, namespace: &Namespace) -> Result<()> {
        let listens = || {
            namespace.run(|| {
                let path = "/proc/thread-self/net/netfilter/nfnetlink_queue";
                let queues = fs::read_to_string(path).context(path)?;
                let mut numbers = queues.lines().filter_map(|line| line.split_whitespace().next());
                Ok(numbers.any(|number| number == QUEUE.to_string()))
            })
        };
        let what = format!("kube-network-policies, see {}", self.log.display());
        wait_for(&what, START_TIMEOUT, POLL, listens)
    }

    pub fn log(&self) -> &Path {
        &self.log
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
