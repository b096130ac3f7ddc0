//! The owner of a stream: the node, or a droplet without a data plane, with which the operator is measured.

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;

use thuban_common::policy::of_vpc;
use thuban_common::tables::EndpointKey;
use thuban_proto::transit::{
    DropletMessage, Hello, Nack, Probe, Program, ReportDenials, Subscribe, droplet_message::Message,
};
use tokio::sync::mpsc;
use tracing::{error, warn};

use crate::attachments::report::attachment;
use crate::checks::checked;
use crate::dataplane::connections::Connections;
use crate::dataplane::tables::TableError;
use crate::node::Node;
use crate::state::service_changes::Changes;
use crate::{boot, endpoints, metrics, path_probes};

/// The stream's outgoing side.
pub type Outbox = mpsc::UnboundedSender<DropletMessage>;

pub trait Peer: Send + Sync + 'static {
    /// Returns the token's file. It is read at each attempt.
    fn token_file(&self) -> &Path;

    /// Adds this droplet's state to `hello`, sends it, and keeps the outbox for later changes; all under one lock.
    fn open(&self, hello: Hello, outbox: &Outbox);

    /// Gives up the outbox: its stream is gone.
    fn close(&self);

    /// Applies a program except for the parts that take long. May block. Returns nacks for rows that could not be
    /// applied, and the work that is left.
    fn apply(&self, program: Program) -> (Vec<Nack>, Changes);

    /// Does the work that programs left. May block. Returns nacks for rows that could not be applied.
    fn finish(&self, changes: Changes) -> Vec<Nack>;

    /// Whether a pod of this droplet has no network yet.
    fn is_awaited(&self, _pod_uid: &str) -> bool {
        false
    }

    /// Takes note of the sets of which the operator wants to know what they deny, and whether it wants to know of pods'
    /// dropped packets.
    fn report_denials(&self, _asked: ReportDenials) {}

    /// Begins a probe of a path. Must be called within the runtime.
    fn probe(self: &Arc<Self>, _asked: Probe) {}

    /// Whether something that a program removed still leads packets somewhere. It ends by itself. May block.
    fn leads_by_old_rules(&self) -> bool {
        false
    }
}

impl Node {
    /// Replaces programs of another layout, now that the tables of this one are filled.
    fn take_over(&self) {
        let taken_over = self.links().take_over();
        let mut state = self.state();
        if let Err(error) = taken_over {
            error!(
                error = &error as &dyn std::error::Error,
                "programs of another layout could not all be replaced"
            );
            state.fronted.clear();
        }
        state.is_replacing = false;
        drop(state);
        self.announce();
    }

    /// Removes connections of endpoints that have left, before their removal is acknowledged.
    fn forget(&self, gone: &HashSet<EndpointKey>) -> Result<(), TableError> {
        if gone.is_empty() {
            return Ok(());
        }
        let mut connections = Connections::open(&self.settings.pins.maps())?;
        connections.forget(|endpoint| gone.contains(endpoint), || self.services().vnis())
    }
}

impl Peer for Node {
    fn token_file(&self) -> &Path {
        &self.settings.token_file
    }

    fn open(&self, hello: Hello, outbox: &Outbox) {
        let mut state = self.state();
        let subscribe = |key: &EndpointKey| Subscribe {
            vni: key.vni,
            address: key.address.to_vec(),
        };
        let checks = state.checks.iter();
        let hello = Hello {
            droplet: self.settings.node_name.clone(),
            attachments: state.attachments.values().map(attachment).collect(),
            subscriptions: state.subscriptions.keys().map(subscribe).collect(),
            checks: checks
                .map(|(key, told)| checked(*key, Some(told.state)))
                .collect(),
            can_probe: true,
            ..hello
        };
        // The receiver lives as long as the session.
        let _ = outbox.send(DropletMessage {
            message: Some(Message::Hello(hello)),
        });
        state.outbox = Some(outbox.clone());
        state.streams += 1;
    }

    fn close(&self) {
        let mut state = self.state();
        (state.outbox, state.stream) = (None, None);
        (state.reported_sets, state.reports_drops) = (None, false);
    }

    fn apply(&self, program: Program) -> (Vec<Nack>, Changes) {
        metrics::receives(&program);
        let is_kept = endpoints::concern(&program);
        let is_snapshot = program.snapshot;
        let (nacks, changes, endpoints) = {
            let heard = boot::nanoseconds();
            let mut state = self.state();
            let (nacks, changes) = state.apply(program);
            state.rules.hear(heard);
            self.askers.publish(state.askers());
            let endpoints = is_kept.then(|| state.program.locals().cloned().collect::<Vec<_>>());
            (nacks, changes, endpoints)
        };
        if let Some(endpoints) = endpoints {
            self.endpoints.keep(endpoints);
        }
        self.askers.keep();
        metrics::refuses(&nacks);
        self.announce();
        if is_snapshot {
            self.opened.notify_one();
        }
        (nacks, changes)
    }

    fn finish(&self, mut changes: Changes) -> Vec<Nack> {
        let gone = std::mem::take(&mut changes.gone);
        let (has_rules, is_first) = (changes.rules, changes.is_first);
        // Fronts come before the rules: who knows from these that an address is served may send clients here.
        let (mut nacks, rows, fronted) = {
            let mut services = self.services();
            (changes.write(&mut services), services.rows(), services.fronted())
        };
        self.state().fronted = fronted;
        if has_rules {
            nacks.extend(self.write_rules());
            // An ADD may wait for them.
            self.announce();
        }
        if is_first {
            self.take_over();
        }
        if let Err(error) = self.forget(&gone) {
            warn!(
                error = &error as &dyn std::error::Error,
                "connections of endpoints that have left go later"
            );
        }
        self.state().services_rows = rows;
        metrics::refuses(&nacks);
        nacks
    }

    fn is_awaited(&self, pod_uid: &str) -> bool {
        let state = self.state();
        let mut attached = state.attachments.values();
        attached.all(|attachment| attachment.pod_uid != pod_uid)
    }

    fn report_denials(&self, asked: ReportDenials) {
        let sets = asked.sets.iter().map(|key| of_vpc(key.vni, key.id)).collect();
        {
            let mut state = self.state();
            (state.reported_sets, state.reports_drops) = (Some(sets), asked.drops);
        }
        self.asked.notify_one();
    }

    fn probe(self: &Arc<Self>, asked: Probe) {
        tokio::spawn(path_probes::run(Arc::clone(self), asked));
    }

    fn leads_by_old_rules(&self) -> bool {
        self.may_lead_by_old_rules()
    }
}
