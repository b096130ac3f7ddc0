//! What this droplet has: its program, its tables, its attachments, and the stream's outgoing side; under one lock in `Node`.
//!
//! Invariant: an attachment's table rows exist exactly while the program has its pod's endpoint with that address and
//! no newer attachment of the pod took over. Until the first snapshot the tables stay as the last transitd left them.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use ipnet::Ipv6Net;
use thuban_common::tables::{
    ATTACHMENT_HOST, AttachmentEntry, EndpointKey, LOCAL_HOST, LOCAL_TAKES_XDP, LocalEntry,
    SUBNET_BOUNCER_HERE,
};
use thuban_proto::transit as proto;
use thuban_rows::{Direct, InvalidRow, LocalEndpoint, NodeService, Refused, Row, RowKey, proto_key};
use tokio::sync::mpsc;
use tracing::{error, info, warn};

use crate::attachments::{Attachment, AttachmentId};
use crate::dataplane::contract::{endpoint_key, endpoint_keys, key_of, row_key};
use crate::dataplane::links::Links;
use crate::dataplane::room::Rows;
use crate::dataplane::services::{Marks, Services};
use crate::dataplane::tables::{TableEntry, TableError, TableKey, Tables};
use crate::netfilter::ruleset::Host;
use crate::netfilter::{Netfilter, NetfilterError};
use crate::program::{Change, Program, table_rows};
use crate::rejection::{Rejection, refusal};
use crate::services::{self, Changes};
use crate::subscriptions::Subscriptions;

#[derive(Debug)]
pub struct State {
    pub program: Program,
    pub tables: Tables,
    pub marks: Marks,
    /// Rows in the tables of services, see `services`.
    pub services_rows: Rows,
    /// Of the last look at them, see `connections`.
    pub connections_held: usize,
    /// Services that those connections lead to.
    pub services_in_use: HashSet<EndpointKey>,
    pub links: Links,
    pub netfilter: Netfilter,
    pub attachments: BTreeMap<AttachmentId, Attachment>,
    pub subscriptions: Subscriptions,
    pub outbox: Option<mpsc::UnboundedSender<proto::DropletMessage>>,
    /// The operator's epoch, while its stream is open and has sent a snapshot.
    pub stream: Option<u64>,
    /// The first snapshot since this start is applied.
    pub synced: bool,
}

/// Why a pod cannot be wired yet, or ever.
#[derive(Clone, Debug)]
pub enum Readiness {
    Ready(LocalEndpoint),
    Refused { reason: String, message: String },
    NotYet(&'static str),
}

impl State {
    pub fn new(
        tables: Tables,
        services: &Services,
        marks: Marks,
        links: Links,
        netfilter: Netfilter,
        attachments: BTreeMap<AttachmentId, Attachment>,
    ) -> Self {
        let direct = tables.held().filter_map(|(key, _)| {
            if let TableKey::Direct(key) = key {
                Some(*key)
            } else {
                None
            }
        });
        let is_bouncer = |vni| {
            tables.held().any(|(key, entry)| match (key, entry) {
                (TableKey::Subnet { vni: of, .. }, TableEntry::Subnet(subnet)) => {
                    *of == vni && subnet.flags & SUBNET_BOUNCER_HERE != 0
                }
                _ => false,
            })
        };
        // Bouncers have a VPC's services unasked.
        let vnis: BTreeSet<u32> = services.addresses().map(|key| key.vni).collect();
        let subscribed: BTreeSet<u32> = vnis.into_iter().filter(|vni| !is_bouncer(*vni)).collect();
        let known = services.addresses().filter(|key| subscribed.contains(&key.vni));
        let subscriptions = Subscriptions::new(direct.chain(known.copied()));
        let program = Program::default();
        Self {
            program,
            tables,
            marks,
            services_rows: services.rows(),
            connections_held: 0,
            services_in_use: HashSet::new(),
            links,
            netfilter,
            attachments,
            subscriptions,
            outbox: None,
            stream: None,
            synced: false,
        }
    }

