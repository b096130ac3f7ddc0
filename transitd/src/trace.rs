//! `transitd trace`: shows where each packet of an endpoint was seen on this node, and which verdict it got for which
//! reason.
//!
//! Invariant: the daemon reads what programs write, and has the endpoint traced as long as this process listens.

mod record;

use std::net::IpAddr;

use clap::Args;
use thiserror::Error;
use thuban_common::packet::ipv4::mapped;
use thuban_common::tables::{EndpointKey, TraceRecord};
use thuban_proto::inspect::{TraceRequest, TracedEndpoint};

use crate::attachments::Attachment;
use crate::attachments::store::{self, StoreError};
use crate::follow;
use crate::follow::asking::{AskError, Following};
use crate::inspect::Deniers;
use crate::settings::NodeSettings;

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
    Ask(#[from] AskError),
    #[error(transparent)]
    Store(#[from] StoreError),
}

pub async fn run(settings: TraceSettings) -> Result<(), TraceError> {
    let endpoints = endpoints(&settings)?.into_iter().map(|key| TracedEndpoint {
        vni: key.vni,
        address: key.address.to_vec(),
    });
    let request = TraceRequest {
        endpoints: endpoints.collect(),
    };
    let socket = settings.node.socket.clone();
    let mut deniers = Deniers::ask(socket.clone());
    let mut left = settings.count.unwrap_or(u64::MAX);
    let start = follow::now();
    let mut packets: Following<TraceRecord> =
        Following::begin(socket, settings.seconds, async |mut daemon| {
            daemon.trace(request).await
        })
        .await?;
    eprintln!("tracing; Ctrl-C ends it");
    while left > 0 {
        let Some(told) = packets.next().await? else {
            break;
        };
        told.lost.print(settings.json);
        let Some(seen) = &told.record else {
            continue;
        };
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
    Ok(())
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
