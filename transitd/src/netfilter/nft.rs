//! Runs nft, which writes and lists the kernel's tables.
//!
//! Invariant: a run ends, by itself or because its time is over. Rows wait for rules, and acks wait for rows: an nft
//! that hung for ever would hold up all of the cluster that waits for this droplet.

use std::io::{self, Read, Write as _};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::NetfilterError;

/// The program, and how long a run may take.
#[derive(Clone, Debug)]
pub struct Nft {
    /// The path, or a name to find in PATH.
    pub program: PathBuf,
    pub patience: Duration,
}

/// The end of a run.
struct Ended {
    status: ExitStatus,
    said: Vec<u8>,
    /// It was killed because its time was over.
    is_late: bool,
}

impl Nft {
    /// Has the kernel take a text of rules, all of it or nothing.
    pub fn write(&self, text: &str) -> Result<(), NetfilterError> {
        let failed = |source| NetfilterError::Start {
            program: self.program.clone(),
            source,
        };
        let mut child = Command::new(&self.program)
            .args(["-f", "-"])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(failed)?;
        let said = child.stderr.take();
        let (ended, written) = self.finish(child, text, said).map_err(failed)?;
        if ended.is_late {
            return Err(NetfilterError::Late {
                program: self.program.clone(),
                seconds: self.patience.as_secs(),
            });
        }
        if ended.status.success() {
            return written.map_err(failed);
        }
        let said = String::from_utf8_lossy(&ended.said);
        let said = said.lines().next().unwrap_or("it said nothing");
        Err(NetfilterError::Refused(said.to_owned()))
    }

    /// Returns what nft prints; none if it fails.
    pub fn list(&self, arguments: &[&str]) -> Option<Vec<u8>> {
        let child = Command::new(&self.program)
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn();
        let mut child = child.ok()?;
        let said = child.stdout.take();
        let (ended, _) = self.finish(child, "", said).ok()?;
        ended.status.success().then_some(ended.said)
    }

    /// Gives the child its input, and reads what it says until it ends. Kills it when its time is over.
    fn finish(
        &self,
        mut child: Child,
        input: &str,
        said: Option<impl Read>,
    ) -> io::Result<(Ended, io::Result<()>)> {
        let process = Pid::from_raw(child.id().cast_signed());
        let (end, ends) = channel::<()>();
        let guard = thread::scope(|scope| {
            let guard = scope.spawn(move || {
                let is_late = ends.recv_timeout(self.patience) == Err(RecvTimeoutError::Timeout);
                // The child is not waited for yet, so the number is still its own.
                is_late && kill(process, Signal::SIGKILL).is_ok()
            });
            // The standard input is taken, so that it is closed. If the child died, its status says why.
            let input = child
                .stdin
                .take()
                .map_or(Ok(()), |mut to| to.write_all(input.as_bytes()));
            let mut text = Vec::new();
            let read = said.map_or(Ok(0), |mut said| said.read_to_end(&mut text));
            drop(end);
            let is_late = guard.join().unwrap_or_default();
            read.map(|_| (text, is_late, input))
        });
        let status = child.wait()?;
        let (said, is_late, written) = guard?;
        Ok((
            Ended {
                status,
                said,
                is_late,
            },
            written,
        ))
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::time::Instant;

    use super::*;

    /// A program that does this instead of nft.
    pub struct Played {
        pub folder: PathBuf,
        pub nft: Nft,
    }

    impl Played {
        pub fn new(name: &str, script: &str) -> Self {
            let folder = std::env::temp_dir().join(format!("nft-{name}-{}", std::process::id()));
            std::fs::create_dir_all(&folder).unwrap();
            let program = folder.join("nft");
            std::fs::write(&program, format!("#!/bin/sh\n{script}\n")).unwrap();
            std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
            let patience = Duration::from_secs(2);
            let nft = Nft { program, patience };
            Self { folder, nft }
        }
    }

    impl Drop for Played {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.folder);
        }
    }

    #[test]
    fn nft_that_never_ends_is_ended() {
        let played = Played::new("late", "exec sleep 600");
        let nft = &played.nft;
        let start = Instant::now();
        let text = "x".repeat(1 << 20);
        assert!(matches!(nft.write(&text), Err(NetfilterError::Late { .. })));
        assert_eq!(nft.list(&["list"]), None);
        assert!(start.elapsed() < Duration::from_mins(5));
    }

    #[test]
    fn text_goes_in_and_what_nft_says_comes_out() {
        let refusing = Played::new("refusing", "cat >&2; exit 1");
        let Err(NetfilterError::Refused(said)) = refusing.nft.write("one\ntwo\n") else {
            panic!("it refused");
        };
        assert_eq!(said, "one");
        let counting = Played::new("counting", "test \"$(wc -c)\" = 1048576");
        counting.nft.write(&"x".repeat(1 << 20)).unwrap();
        let listing = Played::new("listing", "echo \"$@\"");
        assert_eq!(listing.nft.list(&["list", "tables"]).unwrap(), b"list tables\n");
    }
}