    /// Endpoints that an earlier transitd had here: their pods can be served before the first snapshot, which decides. What
    /// they mean in the tables is there still.
    pub fn remember(&mut self, endpoints: Vec<LocalEndpoint>) {
        for endpoint in endpoints {
            let _ = self.program.upsert(Row::Local(endpoint));
        }
    }

    /// Sends to the operator; without a stream nothing is lost, because Hello tells the state.
    pub fn send(&self, message: proto::droplet_message::Message) {
        if let Some(outbox) = &self.outbox {
            // A closed stream is noticed by its session.
            let _ = outbox.send(proto::DropletMessage {
                message: Some(message),
            });
        }
    }

    pub fn readiness(&self, pod_uid: &str) -> Readiness {
        if let Some(Row::Refused(Refused { reason, message, .. })) =
            self.program.get(&RowKey::Refused(pod_uid.to_owned()))
        {
            return Readiness::Refused {
                reason: reason.clone(),
                message: message.clone(),
            };
        }
        if self.links.is_replacing() {
            return Readiness::NotYet(
                "programs of another layout are in place until the operator's rows are here",
            );
        }
        if self.synced && !self.netfilter.is_written() {
            // They may lead to an endpoint that had the address before.
            return Readiness::NotYet("the node's nftables rules could not be written, see transitd's log");
        }
        match self.program.local_of_pod(pod_uid) {
            Some(endpoint) if endpoint.ready => Readiness::Ready(endpoint.clone()),
            Some(_) => Readiness::NotYet("the endpoint's bouncers have not acknowledged it yet"),
            None if self.outbox.is_none() => Readiness::NotYet("this droplet has no stream to the operator"),
            None => Readiness::NotYet("the operator has not sent an endpoint for this pod"),
        }
    }

