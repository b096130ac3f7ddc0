//! Droplets: tables, attachments and subscriptions that outlive their streams, and the task that dials operators.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use thuban_api::identifiers::Vni;
use thuban_operator::hub::{Hub, Outgoing};
use thuban_proto::transit::{
    Attachment, Denials, Load, NackReason, PolicyKey, Program, RoleLoad, operator_message, row,
};
use thuban_rows::Kinds;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::time::{Instant, sleep, sleep_until};

use crate::invariants;
use crate::kind::Kind;
use crate::operators::Operator;
use crate::simulation::{Simulation, State};
use crate::tables::{Refused, Slot, Tables, number};

/// How often a droplet's stream is looked at, as the stream server does every few seconds.
const LOOK: Duration = Duration::from_secs(1);
/// How often transitd looks at its Droplet while it has no stream.
const REGISTER_EVERY: Duration = Duration::from_secs(10);
/// How long a slow droplet takes for each ack of a program: less than the operator waits for an ack.
const SLOWNESS: Duration = Duration::from_secs(59);
/// How long a relapsing droplet takes for the ack of its program.
const RELAPSE: Duration = Duration::from_secs(20);
/// How long a restless droplet waits until it dials again: less than a droplet without a stream takes to become
/// suspect.
const RESTLESSNESS: Duration = Duration::from_secs(9);

/// The manner in which a droplet acks the programs that it has applied. All but the first may be those of a thief who
/// delays others with a node's token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Manner {
    /// It acks at once, or some seconds late.
    Honest,
    /// It acks one program after the other, in [`SLOWNESS`] each.
    Slow,
    /// It never acks.
    Mute,
    /// It never acks, and dials again and again.
    Restless,
    /// It acks its program late, and has dialled again before anybody hears of the ack.
    Relapsing,
}

impl Manner {
    pub const LATE: [Self; 4] = [Self::Slow, Self::Mute, Self::Restless, Self::Relapsing];
}

/// A message of a droplet on its stream besides acks.
#[derive(Clone, Debug)]
pub enum Report {
    Attached(Attachment),
    Detached(Attachment),
    Subscribe(u32, IpAddr),
    Unsubscribe(u32, IpAddr),
    Load(Load),
    Denials(Denials),
    /// The stream breaks; the operator hears of it later.
    Break,
}

pub struct Stream {
    pub outbox: UnboundedSender<Report>,
    /// The epoch of the operator at the other end.
    pub epoch: u64,
}

pub struct Droplet {
    pub name: String,
    /// The number of this droplet among those that had the name.
    pub incarnation: u64,
    pub address: Ipv4Addr,
    /// The machine is on: its data plane forwards.
    pub is_on: bool,
    /// transitd runs and reaches the operator.
    pub is_reachable: bool,
    /// Rows of endpoints that it refuses, the next that come, as if another VPC's endpoint here had the address.
    pub refusals: usize,
    /// The API server is out of the node's reach: kubelet hears of no pod, ends none, and does not say that it lives.
    pub is_kubelet_away: bool,
    highest_epoch: u64,
    pub tables: Tables,
    /// The kinds of rows that its transitd understands.
    pub kinds: Kinds,
    /// Attachments by UID of the pod.
    pub attachments: BTreeMap<String, Attachment>,
    pub subscriptions: BTreeSet<(u32, IpAddr)>,
    pub stream: Option<Stream>,
    /// The sets of network policy that the operator has asked about on this stream.
    pub asked: Vec<PolicyKey>,
    /// The time when it last got or lost a stream, or when its machine last lost its tables.
    pub since: Duration,
    pub is_applied: bool,
    pub manner: Manner,
    /// Whether it has applied programs that it has not acked because of its manner.
    owes: bool,
    pub containers: u64,
}

