//! The API server, who announces what, and the rules that must hold.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use cidrd::store::{Store, StoreError};
use fastrand::Rng;
use kube::ResourceExt;
use thuban_api::ip_lease::{IpLease, IpLeaseStatus, LeaseState};
use tokio::task::yield_now;
use tokio::time::{Instant, sleep};

/// The seconds of a lease, and of a quarantine.
pub const LEASE: u32 = 600;
pub const QUARANTINE: u32 = 120;

/// Who announces an address, until when.
#[derive(Clone, Debug)]
struct Announced {
    uid: String,
    address: String,
    until: Instant,
}

/// How often what happened.
#[derive(Clone, Copy, Debug, Default)]
pub struct Seen {
    pub announced: u32,
    pub passed_on: u32,
    pub expired: u32,
    pub refused: u32,
    pub resumed: u32,
    pub rivals: u32,
    pub crashes: u32,
    pub lost: u32,
}

impl Seen {
    pub fn add(&mut self, other: &Self) {
        self.announced += other.announced;
        self.passed_on += other.passed_on;
        self.expired += other.expired;
        self.refused += other.refused;
        self.resumed += other.resumed;
        self.rivals += other.rivals;
        self.crashes += other.crashes;
        self.lost += other.lost;
    }

    /// Whether all happened.
    pub fn is_whole(&self) -> bool {
        let Self {
            announced,
            passed_on,
            expired,
            refused,
            resumed,
            rivals,
            crashes,
            lost,
        } = *self;
        [
            announced, passed_on, expired, refused, resumed, rivals, crashes, lost,
        ]
        .iter()
        .all(|times| *times > 0)
    }
}

/// What goes wrong with requests.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Faults {
    /// Nothing: they are answered in their order.
    None,
    /// They overtake each other.
    Overtaken,
    /// They are slow, and get lost too.
    Lost,
}

struct State {
    faults: Faults,
    random: Rng,
    version: u64,
    leases: BTreeMap<String, IpLease>,
    /// By the number of the announcing process.
    announced: BTreeMap<u64, Announced>,
    /// Who announced an address last, and when that ended.
    last: BTreeMap<String, (String, Instant)>,
    /// When a holder's announcements were withdrawn last.
    withdrawn: BTreeMap<String, Instant>,
    seen: Seen,
}

#[derive(Clone)]
pub struct World(Arc<Mutex<State>>);

impl World {
    pub fn new(seed: u64) -> Self {
        Self::with(seed, Faults::Lost)
    }

    /// Returns a world in which requests overtake each other.
    pub fn changing(seed: u64) -> Self {
        Self::with(seed, Faults::Overtaken)
    }

    /// Returns a world in which every request is answered soon.
    pub fn calm() -> Self {
        Self::with(0, Faults::None)
    }

    fn with(seed: u64, faults: Faults) -> Self {
        Self(Arc::new(Mutex::new(State {
            faults,
            random: Rng::with_seed(seed),
            version: 0,
            leases: BTreeMap::new(),
            announced: BTreeMap::new(),
            last: BTreeMap::new(),
            withdrawn: BTreeMap::new(),
            seen: Seen::default(),
        })))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }

    pub fn seen(&self) -> Seen {
        self.state().seen
    }

    pub fn note(&self, note: impl FnOnce(&mut Seen)) {
        note(&mut self.state().seen);
    }

    /// One of `of` times.
    pub fn chance(&self, of: u32) -> bool {
        self.state().random.u32(..of) == 0
    }

    pub fn number(&self, below: u64) -> u64 {
        self.state().random.u64(..below)
    }

    /// Mostly some milliseconds, now and then seconds.
    pub async fn pause(&self) {
        let milliseconds = {
            let random = &mut self.state().random;
            if random.u32(..20) == 0 {
                random.u64(..9_000)
            } else {
                random.u64(..40)
            }
        };
        sleep(Duration::from_millis(milliseconds)).await;
    }

    /// Returns all leases as they are now.
    pub fn leases(&self) -> Vec<IpLease> {
        self.state().leases.values().cloned().collect()
    }

    /// A process announces an address for a holder, and nothing else. `sent`: when it asked for the address. Nobody
    /// follows a leader that asked before the last withdrawal.
    pub fn announce(&self, process: u64, uid: &str, address: &str, until: Instant, sent: Instant) {
        if self.state().withdrawn.get(uid).is_some_and(|at| *at >= sent) {
            return;
        }
        let mut state = self.state();
        let now = Instant::now();
        state.end(process, now);
        state.retire(now);
        for other in state.announced.values() {
            assert!(
                other.address != address || other.uid == uid,
                "{address} is announced for {} and {uid}",
                other.uid
            );
            assert!(
                other.uid != uid || other.address == address,
                "{uid} has {} and {address}",
                other.address
            );
        }
        if let Some((before, ended)) = state.last.get(address)
            && before != uid
        {
            let rest = now - *ended;
            assert!(
                rest >= Duration::from_secs(QUARANTINE.into()),
                "{address} goes from {before} to {uid} after {rest:?}"
            );
            state.last.remove(address);
            state.seen.passed_on += 1;
        }
        state.seen.announced += 1;
        let (uid, address) = (uid.to_owned(), address.to_owned());
        state.announced.insert(process, Announced { uid, address, until });
    }

