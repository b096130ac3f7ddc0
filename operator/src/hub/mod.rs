//! Joins objects, rows and streams: holds the world and the acks under one lock, the senders of the open streams, and
//! the triggers of the controllers.
//!
//! Invariant: each droplet is sent what the world says, in order of sequence; nothing else sends.

mod attachments;
mod barrier;
mod checks;
mod denials;
mod full;
mod held;
mod loads;
mod missing;
mod outgoing;
mod paths;
mod policy;
mod probes;
mod rests;
mod sessions;
mod triggers;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::IpAddr;
use std::sync::{Mutex, PoisonError, RwLock};
use std::time::Duration;

use thuban_api::identifiers::{NetworkId, Vni};
use thuban_proto::transit::{Attachment, Load, NackReason, RoleLoad};
use thuban_rows::{Kind, Kinds};
use tokio::sync::Notify;
use tokio::sync::mpsc::UnboundedSender;
use tokio::time::{Instant, sleep};
use tracing::info;

use crate::metrics;
use crate::model::acks::{Acks, SUSPECT_AFTER};
use crate::model::full_tables::FullTables;
use crate::model::rows::Key;
use crate::model::world::{Delta, EndpointName, NodePort, World};
use attachments::Attachments;
use checks::CheckLimit;
use denials::Denials;
use held::Held;
use loads::Loads;
use probes::Probes;
use rests::Rests;

pub use attachments::Report;
pub use barrier::Barrier;
pub use missing::{Missing, TABLE_FULL, WAITS_FOR_ACKS, WAITS_FOR_UPGRADE};
pub use outgoing::{Outgoing, PackedProgram};
pub use policy::PolicyStanding;
pub use probes::Heard;
pub use triggers::{Trigger, Triggers, Waiter};

/// How long a new leader waits for the droplets' reports of what they hold before it gives out addresses, milliseconds.
const ADOPTION_TIMEOUT: u64 = 10_000;
/// How long a droplet's reports of attachments count though nothing bears them out, milliseconds, from its first stream
/// to this leader on. After a restore of etcd pods may be lost, with their Endpoints and claims, while they run.
const DOUBT_TIMEOUT: u64 = 300_000;
/// How often the hub looks for droplets that are suspect now.
const LOOK_FOR_SUSPECTS: Duration = Duration::from_secs(1);
/// How long a droplet is no longer suspect before fronts lead new connections to it again, milliseconds: a stream that
/// comes and goes changes no table.
const TRUSTED_AFTER: u64 = 30_000;
/// The most direct rows that a droplet may hold of one VPC.
const MAX_SUBSCRIPTIONS_PER_VPC: usize = 4096;

/// A stream that has no program yet.
struct Opened {
    id: u64,
    /// The addresses that the droplet asked for.
    subscriptions: Vec<(Vni, IpAddr)>,
    /// The kinds of rows that it understands.
    kinds: Kinds,
}

struct State {
    world: World,
    acks: Acks,
    senders: HashMap<String, UnboundedSender<Outgoing>>,
    /// The objects are being listed: no rows are made yet.
    is_filling: bool,
    /// When all objects had been listed, milliseconds since the start: from then on droplets can open streams.
    filled: u64,
    /// Streams by droplet, while programs are held back.
    held: Option<BTreeMap<String, Opened>>,
    /// The programs that were held back are being sent: new streams get theirs at once.
    is_serving: bool,
    /// How long the leader waits for droplets that don't dial.
    dialling: Duration,
    attachments: Attachments,
    /// The time when each droplet first had a stream.
    heard: HashMap<String, u64>,
    /// Waiters by droplet.
    waiters: HashMap<String, HashSet<Waiter>>,
    /// Endpoints whose droplet already uses the address.
    in_use: HashSet<EndpointName>,
    loads: Loads,
    /// Droplets of which a subscription was refused since their stream opened: the log says it once.
    refused: HashSet<String>,
    rests: Rests,
    full: FullTables,
    steps: policy::Steps,
    /// When droplets were last suspect, as far as fronts still lead new connections past them.
    suspected: BTreeMap<String, u64>,
    /// How much of what droplets say of backends counts. A new stream gets no more.
    check_limits: HashMap<String, CheckLimit>,
    next_id: u64,
}

