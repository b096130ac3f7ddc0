//! Applies programs: classes and sets of network policy first, then the places of roles, deletes, upserts, and the rows
//! of attachments. What is deleted of network policy goes last.

use std::collections::BTreeSet;

use thuban_proto::transit as proto;
use thuban_rows::{Direct, InvalidRow, LocalEndpoint, Row, RowKey, Vpc, proto_key};
use tracing::{info, warn};

use super::State;
use super::attachment_rows::of_sending;
use super::rules::Coming;
use super::service_changes::{Change, Changes};
use crate::dataplane::contract::{endpoint_key, endpoint_keys, front_key, key_of, row_key};
use crate::dataplane::services::Wanted;
use crate::dataplane::tables::{TableEntry, TableKey};
use crate::program::table_rows;
use crate::rejection::{Rejection, refusal};

/// A row, and the key by which it is refused.
pub(super) type Upsert = (Option<proto::RowKey>, Row);

/// The work of one program and its result, from step to step.
pub(super) struct Applying {
    epoch: u64,
    sequence: u64,
    nacks: Vec<proto::Nack>,
    /// The changes of services that are still to be written, and the endpoints that have left.
    pub(super) changes: Changes,
    /// The pods whose attachments' rows may change.
    pods: BTreeSet<String>,
}

impl Applying {
    fn new(program: &proto::Program) -> Self {
        Self {
            epoch: program.epoch,
            sequence: program.sequence,
            nacks: Vec::new(),
            changes: Changes {
                is_all: program.snapshot,
                ..Changes::default()
            },
            pods: BTreeSet::new(),
        }
    }

    pub(super) fn refuse(&mut self, key: Option<proto::RowKey>, rejection: impl Into<Rejection>) {
        let nack = refusal(self.epoch, self.sequence, key, rejection.into());
        self.nacks.push(nack);
    }

    fn change(&self, service: Option<Wanted>, key: Option<proto::RowKey>) -> Change {
        Change {
            service,
            key,
            epoch: self.epoch,
            sequence: self.sequence,
        }
    }
}

impl State {
    /// Applies a program. Returns a nack for each row not applied, and the work to do without the state's lock before
    /// the ack.
    pub fn apply(&mut self, program: proto::Program) -> (Vec<proto::Nack>, Changes) {
        let is_snapshot = program.snapshot;
        let mut applying = Applying::new(&program);
        let (mut rows, deletes) = self.read(program, &mut applying);
        let (sent, removed) = self.put_policies(&mut rows, &deletes, &mut applying);
        for (_, row) in &rows {
            self.note_senders(row, &mut applying);
            self.move_roles(row);
        }
        self.delete_rows(&deletes, &mut applying);
        let is_served = |(_, row): &Upsert| matches!(row, Row::NodeService(_));
        let served: Vec<_> = rows.extract_if(.., |row| is_served(row)).collect();
        self.upsert_rows(rows, &mut applying);
        self.await_rules(served, &mut applying);
        let is_first = is_snapshot && !self.synced;
        if is_snapshot {
            self.end_snapshot(is_first, &mut applying);
        }
        self.refresh_pods(&mut applying);
        self.remove_policies(&removed, &sent, &mut applying);
        applying.changes.rules = self.rules.are_due();
        applying.changes.is_first = is_first;
        let Applying {
            nacks, mut changes, ..
        } = applying;
        // The connections of an endpoint that lives on elsewhere go on.
        changes.gone.retain(|key| {
            let forward = row_key(RowKey::Forward, key);
            forward.is_none_or(|forward| self.program.get(&forward).is_none())
        });
        (nacks, changes)
    }

    /// Returns the valid upserts and deletes. Rows that a snapshot doesn't name are deleted.
    fn read(&mut self, program: proto::Program, applying: &mut Applying) -> (Vec<Upsert>, Vec<RowKey>) {
        let mut wanted = BTreeSet::new();
        let (mut rows, mut deletes, mut unknown) = (Vec::new(), Vec::new(), 0_usize);
        for row in program.upserts {
            let key = proto_key(&row);
            match Row::try_from(row) {
                Err(InvalidRow::UnknownKind) => unknown += 1,
                Ok(row) => {
                    wanted.insert(row.key());
                    rows.push((key, row));
                }
                Err(error) => applying.refuse(key, error),
            }
        }
        for key in &program.deletes {
            match RowKey::try_from(key) {
                Err(InvalidRow::UnknownKind) => unknown += 1,
                Ok(valid) => deletes.push(valid),
                Err(error) => applying.refuse(Some(key.clone()), error),
            }
        }
        if unknown > 0 {
            // The row is of a newer operator, which has our version from Hello. A nack could not name it.
            warn!(
                unknown,
                "rows of a kind that this transitd does not know are ignored"
            );
        }
        if program.snapshot {
            deletes.extend(self.program.keys().filter(|key| !wanted.contains(*key)).cloned());
            deletes.extend(self.policies.keys().filter(|key| !wanted.contains(key)));
            self.rules.forget(|key| !wanted.contains(key));
        }
        self.rules.forget(|key| deletes.contains(key));
        if program.snapshot || deletes.iter().any(has_rules) || wanted.iter().any(has_rules) {
            self.rules.change();
        }
        (rows, deletes)
    }

