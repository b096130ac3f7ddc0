//! The state of this droplet: its program, its tables, its attachments, and the stream's outgoing side; under one lock
//! in `Node`.
//!
//! Invariant: an attachment's table rows exist exactly while the program has its pod's endpoint with that address and
//! no newer attachment of the pod took over. Until the first snapshot the tables stay as the last transitd left them.

mod apply;
mod attachment_rows;
pub mod policies;
pub mod rules;
pub mod service_changes;
pub mod subscriptions;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;

use thuban_api::identifiers::Vni;
use thuban_common::tables::{EndpointKey, RemoteRow, SUBNET_BOUNCER_HERE};
use thuban_proto::transit as proto;
use thuban_rows::{LocalEndpoint, Refused, Row, RowKey, Visible};
use tokio::sync::mpsc;
use tracing::warn;

use crate::askers::Source;
use crate::attachments::{Attachment, AttachmentId};
use crate::checks::{CheckKey, Told};
use crate::dataplane::contract::row_key;
use crate::dataplane::quota::Usage;
use crate::dataplane::services::{Marks, Services};
use crate::dataplane::tables::{TableEntry, TableError, TableKey, Tables};
use crate::netfilter::ruleset::OwnAddresses;
use crate::program::{Change, Program, Silent};
use policies::Policies;
use rules::Rules;
use subscriptions::Subscriptions;

#[derive(Debug)]
pub struct State {
    pub program: Program,
    pub tables: Tables,
    pub policies: Policies,
    pub marks: Marks,
    /// The number of rows in the tables of services, see `dataplane::services`.
    pub services_rows: Usage,
    /// The addresses of fronts that lead to backends, each with its service.
    pub fronted: BTreeSet<(IpAddr, String)>,
    /// The number of connections at the last look at them, see `tasks::expire_connections`.
    pub connections_held: usize,
    /// Services that those connections lead to.
    pub services_in_use: HashSet<EndpointKey>,
    /// The number of entries of FLOWS at the same look.
    pub flows_held: usize,
    pub own: OwnAddresses,
    pub rules: Rules,
    /// Whether programs of another layout are in place until the tables of this one are filled.
    pub is_replacing: bool,
    pub attachments: BTreeMap<AttachmentId, Attachment>,
    pub subscriptions: Subscriptions,
    pub outbox: Option<mpsc::UnboundedSender<proto::DropletMessage>>,
    /// The operator's epoch, while its stream is open and has sent a snapshot.
    pub stream: Option<u64>,
    /// The number of streams so far.
    pub streams: u64,
    /// The states of this droplet's backends of load balancers as the operator is told them.
    pub checks: BTreeMap<CheckKey, Told>,
    /// The sets of network policy (`common::policy::of_vpc`) of which the operator wants to know what they deny; none:
    /// it has not asked on this stream.
    pub reported_sets: Option<HashSet<u64>>,
    /// Whether the operator wants to know of pods' dropped packets.
    pub reports_drops: bool,
    /// When the operator was last heard, by this boot's clock, with everything that it had said by then in the rules.
    pub heard: Option<u64>,
    /// Whether the first snapshot since this start is applied.
    pub synced: bool,
    /// The names that VPCs saw before the first snapshot.
    pub visible_before: HashMap<u32, Arc<Visible>>,
    silent: Silent,
}

