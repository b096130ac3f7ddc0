//! A port of 127.0.0.1 that kubectl forwards to thuban-observe, for as long as a [`Forward`] lives.

use std::time::Duration;

use tokio::io::{AsyncBufReadExt, AsyncRead, BufReader, copy, sink};
use tokio::process::{Child, ChildStdout};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::access::SERVICE;
use super::error::ObserveError;
use crate::kubectl::{Kubectl, MAX_ERROR, read, said};

/// The port of the Service: HTTPS for readers.
const PORT: u16 = 6091;
/// How long kubectl may take until it forwards.
const OPEN_TIMEOUT: Duration = Duration::from_secs(20);
/// How kubectl begins the line that names the port.
const BEGINNING: &str = "Forwarding from 127.0.0.1:";

pub struct Forward {
    pub port: u16,
    /// Reads what kubectl says, so that a full pipe never stops it. It ends when kubectl ends.
    reader: JoinHandle<()>,
    /// It is killed when it is dropped.
    _kubectl: Child,
}

impl Forward {
    /// Starts kubectl, and waits until it forwards.
    pub async fn open(kubectl: &Kubectl, namespace: &str) -> Result<Self, ObserveError> {
        let refused = |said: String| ObserveError::Forward {
            namespace: namespace.to_owned(),
            said,
        };
        let mut child = kubectl
            .port_forward_command(namespace, SERVICE, PORT)
            .spawn()
            .map_err(|error| kubectl.not_started(error))?;
        let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
        let Some(stdout) = stdout else {
            return Err(refused("it has no output".to_owned()));
        };
        let mut stdout = BufReader::new(stdout);
        match timeout(OPEN_TIMEOUT, port(&mut stdout)).await {
            Ok(Some(port)) => {
                tokio::spawn(drain(stderr));
                Ok(Self {
                    port,
                    reader: tokio::spawn(drain(Some(stdout))),
                    _kubectl: child,
                })
            }
            // kubectl has ended.
            Ok(None) => {
                let errors = read(stderr, MAX_ERROR).await.unwrap_or_default();
                Err(refused(said(&errors)))
            }
            Err(_) => Err(refused(format!("nothing within {} s", OPEN_TIMEOUT.as_secs()))),
        }
    }

    /// Whether kubectl still runs. It ends when it loses the pod.
    pub fn is_alive(&self) -> bool {
        !self.reader.is_finished()
    }
}

/// Reads the port that kubectl has chosen; none if it says no port.
async fn port(stdout: &mut BufReader<ChildStdout>) -> Option<u16> {
    let mut line = String::new();
    while stdout.read_line(&mut line).await.is_ok_and(|read| read > 0) {
        if let Some(rest) = line.strip_prefix(BEGINNING) {
            return rest.split_whitespace().next()?.parse().ok();
        }
        line.clear();
    }
    None
}

async fn drain(from: Option<impl AsyncRead + Unpin>) {
    if let Some(mut from) = from {
        let _ = copy(&mut from, &mut sink()).await;
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::{Instant, sleep};

    use super::Forward;
    use crate::kubectl::Kubectl;

    #[tokio::test]
    async fn kubectl_says_the_port_and_may_end_later() {
        let script = "echo hello; echo 'Forwarding from 127.0.0.1:40123 -> 6091'; exec sleep 0.1";
        let forward = Forward::open(&Kubectl::played(script), "net").await.unwrap();
        assert_eq!(forward.port, 40_123);
        let end = Instant::now() + Duration::from_secs(20);
        while forward.is_alive() {
            assert!(Instant::now() < end, "its end is not seen");
            sleep(Duration::from_millis(20)).await;
        }
    }

    #[tokio::test]
    async fn what_kubectl_is_refused_is_told_with_the_remedy() {
        let kubectl = Kubectl::played("echo 'no pods/portforward' >&2; exit 1");
        let Err(error) = Forward::open(&kubectl, "net").await else {
            panic!("a port, and kubectl was refused");
        };
        let error = error.to_string();
        assert!(
            error.contains("namespace net: no pods/portforward;") && error.contains("thuban-observe-connect"),
            "{error}"
        );
    }
}