    /// Has the rows of a VPC's attachments written anew if the VPC says something else of what they send or keep.
    fn note_senders(&self, row: &Row, applying: &mut Applying) {
        let Row::Vpc(new) = row else { return };
        let told = |vpc: &Vpc| (of_sending(vpc), vpc.kept);
        if self.program.vpc(new.vni).map(told) == Some(told(new)) {
            return;
        }
        let own = self.attachments.values().filter(|own| own.vni == new.vni.get());
        applying
            .pods
            .extend(own.map(|attachment| attachment.pod_uid.clone()));
    }

    /// Moves roles to their new places before the rows that were bounced here until now are deleted: a snapshot brings
    /// both at once. Changes that need room wait for their turn.
    fn move_roles(&mut self, row: &Row) {
        let tells_roles = matches!(row, Row::Vpc(_) | Row::Network(_));
        let Some(old) = self.program.get(&row.key()).filter(|_| tells_roles).cloned() else {
            return;
        };
        let has_room = |(key, _): &(TableKey, TableEntry)| self.program.wants(key);
        if !table_rows(row).iter().all(has_room) {
            return;
        }
        let changes = self.program.upsert(row.clone());
        if self.write(changes).is_err() {
            let back = self.program.upsert(old);
            let _ = self.write(back);
        }
    }

    /// Whether the rules of the node's stack name the endpoint.
    fn is_in_rules(&self, endpoint: &LocalEndpoint) -> bool {
        endpoint.host || endpoint.ingress_set.is_some() || self.program.is_led_to(endpoint)
    }

    fn delete_rows(&mut self, deletes: &[RowKey], applying: &mut Applying) {
        for key in deletes {
            if let Some(Row::Local(endpoint)) = self.program.get(key) {
                applying.pods.insert(endpoint.pod_uid.clone());
                applying.changes.gone.extend(endpoint_keys(endpoint));
                if self.is_in_rules(endpoint) {
                    self.rules.change();
                }
            }
            if let RowKey::Vpc(vni) = key {
                // The operator ends them, too. The next VPC of this number may have the same addresses.
                self.subscriptions.forget(vni.get());
            }
            if let RowKey::Service(vni, address) = key {
                let change = applying.change(None, None);
                let of = endpoint_key(*vni, *address);
                applying.changes.rows.insert(of, change);
            }
            if let RowKey::Front(vni, address) = key {
                // Another VPC's front may have the address already.
                let other = self.program.fronts_at(*address).find(|front| front.vni != *vni);
                let change = applying.change(other.map(Wanted::from), None);
                applying.changes.rows.insert(front_key(*address), change);
                self.rules.change();
            }
            let gone = self.program.delete(key);
            if let Err(error) = self.write(gone) {
                applying.refuse(None, error);
            }
        }
    }

    fn upsert_rows(&mut self, rows: Vec<Upsert>, applying: &mut Applying) {
        for (key, row) in rows {
            match &row {
                Row::Service(service) => {
                    let change = applying.change(Some(service.into()), key.clone());
                    applying.changes.rows.insert(key_of(service), change);
                }
                Row::Front(front) => {
                    if self.program.get(&row.key()).is_none() {
                        self.rules.change();
                    }
                    let change = applying.change(Some(front.into()), key.clone());
                    applying.changes.rows.insert(front_key(front.address), change);
                }
                Row::Local(endpoint) => {
                    let is_in = |row: &Row| matches!(row, Row::Local(old) if self.is_in_rules(old));
                    if self.is_in_rules(endpoint) || self.program.get(&row.key()).is_some_and(is_in) {
                        self.rules.change();
                    }
                }
                _ => {}
            }
            let front = match &row {
                Row::Front(front) => Some(front.address),
                _ => None,
            };
            if let Err(rejection) = self.upsert(row, &mut applying.pods) {
                // A front without its clients would take all: the node's stack serves it, which knows them.
                if let Some(address) = front {
                    let gone = applying.change(None, None);
                    applying.changes.rows.insert(front_key(address), gone);
                }
                applying.refuse(key, rejection);
            }
        }
    }