impl Droplet {
    pub fn new(name: &str, incarnation: u64, address: Ipv4Addr) -> Self {
        Self {
            name: name.to_owned(),
            incarnation,
            address,
            is_on: true,
            is_reachable: true,
            refusals: 0,
            is_kubelet_away: false,
            highest_epoch: 0,
            tables: Tables::default(),
            kinds: Kinds::all(),
            attachments: BTreeMap::new(),
            subscriptions: BTreeSet::new(),
            stream: None,
            asked: Vec::new(),
            since: Duration::ZERO,
            is_applied: false,
            manner: Manner::Honest,
            owes: false,
            containers: 0,
        }
    }

    pub fn report(&self, report: Report) {
        if let Some(stream) = &self.stream {
            let _ = stream.outbox.send(report);
        }
    }

    /// Whether its stream is to this operator, all that came by the stream is in its tables, and the operator may wait
    /// for its acks: it holds none back.
    pub fn follows(&self, epoch: u64) -> bool {
        let stream = self.stream.as_ref();
        let is_late = self.manner != Manner::Honest || self.owes;
        self.is_applied && !is_late && stream.is_some_and(|stream| stream.epoch == epoch)
    }

    /// Whether it delivers to the address: it has a row and the pod's attachment.
    pub fn delivers(&self, vni: u32, address: IpAddr) -> bool {
        self.is_on
            && self
                .tables
                .local(vni, address)
                .is_some_and(|row| self.attachments.contains_key(&row.pod_uid))
    }
}

/// Runs a droplet's transitd, until its Droplet goes.
pub async fn live(simulation: Arc<Simulation>, name: String, incarnation: u64) {
    loop {
        simulation.pause(20, 900).await;
        let (operator, hub, epoch) = {
            let state = &mut *simulation.lock();
            let droplet = state.droplets.get(&name);
            let Some(droplet) = droplet.filter(|droplet| droplet.incarnation == incarnation) else {
                return;
            };
            if !droplet.is_reachable || !droplet.is_on {
                continue;
            }
            let epoch = droplet.highest_epoch;
            let leaders = state.leaders().filter(|leader| !leader.is_full.load(Relaxed));
            let leaders: Vec<_> = leaders.cloned().collect();
            let Some(operator) = state.random.pick(&leaders).cloned() else {
                continue;
            };
            let hub = operator.hub().unwrap();
            (operator, hub, epoch)
        };
        // The stream server refuses a Hello that has seen a higher epoch, too.
        if epoch > operator.epoch {
            continue;
        }
        session(&simulation, (&name, incarnation), &operator, &hub).await;
    }
}

/// Looks after the Droplet while there is no stream, as transitd does.
pub async fn keep_registered(simulation: Arc<Simulation>, name: String, incarnation: u64) {
    loop {
        sleep(REGISTER_EVERY).await;
        let lives = simulation.with(|state| {
            let droplet = state.droplets.get(&name);
            let Some(droplet) = droplet.filter(|droplet| droplet.incarnation == incarnation) else {
                return false;
            };
            if droplet.is_on && droplet.stream.is_none() && !droplet.is_kubelet_away {
                register(state, &name);
            }
            true
        });
        if !lives {
            return;
        }
    }
}

/// Makes a Droplet again that somebody deleted.
fn register(state: &mut State, name: &str) {
    let address = state.droplets[name].address;
    if state.store.get(Kind::Droplet, "", name).is_none() {
        let object = crate::cluster::droplet_object(name, address);
        let _ = state.store.create(Kind::Droplet, "", name, object);
    }
}

/// The operator's end of a stream.
struct Line {
    id: u64,
    programs: UnboundedReceiver<Outgoing>,
    /// The last sequence that was acked.
    acked: u64,
}

impl Line {
    /// Opens a stream that sends its reports by `outbox`.
    fn open(
        simulation: &Simulation,
        name: &str,
        operator: &Operator,
        hub: &Hub,
        outbox: UnboundedSender<Report>,
    ) -> Option<Self> {
        let (attachments, subscriptions, kinds) = hello(simulation, name, operator, outbox)?;
        let (id, programs) = hub.open(name, &attachments, &subscriptions, kinds);
        Some(Self {
            id,
            programs,
            acked: 0,
        })
    }
}