impl State {
    fn is_judging(&self, now: u64) -> bool {
        self.acks
            .is_judging(self.world.droplets().map(|(name, _)| name), now)
    }

    /// Yields the droplets whose programs are held back: what they hold is not known.
    fn waiting_for_programs(&self) -> impl Iterator<Item = String> {
        self.held.iter().flat_map(BTreeMap::keys).cloned()
    }

    fn has_dialled(&self, droplet: &str) -> bool {
        let is_held = |held: &BTreeMap<_, _>| held.contains_key(droplet);
        self.acks.is_connected(droplet) || self.held.as_ref().is_some_and(is_held)
    }

    /// Returns the droplets that have been lost for [`SUSPECT_AFTER`], if droplets may be judged.
    fn suspects<'a>(&self, droplets: impl Iterator<Item = &'a String>, now: u64) -> HashSet<String> {
        let is_lost = |droplet: &&String| {
            let lost = self.acks.lost_for(droplet, now);
            lost.is_some_and(|lost| lost >= SUSPECT_AFTER)
        };
        let lost: HashSet<String> = droplets.filter(is_lost).cloned().collect();
        if lost.is_empty() || self.is_judging(now) {
            lost
        } else {
            HashSet::new()
        }
    }

    fn health(&self, droplet: &str, now: u64) -> Health {
        match self.acks.lost_for(droplet, now) {
            None => Health::Connected,
            Some(lost) if lost < SUSPECT_AFTER => {
                Health::Missing(Duration::from_millis(SUSPECT_AFTER - lost))
            }
            Some(_) if self.is_judging(now) => Health::Suspect,
            Some(_) => Health::Missing(Duration::from_millis(SUSPECT_AFTER)),
        }
    }
}

/// The state of a droplet by its stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Health {
    Connected,
    /// The droplet has no stream on which it acks in time, and there is no verdict before this time is over.
    Missing(Duration),
    Suspect,
}

pub struct Hub {
    state: Mutex<State>,
    /// What policies deny and agents drop has a lock of its own, because a droplet may report much. Nobody who holds it
    /// takes that of the state.
    denials: Mutex<Denials>,
    /// Probes too have a lock of their own. Nobody who holds it takes that of the state.
    probes: Mutex<Probes>,
    started: Instant,
    epoch: u64,
    /// Addresses of all Nodes.
    nodes: RwLock<BTreeSet<IpAddr>>,
    /// The signal that a droplet has no room for a row.
    without_room: Notify,
    /// The signal that policies must be applied, or that their steps may go on.
    policy_news: Notify,
    pub triggers: Triggers,
}

impl Hub {
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    pub fn new(epoch: u64, triggers: Triggers) -> Self {
        let state = State {
            world: World::default(),
            acks: Acks::new(0),
            senders: HashMap::new(),
            is_filling: false,
            filled: 0,
            held: None,
            is_serving: false,
            dialling: Duration::ZERO,
            attachments: Attachments::default(),
            heard: HashMap::new(),
            waiters: HashMap::new(),
            in_use: HashSet::new(),
            loads: Loads::default(),
            refused: HashSet::new(),
            rests: Rests::default(),
            full: FullTables::default(),
            steps: policy::Steps::default(),
            suspected: BTreeMap::new(),
            check_limits: HashMap::new(),
            next_id: 1,
        };
        Self {
            state: Mutex::new(state),
            denials: Mutex::default(),
            probes: Mutex::default(),
            started: Instant::now(),
            epoch,
            nodes: RwLock::default(),
            without_room: Notify::new(),
            policy_news: Notify::new(),
            triggers,
        }
    }

    pub fn set_node_addresses(&self, addresses: BTreeSet<IpAddr>) {
        *self.nodes.write().unwrap_or_else(PoisonError::into_inner) = addresses;
    }

