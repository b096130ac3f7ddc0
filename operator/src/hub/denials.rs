//! Asks droplets what the policies that are reported deny, and gathers what the droplets tell.
//!
//! Invariant: a droplet is asked only of sets that it judges by, and heard only of sets that it was asked of.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::time::Duration;

use k8s_openapi::jiff::{SignedDuration, Timestamp};
use thuban_api::identifiers::Vni;
use thuban_api::{DeniedPeer, PacketDirection};
use thuban_proto::MAX_DENIALS;
use thuban_proto::transit::{
    Denial, Denials as Report, OperatorMessage, PolicyKey, ReportDenials, operator_message,
};
use thuban_rows::PolicyId;
use tokio::time::sleep;

use super::{Hub, State};
use crate::model::denial_reports::{DenialReports, Gathered, ReportedSet};
use crate::model::rows;
use crate::model::world::World;

/// How often the hub looks which sets droplets are to be asked of, and what can be written, while a policy is reported.
const LOOK: Duration = Duration::from_secs(10);

type SetKey = (Vni, PolicyId);

#[derive(Debug, Default)]
pub(super) struct Denials {
    reports: DenialReports,
    /// The sets of which droplets are asked.
    sets: HashMap<SetKey, ReportedSet>,
    /// What each droplet was asked on its present stream.
    asked: HashMap<String, BTreeSet<SetKey>>,
}

impl Denials {
    fn is_idle(&self) -> bool {
        self.reports.is_empty() && self.asked.values().all(BTreeSet::is_empty)
    }

    /// Notes that a droplet begins a stream.
    pub fn forget(&mut self, droplet: &str) {
        self.asked.remove(droplet);
    }
}

impl Hub {
    /// Asks droplets for as long as the process leads.
    pub async fn ask_for_denials(&self) {
        loop {
            let news = self.denial_news.notified();
            let is_idle = self.lock().denials.is_idle();
            if is_idle {
                news.await;
            }
            self.look_at_denials();
            sleep(LOOK).await;
        }
    }

    /// Asks droplets of other sets than before, and triggers policies of which something new can be written.
    pub(super) fn look_at_denials(&self) {
        let state = &mut *self.lock();
        if state.held.is_some() {
            // Droplets have no sets yet that this leader knows.
            return;
        }
        let mut wanted = state.wanted_sets();
        let is_open = |droplet: &String| state.senders.contains_key(droplet);
        state.denials.asked.retain(|droplet, _| is_open(droplet));
        for droplet in state.denials.asked.keys() {
            wanted.entry(droplet.clone()).or_default();
        }
        for (droplet, sets) in wanted {
            let known = state.denials.asked.get(&droplet);
            let Some(sender) = state.senders.get(&droplet) else {
                continue;
            };
            if known != Some(&sets) {
                let _ = sender.send(question(&sets));
                state.denials.asked.insert(droplet, sets);
            }
        }
        for policy in state.denials.reports.due(self.now()) {
            self.wake_policy(&policy);
        }
    }

    /// Sets whether the packets that a policy denies are to be reported. `policy`: the name by which the world knows
    /// it.
    pub fn set_reported(&self, policy: &str, is_wanted: bool) {
        let changed = self.lock().denials.reports.set(policy, is_wanted);
        for name in &changed {
            self.wake_policy(name);
        }
        if !changed.is_empty() {
            self.denial_news.notify_one();
        }
    }

    /// Whether packets that the policy denies are reported: it has been set so, and its namespace has not too many.
    pub fn is_reported(&self, policy: &str) -> bool {
        self.lock().denials.reports.is_reported(policy)
    }

    /// Gathers what a droplet reports.
    pub fn note_denials(&self, droplet: &str, report: &Report) {
        let state = &mut *self.lock();
        let Denials { reports, sets, asked } = &mut state.denials;
        let Some(asked) = asked.get(droplet) else { return };
        for denial in report.denials.iter().take(MAX_DENIALS) {
            let key = Vni::new(denial.vni).zip(PolicyId::new(denial.set));
            let set = key
                .filter(|key| asked.contains(key))
                .and_then(|key| sets.get(&key));
            let Some((set, packet)) = set.zip(Packet::read(denial)) else {
                continue;
            };
            let Some((policies, is_egress)) = state.world.denying(set, denial.rank) else {
                continue;
            };
            for policy in policies {
                let peer = packet.peer(&state.world, set.vni, is_egress);
                reports.note(&policy, denial.packets, peer);
            }
        }
    }