/// What a droplet says when it dials: its attachments, its subscriptions, the kinds of rows that it understands.
type Hello = (Vec<Attachment>, Vec<(Vni, IpAddr)>, Kinds);

fn hello(
    simulation: &Simulation,
    name: &str,
    operator: &Operator,
    outbox: UnboundedSender<Report>,
) -> Option<Hello> {
    let state = &mut *simulation.lock();
    let now = state.elapsed();
    let droplet = state.droplets.get_mut(name)?;
    droplet.stream = Some(Stream {
        outbox,
        epoch: operator.epoch,
    });
    droplet.asked.clear();
    droplet.since = now;
    droplet.is_applied = false;
    let attachments: Vec<Attachment> = droplet.attachments.values().cloned().collect();
    let subscriptions = droplet.subscriptions.iter();
    let subscriptions: Vec<_> = subscriptions
        .map(|(vni, address)| (number(*vni), *address))
        .collect();
    let kinds = droplet.kinds.clone();
    let (held, asked) = (attachments.len(), subscriptions.len());
    state.note(|| {
        format!(
            "{name} dials {} ({held} attachments, {asked} subscriptions)",
            operator.id
        )
    });
    Some((attachments, subscriptions, kinds))
}

async fn session(
    simulation: &Arc<Simulation>,
    (name, incarnation): (&str, u64),
    operator: &Arc<Operator>,
    hub: &Arc<Hub>,
) {
    let (outbox, mut reports) = unbounded_channel();
    let Some(mut line) = Line::open(simulation, name, operator, hub, outbox) else {
        return;
    };
    serve(
        simulation,
        (name, incarnation),
        (operator, hub),
        &mut line,
        &mut reports,
    )
    .await;
    let Line { id, acked, .. } = line;
    {
        let state = &mut *simulation.lock();
        let now = state.elapsed();
        state.note(|| format!("{name} loses its stream to {}", operator.id));
        let droplet = state.droplets.get_mut(name);
        if let Some(droplet) = droplet.filter(|droplet| droplet.incarnation == incarnation) {
            droplet.stream = None;
            droplet.since = now;
        }
    }
    // The operator may hear a last ack, and the end of the stream, long after the droplet has dialled again.
    let (simulation, name, operator, hub) =
        (simulation.clone(), name.to_owned(), operator.clone(), hub.clone());
    tokio::spawn(async move {
        let is_late = simulation.lock().random.permille(500);
        if is_late {
            simulation.pause(0, 8000).await;
        }
        operator.hears_ends().await;
        if operator.is_alive() {
            if is_late && acked > 0 {
                hub.ack(&name, id, acked);
            }
            hub.close(&name, id);
        }
    });
}

