//! What programs leave to be done beside the state's lock: a large service and nft take a while, and no ADD and no other
//! row waits for it.
//!
//! Invariant: of a service that changes faster than it is written only the last row is, and nothing is acked before it, or
//! what came in its place, is.

use std::collections::{HashMap, HashSet};

use thuban_common::tables::EndpointKey;
use thuban_proto::transit as proto;
use thuban_rows::Service;

use crate::dataplane::services::Services;
use crate::dataplane::tables::TableError;
use crate::rejection::refusal;

/// What is still to be written of programs that came.
#[derive(Debug, Default)]
pub struct Changes {
    /// A snapshot: what it doesn't name goes.
    pub is_all: bool,
    pub rows: HashMap<EndpointKey, Change>,
    /// Endpoints that have left: nothing may be remembered of them when their addresses are used again.
    pub gone: HashSet<EndpointKey>,
    /// Rules of the node's own stack are due.
    pub rules: bool,
    /// With the first snapshot since this start.
    pub is_first: bool,
}

/// What becomes of a service.
#[derive(Debug)]
pub struct Change {
    /// None: it goes.
    pub service: Option<Service>,
    /// To refuse it by. Without a key the operator begins anew.
    pub key: Option<proto::RowKey>,
    pub epoch: u64,
    pub sequence: u64,
}

impl Changes {
    pub fn is_empty(&self) -> bool {
        let Self {
            is_all,
            rows,
            gone,
            rules,
            is_first,
        } = self;
        !is_all && !rules && !is_first && rows.is_empty() && gone.is_empty()
    }

    /// Both, the later in the place of the earlier.
    pub fn add(&mut self, later: Self) {
        if later.is_all {
            self.is_all = true;
            self.rows.clear();
        }
        self.rows.extend(later.rows);
        self.gone.extend(later.gone);
        self.rules |= later.rules;
        self.is_first |= later.is_first;
    }

    /// Writes them; what goes makes room for what comes, and for what waits. Answers a nack for each row not written.
    pub fn write(self, services: &mut Services) -> Vec<proto::Nack> {
        let Self { is_all, rows, .. } = self;
        let mut nacks = Vec::new();
        let mut refuse = |change: &Change, written: Result<(), TableError>| {
            if let Err(error) = written {
                let (epoch, sequence) = (change.epoch, change.sequence);
                nacks.push(refusal(epoch, sequence, change.key.clone(), error.into()));
            }
        };
        if is_all && let Err(error) = services.keep(|key| rows.contains_key(key)) {
            tracing::warn!(
                error = &error as &dyn std::error::Error,
                "stale services could not be removed"
            );
        }
        let (come, go): (Vec<_>, Vec<_>) = rows.into_iter().partition(|(_, change)| change.service.is_some());
        for (key, change) in go {
            refuse(&change, services.remove(&key));
        }
        for (_, change) in come {
            if let Some(service) = &change.service {
                refuse(&change, services.set(service));
            }
        }
        services.retry();
        nacks
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(last: u8) -> EndpointKey {
        EndpointKey {
            vni: 7,
            address: [last; 16],
        }
    }

    fn changes(is_all: bool, sequence: u64, keys: &[u8]) -> Changes {
        let change = || Change {
            service: None,
            key: None,
            epoch: 1,
            sequence,
        };
        let rows = keys.iter().map(|last| (key(*last), change()));
        let rows = rows.collect();
        let gone = keys.iter().map(|last| key(last + 100)).collect();
        Changes {
            is_all,
            rows,
            gone,
            ..Changes::default()
        }
    }

    #[test]
    fn of_a_service_the_last_row_counts_and_a_snapshot_is_all() {
        let mut pending = changes(true, 1, &[1, 2]);
        pending.add(changes(false, 2, &[2, 3]));
        let sequence = |pending: &Changes, last| pending.rows.get(&key(last)).map(|change| change.sequence);
        assert!(pending.is_all && !pending.is_empty());
        assert_eq!(
            [1, 2, 3].map(|last| sequence(&pending, last)),
            [Some(1), Some(2), Some(2)]
        );
        pending.add(changes(true, 3, &[3]));
        assert_eq!([2, 3].map(|last| sequence(&pending, last)), [None, Some(3)]);
        assert_eq!(pending.gone, [101, 102, 103].map(key).into());
    }
}
