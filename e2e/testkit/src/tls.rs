//! Servers that tests play: TLS with a fixed name, on a runtime of their own.

use std::net::TcpListener;
use std::path::Path;

use tokio::runtime::Runtime;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::service::Routes;
use tonic::transport::{Identity, Server, ServerTlsConfig};

/// Serves on a listener, for as long as the runtime lives. Writes the certificate for the name to a file: it is its own
/// CA.
pub fn serve(listener: TcpListener, name: &str, ca: &Path, routes: Routes) -> Runtime {
    let certified = rcgen::generate_simple_self_signed(vec![name.to_owned()]).unwrap();
    let (certificate, key) = (certified.cert.pem(), certified.signing_key.serialize_pem());
    std::fs::write(ca, &certificate).unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    listener.set_nonblocking(true).unwrap();
    runtime.spawn(async move {
        let listener = tokio::net::TcpListener::from_std(listener).unwrap();
        Server::builder()
            .tls_config(ServerTlsConfig::new().identity(Identity::from_pem(certificate, key)))
            .unwrap()
            .add_routes(routes)
            .serve_with_incoming(TcpListenerStream::new(listener))
            .await
            .unwrap();
    });
    runtime
}
