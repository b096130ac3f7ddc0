//! Random schedules of two lbaasds whose caches are late, of nodes that give requests up and start again, and of an API
//! server that loses requests and answers. The clock is the test's.
//!
//! One address passes from Vip to Vip. At each moment, whoever announces it does so for the Vip that cidrd leases it
//! to. So does each name in DNS, which a node announces until resolvers have forgotten it (`simulation/names.rs`).
//! `THUBAN_SCHEDULES=N` runs N schedules (100). Addresses of L2 have schedules of their own (`simulation/l2.rs`).

mod api_server;
mod l2;
mod names;

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use cidrd::client::Grant;
use cidrd::http::Lease;
use fastrand::Rng;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::api::ObjectMeta;
use kube::runtime::reflector::store::Writer;
use kube::runtime::watcher::Event;
use kube::{Client, ResourceExt};
use serde_json::json;
use thuban_api::ip_lease::LeaseState;
use thuban_api::{BgpPeer, Vip};
use thuban_speaker::decide::{State, Step};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::l2::NodeLeases;
use super::{Report, Serving, Speakers};
use crate::events::Warnings;
use crate::leases::Leases;
use crate::vip::ending::{Ending, ending, is_withdrawn, proceed};
use l2::{L2, NodeLease};
use names::Dns;

const LENGTH: Duration = Duration::from_hours(2);
const ADDRESS: IpAddr = IpAddr::V4(Ipv4Addr::new(203, 0, 113, 7));
const NODES: [&str; 3] = ["node-a", "node-b", "node-c"];
/// The seconds of a lease.
const LEASE: u32 = 300;

/// What happened in a schedule, which must be enough to prove something.
#[derive(Debug, Default)]
struct Seen {
    announced: u32,
    released: u32,
    left: u32,
    given_up: u32,
    conflicts: u32,
    published: u32,
    taken: u32,
    /// Claims that came after the first withdrawal of their name.
    late_claims: u32,
}

/// Everything outside of lbaasd.
struct World {
    start: Instant,
    random: Mutex<Rng>,
    /// The API server's Vip, the only one.
    vip: Mutex<Option<Vip>>,
    version: Mutex<u64>,
    /// The UID that cidrd leases the address to, and when the lease ends without a renewal.
    lease: Mutex<Option<(String, Instant)>>,
    /// The UID for which each node announces the address.
    announced: Mutex<BTreeMap<&'static str, String>>,
    dns: Dns,
    l2: L2,
    seen: Mutex<Seen>,
}

impl World {
    fn new(seed: u64, announce: &'static str) -> Arc<Self> {
        Arc::new(Self {
            start: Instant::now(),
            random: Mutex::new(Rng::with_seed(seed)),
            vip: Mutex::default(),
            version: Mutex::default(),
            lease: Mutex::default(),
            announced: Mutex::default(),
            dns: Dns::default(),
            l2: L2::new(announce),
            seen: Mutex::default(),
        })
    }

    fn number(&self, below: u64) -> u64 {
        self.random.lock().unwrap().u64(..below)
    }

    fn chance(&self, of: u64) -> bool {
        self.number(of) == 0
    }

    async fn pause(&self, most: u64) {
        let pause = Duration::from_millis(self.number(most * 1000));
        sleep(pause).await;
    }

    /// The time as nodes count it.
    fn now(&self) -> Duration {
        self.start.elapsed() + Duration::from_secs(1000)
    }

    /// The time as objects tell it.
    fn timestamp(&self) -> Timestamp {
        Timestamp::UNIX_EPOCH + SignedDuration::try_from(self.now()).unwrap()
    }

    fn count(&self, count: impl FnOnce(&mut Seen)) {
        count(&mut self.seen.lock().unwrap());
    }

    /// Leases the address to another holder, if nobody has it. Returns whether it did.
    fn lease_anew(&self, uid: &str) -> bool {
        let mut lease = self.lease.lock().unwrap();
        let is_free = lease.as_ref().is_none_or(|(_, end)| *end <= Instant::now());
        if is_free {
            let end = Instant::now() + Duration::from_secs(LEASE.into());
            *lease = Some((uid.to_owned(), end));
        }
        is_free
    }

    /// Asserts that everybody who announces the address does so for its holder.
    fn check(&self) {
        let holder = self.lease.lock().unwrap().as_ref().map(|(uid, _)| uid.clone());
        for (node, uid) in &*self.announced.lock().unwrap() {
            assert_eq!(Some(uid), holder.as_ref(), "{node} announces another's address");
        }
        let vip = self.vip.lock().unwrap();
        self.dns.check(vip.as_ref(), holder.as_deref());
        self.l2.check(vip.as_ref(), holder.as_deref(), self.now());
    }
}

