//! The connection to transitd: a Unix socket, one call, a bound on everything.

use std::path::{Path, PathBuf};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use thuban_proto::cni::cni_client::CniClient;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint, Uri};
use tower::service_fn;

use crate::error::PluginError;

/// Runs `call` on a connected client and gives up after `limit`, connecting included.
pub fn call<T, F>(socket: &Path, limit: Duration, call: F) -> Result<T, PluginError>
where
    F: AsyncFnOnce(CniClient<Channel>) -> Result<tonic::Response<T>, tonic::Status>,
{
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(PluginError::Runtime)?;
    runtime.block_on(async {
        tokio::time::timeout(limit, async {
            let channel = connect(socket).await?;
            call(CniClient::new(channel))
                .await
                .map(tonic::Response::into_inner)
                .map_err(|s| PluginError::Call(Box::new(s)))
        })
        .await
        .map_err(|_| PluginError::Timeout(limit))?
    })
}

async fn connect(socket: &Path) -> Result<Channel, PluginError> {
    let path: PathBuf = socket.to_owned();
    let failed = |source| PluginError::Connect {
        socket: socket.display().to_string(),
        source,
    };
    // The address is never dialled, but gRPC wants an authority.
    Endpoint::try_from("http://transitd")
        .map_err(failed)?
        .connect_with_connector(service_fn(move |_: Uri| {
            let path = path.clone();
            async move { UnixStream::connect(path).await.map(TokioIo::new) }
        }))
        .await
        .map_err(failed)
}