    /// Has the services that the node is to serve wait for their rules. Refuses a service that needs a view of names
    /// if this node has none.
    fn await_rules(&mut self, served: Vec<Upsert>, applying: &mut Applying) {
        for (key, row) in served {
            let Row::NodeService(service) = row else { continue };
            if !self.own.has_view_of(&service) {
                let why = "it is the cluster's DNS by the operator's THUBAN_CLUSTER_DNS, but not by this transitd's";
                let (reason, message) = (proto::NackReason::Unspecified, why.to_owned());
                applying.refuse(key, Rejection { reason, message });
                continue;
            }
            self.rules.await_rules(Coming {
                service,
                key,
                epoch: applying.epoch,
                sequence: applying.sequence,
            });
        }
    }

    pub(super) fn upsert(&mut self, row: Row, pods: &mut BTreeSet<String>) -> Result<(), Rejection> {
        let key = row.key();
        if let Row::Local(endpoint) = &row {
            if let Some(address) = self.program.address_taken(endpoint) {
                return Err(Rejection {
                    reason: proto::NackReason::AddressInUseOnNode,
                    message: format!("another VPC's endpoint on this droplet has {address}"),
                });
            }
            pods.insert(endpoint.pod_uid.clone());
            if let Some(Row::Local(old)) = self.program.get(&key) {
                pods.insert(old.pod_uid.clone());
            }
        }
        if let Row::Direct(Direct { vni, address, .. }) = &row {
            self.subscriptions.adopt(endpoint_key(*vni, *address));
        }
        let changes = self.program.upsert(row);
        self.write(changes).map_err(|error| {
            // Nothing stays half-applied: the row is removed again, however much of it was written.
            let undo = self.program.delete(&key);
            if let Err(error) = self.write(undo) {
                warn!(
                    error = &error as &dyn std::error::Error,
                    "a row that was not applied could not be removed"
                );
            }
            error.into()
        })
    }

    /// Removes everything that the snapshot doesn't ask for from the tables.
    fn end_snapshot(&mut self, is_first: bool, applying: &mut Applying) {
        self.sweep();
        let pods = self
            .attachments
            .values()
            .map(|attachment| attachment.pod_uid.clone());
        applying.pods.extend(pods);
        if is_first {
            info!(
                epoch = applying.epoch,
                rows = self.program.keys().count(),
                "first snapshot applied"
            );
        }
        self.synced = true;
        self.stream = Some(applying.epoch);
    }

    /// Removes table rows that no row asks for: after a restart the tables still hold the last program.
    fn sweep(&mut self) {
        let awaited = self.rules.table_keys();
        let stale: Vec<TableKey> = self
            .tables
            .held()
            .map(|(key, _)| *key)
            .filter(|key| match key {
                TableKey::Local(key) => !self.attachments.values().any(|a| a.keys().any(|own| own == *key)),
                other => match other.interface() {
                    Some(ifindex) => !self.attachments.values().any(|a| a.host_ifindex == ifindex),
                    None => !self.program.wants(other) && !awaited.contains(other),
                },
            })
            .collect();
        for key in stale {
            if let Err(error) = self.tables.remove(&key) {
                warn!(
                    ?key,
                    error = &error as &dyn std::error::Error,
                    "a stale row could not be removed"
                );
            }
        }
    }

    fn refresh_pods(&mut self, applying: &mut Applying) {
        for pod in std::mem::take(&mut applying.pods) {
            if let Err(error) = self.refresh(&pod) {
                warn!(
                    pod,
                    error = &error as &dyn std::error::Error,
                    "an attachment's rows could not be written"
                );
                // The nack has no key, so that the operator begins anew instead of taking the rows as applied.
                let reason = proto::NackReason::Unspecified;
                let message = format!("rows of pod {pod}: {error}");
                applying.refuse(None, Rejection { reason, message });
            }
        }
    }
}

/// Whether rules of the node's own stack depend on the row; the service ranges of VPCs and the ranges of private
/// networks are in them.
fn has_rules(key: &RowKey) -> bool {
    matches!(
        key,
        RowKey::NodeService(..)
            | RowKey::Exposed(..)
            | RowKey::Vpc(_)
            | RowKey::Network(..)
            | RowKey::Droplet(_)
            | RowKey::PolicySet(..)
    )
}
