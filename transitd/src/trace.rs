//! `transitd trace`: shows where each packet of an endpoint was seen on this node, and which verdict it got for which
//! reason.
//!
//! Invariant: the endpoint is traced for as long as this process renews the trace every second. A killed process
//! leaves nothing that lasts, and the daemon removes the flag that it may have left ([`tables::sweep`]).

mod record;
mod tables;

use std::net::IpAddr;

use clap::Args;
use thiserror::Error;
use thuban_common::packet::ipv4::mapped;
use thuban_common::tables::{EndpointKey, TraceRecord};

use crate::attachments::Attachment;
use crate::attachments::store::{self, StoreError};
use crate::follow::{self, Event, FollowError, Follower, LEASE};
use crate::inspect::Deniers;
use crate::settings::NodeSettings;

pub use tables::sweep;

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
    #[command(flatten)]
    node: NodeSettings,
}

#[derive(Debug, Error)]
pub enum TraceError {
    #[error("--pod {0}: no attachment of this pod is on this node; expected namespace/name of a running pod")]
    NoPod(String),
    #[error(transparent)]
    Follow(#[from] FollowError),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Tables(#[from] tables::TraceTableError),
}

pub async fn run(settings: TraceSettings) -> Result<(), TraceError> {
    let _lock = follow::lock(&settings.node.pins.maps(), "trace")?;
    let keys = endpoints(&settings)?;
    let mut tables = tables::TraceTables::open(&settings.node.pins.maps())?;
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
    let attachments = store::observe(&settings.node.state_dir.join("attachments"))?;
    let keys: Vec<EndpointKey> = attachments
        .iter()
        .filter(|attachment| attachment.pod() == pod)
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
    let mut deniers = Deniers::ask(settings.node.socket.clone());
    let mut records: Follower<TraceRecord> =
        Follower::open(&settings.node.pins.maps(), "TRACE", settings.seconds)?;
    let mut left = settings.count.unwrap_or(u64::MAX);
    let start = follow::now();
    tables.start(keys, LEASE)?;
    eprintln!("tracing; Ctrl-C ends it");
    while left > 0 {
        match records.next().await? {
            Event::Records(batch) => {
                for seen in batch.iter().take(usize::try_from(left).unwrap_or(usize::MAX)) {
                    let denier = match seen.set {
                        0 => None,
                        set => deniers.of(seen.vni, set, seen.rank).await,
                    };
                    if settings.json {
                        println!("{}", record::to_json(seen, denier.as_ref()));
                    } else {
                        println!("{}", record::to_text(seen, start, denier.as_ref()));
                    }
                    left -= 1;
                }
            }
            Event::Renewal => tables.start(keys, LEASE)?,
            Event::End => break,
        }
    }
    Ok(())
}