    pub fn is_node_address(&self, address: IpAddr) -> bool {
        let nodes = self.nodes.read().unwrap_or_else(PoisonError::into_inner);
        nodes.contains(&address)
    }

    fn now(&self) -> u64 {
        self.started.elapsed().as_millis() as u64
    }

    /// Returns for how long droplets could open streams, milliseconds.
    fn open_for(&self, state: &State) -> u64 {
        self.now().saturating_sub(state.filled)
    }

    fn lock(&self) -> Held<'_> {
        // No code under the lock panics half-way through a change.
        Held::new(self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Has fronts lead new connections past suspect droplets, and past backends that fail their check, for as long as
    /// the process leads.
    pub async fn leave_suspects_out(&self) {
        loop {
            sleep(LOOK_FOR_SUSPECTS).await;
            self.look_for_suspects();
        }
    }

    fn look_for_suspects(&self) {
        let state = &mut *self.lock();
        let now = self.now();
        let suspects = state.suspects(state.world.droplets().map(|(name, _)| name), now);
        state
            .suspected
            .extend(suspects.into_iter().map(|droplet| (droplet, now)));
        state
            .suspected
            .retain(|_, since| now.saturating_sub(*since) < TRUSTED_AFTER);
        let suspects = state.suspected.keys().cloned().collect();
        state.world.set_suspects(suspects);
        state
            .check_limits
            .retain(|droplet, _| state.world.is_droplet(droplet));
        // As long as programs are held back, no change costs anything.
        if state.held.is_none() {
            let acks = &state.acks;
            let is_connected = |droplet: &str| acks.is_connected(droplet);
            state.world.forget_unrepeated(now, is_connected);
            state.world.follow_checks(now);
        }
        self.send(state);
    }

    /// Changes the world and sends the resulting changes of rows.
    pub fn update<T>(&self, change: impl FnOnce(&mut World) -> T) -> T {
        let state = &mut *self.lock();
        let result = change(&mut state.world);
        self.send(state);
        result
    }

    /// Reads the world.
    pub fn read<T>(&self, look: impl FnOnce(&World) -> T) -> T {
        look(&self.lock().world)
    }

    fn send(&self, state: &mut State) {
        if state.is_filling {
            return;
        }
        let acks = &state.acks;
        let deltas = state.world.flush_to(|droplet| acks.is_connected(droplet));
        for (droplet, delta) in deltas {
            self.send_to(state, &droplet, delta);
        }
        state.note_rests(self.now());
        self.note_policies(state);
    }

    /// Sends a droplet the rows that it understands.
    fn send_to(&self, state: &mut State, droplet: &str, mut delta: Delta) {
        let had_any = !delta.is_empty();
        delta.retain(|key, _| state.acks.understands(droplet, key.kind()));
        if had_any && delta.is_empty() {
            return;
        }
        let Some(sequence) = state.acks.send(droplet, &delta, self.now()) else {
            return;
        };
        state.full.sent(droplet, &delta, sequence);
        let Some(sender) = state.senders.get(droplet) else {
            return;
        };
        let program = PackedProgram::changes(self.epoch, sequence, delta);
        let _ = sender.send(program.into());
    }

    /// Takes note of how long droplets serve NodePorts without an operator, and that an earlier leader may have told
    /// them of any port.
    pub fn distrust_node_ports(&self, lease: Duration) {
        let state = &mut *self.lock();
        state.rests.set_lease(lease);
        state.world.distrust_node_ports();
        self.send(state);
    }

    /// Returns the ports of a service that were another VPC's until lately and rest.
    pub fn resting_node_ports(&self, name: &EndpointName) -> BTreeSet<NodePort> {
        let state = &mut *self.lock();
        if state.world.resting_node_ports(name).is_empty() {
            return BTreeSet::new();
        }
        if state.end_rests(self.now()) {
            self.send(state);
        }
        state.world.resting_node_ports(name)
    }

    pub fn ack(&self, droplet: &str, id: u64, sequence: u64) -> bool {
        let state = &mut *self.lock();
        let is_valid = state.acks.ack(droplet, id, sequence, self.now());
        if is_valid {
            state.full.acked(droplet, sequence);
            self.note_policy_ack(state, droplet);
            self.wake(state, droplet);
        }
        is_valid
    }

    /// Whether the droplet has left something unacked for too long: its stream must end.
    pub fn is_silent(&self, droplet: &str, id: u64) -> bool {
        let (state, now) = (self.lock(), self.now());
        // The droplet may owe acks of an earlier stream.
        if state.acks.is_overdue(droplet, now) {
            self.triggers.droplet(droplet);
        }
        state.acks.is_silent(droplet, id, now)
    }

    pub fn nack(&self, droplet: &str, id: u64, sequence: u64, key: &Key, reason: NackReason) {
        let state = &mut *self.lock();
        // A droplet has no say in rows that it should not have.
        if state.world.row(droplet, key).is_none() {
            return;
        }
        let is_lacking = state.acks.nack(droplet, id, sequence, key);
        // Nobody waits for the rows of known droplets in a snapshot, and so the acks don't know them.
        if reason == NackReason::TableFull && (is_lacking || key.kind() == Kind::Droplet) {
            self.refuse(state, droplet, key, sequence);
        }
        if !is_lacking {
            return;
        }
        if reason == NackReason::IdTaken {
            self.refuse_policy_id(state, droplet, key);
        }
        if let (Key::Local(vni, address), NackReason::AddressInUseOnNode) = (key, reason)
            && let Some(name) = state.world.holder(*vni, *address).cloned()
        {
            self.triggers.endpoint(&name);
            state.in_use.insert(name);
        }
    }

    /// Whether the endpoint's droplet refused its address.
    pub fn is_in_use(&self, name: &EndpointName) -> bool {
        self.lock().in_use.contains(name)
    }

    /// Forgets the refusal: the endpoint has another address now.
    pub fn forget_in_use(&self, name: &EndpointName) {
        self.lock().in_use.remove(name);
    }

    pub fn subscribe(&self, droplet: &str, vni: Vni, address: IpAddr, wanted: bool) -> bool {
        let state = &mut *self.lock();
        let is_taken = if wanted {
            subscribe(state, droplet, vni, address)
        } else {
            state.world.subscribe(droplet, vni, address, false)
        };
        self.send(state);
        is_taken
    }

    /// Replaces the reported loads of a droplet's roles.
    pub fn report(&self, droplet: &str, load: &Load) {
        let state = &mut *self.lock();
        let world = &state.world;
        let read = |role: &RoleLoad| {
            let (vni, network) = (Vni::new(role.vni)?, NetworkId::new(role.network));
            let is_here = world.carries(droplet, vni, network);
            is_here.then_some(((vni, network), role.packets_per_second))
        };
        state.loads.report(droplet, load.roles.iter().filter_map(read));
    }

    /// Returns the packets a second that the bouncers of a network, or without a network the dividers of a VPC, passed
    /// on together.
    pub fn load(&self, vni: Vni, network: Option<NetworkId>) -> u64 {
        self.lock().loads.of((vni, network))
    }

    /// Notes that an attachment came or went.
    pub fn attach(&self, droplet: &str, attachment: &Attachment, removed: bool) {
        let state = &mut *self.lock();
        if removed {
            state.attachments.remove(droplet, attachment);
        } else {
            state.attachments.add(droplet, attachment);
        }
        let key = Vni::new(attachment.vni).zip(crate::model::rows::address(&attachment.address));
        let name = key.and_then(|(vni, address)| state.world.holder(vni, address));
        let is_own = |name: &&EndpointName| {
            let endpoint = state.world.endpoint(name);
            endpoint.is_some_and(|endpoint| endpoint.droplet == droplet)
        };
        if let Some(name) = name.filter(is_own) {
            self.triggers.endpoint(name);
        }
    }

    /// Whether the pod may still have a network on that droplet: the droplet reported an attachment, or can't be asked.
    /// Reports of other droplets on the pod don't count, and a former droplet holds nothing.
    pub fn may_be_attached(&self, pod_uid: &str, droplet: &str) -> bool {
        let state = self.lock();
        state.world.is_droplet(droplet)
            && (!state.acks.is_connected(droplet) || state.attachments.has(pod_uid, droplet))
    }

    /// Returns the addresses in a VPC that the pod already has on the droplet, by the droplet's report.
    pub fn attached_addresses(&self, pod_uid: &str, droplet: &str, vni: Vni) -> Vec<IpAddr> {
        self.lock().attachments.addresses(pod_uid, droplet, vni)
    }

    /// Whether another pod has the address, by a droplet's report that counts. `judge` says whether a report does.
    /// Where it does not know, a report counts if the droplet had its first stream a short time ago.
    pub fn is_live(
        &self,
        vni: Vni,
        address: IpAddr,
        except: &str,
        judge: impl Fn(&Report, &World) -> Option<bool>,
    ) -> bool {
        let (state, now) = (self.lock(), self.now());
        let is_new = |droplet: &str| {
            let heard = state.heard.get(droplet);
            heard.is_some_and(|since| now.saturating_sub(*since) < DOUBT_TIMEOUT)
        };
        let others = state.attachments.at(vni, address);
        let mut others = others.filter(|report| report.uid != except);
        others.any(|report| judge(&report, &state.world).unwrap_or_else(|| is_new(report.droplet)))
    }

    pub fn is_connected(&self, droplet: &str) -> bool {
        self.lock().acks.is_connected(droplet)
    }

    /// Whether all droplets have dialled, or had the time to: from then on it is known what they hold.
    pub fn is_whole(&self) -> bool {
        let state = self.lock();
        let mut droplets = state.world.droplets().map(|(name, _)| name);
        self.open_for(&state) >= ADOPTION_TIMEOUT || droplets.all(|name| state.has_dialled(name))
    }

    pub fn health(&self, droplet: &str) -> Health {
        self.lock().health(droplet, self.now())
    }

    /// Wakes all objects that wait for a droplet's ack: the droplet may be excused now.
    pub fn wake_waiters(&self, droplet: &str) {
        self.wake(&mut self.lock(), droplet);
    }

    fn wake(&self, state: &mut State, droplet: &str) {
        for waiter in state.waiters.remove(droplet).into_iter().flatten() {
            self.triggers.waiter(&waiter);
        }
    }

    /// Returns what a barrier waits for; its waiter is triggered when one of these droplets acks.
    pub fn missing(&self, barrier: &Barrier) -> Missing {
        let state = &mut *self.lock();
        let missing = barrier.missing(state, self.now());
        wait_for(state, barrier.awaited(&missing), &barrier.waiter);
        missing
    }
}

/// Notes that the waiter is triggered when one of the droplets acks.
fn wait_for<'a>(state: &mut State, droplets: impl IntoIterator<Item = &'a String>, waiter: &Waiter) {
    for droplet in droplets {
        state
            .waiters
            .entry(droplet.clone())
            .or_default()
            .insert(waiter.clone());
    }
}

/// Notes a subscription: only to addresses of VPCs that the droplet takes part in, and only up to a limit.
fn subscribe(state: &mut State, droplet: &str, vni: Vni, address: IpAddr) -> bool {
    let reason = if !state.world.takes_part(droplet, vni) {
        "no_part"
    } else if state.world.subscribed(droplet, vni) >= MAX_SUBSCRIPTIONS_PER_VPC {
        "quota"
    } else {
        return state.world.subscribe(droplet, vni, address, true);
    };
    metrics::refuses_subscription(reason);
    if state.refused.insert(droplet.to_owned()) {
        info!(
            droplet,
            vni = vni.get(),
            reason,
            "a subscription is refused; further ones of this stream are only counted"
        );
    }
    false
}

#[cfg(test)]
mod tests;
