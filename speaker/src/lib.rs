//! The speaker: announces the addresses of load balancers from its node by BGP, through gobgpd. Addresses of L2 it
//! announces itself, by ARP and neighbour discovery. It also manages HAProxy, if the node has it.
//!
//! Invariant: a route is announced only while lbaasd has granted it, and while transitd serves its address. What
//! lbaasd is told never leaves out a route that gobgpd may have, nor an address that the node answers for.

pub mod deadlines;
pub mod decide;
pub mod gobgp;
pub mod haproxy;
pub mod l2;
pub mod lbaasd;
pub mod ledger;
pub mod metrics;
pub mod passwords;
pub mod reconcile;
pub mod sequence;
pub mod transitd;

use std::path::PathBuf;

use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint};

/// Returns a channel to the gRPC server at a Unix socket. The first call connects.
fn channel(socket: PathBuf) -> Channel {
    let connector = tower::service_fn(move |_| {
        let socket = socket.clone();
        async move { UnixStream::connect(socket).await.map(TokioIo::new) }
    });
    Endpoint::from_static("http://local").connect_with_connector_lazy(connector)
}
