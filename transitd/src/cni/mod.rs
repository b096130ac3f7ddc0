//! The CNI service on a Unix socket: only root on this node may call. transitd's own verbs ask there too, see
//! [`crate::inspect`].
//!
//! One verb a file.

pub mod add;
pub mod check;
pub mod del;
pub mod error;
pub mod gc;
pub mod request;
pub mod spool;
pub mod status;
pub mod wiring;

use std::sync::Arc;
use std::time::Duration;

use thuban_proto::cni::cni_server::{Cni, CniServer};
use thuban_proto::cni::{
    AddReply, AddRequest, CheckReply, CheckRequest, CniError, DelReply, DelRequest, GcReply, GcRequest,
    StatusReply, StatusRequest, add_reply,
};
use thuban_telemetry::traces::Span;
use tokio::time::Instant;
use tonic::{Request, Response, Status};
use tracing::{info, warn};

use self::error::AttachmentError;
use crate::inspect;
use crate::metrics;
use crate::node::Node;
use crate::socket::{self, ServerError};

/// The time between looks at whether a caller still is there, and how long the caller may take to answer.
const KEEPALIVE: Duration = Duration::from_secs(10);
/// The most bytes of one call's headers.
const MAX_HEADER_BYTES: u32 = 16 * 1024;
/// The most calls at once on one connection. The plugin makes one.
const MAX_CALLS_AT_ONCE: u32 = 64;

#[derive(Debug)]
struct Service {
    node: Arc<Node>,
}

/// Serves until `stop` is done; calls in flight are finished.
pub async fn serve(node: Arc<Node>, stop: impl Future<Output = ()>) -> Result<(), ServerError> {
    let connections = socket::connections(socket::listen(&node.settings.socket)?);
    tonic::transport::Server::builder()
        .http2_keepalive_interval(Some(KEEPALIVE))
        .http2_keepalive_timeout(Some(KEEPALIVE))
        .http2_max_header_list_size(Some(MAX_HEADER_BYTES))
        .max_concurrent_streams(Some(MAX_CALLS_AT_ONCE))
        .add_service(inspect::server(Arc::clone(&node)))
        .add_service(CniServer::new(Service { node }))
        .serve_with_incoming_shutdown(connections, stop)
        .await
        .map_err(ServerError::Serve)
}

#[tonic::async_trait]
impl Cni for Service {
    async fn add(&self, request: Request<AddRequest>) -> Result<Response<AddReply>, Status> {
        let request = request.into_inner();
        let (container_id, pod) = (request.container_id.clone(), request.pod_name.clone());
        let span = Span::begin(&request.pod_uid, "ADD")
            .with("k8s.namespace.name", &request.pod_namespace)
            .with("k8s.pod.name", &pod);
        let start = Instant::now();
        let result = add::run(&self.node, request).await;
        span.end_with(&result);
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

/// Counts and logs a failure, and returns it in the form of CNI.
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