    /// Takes what droplets have reported of a policy since it was taken last. That is at most once a minute, and only
    /// if `may_write` says so. What can't be written must be given back.
    pub fn take_denied(&self, policy: &str, may_write: impl FnOnce() -> bool) -> Option<Gathered> {
        let now = self.now();
        self.lock().denials.reports.take(policy, now, may_write)
    }

    pub fn give_denied_back(&self, policy: &str, gathered: Gathered) {
        self.lock().denials.reports.give_back(policy, gathered);
    }
}

impl State {
    /// Returns the sets that each droplet is to be asked of, and remembers them.
    fn wanted_sets(&mut self) -> BTreeMap<String, BTreeSet<SetKey>> {
        let reports = &self.denials.reports;
        let chosen = if reports.is_empty() {
            Vec::new()
        } else {
            reports.choose(self.world.reported_sets(|policy| reports.is_reported(policy)))
        };
        let mut by_vpc: BTreeMap<&str, BTreeSet<SetKey>> = BTreeMap::new();
        for set in &chosen {
            by_vpc.entry(&set.vpc).or_default().insert((set.vni, set.id));
        }
        let mut wanted: BTreeMap<String, BTreeSet<SetKey>> = BTreeMap::new();
        for (vpc, keys) in by_vpc {
            for droplet in self.world.endpoint_droplets_of(vpc) {
                wanted.entry(droplet.to_owned()).or_default().extend(&keys);
            }
        }
        self.denials.sets = chosen.into_iter().map(|set| ((set.vni, set.id), set)).collect();
        wanted
    }
}

fn question(sets: &BTreeSet<SetKey>) -> OperatorMessage {
    let key = |(vni, id): &SetKey| PolicyKey {
        vni: vni.get(),
        id: id.get(),
    };
    let asked = ReportDenials {
        sets: sets.iter().map(key).collect(),
    };
    OperatorMessage {
        message: Some(operator_message::Message::ReportDenials(asked)),
    }
}

/// A packet that a droplet reports.
#[derive(Debug)]
struct Packet {
    source: IpAddr,
    destination: IpAddr,
    protocol: String,
    port: Option<u16>,
    time: String,
}

impl Packet {
    fn read(denial: &Denial) -> Option<Self> {
        let protocol = match denial.protocol {
            1 => "ICMP".to_owned(),
            6 => "TCP".to_owned(),
            17 => "UDP".to_owned(),
            58 => "ICMPv6".to_owned(),
            132 => "SCTP".to_owned(),
            number => number.to_string(),
        };
        let age = SignedDuration::from_millis(i64::try_from(denial.age_ms).unwrap_or(i64::MAX));
        let time = Timestamp::now()
            .saturating_sub(age)
            .unwrap_or(Timestamp::UNIX_EPOCH);
        Some(Self {
            source: rows::address(&denial.source)?,
            destination: rows::address(&denial.destination)?,
            protocol,
            port: u16::try_from(denial.port).ok().filter(|port| *port != 0),
            // Of one length, so that the order of texts is that of times.
            time: format!("{time:.3}"),
        })
    }

    /// Returns the other side of the packet. Only pods of the VPC have names.
    fn peer(&self, world: &World, vni: Vni, is_egress: bool) -> DeniedPeer {
        let (direction, own, other) = if is_egress {
            (PacketDirection::Egress, self.source, self.destination)
        } else {
            (PacketDirection::Ingress, self.destination, self.source)
        };
        DeniedPeer {
            time: self.time.clone(),
            direction,
            pod: world.pod_at(vni, own),
            address: other.to_string(),
            peer_pod: world.pod_at(vni, other),
            protocol: self.protocol.clone(),
            port: self.port,
        }
    }
}
