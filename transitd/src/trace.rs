//! `transitd trace`: shows where each packet of an endpoint was seen on this node, and which verdict it got for which
//! reason.
//!
//! Invariant: the endpoint is traced for as long as this process renews the trace every second. A killed process
//! leaves nothing that lasts, and the daemon removes the flag that it may have left ([`tables::sweep`]).

mod record;
mod tables;

use std::fs::File;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use nix::fcntl::{Flock, FlockArg};
use thiserror::Error;
use thuban_common::packet::ipv4::mapped;
use thuban_common::tables::EndpointKey;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::signal::unix::{SignalKind, signal};

use crate::attachments::Attachment;
use crate::attachments::store::{self, StoreError};
use crate::settings::PinSettings;

pub use tables::sweep;

/// How long an endpoint stays traced without a renewal.
const LEASE: Duration = Duration::from_secs(5);

/// Print each packet of a pod or endpoint as this node's programs see it.
#[derive(Args, Clone, Debug)]
pub struct TraceSettings {
    /// The pod, as namespace/name. It must run on this node. Packets of all its addresses are printed.
    #[arg(long, required_unless_present = "address")]
    pod: Option<String>,
    /// VNI of the endpoint's VPC (see `kubectl get vpcs`). Needs --address.
    #[arg(long, requires = "address", conflicts_with = "pod")]
    vni: Option<u32>,
    /// Address of an endpoint, on this node or another one. Needs --vni.
    #[arg(long, requires = "vni")]
    address: Option<IpAddr>,
    /// Stop after this number of packets. Default: never.
    #[arg(long)]
    count: Option<u64>,
    /// Stop after this number of seconds. Default: never.
    #[arg(long)]
    seconds: Option<u64>,
    /// Print one JSON object for each packet.
    #[arg(long)]
    json: bool,
    /// Folder of the daemon's files. --pod reads the pod's addresses there.
    #[arg(long, env = "THUBAN_STATE_DIR", default_value = "/var/lib/thuban")]
    state_dir: PathBuf,
    #[command(flatten)]
    pins: PinSettings,
}

#[derive(Debug, Error)]
pub enum TraceError {
    #[error("--pod {0}: no attachment of this pod is on this node; expected namespace/name of a running pod")]
    NoPod(String),
    #[error("another `transitd trace` runs on this node")]
    Busy,
    #[error("cannot open {path}; has transitd run on this node?")]
    Lock { path: PathBuf, source: std::io::Error },
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Tables(#[from] tables::TraceTableError),
    #[error("cannot wait for packets")]
    Wait(#[source] std::io::Error),
}

pub async fn run(settings: TraceSettings) -> Result<(), TraceError> {
    let path = settings.pins.maps();
    let directory = File::open(&path).map_err(|source| TraceError::Lock { path, source })?;
    // The ring buffer has one reader.
    let _lock = Flock::lock(directory, FlockArg::LockExclusiveNonblock).map_err(|_| TraceError::Busy)?;
    let keys = endpoints(&settings)?;
    let mut tables = tables::TraceTables::open(&settings.pins.maps())?;
    let outcome = follow(&settings, &keys, &mut tables).await;
    tables.stop(&keys)?;
    outcome
}

fn endpoints(settings: &TraceSettings) -> Result<Vec<EndpointKey>, TraceError> {
    if let (Some(vni), Some(address)) = (settings.vni, settings.address) {
        let address = match address {
            IpAddr::V4(address) => mapped(address.octets()),
            IpAddr::V6(address) => address.octets(),
        };
        return Ok(vec![EndpointKey { vni, address }]);
    }
    let pod = settings.pod.clone().unwrap_or_default();
    let attachments = store::observe(&settings.state_dir.join("attachments"))?;
    let keys: Vec<EndpointKey> = attachments
        .iter()
        .filter(|attachment| format!("{}/{}", attachment.pod_namespace, attachment.pod_name) == pod)
        .flat_map(Attachment::keys)
        .collect();
    if keys.is_empty() {
        return Err(TraceError::NoPod(pod));
    }
    Ok(keys)
}

async fn follow(
    settings: &TraceSettings,
    keys: &[EndpointKey],
    tables: &mut tables::TraceTables,
) -> Result<(), TraceError> {
    let ring = tables::ring(&settings.pins.maps())?;
    // SAFETY: the ring buffer owns its file descriptor and never changes it.
    #[allow(unsafe_code)]
    let ring = unsafe { AsyncFd::register_with_interest(ring, Interest::READABLE) };
    let mut ring = ring.map_err(|error| TraceError::Wait(error.into_parts().1))?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(TraceError::Wait)?;
    let mut terminate = signal(SignalKind::terminate()).map_err(TraceError::Wait)?;
    let renewal = LEASE / 5;
    let mut renew = tokio::time::interval_at(tokio::time::Instant::now() + renewal, renewal);
    let end = tokio::time::sleep(Duration::from_secs(settings.seconds.unwrap_or(u64::MAX / 4)));
    tokio::pin!(end);
    let mut left = settings.count.unwrap_or(u64::MAX);
    let start = tables::now();
    tables.start(keys, LEASE)?;
    eprintln!("tracing; Ctrl-C ends it");
    while left > 0 {
        tokio::select! {
            guard = ring.readable_mut() => {
                let mut guard = guard.map_err(TraceError::Wait)?;
                while let Some(item) = guard.get_inner_mut().next() {
                    let Some(seen) = tables::decode(&item) else { continue };
                    if settings.json {
                        println!("{}", record::to_json(&seen));
                    } else {
                        println!("{}", record::to_text(&seen, start));
                    }
                    left -= 1;
                    if left == 0 {
                        break;
                    }
                }
                guard.clear_ready();
            }
            _ = renew.tick() => tables.start(keys, LEASE)?,
            () = &mut end => break,
            _ = interrupt.recv() => break,
            _ = terminate.recv() => break,
        }
    }
    Ok(())
}
