//! `transitd denials`: shows which policy denied which packets on this node.
//!
//! Invariant: it changes nothing but FOLLOWED, which ends by itself soon after the process.

mod pods;
mod record;

use clap::Args;
use thiserror::Error;
use thuban_common::policy::{DenialRecord, in_vpc};

use crate::attachments::store::StoreError;
use crate::dataplane::denials::{self, Followed};
use crate::dataplane::tables::TableError;
use crate::follow::{self, Event, FollowError, Follower, LEASE};
use crate::inspect::Deniers;
use crate::settings::NodeSettings;

use pods::Pods;
use record::Denial;

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
    Follow(#[from] FollowError),
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
        let pins = self.settings.node.pins.clone();
        // `transitd trace` locks the directory of maps.
        let _lock = follow::lock(&pins.layout(), "denials --follow")?;
        let mut followed = Followed::open(&pins.maps())?;
        let mut records = Follower::open(&pins.maps(), "DENIED", self.settings.seconds)?;
        let mut renew = || followed.set(follow::now() + LEASE.as_nanos() as u64);
        renew()?;
        eprintln!("following; Ctrl-C ends it");
        let mut left = self.settings.count.unwrap_or(u64::MAX);
        while left > 0 {
            match records.next().await? {
                Event::Records(batch) => {
                    for record in batch {
                        left = left.saturating_sub(self.print(record).await.into());
                        if left == 0 {
                            break;
                        }
                    }
                }
                Event::Renewal => {
                    renew()?;
                    // Pods come and go.
                    self.pods = Pods::read(&self.settings.node.state_dir)?;
                }
                Event::End => break,
            }
        }
        Ok(followed.set(0)?)
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
            time: record::wall_clock(record.entry.time),
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
