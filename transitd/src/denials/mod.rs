//! `transitd denials`: shows which policy denied which packets on this node.
//!
//! Invariant: it changes nothing. The daemon reads the packets that it follows.

mod pods;
mod record;

use std::time::Duration;

use clap::Args;
use thiserror::Error;
use thuban_common::policy::{DenialRecord, in_vpc};
use thuban_proto::inspect::DenialsRequest;
use tokio::time::{MissedTickBehavior, interval};

use crate::attachments::store::StoreError;
use crate::boot;
use crate::dataplane::denials;
use crate::dataplane::tables::TableError;
use crate::follow::asking::{AskError, Following};
use crate::inspect::Deniers;
use crate::settings::NodeSettings;

use pods::Pods;
use record::Denial;

/// The time between looks at which pods there are.
const POD_INTERVAL: Duration = Duration::from_secs(1);

/// Print which network policies denied which packets on this node, one line for each rule and pod: the last second
/// with such packets, one of its packets, and the number of all.
#[derive(Args, Clone, Debug)]
pub struct DenialsSettings {
    /// Print only packets from or to this pod, as namespace/name. It must run on this node.
    #[arg(long)]
    pod: Option<String>,
    /// Print packets that are denied from now on, a line for each: at most 16 in a second for each rule and pod. Ends
    /// with Ctrl-C.
    #[arg(long)]
    follow: bool,
    /// Stop after this number of packets. Default: never.
    #[arg(long, requires = "follow")]
    count: Option<u64>,
    /// Stop after this number of seconds. Default: never.
    #[arg(long, requires = "follow")]
    seconds: Option<u64>,
    /// Print one JSON object for each line.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    node: NodeSettings,
}

#[derive(Debug, Error)]
pub enum DenialsError {
    #[error("--pod {0}: no attachment of this pod is on this node; expected namespace/name of a running pod")]
    NoPod(String),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("cannot read what was denied; has this version of transitd run on this node?")]
    Tables(#[from] TableError),
    #[error(transparent)]
    Ask(#[from] AskError),
}

pub async fn run(settings: DenialsSettings) -> Result<(), DenialsError> {
    let mut printer = Printer {
        deniers: Deniers::ask(settings.node.socket.clone()),
        pods: Pods::read(&settings.node.state_dir)?,
        settings,
    };
    if let Some(pod) = &printer.settings.pod
        && !printer.pods.has(pod)
    {
        return Err(DenialsError::NoPod(pod.clone()));
    }
    if printer.settings.follow {
        return printer.follow().await;
    }
    for record in denials::read(&printer.settings.node.pins.maps())? {
        printer.print(record).await;
    }
    Ok(())
}

struct Printer {
    settings: DenialsSettings,
    deniers: Deniers,
    pods: Pods,
}

impl Printer {
    async fn follow(&mut self) -> Result<(), DenialsError> {
        let socket = self.settings.node.socket.clone();
        let mut packets: Following<DenialRecord> =
            Following::begin(socket, self.settings.seconds, async |mut daemon| {
                daemon.denials(DenialsRequest {}).await
            })
            .await?;
        eprintln!("following; Ctrl-C ends it");
        let mut look = interval(POD_INTERVAL);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut left = self.settings.count.unwrap_or(u64::MAX);
        while left > 0 {
            tokio::select! {
                told = packets.next() => {
                    let Some(told) = told? else {
                        break;
                    };
                    told.lost.print(self.settings.json);
                    if let Some(record) = told.record {
                        left = left.saturating_sub(self.print(record).await.into());
                    }
                }
                // Pods come and go.
                _ = look.tick() => self.pods = Pods::read(&self.settings.node.state_dir)?,
            }
        }
        Ok(())
    }

    /// Prints the record, unless it is of other pods. Returns whether it was printed.
    async fn print(&mut self, record: DenialRecord) -> bool {
        if let Some(pod) = &self.settings.pod
            && !self.pods.is_of(pod, &record)
        {
            return false;
        }
        let (vni, set) = in_vpc(record.key.set);
        let denial = Denial {
            time: boot::wall_clock(record.entry.time),
            names: self.pods.names(&record),
            denier: self.deniers.of(vni, set, record.key.rank).await,
            record,
        };
        if self.settings.json {
            println!("{}", denial.to_json());
        } else {
            println!("{}", denial.to_text(self.settings.follow));
        }
        true
    }
}