/// An lbaasd: its speakers' part, and the stores that are late.
struct Lbaasd {
    speakers: Arc<Speakers>,
    leases: Arc<Leases>,
    changes: watch::Sender<u64>,
    writer: Mutex<Writer<Vip>>,
    node_leases: Mutex<Writer<NodeLease>>,
}

impl Lbaasd {
    fn new(world: &Arc<World>) -> Arc<Self> {
        let of = world.clone();
        let service = tower::service_fn(move |request| of.clone().serve(request));
        let client = Client::new(service, "default");
        let changes = watch::Sender::new(0);
        let leases = Arc::new(Leases::new(client.clone(), String::new(), changes.clone()));
        let (vips, writer) = kube::runtime::reflector::store();
        let (nodes, mut all) = kube::runtime::reflector::store();
        for name in NODES {
            let node = k8s_openapi::api::core::v1::Node {
                metadata: ObjectMeta {
                    name: Some(name.to_owned()),
                    ..ObjectMeta::default()
                },
                ..k8s_openapi::api::core::v1::Node::default()
            };
            all.apply_watcher_event(&Event::Apply(node));
        }
        let (peers, mut one) = kube::runtime::reflector::store();
        let peer = json!({"apiVersion": "thuban.dev/v1alpha1", "kind": "BgpPeer", "metadata": {"name": "router"},
            "spec": {"address": "192.0.2.1", "asn": 64512, "localAsn": 64513}});
        one.apply_watcher_event(&Event::Apply(serde_json::from_value::<BgpPeer>(peer).unwrap()));
        let (known, node_leases) = kube::runtime::reflector::store();
        let l2 = NodeLeases::new(client.clone(), known, l2::SECONDS, changes.clone());
        let speakers = Speakers {
            warnings: Warnings::new(client.clone()),
            client,
            leases: leases.clone(),
            l2: Arc::new(l2),
            vips,
            nodes,
            peers,
            changes: changes.subscribe(),
            reviewed: Mutex::default(),
            reviews: tokio::sync::Semaphore::new(1),
        };
        Arc::new(Self {
            speakers: Arc::new(speakers),
            leases,
            changes,
            writer: Mutex::new(writer),
            node_leases: Mutex::new(node_leases),
        })
    }

    /// Watches the Vip late, and renews its lease as it knows the Vip.
    async fn live(self: Arc<Self>, world: Arc<World>) {
        let mut known: Option<Vip> = None;
        loop {
            let vip = world.vip.lock().unwrap().clone();
            world.pause(8).await;
            match (&vip, &known) {
                (Some(vip), _) => self.hear(&Event::Apply(vip.clone())),
                (None, Some(known)) => self.hear(&Event::Delete(known.clone())),
                (None, None) => {}
            }
            known = vip;
            let Some(vip) = &known else { continue };
            let uid = vip.uid().unwrap();
            if is_withdrawn(vip) {
                self.leases.forget(&uid);
            } else if world.chance(6) || self.leases.remaining(&uid, ADDRESS).is_none() {
                self.renew(&world, &uid).await;
            }
        }
    }

    fn hear(&self, event: &Event<Vip>) {
        self.writer.lock().unwrap().apply_watcher_event(event);
        self.changes.send_modify(|number| *number += 1);
    }

    async fn renew(&self, world: &World, uid: &str) {
        let sent = Instant::now();
        world.pause(2).await;
        let has = {
            let mut lease = world.lease.lock().unwrap();
            let has = lease.as_ref().is_some_and(|(holder, _)| holder == uid);
            if has {
                *lease = Some((uid.to_owned(), Instant::now() + Duration::from_secs(LEASE.into())));
            }
            has
        };
        world.pause(2).await;
        let lease = Lease {
            uid: uid.to_owned(),
            namespace: "red".into(),
            name: "web".into(),
            pool: "public".into(),
            vpc: String::new(),
            address: ADDRESS,
            state: LeaseState::Held,
            grant: String::new(),
            lease_seconds: LEASE,
            quarantine_seconds: 1,
        };
        let grants = has.then(|| Grant::new(lease, sent));
        self.leases.note(uid, grants.as_slice());
    }
}

