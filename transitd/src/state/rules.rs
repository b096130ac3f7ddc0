//! The wanted rules of the node's own stack, and the rows that wait for them. The writer of the rules waits for nft
//! without the state's lock ([`crate::rules`]).
//!
//! Invariant: rules come before rows. Without the rules, an untranslated packet to a service that the node serves
//! would leave, and conntrack would keep it so. Nothing of such a row is in the tables before its rules are in force.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::net::{IpAddr, Ipv4Addr};

use thuban_proto::transit as proto;
use thuban_rows::{NodeService, Row, RowKey};

use super::State;
use crate::dataplane::tables::TableKey;
use crate::netfilter::NetfilterError;
use crate::netfilter::host::Host;
use crate::netfilter::limits::PodVpcs;
use crate::netfilter::policy::Admission;
use crate::netfilter::ruleset::{Ruleset, ruleset};
use crate::program::table_rows;
use crate::rejection::{Rejection, refusal};

/// The state of the kernel's rules, compared with the program.
#[derive(Debug, Default)]
pub struct Rules {
    /// Services whose rows wait for rules.
    coming: BTreeMap<RowKey, Coming>,
    /// Changes of the program that rules are made of, as a count.
    changes: u64,
    /// Those of which rules were last made.
    made: u64,
    /// Those whose rules are in force.
    in_force: u64,
    /// Whether the kernel has the rules that were last asked for, as far as is known.
    pub are_written: bool,
    /// The addresses outside of the cluster of which the rules that were last written lead ports to backends, each with
    /// its Services. `None`: this process has written none yet.
    pub outside: Option<BTreeSet<(IpAddr, String)>>,
    /// Nacks of rows that waited. The operator has not been told yet.
    nacks: Vec<proto::Nack>,
    /// When the program came, by this boot's clock.
    said: Option<u64>,
}

/// A row that waits for its rules.
#[derive(Debug)]
pub struct Coming {
    pub service: NodeService,
    /// The key by which the row is refused.
    pub key: Option<proto::RowKey>,
    pub epoch: u64,
    pub sequence: u64,
}

impl Coming {
    /// Returns the row's version. Another row in its place has another version.
    fn version(&self) -> (u64, u64) {
        (self.epoch, self.sequence)
    }

    fn refusal(self, rejection: Rejection) -> proto::Nack {
        refusal(self.epoch, self.sequence, self.key, rejection)
    }
}

/// Everything of the tables `inet thuban` and `inet thuban-policy`, and the rows that wait for the first, each with its
/// version.
#[derive(Debug)]
pub struct Wanted {
    pub rules: Ruleset,
    /// The program's changes with which all of it is in force.
    pub changes: u64,
    /// What table `inet thuban-policy` is to have.
    pub admission: Admission,
    /// When the operator was heard with the program that the rules are made of.
    pub heard: Option<u64>,
    pub awaited: Vec<(RowKey, (u64, u64))>,
}

impl Rules {
    pub fn change(&mut self) {
        self.changes += 1;
    }

    /// Whether the kernel has the rules for the program as it is.
    pub const fn are_in_force(&self) -> bool {
        self.in_force == self.changes
    }

    /// Notes that the rules are in force for the program as it was at so many changes.
    pub fn enforce(&mut self, changes: u64) {
        self.in_force = self.in_force.max(changes);
    }

    /// Notes that a program came.
    pub fn hear(&mut self, now: u64) {
        self.said = Some(now);
    }

    /// Whether there are rules to write, or to try again.
    pub fn are_due(&self) -> bool {
        self.made != self.changes || !self.are_written || !self.coming.is_empty()
    }

    pub fn await_rules(&mut self, row: Coming) {
        let key = RowKey::NodeService(row.service.vni, row.service.address);
        self.coming.insert(key, row);
    }

    /// Forgets rows that are deleted, or that a snapshot doesn't name.
    pub fn forget(&mut self, is_gone: impl Fn(&RowKey) -> bool) {
        self.coming.retain(|key, _| !is_gone(key));
    }

    /// Returns the keys of the table rows that the waiting rows ask for. Earlier versions of these rows may be in the
    /// tables.
    pub fn table_keys(&self) -> HashSet<TableKey> {
        let rows = self.coming.values().flat_map(|row| {
            let row = Row::NodeService(row.service.clone());
            table_rows(&row)
        });
        rows.map(|(key, _)| key).collect()
    }

