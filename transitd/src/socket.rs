//! The Unix socket of the CNI service, and the check of its callers.
//!
//! Invariant: the socket's directory is 0700, the socket 0600, and each connection's peer has uid 0. A caller that
//! does not begin to speak HTTP/2 in time is hung up on. No caller keeps another one waiting.

use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use futures::Stream;
use hyper_util::rt::TokioIo;
use nix::sys::socket::{MsgFlags, recv};
use thiserror::Error;
use tokio::io::Interest;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Uri;
use tracing::{debug, warn};

/// The first bytes that an HTTP/2 client sends (RFC 9113, section 3.4).
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// The time that a client has to send the preface.
const HELLO_TIMEOUT: Duration = Duration::from_secs(2);
/// The pause after an accept that failed, most likely for want of file descriptors.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);
/// The pause between looks at a preface that comes in pieces.
const PIECE: Duration = Duration::from_millis(20);

#[derive(Debug, Error)]
pub enum ServerError {
    #[error("cannot {operation} {path}")]
    Socket {
        operation: &'static str,
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("the CNI service ended")]
    Serve(#[source] tonic::transport::Error),
}

/// Makes the socket, its directory 0700 and itself 0600.
pub(super) fn listen(path: &Path) -> Result<UnixListener, ServerError> {
    let failed = |operation| {
        move |source| ServerError::Socket {
            operation,
            path: path.to_owned(),
            source,
        }
    };
    if let Some(directory) = path.parent() {
        let mut builder = std::fs::DirBuilder::new();
        builder
            .recursive(true)
            .mode(0o700)
            .create(directory)
            .map_err(failed("create the directory of"))?;
        let private = std::fs::Permissions::from_mode(0o700);
        std::fs::set_permissions(directory, private).map_err(failed("protect the directory of"))?;
    }
    // The last transitd left the socket; nobody listens on it any more.
    if let Err(error) = std::fs::remove_file(path)
        && error.kind() != std::io::ErrorKind::NotFound
    {
        return Err(failed("remove")(error));
    }
    let listener = UnixListener::bind(path).map_err(failed("listen on"))?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).map_err(failed("protect"))?;
    Ok(listener)
}

/// Returns how clients of this node connect to the socket.
pub fn connector(
    socket: PathBuf,
) -> impl tower::Service<
    Uri,
    Response = TokioIo<UnixStream>,
    Error = io::Error,
    Future = impl Future<Output = io::Result<TokioIo<UnixStream>>> + Send,
> + Send
+ 'static {
    tower::service_fn(move |_: Uri| {
        let socket = socket.clone();
        async move { UnixStream::connect(socket).await.map(TokioIo::new) }
    })
}

fn is_root(stream: &UnixStream) -> bool {
    match stream.peer_cred() {
        Ok(peer) if peer.uid() == 0 => true,
        Ok(peer) => {
            warn!(
                uid = peer.uid(),
                "refused a caller of the CNI socket that is not root"
            );
            false
        }
        Err(error) => {
            warn!(
                error = &error as &dyn std::error::Error,
                "refused an unknown caller of the CNI socket"
            );
            false
        }
    }
}

/// Returns the connections of root that speak HTTP/2; the stream never ends.
pub(super) fn connections(listener: UnixListener) -> impl Stream<Item = io::Result<UnixStream>> {
    let (sender, receiver) = mpsc::channel(1);
    tokio::spawn(async move {
        loop {
            let stream = tokio::select! {
                accepted = listener.accept() => match accepted {
                    Ok((stream, _)) => stream,
                    Err(error) => {
                        warn!(
                            error = &error as &dyn std::error::Error,
                            "a caller of the CNI socket could not be taken"
                        );
                        sleep(ACCEPT_RETRY).await;
                        continue;
                    }
                },
                () = sender.closed() => return,
            };
            if is_root(&stream) {
                let sender = sender.clone();
                tokio::spawn(async move {
                    if matches!(timeout(HELLO_TIMEOUT, speaks(&stream)).await, Ok(Ok(true))) {
                        // After the service has ended nobody receives the stream.
                        let _ = sender.send(Ok(stream)).await;
                    } else {
                        debug!("hung up on a caller of the CNI socket that speaks no HTTP/2");
                    }
                });
            }
        }
    });
    ReceiverStream::new(receiver)
}

/// Whether the connection begins with the preface. The preface stays to be read.
async fn speaks(stream: &UnixStream) -> io::Result<bool> {
    let mut buffer = [0; PREFACE.len()];
    loop {
        stream.readable().await?;
        let peeked = stream.try_io(Interest::READABLE, || {
            recv(stream.as_raw_fd(), &mut buffer, MsgFlags::MSG_PEEK).map_err(io::Error::from)
        });
        let length = match peeked {
            Ok(length) => length,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
            Err(error) => return Err(error),
        };
        if length == 0 || !PREFACE.starts_with(&buffer[..length]) {
            return Ok(false);
        }
        if length == PREFACE.len() {
            return Ok(true);
        }
        // The socket stays readable, because the preface was only peeked at.
        sleep(PIECE).await;
    }
}
