//! Has droplets probe paths, for people who ask.
//!
//! Invariant: a probe ends after [`HEAD_START`] and [`ANSWER_TIMEOUT`], whatever droplets say. A droplet is heard once
//! of a probe, and only if it was asked. Few probes run at a time.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::{MutexGuard, PoisonError};
use std::time::Duration;

use thuban_proto::MAX_SIGHTINGS;
use thuban_proto::transit::{OperatorMessage, Probe, ProbeAnswer, Probed, Sighting, operator_message};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::time::{Instant, sleep, timeout_at};

use super::Hub;
use crate::model::world::path::ProbePlan;

/// The most probes at a time.
const MAX_PROBES: usize = 16;
/// The most probes of one namespace for which droplets watch: fewer than a droplet takes, so that nobody holds others
/// up.
const MAX_OF_NAMESPACE: usize = 2;
/// How long the droplets on the way have to get ready before the packet is sent.
const HEAD_START: Duration = Duration::from_millis(300);
/// How long the droplet of the pod may take. The packet's answer may take 2 s.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(4);
/// How long other droplets are awaited after the packet's answer.
const LATE_TIMEOUT: Duration = Duration::from_millis(700);
/// How long a droplet may watch for a probe's packet. It watches on when the probe is over, until it reports.
const WATCH_TIME: Duration = Duration::from_secs(4);
/// Source ports of probes: above those that Linux gives to pods' own connections.
const FIRST_PORT: u16 = 61_000;
const PORTS: u64 = 4_500;

#[derive(Debug, Default)]
pub(super) struct Probes {
    /// Droplets that understand probes.
    able: BTreeSet<String>,
    open: HashMap<u64, Open>,
    last_id: u64,
}

#[derive(Debug)]
struct Open {
    /// The asker's namespace.
    namespace: String,
    /// The droplets that were asked and have not reported yet.
    waiting: BTreeSet<String>,
    /// When they watch no more.
    watched_until: Instant,
    reports: UnboundedSender<(String, Probed)>,
}

impl Open {
    /// Whether somebody waits for the probe's reports.
    fn runs(&self) -> bool {
        !self.reports.is_closed()
    }
}

impl Probes {
    /// Whether a namespace may have another probe now.
    fn has_room(&mut self, namespace: &str) -> bool {
        let now = Instant::now();
        self.open
            .retain(|_, open| open.runs() || !open.waiting.is_empty() && now < open.watched_until);
        let running = self.open.values().filter(|open| open.runs()).count();
        let others = self.open.values();
        let own = others.filter(|open| open.namespace == namespace).count();
        running < MAX_PROBES && own < MAX_OF_NAMESPACE
    }
}

/// What droplets said of a probe.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Heard {
    /// What the droplet of the pod said of the packet's answer; none: the droplet did not say it.
    pub answer: Option<ProbeAnswer>,
    pub sightings: BTreeMap<String, Vec<Sighting>>,
    /// Droplets that do not understand probes.
    pub unable: BTreeSet<String>,
}

/// A probe that runs. It is over when this is dropped, but droplets may still watch for its packet.
struct Running {
    id: u64,
    /// The droplets that can report.
    able: BTreeSet<String>,
    reports: UnboundedReceiver<(String, Probed)>,
}

impl Hub {
    fn probes(&self) -> MutexGuard<'_, Probes> {
        self.probes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes whether a droplet understands probes.
    pub(super) fn note_can_probe(&self, droplet: &str, can_probe: bool) {
        let able = &mut self.probes().able;
        if can_probe {
            able.insert(droplet.to_owned());
        } else {
            able.remove(droplet);
        }
    }

    /// Whether a namespace may have another probe now. The answer costs little.
    pub fn has_room_for_probe(&self, namespace: &str) -> bool {
        self.probes().has_room(namespace)
    }

