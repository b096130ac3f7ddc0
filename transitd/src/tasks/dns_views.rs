//! Answers queries of pods for the cluster's DNS, each by the view of its VPC.
//!
//! DNS runs on threads of its own, which begin before any part of the start that may take time. So nothing that the
//! daemon does or waits for delays an answer.

use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use thuban_api::cluster_dns::ClusterDns;
use thuban_common::tables::HOST_SOURCE;
use tracing::{info, warn};

use crate::askers::Askers;
use crate::dns::{DNS_PORT, Server, Settings, Views};

const THREADS: usize = 2;
/// The pause between tries: the address may not be there yet, and the port may still be a predecessor's.
const BIND_RETRY: Duration = Duration::from_millis(50);
/// The number of failed tries before each warning.
const TRIES_TO_WARN: u32 = 100;

/// Starts the thread that answers. It runs until the process ends.
pub fn start(askers: Arc<Askers>, cluster_dns: ClusterDns) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(THREADS)
        .thread_name("dns")
        .enable_all()
        .build()?;
    let serve = move || runtime.block_on(run(askers, cluster_dns));
    thread::Builder::new().name("dns".into()).spawn(serve)?;
    Ok(())
}

async fn run(askers: Arc<Askers>, cluster_dns: ClusterDns) {
    let listening: Vec<SocketAddr> = cluster_dns
        .addresses()
        .map(|address| match address {
            IpAddr::V4(_) => (HOST_SOURCE, DNS_PORT).into(),
            // The node's address towards pods is link-local, and each pod's interface has it. Routes to pods choose it
            // for answers, and netfilter drops what was sent to any other address.
            IpAddr::V6(_) => (Ipv6Addr::UNSPECIFIED, DNS_PORT).into(),
        })
        .collect();
    let mut tries = 0;
    loop {
        let settings = Settings::new(listening.clone(), (cluster_dns.upstream(), 53).into());
        let known = Arc::clone(&askers);
        match Server::bind(settings, move |source| known.of(source)) {
            Ok(server) => {
                info!(
                    ?cluster_dns,
                    "answers queries of VPCs that share the cluster's DNS"
                );
                return server.serve(std::future::pending()).await;
            }
            Err(error) => {
                tries += 1;
                if tries % TRIES_TO_WARN == 0 {
                    warn!(
                        error = &error as &dyn std::error::Error,
                        "pods of other VPCs than the nodes' have no DNS, it is tried again"
                    );
                }
            }
        }
        tokio::time::sleep(BIND_RETRY).await;
    }
}