async fn serve(
    simulation: &Arc<Simulation>,
    (name, incarnation): (&str, u64),
    (operator, hub): (&Arc<Operator>, &Arc<Hub>),
    line: &mut Line,
    reports: &mut UnboundedReceiver<Report>,
) {
    let mut owed = Owed::default();
    let mut look = Instant::now() + LOOK;
    loop {
        tokio::select! {
            biased;
            () = operator.died() => return,
            () = sleep_until(look), if !owed.programs.is_empty() => {
                look = Instant::now() + LOOK;
                let due = owed.due(simulation, name);
                if due.is_none() || hub.is_silent(name, line.id) {
                    return;
                }
                for (sequence, refused) in owed.programs.drain(..due.unwrap_or_default()) {
                    line.acked = sequence;
                    if !ack(hub, (name, line.id), sequence, &refused) {
                        return;
                    }
                    owed.last = Instant::now();
                }
                simulation.with(|state| owed.note_acked(state, name));
                if owed.programs.is_empty()
                    && let Some(outbox) = relapsing(simulation, name)
                {
                    let Some(next) = Line::open(simulation, name, operator, hub, outbox) else { return };
                    (*line, owed) = (next, Owed::default());
                }
            }
            report = reports.recv() => {
                let Some(report) = report else { return };
                let late = delay(simulation, 30);
                sleep(late).await;
                if !operator.is_alive() || !say(name, hub, report) {
                    return;
                }
            }
            message = line.programs.recv() => {
                let Some(message) = message else { return };
                let program = match message.unpack().message {
                    Some(operator_message::Message::Program(program)) => program,
                    Some(operator_message::Message::ReportDenials(asked)) => {
                        note_asked(simulation, name, asked.sets);
                        continue;
                    }
                    Some(operator_message::Message::Probe(_)) | None => continue,
                };
                sleep(delay(simulation, 5)).await;
                if !operator.is_alive() {
                    return;
                }
                let sequence = program.sequence;
                let Some(refused) = apply(simulation, (name, incarnation), program) else { return };
                if owed.is_kept_back(simulation, name) {
                    owed.programs.push_back((sequence, refused));
                    continue;
                }
                line.acked = sequence;
                let (late, is_lost) = {
                    let late = delay(simulation, 5);
                    let state = &mut *simulation.lock();
                    let chance = state.faults.stream_lost;
                    (late, state.random.permille(chance))
                };
                sleep(late).await;
                if is_lost || !operator.is_alive() {
                    return;
                }
                if !ack(hub, (name, line.id), sequence, &refused) {
                    return;
                }
                simulation.with(|state| owed.note_acked(state, name));
            }
        }
    }
}

/// Passes an ack on. Returns false if the stream must end as the stream server ends it: another one is open, or nothing
/// was sent.
fn ack(hub: &Hub, (name, id): (&str, u64), sequence: u64, refused: &[Refused]) -> bool {
    for (key, reason) in refused {
        hub.nack(name, id, sequence, key, *reason);
    }
    hub.ack(name, id, sequence)
}

/// Applied programs of a stream whose acks are held back.
struct Owed {
    programs: VecDeque<(u64, Vec<Refused>)>,
    opened: Instant,
    /// The time of the last ack.
    last: Instant,
}

impl Default for Owed {
    fn default() -> Self {
        let now = Instant::now();
        Self {
            programs: VecDeque::new(),
            opened: now,
            last: now,
        }
    }
}

impl Owed {
    fn is_kept_back(&self, simulation: &Simulation, name: &str) -> bool {
        let state = &mut *simulation.lock();
        let Some(droplet) = state.droplets.get_mut(name) else {
            return false;
        };
        let is_kept_back = droplet.manner != Manner::Honest || !self.programs.is_empty();
        droplet.owes |= is_kept_back;
        is_kept_back
    }

    /// Returns how many programs are acked now; none: the droplet dials again.
    fn due(&self, simulation: &Simulation, name: &str) -> Option<usize> {
        let state = simulation.lock();
        match state.droplets.get(name)?.manner {
            Manner::Slow => Some(usize::from(self.last.elapsed() >= SLOWNESS)),
            Manner::Mute => Some(0),
            Manner::Restless => (self.opened.elapsed() < RESTLESSNESS).then_some(0),
            Manner::Relapsing if self.opened.elapsed() < RELAPSE => Some(0),
            Manner::Honest | Manner::Relapsing => Some(self.programs.len()),
        }
    }

    /// Notes that all is acked, if nothing is held back.
    fn note_acked(&self, state: &mut State, name: &str) {
        if let Some(droplet) = state.droplets.get_mut(name)
            && self.programs.is_empty()
        {
            droplet.owes = false;
        }
    }
}