    /// Applies rows: where roles are, then deletes, then upserts, then what attachments make of them. Answers a nack for each
    /// row not applied, and what is to be written of services.
    pub fn apply(&mut self, program: proto::Program) -> (Vec<proto::Nack>, Changes) {
        let (epoch, sequence) = (program.epoch, program.sequence);
        let nack = |key, rejection| refusal(epoch, sequence, key, rejection);
        let mut changes = Changes {
            is_all: program.snapshot,
            ..Changes::default()
        };
        let change = |service, key| services::Change {
            service,
            key,
            epoch,
            sequence,
        };
        let (mut nacks, mut pods) = (Vec::new(), BTreeSet::new());
        let mut wanted = BTreeSet::new();
        let (mut rows, mut unknown) = (Vec::new(), 0_usize);
        for row in program.upserts {
            let key = proto_key(&row);
            match Row::try_from(row) {
                Err(InvalidRow::UnknownKind) => unknown += 1,
                Ok(row) => {
                    wanted.insert(row.key());
                    rows.push((key, row));
                }
                Err(error) => nacks.push(nack(key, error.into())),
            }
        }
        let mut deletes = Vec::new();
        for key in &program.deletes {
            match RowKey::try_from(key) {
                Err(InvalidRow::UnknownKind) => unknown += 1,
                Ok(valid) => deletes.push(valid),
                Err(error) => nacks.push(nack(Some(key.clone()), error.into())),
            }
        }
        if unknown > 0 {
            // Of a newer operator, which has our version from Hello. A nack could not name them.
            warn!(
                unknown,
                "rows of a kind that this transitd does not know are ignored"
            );
        }
        if program.snapshot {
            deletes.extend(self.program.keys().filter(|key| !wanted.contains(*key)).cloned());
        }
        let mut changes_rules = deletes.iter().any(has_rules) || wanted.iter().any(has_rules);
        for (_, row) in &rows {
            self.move_roles(row);
        }
        for key in deletes {
            if let Some(Row::Local(endpoint)) = self.program.get(&key) {
                pods.insert(endpoint.pod_uid.clone());
                changes.gone.extend(endpoint_keys(endpoint));
                changes_rules |= endpoint.host || self.program.is_led_to(endpoint);
            }
            if let RowKey::Service(vni, address) = key {
                changes
                    .rows
                    .insert(endpoint_key(vni, address), change(None, None));
            }
            let gone = self.program.delete(&key);
            if let Err(error) = self.write(gone) {
                nacks.push(nack(None, error.into()));
            }
        }
        let is_served = |(_, row): &(_, Row)| matches!(row, Row::NodeService(_));
        let mut served: Vec<_> = rows.extract_if(.., |row| is_served(row)).collect();
        for (key, row) in rows {
            if let Row::Service(service) = &row {
                let change = change(Some(service.clone()), key.clone());
                changes.rows.insert(key_of(service), change);
            }
            changes_rules |=
                matches!(&row, Row::Local(endpoint) if endpoint.host || self.program.is_led_to(endpoint));
            if let Err(rejection) = self.upsert(row, &mut pods) {
                nacks.push(nack(key, rejection));
            }
        }
        // Rules before rows: an untranslated packet would leave, and conntrack would keep it so.
        for (key, message) in self.prepare(&mut served) {
            let reason = proto::NackReason::Unspecified;
            nacks.push(nack(key, Rejection { reason, message }));
        }
        for (key, row) in served {
            if let Err(rejection) = self.upsert(row, &mut pods) {
                nacks.push(nack(key, rejection));
            }
        }
        let is_first = program.snapshot && !self.synced;
        if (program.snapshot || changes_rules || !self.netfilter.is_written())
            && let Err(error) = self.serve()
        {
            // What went is still served; the next look tries again.
            warn!(
                error = &error as &dyn std::error::Error,
                "the node's rules could not be written"
            );
        }
        if program.snapshot {
            self.sweep();
            pods.extend(
                self.attachments
                    .values()
                    .map(|attachment| attachment.pod_uid.clone()),
            );
            if is_first {
                info!(
                    epoch,
                    rows = self.program.keys().count(),
                    "first snapshot applied"
                );
            }
            self.synced = true;
            self.stream = Some(epoch);
            // Those that went meanwhile are swept now.
            if let Err(error) = self.protect_port() {
                warn!(
                    error = &error as &dyn std::error::Error,
                    "the overlay's port could not be protected anew, it is tried again"
                );
            }
        }
        for pod in pods {
            if let Err(error) = self.refresh(&pod) {
                warn!(
                    pod,
                    error = &error as &dyn std::error::Error,
                    "an attachment's rows could not be written"
                );
                // Without a key: the operator begins anew instead of taking the rows for applied.
                nacks.push(nack(
                    None,
                    Rejection {
                        reason: proto::NackReason::Unspecified,
                        message: format!("rows of pod {pod}: {error}"),
                    },
                ));
            }
        }
        if is_first && let Err(error) = self.links.take_over() {
            error!(
                error = &error as &dyn std::error::Error,
                "programs of another layout could not all be replaced"
            );
        }
        // Of one that lives on elsewhere connections go on.
        changes.gone.retain(|key| {
            let forward = row_key(RowKey::Forward, key);
            forward.is_none_or(|forward| self.program.get(&forward).is_none())
        });
        (nacks, changes)
    }

    /// Where roles are, before what they bounced by here until now goes: a snapshot brings both at once. What needs room is
    /// left for its turn.
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

    /// Writes the rules for services that nodes are to serve, and takes those out that can't be, with the reason.
    fn prepare(
        &mut self,
        coming: &mut Vec<(Option<proto::RowKey>, Row)>,
    ) -> Vec<(Option<proto::RowKey>, String)> {
        let is_blind =
            |(_, row): &(_, Row)| served(row).is_some_and(|service| !self.netfilter.has_view_of(service));
        let blind = coming.extract_if(.., |row| is_blind(row));
        let why = "it is the cluster's DNS by the operator's THUBAN_CLUSTER_DNS, but not by this transitd's";
        let mut refused: Vec<_> = blind.map(|(key, _)| (key, why.to_owned())).collect();
        if coming.is_empty() {
            return refused;
        }
        let services = || coming.iter().filter_map(|(_, row)| served(row));
        let of = |service: &NodeService| (service.vni, service.address);
        let keys: HashSet<_> = services().map(of).collect();
        let staying = self.program.served_by_node();
        let staying = staying.filter(|service| !keys.contains(&of(service)));
        let host = Host::of(&self.program);
        if let Err(error) = self.netfilter.set(services().chain(staying), host) {
            refused.extend(coming.drain(..).map(|(key, _)| (key, error.to_string())));
        }
        refused
    }