    /// A process announces nothing any more.
    pub fn withdraw(&self, process: u64) {
        self.state().end(process, Instant::now());
    }

    /// Nobody announces anything for a holder any more, until somebody asks anew.
    pub fn withdraw_all(&self, uid: &str) {
        let mut state = self.state();
        state.withdrawn.insert(uid.to_owned(), Instant::now());
        let of_holder = |(process, announced): (&u64, &Announced)| (announced.uid == uid).then_some(*process);
        let processes: Vec<u64> = state.announced.iter().filter_map(of_holder).collect();
        for process in processes {
            state.end(process, Instant::now());
        }
    }

    /// Checks what the API server has: a holder has one address at most.
    fn check(state: &State) {
        let held = state
            .leases
            .values()
            .filter(|lease| lease.state() == LeaseState::Held);
        let mut holders = BTreeSet::new();
        for lease in held {
            let is_v6 = lease.spec.address.contains(':');
            assert!(
                holders.insert((&lease.spec.holder.uid, is_v6)),
                "two addresses for {}",
                lease.spec.holder.uid
            );
        }
    }
}

impl State {
    fn end(&mut self, process: u64, now: Instant) {
        if let Some(announced) = self.announced.remove(&process) {
            let ended = now.min(announced.until);
            self.last.insert(announced.address, (announced.uid, ended));
        }
    }

    /// Ends what is past its deadline.
    fn retire(&mut self, now: Instant) {
        let past = |(process, announced): (&u64, &Announced)| (announced.until <= now).then_some(*process);
        let processes: Vec<u64> = self.announced.iter().filter_map(past).collect();
        for process in processes {
            self.end(process, now);
        }
    }
}

impl World {
    /// Does something at the API server, which may be slow, may not hear of it, and whose answer may be lost.
    async fn at_server<T>(
        &self,
        work: impl FnOnce(&mut State) -> Result<T, StoreError> + Send,
    ) -> Result<T, StoreError> {
        let away = || Err(StoreError::Away(kube::Error::Service("away".into())));
        let faults = self.state().faults;
        if faults != Faults::Lost {
            let turns = if faults == Faults::None { 1 } else { self.number(6) };
            for _ in 0..turns {
                yield_now().await;
            }
            let mut state = self.state();
            let done = work(&mut state);
            Self::check(&state);
            return done;
        }
        self.pause().await;
        if self.chance(40) {
            self.note(|seen| seen.lost += 1);
            return away();
        }
        let done = {
            let mut state = self.state();
            let done = work(&mut state);
            Self::check(&state);
            done
        };
        let is_lost = self.chance(40);
        self.pause().await;
        if is_lost {
            self.note(|seen| seen.lost += 1);
            return away();
        }
        done
    }
}

impl State {
    fn stamp(&mut self, lease: &mut IpLease) {
        self.version += 1;
        lease.metadata.resource_version = Some(self.version.to_string());
    }

    /// Returns the name of a lease that is as it was read.
    fn unchanged(&self, lease: &IpLease) -> Result<String, StoreError> {
        let name = lease.name_any();
        match self.leases.get(&name) {
            Some(now) if now.resource_version() == lease.resource_version() && now.uid() == lease.uid() => {
                Ok(name)
            }
            _ => Err(StoreError::Conflict),
        }
    }
}

impl Store for World {
    async fn of_holder(&self, uid: &str) -> Result<Vec<IpLease>, StoreError> {
        let leases = self.all().await?;
        Ok(leases
            .into_iter()
            .filter(|lease| lease.spec.holder.uid == uid)
            .collect())
    }

    async fn all(&self) -> Result<Vec<IpLease>, StoreError> {
        self.at_server(|state| Ok(state.leases.values().cloned().collect()))
            .await
    }

    async fn create(&self, lease: &IpLease) -> Result<(), StoreError> {
        self.at_server(|state| {
            let mut lease = lease.clone();
            let name = lease.name_any();
            if state.leases.contains_key(&name) {
                return Err(StoreError::Exists);
            }
            state.stamp(&mut lease);
            lease.metadata.uid = Some(format!("lease-{}", state.version));
            let uid = &lease.spec.holder.uid;
            let is_proposed =
                |other: &&IpLease| other.state() == LeaseState::Proposed && other.spec.holder.uid == *uid;
            let rivals = state.leases.values().filter(is_proposed).count();
            state.seen.rivals += u32::from(rivals > 0);
            state.leases.insert(name, lease);
            Ok(())
        })
        .await
    }

    async fn set_status(&self, lease: &IpLease, status: IpLeaseStatus) -> Result<IpLease, StoreError> {
        self.at_server(|state| {
            let name = state.unchanged(lease)?;
            let mut lease = lease.clone();
            let is_back = lease.state() == LeaseState::Quarantined && status.state == LeaseState::Proposed;
            state.seen.resumed += u32::from(is_back);
            lease.status = Some(status);
            state.stamp(&mut lease);
            state.leases.insert(name, lease.clone());
            Ok(lease)
        })
        .await
    }

    async fn delete(&self, lease: &IpLease) -> Result<(), StoreError> {
        self.at_server(|state| {
            let name = state.unchanged(lease)?;
            state.leases.remove(&name);
            Ok(())
        })
        .await
    }
}