/// Makes Vips one after the other, and ends them as lbaasd does.
async fn vips(world: Arc<World>) {
    for number in 0.. {
        let uid = format!("vip-{number}");
        // cidrd gives the address to nobody who does not own it.
        while !world.lease_anew(&uid) {
            sleep(Duration::from_secs(1)).await;
        }
        world.check();
        let vip = json!({"apiVersion": "thuban.dev/v1alpha1", "kind": "Vip",
            "metadata": {"name": "web", "namespace": "red", "uid": uid},
            "spec": {"service": "web", "ipFamilies": ["IPv4"], "dns": {"name": names::random(&world)},
                "drainSeconds": world.number(2) * 10},
            "status": {"addresses": [ADDRESS], "announce": world.l2.announce, "conditions": [{"type": "Accepted",
                "status": "True", "reason": "Valid", "message": "", "lastTransitionTime": ""}]}});
        world.write(serde_json::from_value(vip).unwrap());
        while !world.chance(4) {
            world.pause(80).await;
            names::change(&world);
        }
        let mut vip = world.vip.lock().unwrap().clone().unwrap();
        let deleted = k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(world.timestamp());
        vip.metadata.deletion_timestamp = Some(deleted);
        world.write(vip);
        loop {
            world.pause(4).await;
            let vip = world.vip.lock().unwrap().clone().unwrap();
            let mut further = vip.clone();
            if proceed(&mut further, world.timestamp()) {
                world.pause(3).await;
                let version = world
                    .vip
                    .lock()
                    .unwrap()
                    .as_ref()
                    .and_then(ResourceExt::resource_version);
                if version == vip.resource_version() {
                    world.write(further);
                    world.check();
                }
                continue;
            }
            let decided = ending(&vip, false, world.timestamp());
            world.pause(3).await;
            match decided {
                Ending::Wait => continue,
                Ending::Release => {
                    *world.lease.lock().unwrap() = None;
                    world.count(|seen| seen.released += 1);
                }
                Ending::Leave => world.count(|seen| seen.left += 1),
            }
            *world.vip.lock().unwrap() = None;
            world.check();
            break;
        }
    }
}

/// A node: its speaker, and what gobgpd has.
struct Node {
    name: &'static str,
    world: Arc<World>,
    lbaasds: [Arc<Lbaasd>; 2],
    state: State,
    serves: bool,
    sequence: u64,
    /// For whom the address was announced last.
    last: String,
}

impl Node {
    fn begin(&mut self) {
        // The file of numbers is lost now and then: the clock is not.
        let start = self.world.now().as_secs();
        let file = if self.world.chance(4) {
            0
        } else {
            (self.sequence >> 24) + 1
        };
        self.sequence = file.max(start) << 24;
        // The file of deadlines is what was granted.
        self.state = State::new(self.state.granted().clone(), self.world.now());
        let has = self.world.announced.lock().unwrap().contains_key(self.name);
        self.state.adopt(has.then_some(ADDRESS).into_iter().collect());
    }

    /// Has gobgpd do what is decided. Some requests and answers get lost, and now and then transitd serves nothing.
    fn carry_out(&mut self) {
        if self.world.chance(20) {
            self.serves = self.world.chance(2);
        }
        let served = self.serves.then_some(ADDRESS).into_iter().collect();
        self.state.served(served, self.world.now());
        if self.world.chance(6) {
            return;
        }
        for step in self.state.steps(self.world.now()) {
            if !self.state.begin(&step, self.world.now()) {
                continue;
            }
            if !self.world.chance(10) {
                let report = self.state.report(self.world.now());
                let uid = report.first().map(|announced| announced.uid.clone());
                let mut announced = self.world.announced.lock().unwrap();
                match step {
                    Step::Add(..) => {
                        // What an earlier speaker announced stays what it was.
                        self.last = uid.filter(|uid| !uid.is_empty()).unwrap_or(self.last.clone());
                        announced.insert(self.name, self.last.clone());
                        self.world.seen.lock().unwrap().announced += 1;
                    }
                    Step::Delete(_) => {
                        announced.remove(self.name);
                    }
                }
                drop(announced);
                if !self.world.chance(10) {
                    self.state.done(&step);
                }
            }
            self.world.check();
        }
    }

    /// Returns what is said of the address: a speaker that has just started may not know the Service.
    fn serves_for(&self) -> Vec<Serving> {
        let vip = self.world.vip.lock().unwrap().clone();
        let service = vip.map(|vip| format!("{}/{}", vip.namespace().unwrap_or_default(), vip.spec.service));
        let service = service.filter(|_| !self.world.chance(8)).unwrap_or_default();
        let serving = |address: &IpAddr| Serving {
            address: *address,
            service: service.clone(),
            on_link: false,
        };
        self.state.serves().iter().map(serving).collect()
    }

