//! Random schedules of nodes that answer for an address of L2. Nodes are silent for a while, lose their numbers, and
//! give requests up. lbaasds see Leases and Vips late.
//!
//! At each moment, one node at most answers for the address by its own clock. It does so for the address's holder.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use http::{Method, Response};
pub use k8s_openapi::api::coordination::v1::Lease as NodeLease;
use kube::ResourceExt;
use kube::client::Body;
use kube::runtime::watcher::Event;
use thuban_api::Vip;
use thuban_api::routes::{Report, Serving};
use thuban_speaker::l2::owned::Owned;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use super::api_server::{Fault, fault};
use super::{ADDRESS, Lbaasd, NODES, World, play, seeds};

/// The seconds for which an answer counts. Requests to the API server take long here.
pub const SECONDS: u32 = 60;
const LENGTH: Duration = Duration::from_hours(1);

/// What happened.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    takeovers: u32,
    given_up: u32,
    restarts: u32,
    expired: u32,
}

pub struct L2 {
    /// How Vips are announced.
    pub announce: &'static str,
    leases: Mutex<BTreeMap<String, NodeLease>>,
    owned: Mutex<BTreeMap<&'static str, Owned>>,
    /// The node that answered last.
    last: Mutex<&'static str>,
    seen: Mutex<Seen>,
}

impl L2 {
    pub fn new(announce: &'static str) -> Self {
        Self {
            announce,
            leases: Mutex::default(),
            owned: Mutex::default(),
            last: Mutex::default(),
            seen: Mutex::default(),
        }
    }

    pub fn check(&self, vip: Option<&Vip>, holder: Option<&str>, now: Duration) {
        let mut owners = BTreeSet::new();
        for (node, owned) in &*self.owned.lock().unwrap() {
            for announced in owned.report(now) {
                assert_eq!(
                    Some(announced.uid.as_str()),
                    holder,
                    "{node} answers for another's address"
                );
                owners.insert(*node);
            }
        }
        assert!(owners.len() <= 1, "{owners:?} answer for one address");
        let mut last = self.last.lock().unwrap();
        if let Some(owner) = owners.first()
            && *owner != *last
        {
            *last = *owner;
            self.count(|seen| seen.takeovers += 1);
        }
        let status = vip.and_then(|vip| vip.status.as_ref());
        let count = status.map_or(0, |status| status.announcers.len());
        assert!(self.announce != "L2" || count <= 1, "{count} announcers of L2");
    }

    fn count(&self, count: impl FnOnce(&mut Seen)) {
        count(&mut self.seen.lock().unwrap());
    }
}

/// Carries out a request for a Lease as an API server does.
pub fn serve(world: &World, method: &Method, path: &str, body: &[u8]) -> Result<Response<Body>, Fault> {
    let mut leases = world.l2.leases.lock().unwrap();
    let name = path.rsplit('/').next().unwrap_or_default();
    if *method == Method::GET {
        return match leases.get(name) {
            Some(lease) => Ok(Response::new(Body::from(serde_json::to_vec(lease)?))),
            None => fault(404, "NotFound"),
        };
    }
    let mut written: NodeLease = serde_json::from_slice(body)?;
    let known = leases.get(&written.name_any());
    let version = known.and_then(|known| known.metadata.resource_version.clone());
    if *method == Method::POST && known.is_some() {
        return fault(409, "AlreadyExists");
    }
    if *method == Method::PUT && version != written.metadata.resource_version {
        return fault(409, "Conflict");
    }
    let expired = |lease: &NodeLease| lease.annotations().get("thuban.dev/expired-request").cloned();
    if known.is_some_and(|known| expired(known) != expired(&written)) {
        world.l2.count(|seen| seen.expired += 1);
    }
    written.metadata.resource_version = Some(world.version());
    leases.insert(written.name_any(), written.clone());
    Ok(Response::new(Body::from(serde_json::to_vec(&written)?)))
}

/// Has an lbaasd see Leases late, and look at them.
async fn look(lbaasd: Arc<Lbaasd>, world: Arc<World>) {
    loop {
        let leases: Vec<NodeLease> = world.l2.leases.lock().unwrap().values().cloned().collect();
        world.pause(8).await;
        for mut lease in leases {
            lease.metadata.namespace = Some(super::super::l2::NAMESPACE.to_owned());
            lbaasd
                .node_leases
                .lock()
                .unwrap()
                .apply_watcher_event(&Event::Apply(lease));
        }
        let speakers = &lbaasd.speakers;
        let _ = timeout(Duration::from_secs(20), speakers.l2.look(&speakers.vips)).await;
    }
}

