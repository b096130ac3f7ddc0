//! Runs kubectl, as the user and on the cluster of this command. It is there, because kubectl runs this plugin. The
//! client of this plugin has no WebSockets, so what runs in pods is started by `kubectl exec`.

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::{ExitStatus, Output, Stdio};
use std::time::Duration;

use thiserror::Error;
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::process::Command;
use tokio::time::timeout;

use crate::arguments::Connection;

/// How long a command in a pod may take.
const EXEC_TIMEOUT: Duration = Duration::from_secs(30);
/// The most that is read of what a command says on standard error.
pub const MAX_ERROR: u64 = 16 * 1024;

/// Why kubectl did not do it.
#[derive(Debug, Error)]
pub enum KubectlError {
    #[error("{} does not start: put kubectl into PATH, or name it by --kubectl: {error}", .program.display())]
    Start { program: PathBuf, error: io::Error },
    #[error("kubectl {command}: {error}")]
    Io { command: String, error: io::Error },
    #[error("kubectl {command}: {}", why(*.status, .said))]
    Failed {
        command: String,
        status: ExitStatus,
        said: String,
    },
    #[error("kubectl {command}: no answer within {} s", EXEC_TIMEOUT.as_secs())]
    Late { command: String },
}

/// kubectl with the flags of the connection.
#[derive(Clone, Debug)]
pub struct Kubectl {
    program: PathBuf,
    flags: Vec<String>,
}

/// A container of a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    pub namespace: String,
    pub pod: String,
    pub container: &'static str,
}

/// What a command printed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Printed {
    pub bytes: Vec<u8>,
    /// Whether there was more than was read.
    pub is_cut: bool,
}

impl Kubectl {
    pub fn new(connection: &Connection) -> Self {
        let kubeconfig = connection.kubeconfig.as_ref();
        let flags = [
            ("kubeconfig", kubeconfig.map(|path| path.display().to_string())),
            ("context", connection.context.clone()),
            ("as", connection.as_user.clone()),
        ];
        let flags = flags.into_iter();
        Self {
            program: connection.kubectl.clone(),
            flags: flags
                .filter_map(|(flag, value)| Some(format!("--{flag}={}", value?)))
                .collect(),
        }
    }

    /// Runs kubectl to its end, and returns what it printed. Blocks.
    pub fn run(&self, arguments: &[&str]) -> Result<String, KubectlError> {
        self.run_with(arguments, "")
    }

    /// Does the same, and gives kubectl something to read.
    pub fn run_with(&self, arguments: &[&str], input: &str) -> Result<String, KubectlError> {
        let command = || arguments.join(" ");
        let mut child = std::process::Command::new(&self.program)
            .args(&self.flags)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| self.not_started(error))?;
        if let Some(mut pipe) = child.stdin.take() {
            // kubectl that is refused may not have read all of it.
            let _ = pipe.write_all(input.as_bytes());
        }
        let output = child.wait_with_output().map_err(|error| KubectlError::Io {
            command: command(),
            error,
        })?;
        let Output {
            status,
            stdout,
            stderr,
        } = output;
        if !status.success() {
            return Err(KubectlError::Failed {
                command: command(),
                status,
                said: said(&stderr),
            });
        }
        Ok(String::from_utf8_lossy(&stdout).into_owned())
    }

    /// Runs a command in a pod to its end, and returns the first `limit` bytes that it prints.
    pub async fn exec(&self, place: &Place, command: &[&str], limit: u64) -> Result<Printed, KubectlError> {
        let name = format!("exec {} -- {}", place.pod, command.join(" "));
        let mut child = self
            .exec_command(place, command)
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| self.not_started(error))?;
        let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
        // Both are read at once, so that none of them stops the other.
        let errors = tokio::spawn(read(stderr, MAX_ERROR));
        let ran = async {
            let bytes = read(stdout, limit + 1).await?;
            let is_cut = bytes.len() as u64 > limit;
            if is_cut {
                child.start_kill()?;
            }
            Ok::<_, io::Error>((bytes, is_cut, child.wait().await?))
        };
        let (mut bytes, is_cut, status) = match timeout(EXEC_TIMEOUT, ran).await {
            Ok(ran) => ran.map_err(|error| KubectlError::Io {
                command: name.clone(),
                error,
            })?,
            // The child is killed when it is dropped.
            Err(_) => return Err(KubectlError::Late { command: name }),
        };
        if !is_cut && !status.success() {
            let errors = errors.await.ok().and_then(Result::ok).unwrap_or_default();
            return Err(KubectlError::Failed {
                command: name,
                status,
                said: said(&errors),
            });
        }
        bytes.truncate(usize::try_from(limit).unwrap_or(usize::MAX));
        Ok(Printed { bytes, is_cut })
    }

    /// Returns kubectl that runs a command in a pod. Its output is to be read; it ends when it is dropped.
    pub fn exec_command(&self, place: &Place, command: &[&str]) -> Command {
        let mut kubectl = Command::new(&self.program);
        kubectl
            .args(&self.flags)
            .args(["exec", "-n", &place.namespace, &place.pod])
            .args(["-c", place.container, "--"])
            .args(command)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .kill_on_drop(true);
        kubectl
    }

    /// Returns kubectl that forwards a free port of 127.0.0.1 to a port of a Service. Its output says which port it is;
    /// it ends when it is dropped. Ctrl-C does not reach it, so that its user can end first.
    pub fn port_forward_command(&self, namespace: &str, service: &str, port: u16) -> Command {
        let mut kubectl = Command::new(&self.program);
        kubectl
            .args(&self.flags)
            .args(["port-forward", "-n", namespace, "--address", "127.0.0.1"])
            .args([format!("service/{service}"), format!(":{port}")])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .kill_on_drop(true);
        kubectl
    }

    /// Returns a kubectl that is a script of the shell: its arguments are `$*`.
    #[cfg(test)]
    pub fn played(script: &str) -> Self {
        Self {
            program: "/bin/sh".into(),
            flags: ["-c", script, "kubectl"].map(str::to_owned).into(),
        }
    }

    pub fn not_started(&self, error: io::Error) -> KubectlError {
        KubectlError::Start {
            program: self.program.clone(),
            error,
        }
    }
}