    async fn live(mut self) {
        let mut requests = JoinSet::new();
        let mut version = String::new();
        self.begin();
        loop {
            self.carry_out();
            if self.world.chance(40) {
                sleep(Duration::from_secs(2)).await;
                self.begin();
                version = String::new();
            }
            // A node that is away for a while withdraws at the deadline.
            if self.world.chance(30) {
                let back = Instant::now() + Duration::from_secs(self.world.number(400));
                while Instant::now() < back {
                    self.carry_out();
                    sleep(Duration::from_secs(1)).await;
                }
            }
            self.sequence += 1;
            // While gobgpd is slow, a node says that it announces all that it was granted.
            let (announced, renounced) = if self.world.chance(8) {
                (self.state.report_granted(self.world.now()), BTreeMap::new())
            } else {
                self.state.renounce(self.world.now())
            };
            if !renounced.is_empty() {
                version.clear();
                if self.world.chance(4) {
                    // Nobody is reached.
                    self.state.take_back(renounced);
                    sleep(Duration::from_secs(1)).await;
                    continue;
                }
            }
            let report = Report {
                sequence: self.sequence,
                announced,
                serves: self.serves_for(),
                version: version.clone(),
                without_password: Vec::new(),
            };
            let sent = self.world.now();
            let index = usize::try_from(self.world.number(2)).unwrap();
            let (lbaasd, world, name) = (self.lbaasds[index].clone(), self.world.clone(), self.name);
            let (sender, mut answer) = tokio::sync::oneshot::channel();
            // A request goes on at lbaasd after the node gave it up.
            requests.spawn(async move {
                world.pause(5).await;
                let (answer, _) = lbaasd.speakers.answer(name, &report).await;
                world.pause(5).await;
                let _ = sender.send(answer);
            });
            let patience = Instant::now() + Duration::from_secs(1 + self.world.number(40));
            loop {
                self.carry_out();
                let until = patience.min(Instant::now() + Duration::from_secs(1));
                match timeout(until.duration_since(Instant::now()), &mut answer).await {
                    Ok(Ok(routes)) => {
                        version.clone_from(&routes.version);
                        if routes.sequence > self.sequence {
                            self.sequence = ((routes.sequence >> 24) + 1) << 24;
                        }
                        self.state.answered(routes.routes, sent);
                        break;
                    }
                    Ok(Err(_)) => panic!("a request ended without an answer"),
                    Err(_) if Instant::now() >= patience => {
                        self.world.count(|seen| seen.given_up += 1);
                        break;
                    }
                    Err(_) => {}
                }
            }
            while requests.try_join_next().is_some() {}
        }
    }
}

/// Plays a world with two lbaasds and the Vips, on a clock of its own. `begin` adds what else lives in it.
fn play(
    seed: u64,
    (announce, length): (&'static str, Duration),
    begin: impl FnOnce(&Arc<World>, &[Arc<Lbaasd>; 2], &mut JoinSet<()>),
) -> Arc<World> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .unwrap();
    runtime.block_on(async {
        let world = World::new(seed, announce);
        let lbaasds = [Lbaasd::new(&world), Lbaasd::new(&world)];
        let mut tasks = JoinSet::new();
        for lbaasd in &lbaasds {
            tasks.spawn(lbaasd.clone().live(world.clone()));
        }
        begin(&world, &lbaasds, &mut tasks);
        tasks.spawn(vips(world.clone()));
        tokio::select! {
            () = sleep_until(world.start + length) => {}
            ended = tasks.join_next() => panic!("seed {seed}: a task ended: {ended:?}"),
        }
        world
    })
}

/// Returns the seeds of the schedules that are run.
fn seeds() -> Range<u64> {
    let schedules = std::env::var("THUBAN_SCHEDULES").unwrap_or_else(|_| "100".to_owned());
    0..schedules.parse().unwrap()
}

fn run(seed: u64) -> Seen {
    let world = play(seed, ("BGP", LENGTH), |world, lbaasds, tasks| {
        for lbaasd in lbaasds {
            tasks.spawn(names::live(lbaasd.clone(), world.clone()));
        }
        for name in NODES {
            let node = Node {
                name,
                world: world.clone(),
                lbaasds: lbaasds.clone(),
                state: State::new(BTreeMap::new(), world.now()),
                serves: true,
                sequence: 0,
                last: String::new(),
            };
            tasks.spawn(node.live());
        }
        tasks.spawn(names::others(world.clone()));
    });
    std::mem::take(&mut *world.seen.lock().unwrap())
}

#[test]
fn nobody_announces_an_address_for_another_than_its_holder() {
    let mut all = Seen::default();
    for seed in seeds() {
        let seen = run(seed);
        all.announced += seen.announced;
        all.released += seen.released;
        all.left += seen.left;
        all.given_up += seen.given_up;
        all.conflicts += seen.conflicts;
        all.published += seen.published;
        all.taken += seen.taken;
        all.late_claims += seen.late_claims;
    }
    eprintln!("{all:?}");
    let Seen {
        announced,
        released,
        left,
        given_up,
        conflicts,
        published,
        taken,
        late_claims,
    } = all;
    let seen = [
        announced,
        released,
        left,
        given_up,
        conflicts,
        published,
        taken,
        late_claims,
    ];
    assert!(
        seen.iter().all(|count| *count > 0),
        "schedules that lack something prove little"
    );
}
