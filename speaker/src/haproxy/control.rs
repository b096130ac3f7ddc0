//! The socket of HAProxy's master, by which its present worker is asked, too.
//!
//! One command a connection. HAProxy has no codes: an answer is a text, and a change that was made has a known one.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use thiserror::Error;
use thuban_api::proxies::Pem;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::time::timeout;

/// How long an answer may take.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// Bytes of the largest answer.
const LARGEST_ANSWER: u64 = 1 << 20;

#[derive(Debug, Error)]
pub enum ControlError {
    #[error("HAProxy's master can't be asked to {action}: {source}")]
    Io { action: &'static str, source: io::Error },
    #[error("HAProxy's master does not answer in time when asked to {0}")]
    Silent(&'static str),
    #[error("HAProxy refuses to {action}: {said}")]
    Refused { action: &'static str, said: String },
}

/// What the worker that takes new connections says of itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Info {
    pub pid: String,
    /// The digest of its configuration.
    pub digest: String,
}

/// What a member gets of new connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemberState {
    Weight(u16),
    /// None.
    Out,
}

#[derive(Clone, Debug)]
pub struct Control {
    socket: PathBuf,
}

impl Control {
    pub fn new(socket: PathBuf) -> Self {
        Self { socket }
    }

    /// Asks the present worker what it is.
    pub async fn info(&self) -> Result<Info, ControlError> {
        let said = self.ask("show its state", "@1 show info\n").await?;
        Ok(info(&said))
    }

    /// Has the master start another worker by the configuration in its file. The master closes the connection early.
    pub async fn reload(&self) -> Result<(), ControlError> {
        self.ask("reload", "reload\n").await.map(drop)
    }

    /// Replaces a certificate in the present worker. The file must have it as well, for the next one.
    pub async fn set_certificate(&self, file: &str, pem: &Pem) -> Result<(), ControlError> {
        let action = "replace a certificate";
        // An empty line ends the certificate; it has none itself.
        let set = format!("@1 set ssl cert {file} <<\n{}\n", pem.text());
        self.expect(action, &set, "Transaction ").await?;
        let committed = self
            .expect(action, &format!("@1 commit ssl cert {file}\n"), "Success")
            .await;
        if committed.is_err() {
            // Else the next one would be refused.
            let _ = self.ask(action, &format!("@1 abort ssl cert {file}\n")).await;
        }
        committed
    }

    /// Changes what a member of a listener gets.
    pub async fn set_member(
        &self,
        listener: &str,
        member: &str,
        state: MemberState,
    ) -> Result<(), ControlError> {
        let server = format!("@1 set server {listener}/{member}");
        match state {
            MemberState::Weight(weight) => {
                self.silently(&format!("{server} weight {weight}\n")).await?;
                self.silently(&format!("{server} state ready\n")).await
            }
            MemberState::Out => self.silently(&format!("{server} state maint\n")).await,
        }
    }

    async fn silently(&self, command: &str) -> Result<(), ControlError> {
        let action = "change a member";
        let said = self.ask(action, command).await?;
        if said.trim().is_empty() {
            return Ok(());
        }
        Err(refused(action, &said))
    }

    async fn expect(&self, action: &'static str, command: &str, words: &str) -> Result<(), ControlError> {
        let said = self.ask(action, command).await?;
        if said.contains(words) {
            return Ok(());
        }
        Err(refused(action, &said))
    }

    async fn ask(&self, action: &'static str, command: &str) -> Result<String, ControlError> {
        let asked = timeout(ANSWER_TIMEOUT, self.exchange(command)).await;
        let asked = asked.map_err(|_| ControlError::Silent(action))?;
        asked.map_err(|source| ControlError::Io { action, source })
    }

    async fn exchange(&self, command: &str) -> io::Result<String> {
        let mut stream = UnixStream::connect(&self.socket).await?;
        stream.write_all(command.as_bytes()).await?;
        stream.shutdown().await?;
        let mut said = Vec::new();
        let read = stream.take(LARGEST_ANSWER).read_to_end(&mut said).await;
        match read {
            // A master that reloads ends its connections.
            Err(error) if error.kind() != io::ErrorKind::ConnectionReset => Err(error),
            _ => Ok(String::from_utf8_lossy(&said).into_owned()),
        }
    }
}

fn refused(action: &'static str, said: &str) -> ControlError {
    ControlError::Refused {
        action,
        said: said.trim().to_owned(),
    }
}

fn info(said: &str) -> Info {
    let field = |name: &str| {
        let mut lines = said.lines();
        let found = lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        found.unwrap_or_default().trim().to_owned()
    };
    Info {
        pid: field("Pid"),
        digest: field("description"),
    }
}

#[cfg(test)]
mod tests {
    use super::{Info, info};

    #[test]
    fn a_worker_tells_its_configuration() {
        let said = "Name: HAProxy\nPid: 26390\nUptime: 0d 0h00m22s\nnode: vm\ndescription: 00c0ffee\n\n";
        let expected = Info {
            pid: "26390".to_owned(),
            digest: "00c0ffee".to_owned(),
        };
        assert_eq!(info(said), expected);
        assert_eq!(info("unknown command"), Info::default());
    }
}