/// Reads at most `limit` bytes.
pub async fn read(from: Option<impl AsyncRead + Unpin>, limit: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    if let Some(from) = from {
        from.take(limit).read_to_end(&mut bytes).await?;
    }
    Ok(bytes)
}

fn why(status: ExitStatus, said: &str) -> String {
    if said.is_empty() {
        status.to_string()
    } else {
        said.to_owned()
    }
}

/// Returns what kubectl said, as one line.
pub fn said(errors: &[u8]) -> String {
    let text = String::from_utf8_lossy(errors);
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    lines.collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::{Kubectl, KubectlError, Place};
    use crate::arguments::Arguments;

    fn place() -> Place {
        Place {
            namespace: "thuban-system".to_owned(),
            pod: "transitd-x".to_owned(),
            container: "transitd",
        }
    }

    #[test]
    fn kubectl_gets_the_flags_of_the_connection() {
        let line = "kubectl-thuban status --context blue --kubeconfig /c --as me --kubectl /bin/k";
        let arguments = Arguments::try_parse_from(line.split(' ')).unwrap();
        let kubectl = Kubectl::new(&arguments.connection);
        assert_eq!(kubectl.flags, ["--kubeconfig=/c", "--context=blue", "--as=me"]);
        assert_eq!(kubectl.program, std::path::Path::new("/bin/k"));
    }

    #[tokio::test]
    async fn a_command_in_a_pod_is_run_by_kubectl_exec() {
        let kubectl = Kubectl::played("echo \"$*\"");
        let printed = kubectl.exec(&place(), &["transitd", "rows"], 1000).await.unwrap();
        assert_eq!(
            String::from_utf8(printed.bytes).unwrap(),
            "exec -n thuban-system transitd-x -c transitd -- transitd rows\n"
        );
        assert!(!printed.is_cut);
    }

    #[tokio::test]
    async fn what_is_too_long_is_cut_and_what_fails_is_told() {
        let endless = Kubectl::played("while :; do echo more; done");
        let printed = endless.exec(&place(), &["x"], 10).await.unwrap();
        assert_eq!((printed.bytes.len(), printed.is_cut), (10, true));
        let kubectl = Kubectl::played("echo; echo no rights >&2; exit 3");
        let error = kubectl.exec(&place(), &["x"], 10).await.unwrap_err();
        assert!(error.to_string().ends_with(": no rights"), "{error}");
        let error = kubectl.run(&["get", "pods"]).unwrap_err();
        assert_eq!(error.to_string(), "kubectl get pods: no rights");
        let missing = Kubectl {
            program: "/nonexistent/kubectl".into(),
            flags: Vec::new(),
        };
        let error = missing.run(&[]).unwrap_err();
        assert!(matches!(error, KubectlError::Start { .. }), "{error}");
    }

    #[tokio::test]
    async fn a_port_is_forwarded_to_that_of_a_service() {
        let mut kubectl = Kubectl::played("echo \"$*\"").port_forward_command("net", "relay", 6091);
        let output = kubectl.output().await.unwrap();
        assert_eq!(
            String::from_utf8(output.stdout).unwrap(),
            "port-forward -n net --address 127.0.0.1 service/relay :6091\n"
        );
    }

    #[test]
    fn kubectl_reads_what_it_is_given() {
        assert_eq!(
            Kubectl::played("cat").run_with(&["apply"], "an object").unwrap(),
            "an object"
        );
    }
}