    fn upsert(&mut self, row: Row, pods: &mut BTreeSet<String>) -> Result<(), Rejection> {
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
            // Nothing half-applied: the row goes again, whatever of it was written.
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

    /// Brings the rules of the node's own stack in line with the program.
    pub fn serve(&mut self) -> Result<(), NetfilterError> {
        self.protect_port()?;
        self.netfilter
            .set(self.program.served_by_node(), Host::of(&self.program))
    }

    /// Keeps others from the overlay's port, at the droplets that the tables have: an earlier transitd's too, until the first
    /// snapshot.
    pub fn protect_port(&mut self) -> Result<(), NetfilterError> {
        if self.synced {
            return self.netfilter.protect_port(self.program.droplets(), true);
        }
        let held = self.tables.held().filter_map(|(key, _)| match key {
            TableKey::Droplet(address) => Some((*address).into()),
            _ => None,
        });
        self.netfilter.protect_port(held, false)
    }

    fn write(&mut self, changes: Vec<Change>) -> Result<(), TableError> {
        let mut result = Ok(());
        for (key, entry) in changes {
            let written = match entry {
                Some(entry) => self.tables.set(key, entry),
                None => self.tables.remove(&key),
            };
            result = result.and(written);
        }
        result
    }

    /// Removes table rows that nobody asks for: after a restart the tables still hold the last program.
    fn sweep(&mut self) {
        let stale: Vec<TableKey> = self
            .tables
            .held()
            .map(|(key, _)| *key)
            .filter(|key| match key {
                TableKey::Attachment(ifindex) => {
                    !self.attachments.values().any(|a| a.host_ifindex == *ifindex)
                }
                TableKey::Local(key) => !self.attachments.values().any(|a| a.keys().any(|own| own == *key)),
                other => !self.program.wants(other),
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

    /// Brings the table rows of a pod's attachments in line with its endpoint.
    pub fn refresh(&mut self, pod_uid: &str) -> Result<(), TableError> {
        let endpoint = self.program.local_of_pod(pod_uid).cloned();
        let mut attachments: Vec<Attachment> = self
            .attachments
            .values()
            .filter(|a| a.pod_uid == pod_uid)
            .cloned()
            .collect();
        attachments.sort_by_key(|attachment| attachment.generation);
        let newest = attachments.last().map(|attachment| attachment.generation);
        for attachment in &attachments {
            let own = endpoint.as_ref().filter(|e| {
                Some(attachment.generation) == newest
                    && e.vni.get() == attachment.vni
                    && e.address == attachment.address
            });
            match own {
                Some(endpoint) => self.wire(attachment, endpoint.address6)?,
                None => self.fence(attachment)?,
            }
        }
        Ok(())
    }

    /// `address6` is the endpoint's. An attachment made by a transitd that knew no IPv6 goes on with IPv4 alone.
    fn wire(&mut self, attachment: &Attachment, address6: Option<Ipv6Net>) -> Result<(), TableError> {
        let entry = AttachmentEntry {
            vni: attachment.vni,
            network: attachment.network,
            address: attachment.key().address,
            mac: attachment.mac,
            flags: if attachment.is_host() { ATTACHMENT_HOST } else { 0 },
        };
        self.tables.set(
            TableKey::Attachment(attachment.host_ifindex),
            TableEntry::Attachment(entry),
        )?;
        let entry = LocalEntry {
            ifindex: attachment.host_ifindex,
            network: attachment.network,
            mac: attachment.mac,
            flags: match (attachment.is_host(), attachment.takes_xdp) {
                (true, _) => LOCAL_HOST,
                (false, true) => LOCAL_TAKES_XDP,
                (false, false) => 0,
            },
        };
        self.tables
            .set(TableKey::Local(attachment.key()), TableEntry::Local(entry))?;
        match attachment.key6() {
            Some(key6) if attachment.address6 == address6 => {
                self.tables.set(TableKey::Local(key6), TableEntry::Local(entry))
            }
            Some(key6) => self.remove_local(key6, attachment.host_ifindex),
            None => Ok(()),
        }
    }

    /// Removes the row of an address if it leads to this interface.
    fn remove_local(&mut self, key: EndpointKey, ifindex: u32) -> Result<(), TableError> {
        let key = TableKey::Local(key);
        match self.tables.get(&key) {
            Some(TableEntry::Local(entry)) if entry.ifindex == ifindex => self.tables.remove(&key),
            _ => Ok(()),
        }
    }

    /// Takes an attachment's rows out of the tables, as many as can be; never those of a newer attachment with the
    /// same addresses.
    pub fn fence(&mut self, attachment: &Attachment) -> Result<(), TableError> {
        let ifindex = attachment.host_ifindex;
        let mut result = Ok(());
        for key in attachment.keys() {
            result = result.and(self.remove_local(key, ifindex));
        }
        self.tables.remove(&TableKey::Attachment(ifindex)).and(result)
    }

    /// Takes all rows that lead to an interface out of the tables.
    pub fn fence_interface(&mut self, ifindex: u32) -> Result<(), TableError> {
        let rows: Vec<TableKey> = self
            .tables
            .held()
            .filter(|(k, e)| leads_to(k, e) == Some(ifindex))
            .map(|(k, _)| *k)
            .collect();
        rows.iter().try_for_each(|key| self.tables.remove(key))
    }

    /// Interfaces that rows lead to.
    pub fn interfaces(&self) -> BTreeSet<u32> {
        self.tables
            .held()
            .filter_map(|(key, entry)| leads_to(key, entry))
            .collect()
    }

    /// Whether a direct row or a service was used since the last scan; a service is while connections lead to it.
    pub fn direct_used(&mut self, key: &EndpointKey) -> bool {
        let used = self
            .tables
            .take_used(key)
            .and_then(|used| Ok(self.marks.take(key)? || used));
        self.services_in_use.contains(key)
            || used.unwrap_or_else(|error| {
                warn!(
                    error = &error as &dyn std::error::Error,
                    "a direct row could not be read"
                );
                true
            })
    }

    /// Gives a direct row back. A service's row stays until the operator takes it: this droplet may be a bouncer too.
    pub fn drop_direct(&mut self, key: &EndpointKey) {
        let row = row_key(RowKey::Direct, key);
        let changes = row.map(|row| self.program.delete(&row)).unwrap_or_default();
        let removed = self
            .write(changes)
            .and(self.tables.remove(&TableKey::Direct(*key)));
        if let Err(error) = removed {
            warn!(
                error = &error as &dyn std::error::Error,
                "an idle direct row could not be removed"
            );
        }
    }
}

/// Whether a row is one of rules of the node's own stack; the service ranges of VPCs are in them.
fn has_rules(key: &RowKey) -> bool {
    matches!(
        key,
        RowKey::NodeService(..) | RowKey::Exposed(..) | RowKey::Vpc(_) | RowKey::Droplet(_)
    )
}

/// The service, if the node's own stack serves it.
fn served(row: &Row) -> Option<&NodeService> {
    match row {
        Row::NodeService(service) => Some(service),
        _ => None,
    }
}

fn leads_to(key: &TableKey, entry: &TableEntry) -> Option<u32> {
    match (key, entry) {
        (TableKey::Attachment(ifindex), _) => Some(*ifindex),
        (TableKey::Local(_), TableEntry::Local(entry)) => Some(entry.ifindex),
        _ => None,
    }
}