    /// Hears what a droplet reports of a probe.
    pub fn note_probed(&self, droplet: &str, mut probed: Probed) {
        let mut probes = self.probes();
        let Some(open) = probes.open.get_mut(&probed.id) else {
            return;
        };
        if open.waiting.remove(droplet) {
            probed.sightings.truncate(MAX_SIGHTINGS);
            let _ = open.reports.send((droplet.to_owned(), probed));
        }
    }

    /// Has the droplet of the pod send the packet, and the droplets on the way report. Returns nothing if too many
    /// probes run at this moment.
    pub async fn probe(&self, plan: &ProbePlan) -> Option<Heard> {
        let mut running = self.begin_probe(plan)?;
        let on_way = plan.droplets.iter().map(|(droplet, _)| droplet);
        let mut heard = Heard {
            unable: on_way
                .filter(|droplet| !running.able.contains(*droplet))
                .cloned()
                .collect(),
            ..Heard::default()
        };
        let home = plan.home();
        if heard.unable.contains(home) {
            return Some(heard);
        }
        let mut message = packet(plan, running.id);
        let others = running.able.iter().filter(|droplet| *droplet != home);
        let asked = others.filter(|droplet| self.ask_for_probe(droplet, message.clone()));
        let mut awaited = asked.count();
        if awaited > 0 {
            sleep(HEAD_START).await;
        }
        message.send = true;
        if !self.ask_for_probe(home, message) {
            return Some(heard);
        }
        awaited += 1;
        let mut end = Instant::now() + ANSWER_TIMEOUT;
        while awaited > 0 {
            let Ok(Some((droplet, probed))) = timeout_at(end, running.reports.recv()).await else {
                break;
            };
            awaited -= 1;
            if droplet == home {
                heard.answer = Some(probed.answer());
                end = end.min(Instant::now() + LATE_TIMEOUT);
            }
            heard.sightings.insert(droplet, probed.sightings);
        }
        Some(heard)
    }

    fn begin_probe(&self, plan: &ProbePlan) -> Option<Running> {
        let mut probes = self.probes();
        if !probes.has_room(&plan.namespace) {
            return None;
        }
        probes.last_id += 1;
        // Droplets may still report to the former leader's probes.
        let id = self.epoch.wrapping_shl(32) ^ probes.last_id;
        let on_way = plan.droplets.iter().map(|(droplet, _)| droplet);
        let able: BTreeSet<String> = on_way
            .filter(|droplet| probes.able.contains(*droplet))
            .cloned()
            .collect();
        let (sender, reports) = unbounded_channel();
        let open = Open {
            namespace: plan.namespace.clone(),
            waiting: BTreeSet::new(),
            watched_until: Instant::now() + WATCH_TIME,
            reports: sender,
        };
        probes.open.insert(id, open);
        Some(Running { id, able, reports })
    }

    /// Returns whether the droplet has a stream.
    fn ask_for_probe(&self, droplet: &str, probe: Probe) -> bool {
        let state = self.lock();
        let Some(sender) = state.senders.get(droplet) else {
            return false;
        };
        // The droplet may report at once.
        if let Some(open) = self.probes().open.get_mut(&probe.id) {
            open.waiting.insert(droplet.to_owned());
        }
        let message = Some(operator_message::Message::Probe(probe));
        sender.send(OperatorMessage { message }.into()).is_ok()
    }
}

/// Returns the packet that droplets are to watch for.
fn packet(plan: &ProbePlan, id: u64) -> Probe {
    let octets = |address: IpAddr| match address {
        IpAddr::V4(address) => address.to_ipv6_mapped().octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    };
    let source_port = FIRST_PORT + (id % PORTS) as u16;
    Probe {
        id,
        vni: plan.vni.get(),
        source: octets(plan.source),
        destination: octets(plan.destination),
        protocol: plan.protocol.into(),
        source_port: plan.port.map_or(0, |_| source_port.into()),
        port: plan.port.map_or(0, u32::from),
        send: false,
    }
}
