//! The work that programs leave to be done without the state's lock. A large service and nft take a while, and no ADD
//! and no other row waits for them.
//!
//! Invariant: if a service changes faster than it is written, only its last row is written. Nothing is acked before
//! it, or its replacement, is written.

use std::collections::{HashMap, HashSet};

use thuban_common::tables::EndpointKey;
use thuban_proto::transit as proto;

use crate::dataplane::services::{Services, Wanted};
use crate::dataplane::tables::TableError;
use crate::rejection::refusal;

/// The part of programs that is still to be written.
#[derive(Debug, Default)]
pub struct Changes {
    /// The changes are a snapshot: a service that it doesn't name is removed.
    pub is_all: bool,
    pub rows: HashMap<EndpointKey, Change>,
    /// Endpoints that have left: nothing may be remembered of them when their addresses are used again.
    pub gone: HashSet<EndpointKey>,
    /// Whether rules of the node's own stack are due.
    pub rules: bool,
    /// Whether the first snapshot since this start is among them.
    pub is_first: bool,
}

/// The change of a service or front.
#[derive(Debug)]
pub struct Change {
    /// The new row; `None`: the service is removed.
    pub service: Option<Wanted>,
    /// The key by which the row is refused. Without a key the operator begins anew.
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

    /// Adds later changes. They replace earlier ones of the same service.
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

    /// Writes the changes. Removals come first, because they make room for new and waiting services. Returns a nack
    /// for each row not written.
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