/// Whether a pod can be wired, and if not, why.
#[derive(Clone, Debug)]
pub enum Readiness {
    Ready(LocalEndpoint),
    Refused { reason: String, message: String },
    NotYet(&'static str),
}

impl State {
    pub fn new(
        tables: Tables,
        policies: Policies,
        services: &Services,
        marks: Marks,
        own: OwnAddresses,
        attachments: BTreeMap<AttachmentId, Attachment>,
    ) -> Self {
        let direct = tables.held().filter_map(|(key, _)| {
            if let TableKey::Remote(RemoteRow::Direct, key) = key {
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
        // Bouncers get a VPC's services without asking.
        let vnis: BTreeSet<u32> = services.addresses().map(|key| key.vni).collect();
        let subscribed: BTreeSet<u32> = vnis.into_iter().filter(|vni| !is_bouncer(*vni)).collect();
        let known = services.addresses().filter(|key| subscribed.contains(&key.vni));
        let subscriptions = Subscriptions::new(direct.chain(known.copied()));
        let program = Program::default();
        Self {
            program,
            tables,
            policies,
            marks,
            services_rows: services.rows(),
            fronted: services.fronted(),
            connections_held: 0,
            services_in_use: HashSet::new(),
            flows_held: 0,
            own,
            rules: Rules::default(),
            is_replacing: false,
            attachments,
            subscriptions,
            outbox: None,
            stream: None,
            streams: 0,
            checks: BTreeMap::new(),
            reported_sets: None,
            reports_drops: false,
            heard: None,
            synced: false,
            visible_before: HashMap::new(),
            silent: Silent::default(),
        }
    }

    /// Remembers endpoints that an earlier transitd had here: their pods can be served before the first snapshot,
    /// which decides. Their table rows are still there.
    pub fn remember(&mut self, endpoints: Vec<LocalEndpoint>) {
        for endpoint in endpoints {
            let _ = self.program.upsert(Row::Local(endpoint));
        }
    }

    /// Remembers the droplets that an earlier transitd found silent: its tables are arranged for them.
    pub fn remember_silent(&mut self, silent: Silent) {
        self.silent = silent;
    }

    pub fn silent(&self) -> &Silent {
        &self.silent
    }

    /// Makes these droplets the silent ones, and no others. After an error the former droplets stay the silent ones,
    /// though some tables may say otherwise.
    pub fn silence(&mut self, silent: Silent) -> Result<(), TableError> {
        let before = std::mem::replace(&mut self.silent, silent);
        let written = self.write(self.program.role_tables());
        if written.is_err() {
            self.silent = before;
        }
        written
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

    /// Returns the pods that may ask the cluster's DNS by this node's view. A fenced attachment is left out, because
    /// another attachment may have its address by now.
    pub fn askers(&self) -> Source {
        let mut source = Source::default();
        for attachment in self.attachments.values() {
            let key = TableKey::Attachment(attachment.host_ifindex);
            if self.tables.get(&key).is_none() {
                continue;
            }
            let vpc = attachment.vni;
            let visible = if self.synced {
                Vni::new(vpc).and_then(|vni| self.program.visible(vni))
            } else {
                self.visible_before.get(&vpc)
            };
            if let Some(visible) = visible {
                source.visible.insert(vpc, Arc::clone(visible));
                source
                    .vpcs
                    .extend(attachment.addresses().map(|address| (address, vpc)));
            }
        }
        source
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
        if self.is_replacing {
            return Readiness::NotYet(
                "programs of another layout are in place until the operator's rows are here",
            );
        }
        if self.synced && !self.rules.are_written {
            // These rules may lead to an endpoint that had the address before.
            return Readiness::NotYet("the node's nftables rules could not be written, see transitd's log");
        }
        match self.program.local_of_pod(pod_uid) {
            Some(endpoint) if endpoint.ingress_set.is_some() && !self.rules.are_in_force() => {
                Readiness::NotYet(
                    "the node's nftables rules are not in force for the pod's ingress policies yet",
                )
            }
            Some(endpoint) if endpoint.ready => Readiness::Ready(endpoint.clone()),
            Some(_) => Readiness::NotYet("the endpoint's bouncers have not acknowledged it yet"),
            None if self.stream.is_none() => Readiness::NotYet("this droplet has no stream to the operator"),
            None => {
                Readiness::NotYet("the operator has not sent an endpoint for this pod; see the pod's events")
            }
        }
    }

    /// Returns the host's interface to the pod of the VPC that has an address.
    pub fn interface_to(&self, vni: Vni, address: IpAddr) -> Option<&str> {
        let is_it = |attachment: &Attachment| {
            !attachment.is_host()
                && attachment.vni == vni.get()
                && attachment.addresses().any(|own| own == address)
        };
        // A fenced attachment carries nothing.
        let is_carried = |attachment: &Attachment| {
            let key = TableKey::Attachment(attachment.host_ifindex);
            self.tables.get(&key).is_some()
        };
        if !self.program.has_local(vni, address) {
            return None;
        }
        let mut attached = self.attachments.values();
        let attachment = attached.find(|attachment| is_it(attachment) && is_carried(attachment))?;
        Some(attachment.host_interface.as_str())
    }

    fn write(&mut self, changes: Vec<Change>) -> Result<(), TableError> {
        let mut result = Ok(());
        for (key, entry) in changes {
            let written = match entry {
                Some(entry) => self.tables.set(key, self.silent.arrange(entry)),
                None => self.tables.remove(&key),
            };
            result = result.and(written);
        }
        result
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

    /// Returns how long clients of a service keep their backends, seconds: agents can't know what clients keep without
    /// the service's row.
    pub fn affinity_at(&self, key: &EndpointKey) -> u64 {
        let service = row_key(RowKey::Service, key).and_then(|key| self.program.get(&key));
        match service {
            Some(Row::Service(service)) => {
                let seconds = service.ports.iter().map(|port| u64::from(port.affinity));
                seconds.max().unwrap_or_default()
            }
            _ => 0,
        }
    }

    /// Gives a direct row back. A service's row stays until the operator removes it: this droplet may be a bouncer
    /// too.
    pub fn drop_direct(&mut self, key: &EndpointKey) {
        let row = row_key(RowKey::Direct, key);
        let changes = row.map(|row| self.program.delete(&row)).unwrap_or_default();
        let removed = self
            .write(changes)
            .and(self.tables.remove(&TableKey::Remote(RemoteRow::Direct, *key)));
        if let Err(error) = removed {
            warn!(
                error = &error as &dyn std::error::Error,
                "an idle direct row could not be removed"
            );
        }
    }
}
