//! The CNI service on a Unix socket: only root on this node may call.
//!
//! One verb a file. The socket's directory is 0700, the socket 0600, and each connection's peer must have uid 0.

pub mod add;
pub mod check;
pub mod del;
pub mod error;
pub mod gc;
pub mod spool;
pub mod status;
mod wiring;

use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use thiserror::Error;
use thuban_proto::cni::cni_server::{Cni, CniServer};
use thuban_proto::cni::{
    AddReply, AddRequest, CheckReply, CheckRequest, CniError, DelReply, DelRequest, GcReply, GcRequest,
    StatusReply, StatusRequest, add_reply,
};
use tokio::net::{UnixListener, UnixStream};
use tokio::time::Instant;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{Request, Response, Status};
use tracing::{info, warn};

use self::error::AttachmentError;
use crate::metrics;
use crate::node::Node;

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

#[derive(Debug)]
struct Service {
    node: Arc<Node>,
}

/// Serves until `stop` is done; calls in flight are finished.
pub async fn serve(node: Arc<Node>, stop: impl Future<Output = ()>) -> Result<(), ServerError> {
    let listener = listen(&node.settings.socket)?;
    let connections = UnixListenerStream::new(listener).filter(|stream| stream.as_ref().is_ok_and(is_root));
    tonic::transport::Server::builder()
        .add_service(CniServer::new(Service { node }))
        .serve_with_incoming_shutdown(connections, stop)
        .await
        .map_err(ServerError::Serve)
}

fn listen(path: &Path) -> Result<UnixListener, ServerError> {
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
    // Left by the last transitd; nobody listens on it any more.
    if let Err(error) = std::fs::remove_file(path)
        && error.kind() != std::io::ErrorKind::NotFound
    {
        return Err(failed("remove")(error));
    }
    let listener = UnixListener::bind(path).map_err(failed("listen on"))?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).map_err(failed("protect"))?;
    Ok(listener)
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

#[tonic::async_trait]
impl Cni for Service {
    async fn add(&self, request: Request<AddRequest>) -> Result<Response<AddReply>, Status> {
        let request = request.into_inner();
        let (container_id, pod) = (request.container_id.clone(), request.pod_name.clone());
        let start = Instant::now();
        let result = add::run(&self.node, request).await;
        let code = result.as_ref().map_or_else(AttachmentError::code, |_| 0);
        metrics::answered("ADD", code, start.elapsed());
        let result = match result {
            Ok(attached) => add_reply::Result::Attached(attached),
            Err(error) => {
                let error = CniError::from(&error);
                warn!(
                    container_id,
                    pod,
                    code = error.code,
                    message = error.message,
                    details = error.details,
                    "ADD failed"
                );
                add_reply::Result::Error(error)
            }
        };
        Ok(Response::new(AddReply { result: Some(result) }))
    }

    async fn del(&self, request: Request<DelRequest>) -> Result<Response<DelReply>, Status> {
        let request = request.into_inner();
        let container_id = request.container_id.clone();
        let error = told("DEL", &container_id, del::run(&self.node, request)).await;
        if error.is_none() {
            info!(container_id, "DEL done");
        }
        Ok(Response::new(DelReply { error }))
    }

    async fn check(&self, request: Request<CheckRequest>) -> Result<Response<CheckReply>, Status> {
        let request = request.into_inner();
        let container_id = request.container_id.clone();
        let error = told("CHECK", &container_id, check::run(&self.node, request)).await;
        Ok(Response::new(CheckReply { error }))
    }

    async fn gc(&self, request: Request<GcRequest>) -> Result<Response<GcReply>, Status> {
        let error = told("GC", "", gc::run(&self.node, request.into_inner())).await;
        Ok(Response::new(GcReply { error }))
    }

    async fn status(&self, _: Request<StatusRequest>) -> Result<Response<StatusReply>, Status> {
        let error = told("STATUS", "", status::run(&self.node)).await;
        Ok(Response::new(StatusReply { error }))
    }
}

/// A failure in the form of CNI, after it was counted and logged.
async fn told(
    verb: &'static str,
    container_id: &str,
    work: impl Future<Output = Result<(), AttachmentError>>,
) -> Option<CniError> {
    let start = Instant::now();
    let result = work.await;
    let code = result.as_ref().map_or_else(AttachmentError::code, |()| 0);
    metrics::answered(verb, code, start.elapsed());
    let error = CniError::from(&result.err()?);
    warn!(
        verb,
        container_id,
        code = error.code,
        message = error.message,
        details = error.details,
        "a CNI verb failed"
    );
    Some(error)
}
