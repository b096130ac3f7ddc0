//! Commands to a running process, by a Unix socket in a folder that only its pod has.
//!
//! Invariant: a caller is root or the process's own user. Metrics and probes have a server of their own, which changes
//! nothing.
//!
//! A request is a line. The answer begins with the line `ok` or `error`, and ends with the connection.

use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use std::{env, fs};

use clap::{Args, Subcommand};
use thiserror::Error;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::task::spawn_blocking;
use tokio::time::{sleep, timeout};
use tracing::{debug, info, warn};

use crate::levels::{self, LevelsError};
use crate::{LONGEST_REQUEST, PAUSE, REQUEST_TIMEOUT};

/// The setting of the socket's path.
const SETTING: &str = "THUBAN_CONTROL_SOCKET";
/// The folder is a volume of the pod.
const SOCKET: &str = "/run/thuban-control/control.sock";
const OK: &[u8] = b"ok\n";
const ERROR: &[u8] = b"error\n";
/// The number of the next file, so that no two profiles are written to one.
static NEXT_FILE: AtomicU64 = AtomicU64::new(0);

/// A command to the process that runs in this pod.
#[derive(Clone, Debug, PartialEq, Eq, Subcommand)]
pub enum Command {
    /// Change the levels of the running process's log for some minutes; without LEVELS, print them.
    Log {
        /// The levels: `debug`, or `info,transitd::cni=debug` with parts. `default` brings back those of the start.
        levels: Option<String>,
        /// Minutes until the levels of the start come back.
        #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=1440))]
        minutes: u64,
        #[command(flatten)]
        socket: Socket,
    },
}

/// Where the running process is asked.
#[derive(Args, Clone, Debug, PartialEq, Eq)]
pub struct Socket {
    /// Unix socket of the running process.
    #[arg(long = "control-socket", env = SETTING, default_value = SOCKET)]
    path: PathBuf,
}

#[derive(Debug, Error)]
pub enum CommandError {
    #[error("the process can't be asked at {path}: run the command in its pod, as its user")]
    Connect { path: PathBuf, source: io::Error },
    #[error("the answer of the process can't be read")]
    Answer(#[source] io::Error),
    #[error("the answer can't be written")]
    Print(#[source] io::Error),
    #[error("{0}")]
    Refused(String),
}

impl Command {
    fn request(&self) -> String {
        match self {
            Self::Log { levels: None, .. } => "log\n".to_owned(),
            Self::Log {
                levels: Some(levels),
                minutes,
                ..
            } => format!("log {minutes} {levels}\n"),
        }
    }

    fn socket(&self) -> &Socket {
        match self {
            Self::Log { socket, .. } => socket,
        }
    }

    /// Asks the running process, and prints its answer on standard output.
    pub fn run(&self) -> Result<(), CommandError> {
        print(&self.ask()?)
    }

    fn ask(&self) -> Result<Vec<u8>, CommandError> {
        self.socket().ask(&self.request())
    }
}

fn print(answer: &[u8]) -> Result<(), CommandError> {
    io::stdout().write_all(answer).map_err(CommandError::Print)
}

impl Socket {
    /// Asks the running process for a profile of its heap, and prints the profile on standard output.
    pub fn print_heap(&self) -> Result<(), CommandError> {
        print(&self.ask("heap\n")?)
    }

    fn ask(&self, request: &str) -> Result<Vec<u8>, CommandError> {
        let path = &self.path;
        let mut stream =
            std::os::unix::net::UnixStream::connect(path).map_err(|source| CommandError::Connect {
                path: path.clone(),
                source,
            })?;
        let mut answer = Vec::new();
        stream
            .write_all(request.as_bytes())
            .and_then(|()| stream.read_to_end(&mut answer))
            .map_err(CommandError::Answer)?;
        if let Some(text) = answer.strip_prefix(OK) {
            return Ok(text.to_owned());
        }
        match answer.strip_prefix(ERROR) {
            Some(text) => Err(CommandError::Refused(
                String::from_utf8_lossy(text).trim_end().to_owned(),
            )),
            None => Err(CommandError::Answer(io::ErrorKind::UnexpectedEof.into())),
        }
    }
}

/// Writes a profile of the heap to a file. May block.
pub type Heap = fn(&Path) -> io::Result<()>;

/// What commands may ask of this process.
#[derive(Debug)]
struct Process {
    /// None: its allocator keeps no profile.
    heap: Option<Heap>,
    /// Where files may be written
    folder: PathBuf,
}

/// Takes commands until the process ends. A process without its socket works on.
pub async fn serve(heap: Option<Heap>) {
    let path = env::var_os(SETTING).filter(|path| !path.is_empty());
    let path = path.map_or_else(|| PathBuf::from(SOCKET), PathBuf::from);
    let process = Arc::new(Process {
        heap,
        folder: path.parent().map(Path::to_owned).unwrap_or_default(),
    });
    match listen(&path) {
        Ok((listener, user)) => accept(&listener, user, &process).await,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            info!(path = %path.display(), "no commands are taken: there is no such folder");
        }
        Err(error) => warn!(path = %path.display(), %error, "no commands are taken"),
    }
}

/// Makes the socket, for its user alone. Returns that user, too.
fn listen(path: &Path) -> io::Result<(UnixListener, u32)> {
    // The process before has left it; nobody listens at it any more.
    if let Err(error) = fs::remove_file(path)
        && error.kind() != io::ErrorKind::NotFound
    {
        return Err(error);
    }
    let listener = UnixListener::bind(path)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
    Ok((listener, fs::metadata(path)?.uid()))
}

async fn accept(listener: &UnixListener, user: u32, process: &Arc<Process>) {
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                warn!(%error, "a command could not be taken");
                sleep(PAUSE).await;
                continue;
            }
        };
        match stream.peer_cred() {
            Ok(peer) if peer.uid() == 0 || peer.uid() == user => {
                let process = Arc::clone(process);
                tokio::spawn(async move {
                    if let Err(error) = one_command(stream, &process).await {
                        debug!(%error, "a command that can't be read, or its answer not be sent");
                    }
                });
            }
            Ok(peer) => warn!(uid = peer.uid(), "refused a command of another user"),
            Err(error) => warn!(%error, "refused a command of an unknown user"),
        }
    }
}