    /// Returns the nacks of rows that waited, no matter who wrote the rules.
    pub fn take_nacks(&mut self) -> Vec<proto::Nack> {
        std::mem::take(&mut self.nacks)
    }

    fn take(&mut self, awaited: &[(RowKey, (u64, u64))]) -> Vec<Coming> {
        let is_same = |coming: &Coming, version| coming.version() == version;
        let taken = awaited.iter().filter_map(|(key, version)| {
            let same = self.coming.get(key).is_some_and(|row| is_same(row, *version));
            same.then(|| self.coming.remove(key))?
        });
        taken.collect()
    }
}

impl State {
    /// Returns what table `inet thuban` is to have now. Changes that come later are due again.
    pub fn wanted_rules(&mut self) -> Wanted {
        self.rules.made = self.rules.changes;
        let coming = &self.rules.coming;
        let key = |service: &NodeService| RowKey::NodeService(service.vni, service.address);
        let staying = self.program.served_by_node();
        let staying = staying.filter(|service| !coming.contains_key(&key(service)));
        let services = coming.values().map(|row| &row.service).chain(staying);
        let host = Host::of(&self.program, self.own.underlay);
        Wanted {
            rules: ruleset(services, &host, self.own),
            admission: self.admission(),
            changes: self.rules.made,
            heard: self.rules.said.max(self.heard),
            awaited: coming
                .iter()
                .map(|(key, row)| (key.clone(), row.version()))
                .collect(),
        }
    }

    fn admission(&self) -> Admission {
        let judged = self.program.locals().filter_map(|local| {
            let set = (local.vni, local.ingress_set?);
            Some(local.addresses().map(move |address| (address, set)))
        });
        let pods: BTreeMap<IpAddr, _> = judged.flatten().collect();
        let rejects = |vni| self.program.vpc(vni).is_some_and(|vpc| vpc.reject);
        let rejecting = pods.iter().filter(|(_, (vni, _))| rejects(*vni));
        let rejecting = rejecting.map(|(address, _)| *address).collect();
        let sets: BTreeSet<_> = pods.values().copied().collect();
        let known = sets.into_iter().filter_map(|(vni, id)| {
            let outside = self.policies.outside(vni, id)?;
            Some(((vni, id), outside))
        });
        Admission {
            sets: known.collect(),
            rejecting,
            pods,
        }
    }

    /// Applies rows whose rules are in force, if they can be.
    pub fn admit(&mut self, awaited: &[(RowKey, (u64, u64))]) {
        for row in self.rules.take(awaited) {
            let applied = self.upsert(Row::NodeService(row.service.clone()), &mut BTreeSet::new());
            if let Err(rejection) = applied {
                self.rules.change();
                self.rules.nacks.push(row.refusal(rejection));
            }
        }
    }

    /// Refuses rows whose rules could not be written.
    pub fn refuse(&mut self, awaited: &[(RowKey, (u64, u64))], error: &NetfilterError) {
        for row in self.rules.take(awaited) {
            let rejection = Rejection {
                reason: proto::NackReason::Unspecified,
                message: error.to_string(),
            };
            self.rules.nacks.push(row.refusal(rejection));
        }
    }

    /// Returns the droplets that the rules of the overlay's port protect, and whether these are all droplets. Until
    /// the first snapshot they are those in the tables, which an earlier transitd wrote.
    pub fn droplets_to_protect(&self) -> (BTreeSet<Ipv4Addr>, bool) {
        if self.synced {
            return (
                self.program.droplets().map(|droplet| droplet.address.0).collect(),
                true,
            );
        }
        let held = self.tables.held().filter_map(|(key, _)| match key {
            TableKey::Droplet(address) => Some((*address).into()),
            _ => None,
        });
        (held.collect(), false)
    }

    /// Returns the pods whose connections by the node's own stack are bounded.
    pub fn limited_pods(&self) -> PodVpcs {
        let pods = self
            .attachments
            .values()
            .filter(|attachment| !attachment.is_host());
        pods.map(|attachment| (attachment.host_ifindex, attachment.vni))
            .collect()
    }
}