/// Returns where a relapsing droplet's reports go: they go on by its next stream.
fn relapsing(simulation: &Simulation, name: &str) -> Option<UnboundedSender<Report>> {
    let state = simulation.lock();
    let droplet = state.droplets.get(name);
    let droplet = droplet.filter(|droplet| droplet.manner == Manner::Relapsing)?;
    droplet.stream.as_ref().map(|stream| stream.outbox.clone())
}

fn delay(simulation: &Simulation, most: u64) -> Duration {
    let state = &mut *simulation.lock();
    let chance = state.faults.late_ack;
    if state.random.permille(chance) {
        state.random.millis(0, 4000)
    } else {
        state.random.millis(0, most)
    }
}

fn say(name: &str, hub: &Hub, report: Report) -> bool {
    match report {
        Report::Attached(attachment) => hub.attach(name, &attachment, false),
        Report::Detached(attachment) => hub.attach(name, &attachment, true),
        Report::Subscribe(vni, address) => {
            hub.subscribe(name, number(vni), address, true);
        }
        Report::Unsubscribe(vni, address) => {
            hub.subscribe(name, number(vni), address, false);
        }
        Report::Load(load) => hub.report(name, &load),
        Report::Denials(denials) => hub.note_denials(name, &denials),
        Report::Break => return false,
    }
    true
}

fn note_asked(simulation: &Simulation, name: &str, sets: Vec<PolicyKey>) {
    simulation.with(|state| {
        state.note(|| format!("{name} is asked about {} sets", sets.len()));
        if let Some(droplet) = state.droplets.get_mut(name) {
            droplet.asked = sets;
        }
    });
}

/// Applies a program. Returns the refused rows; none if the stream must end.
fn apply(
    simulation: &Simulation,
    (name, incarnation): (&str, u64),
    program: Program,
) -> Option<Vec<Refused>> {
    let refused = simulation.with(|state| {
        let droplet = state.droplets.get_mut(name);
        let droplet = droplet.filter(|droplet| droplet.incarnation == incarnation)?;
        let is_cut = droplet.stream.is_none() || !droplet.is_on || !droplet.is_reachable;
        if is_cut || program.epoch < droplet.highest_epoch {
            return None;
        }
        droplet.highest_epoch = program.epoch;
        droplet.is_applied = true;
        let is_snapshot = program.snapshot;
        let line = format!(
            "{name} applies {}{} of epoch {}: {} rows, {} deletes",
            program.sequence,
            if is_snapshot { " (snapshot)" } else { "" },
            program.epoch,
            program.upserts.len(),
            program.deletes.len()
        );
        for row in &program.upserts {
            if let Some(row::Row::Direct(row)) = &row.row {
                droplet
                    .subscriptions
                    .insert((row.vni, crate::tables::address(&row.address)));
            }
        }
        let locals = program.upserts.iter().filter_map(|row| match &row.row {
            Some(row::Row::Local(row)) => Some((row.vni, crate::tables::address(&row.address))),
            _ => None,
        });
        let also_refused: Vec<_> = locals.take(droplet.refusals).collect();
        let mut refused = droplet.tables.apply(program);
        droplet.refusals -= also_refused.len();
        for (vni, address) in also_refused {
            let slot = Slot::Local(number(vni), address);
            droplet.tables.rows.remove(&slot);
            refused.push((slot, NackReason::AddressInUseOnNode));
        }
        let mut rows = droplet.tables.rows.keys();
        let foreign = rows.find(|slot| !droplet.kinds.contains(slot.kind())).cloned();
        state.note(|| line);
        if let Some(slot) = foreign {
            state.violation(format!("{name} was sent {slot:?}, which it does not understand"));
        }
        if is_snapshot {
            register(state, name);
        }
        invariants::after_apply(state, name);
        Some(refused)
    });
    simulation.stir();
    refused
}

/// Makes a report of the packets that a role passes on.
pub fn load(vni: u32, network: u32, packets_per_second: u64) -> Report {
    Report::Load(Load {
        roles: vec![RoleLoad {
            vni,
            network,
            packets_per_second,
        }],
    })
}