async fn one_command(stream: UnixStream, process: &Process) -> io::Result<()> {
    let (reader, mut writer) = stream.into_split();
    let mut line = String::new();
    let mut reader = BufReader::new(reader.take(LONGEST_REQUEST as u64));
    timeout(REQUEST_TIMEOUT, reader.read_line(&mut line)).await??;
    let (begin, answer) = match perform(line.trim_end_matches('\n'), process).await {
        Ok(answer) => (OK, answer),
        Err(error) => (ERROR, format!("{error}\n").into_bytes()),
    };
    let sent = async {
        writer.write_all(begin).await?;
        writer.write_all(&answer).await?;
        writer.shutdown().await
    };
    timeout(REQUEST_TIMEOUT, sent).await?
}

#[derive(Debug, Error)]
enum PerformError {
    #[error("this process does not know the command: is it of another version?")]
    Unknown,
    #[error(transparent)]
    Levels(#[from] LevelsError),
    #[error("this process keeps no profile of its heap: the operator does")]
    NoHeap,
    #[error("the profile of the heap can't be made: {0}")]
    Heap(#[source] io::Error),
}

async fn perform(request: &str, process: &Process) -> Result<Vec<u8>, PerformError> {
    let (command, rest) = request.split_once(' ').unwrap_or((request, ""));
    match command {
        "log" => {
            let levels = levels::of_process()?;
            if let Some((minutes, wanted)) = rest.split_once(' ') {
                let minutes: u32 = minutes.parse().map_err(|_| PerformError::Unknown)?;
                levels.change(wanted, Duration::from_mins(minutes.into()))?;
            }
            Ok(levels.describe().into_bytes())
        }
        "heap" => {
            let heap = process.heap.ok_or(PerformError::NoHeap)?;
            let file = process
                .folder
                .join(format!("heap-{}", NEXT_FILE.fetch_add(1, Ordering::Relaxed)));
            let profile = spawn_blocking(move || profile_of(heap, &file)).await;
            profile
                .map_err(io::Error::from)
                .flatten()
                .map_err(PerformError::Heap)
        }
        _ => Err(PerformError::Unknown),
    }
}

/// Returns the profile that is written to a file, and removes the file.
fn profile_of(heap: Heap, file: &Path) -> io::Result<Vec<u8>> {
    let profile = heap(file).and_then(|()| fs::read(file));
    let _ = fs::remove_file(file);
    profile
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use clap::Parser;

    use super::*;

    /// A daemon whose commands stand beside its settings.
    #[derive(Debug, Parser)]
    struct Daemon {
        #[arg(long, default_value_t = 1)]
        port: u16,
        #[command(subcommand)]
        command: Option<Command>,
    }

    fn path(name: &str) -> PathBuf {
        env::temp_dir().join(format!("thuban-control-{name}-{}", std::process::id()))
    }

    fn process(heap: Option<Heap>) -> Arc<Process> {
        let folder = env::temp_dir();
        Arc::new(Process { heap, folder })
    }

    fn command(path: &Path, arguments: &[&str]) -> Command {
        let path = path.display().to_string();
        let arguments = [&["daemon", "log", "--control-socket", &path][..], arguments].concat();
        Daemon::try_parse_from(arguments).unwrap().command.unwrap()
    }

    #[test]
    fn a_daemon_without_a_command_is_itself() {
        let daemon = Daemon::try_parse_from(["daemon", "--port", "2"]).unwrap();
        assert_eq!((daemon.port, daemon.command), (2, None));
        assert!(Daemon::try_parse_from(["daemon", "log", "debug", "--minutes", "0"]).is_err());
    }

    #[tokio::test]
    async fn a_command_changes_the_levels_of_a_process_that_runs() {
        let path = path("levels");
        // The process before has left its socket.
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        let (listener, user) = listen(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        let process = process(None);
        let server = tokio::spawn(async move { accept(&listener, user, &process).await });
        let (_layer, handle) = tracing_subscriber::reload::Layer::<_, tracing_subscriber::Registry>::new(
            tracing_subscriber::EnvFilter::new("info"),
        );
        levels::keep("info", handle);
        let ask = async |arguments: &[&str]| {
            let command = command(&path, arguments);
            spawn_blocking(move || command.ask()).await.unwrap()
        };
        let told = ask(&["debug", "--minutes", "2"]).await.unwrap();
        assert_eq!(told, b"levels: debug\nlevels of the start: info\n");
        assert_eq!(ask(&[]).await.unwrap(), told);
        let refused = ask(&["debgu"]).await.unwrap_err().to_string();
        assert!(refused.contains("say a level for all parts too"), "{refused}");
        let told = ask(&["default"]).await.unwrap();
        assert_eq!(told, b"levels: info\nlevels of the start: info\n");
        server.abort();
        fs::remove_file(&path).unwrap();
    }

    #[tokio::test]
    async fn a_profile_of_the_heap_leaves_no_file() {
        static WRITTEN: std::sync::Mutex<Option<PathBuf>> = std::sync::Mutex::new(None);
        let write: Heap = |file| {
            *WRITTEN.lock().unwrap() = Some(file.to_owned());
            fs::write(file, "heap_v2/1")
        };
        let profile = perform("heap", &process(Some(write))).await.unwrap();
        assert_eq!(profile, b"heap_v2/1");
        let file = WRITTEN.lock().unwrap().take().unwrap();
        assert!(!file.exists(), "{}", file.display());
        let refused = perform("heap", &process(None)).await.unwrap_err();
        assert!(matches!(refused, PerformError::NoHeap), "{refused}");
    }

    #[tokio::test]
    async fn a_request_that_is_no_command_is_refused() {
        let path = path("unknown");
        let (listener, user) = listen(&path).unwrap();
        let process = process(None);
        let server = tokio::spawn(async move { accept(&listener, user, &process).await });
        for request in ["GET /metrics HTTP/1.1\r\n", "log x debug\n", "\n"] {
            let mut stream = UnixStream::connect(&path).await.unwrap();
            stream.write_all(request.as_bytes()).await.unwrap();
            let mut answer = String::new();
            stream.read_to_string(&mut answer).await.unwrap();
            assert!(answer.starts_with("error\n"), "{request}: {answer}");
        }
        server.abort();
        fs::remove_file(&path).unwrap();
        let error = command(&path, &[]).ask().unwrap_err().to_string();
        assert!(error.contains("run the command in its pod"), "{error}");
    }
}