/// A node, with what it says of itself.
struct Node {
    name: &'static str,
    world: Arc<World>,
    lbaasds: [Arc<Lbaasd>; 2],
    serves: bool,
    sequence: u64,
    version: String,
}

impl Node {
    /// Changes what the node answers for.
    fn change<T>(&self, change: impl FnOnce(&mut Owned) -> T) -> T {
        let changed = change(self.world.l2.owned.lock().unwrap().entry(self.name).or_default());
        self.world.check();
        changed
    }

    fn served(&self) -> BTreeSet<IpAddr> {
        self.serves.then_some(ADDRESS).into_iter().collect()
    }

    /// A new speaker answers for nothing. Its numbers may be lost, its clock is not.
    fn begin(&mut self) {
        self.world.l2.count(|seen| seen.restarts += 1);
        self.change(Owned::clear);
        let file = if self.world.chance(4) {
            0
        } else {
            (self.sequence >> 24) + 1
        };
        self.sequence = file.max(self.world.now().as_secs()) << 24;
        self.version.clear();
    }

    /// Now and then transitd serves nothing. Returns whether that changed.
    fn disturb(&mut self) -> bool {
        if !self.world.chance(30) {
            return false;
        }
        let before = self.serves;
        self.serves = !self.world.chance(3);
        let served = self.served();
        self.change(|owned| owned.served(&served));
        before != self.serves
    }

    fn report(&mut self) -> Report {
        self.sequence += 1;
        let now = self.world.now();
        let announced = self.change(|owned| owned.renounce(now));
        let service = if self.world.chance(8) { "" } else { "red/web" };
        let serving = |address: IpAddr| Serving {
            address,
            service: service.to_owned(),
            on_link: true,
        };
        Report {
            sequence: self.sequence,
            announced,
            serves: self.served().into_iter().map(serving).collect(),
            version: self.version.clone(),
            without_password: Vec::new(),
        }
    }

    async fn live(mut self) {
        let mut requests = JoinSet::new();
        loop {
            if self.world.chance(60) {
                sleep(Duration::from_secs(2)).await;
                self.begin();
            }
            // A node that is silent answers ARP until its deadline.
            if self.world.chance(30) {
                self.world.pause(200).await;
            }
            self.disturb();
            let report = self.report();
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
            let patience = Instant::now() + Duration::from_secs(1 + self.world.number(50));
            let mut renewal = Duration::from_secs(1);
            while Instant::now() < patience && !self.disturb() {
                match timeout(Duration::from_secs(1), &mut answer).await {
                    Ok(Ok(routes)) => {
                        self.version.clone_from(&routes.version);
                        if routes.sequence > self.sequence {
                            self.sequence = ((routes.sequence >> 24) + 1) << 24;
                        }
                        renewal = Duration::from_millis(routes.renew_after_ms.unwrap_or(100));
                        let (served, now) = (self.served(), self.world.now());
                        self.change(|owned| owned.answered(&routes.routes, &served, sent, now));
                        break;
                    }
                    Ok(Err(_)) => panic!("a request ended without an answer"),
                    Err(_) => self.world.check(),
                }
            }
            if Instant::now() >= patience {
                self.world.l2.count(|seen| seen.given_up += 1);
            }
            sleep(renewal).await;
            while requests.try_join_next().is_some() {}
        }
    }
}

fn run(seed: u64) -> Seen {
    let world = play(seed, ("L2", LENGTH), |world, lbaasds, tasks| {
        for lbaasd in lbaasds {
            tasks.spawn(look(lbaasd.clone(), world.clone()));
        }
        for name in NODES {
            let node = Node {
                name,
                world: world.clone(),
                lbaasds: lbaasds.clone(),
                serves: true,
                sequence: world.now().as_secs() << 24,
                version: String::new(),
            };
            tasks.spawn(node.live());
        }
    });
    *world.l2.seen.lock().unwrap()
}

#[test]
fn one_node_at_most_answers_for_an_address_of_l2() {
    let mut all = Seen::default();
    for seed in seeds() {
        let seen = run(seed);
        all.takeovers += seen.takeovers;
        all.given_up += seen.given_up;
        all.restarts += seen.restarts;
        all.expired += seen.expired;
    }
    eprintln!("{all:?}");
    let counts = [all.takeovers, all.given_up, all.restarts, all.expired];
    assert!(
        counts.iter().all(|count| *count > 0),
        "schedules that lack something prove little"
    );
}
