//! What this node serves, was granted and announces. The task that asks lbaasd and the one that tells gobgpd share it.
//! So addresses of L2 are renewed while gobgpd hangs.
//!
//! Invariant: while gobgpd was not told of lbaasd's last answer, lbaasd is told that gobgpd has all of that answer.
//! Nobody waits for another process while the ledger is locked.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use thuban_api::routes::{Announced, Peer, Route, Routes, Serving, WithoutPassword};
use thuban_telemetry::process;
use tokio::sync::watch;
use tracing::{info, warn};

use crate::deadlines::{Deadlines, DeadlinesError, now};
use crate::decide::{Form, Grant, State, Step};
use crate::gobgp::NextHops;
use crate::l2::L2;
use crate::lbaasd::{Said, Told};
use crate::metrics;
use crate::passwords::Passwords;
use crate::transitd::Served;

/// How long routers may keep routes of a gobgpd that has ended, if nothing is known of the routers.
const KEPT: Duration = Duration::from_mins(5);
/// How long addresses of L2 stay at a node whose transitd does not answer. Routers share out BGP's among nodes, but one
/// node gets all packets of these.
const L2_WITHOUT_TRANSITD: Duration = Duration::from_mins(1);

#[derive(Debug)]
pub struct Ledger {
    deadlines: Deadlines,
    state: State,
    next_hops: NextHops,
    /// `None`: the node answers for no addresses yet.
    l2: Option<L2>,
    /// The addresses that transitd serves, with their Services. `None`: it has not answered yet.
    services: Option<BTreeSet<(IpAddr, String)>>,
    /// When transitd was asked for these.
    services_at: Duration,
    /// The addresses that HAProxy serves, likewise. `None`: it has not been asked yet.
    proxied: Option<BTreeSet<(IpAddr, String)>>,
    /// `None`: lbaasd has not answered yet.
    peers: Option<Vec<Peer>>,
    passwords: Passwords,
    /// Whether gobgpd has been asked what it has since the speaker started.
    is_adopted: bool,
    /// What lbaasd would be told; `None` while gobgpd has not said what it has.
    reports: watch::Sender<Option<Said>>,
    /// How many answers of lbaasd came, and when the last one did.
    answers: watch::Sender<u64>,
    answered_at: Duration,
    /// How many of these answers gobgpd was told of, or could not be told of.
    applied: watch::Sender<u64>,
}

/// The ledger, as tasks share it.
#[derive(Clone, Debug)]
pub struct SharedLedger(Arc<Mutex<Ledger>>);

impl SharedLedger {
    pub fn new(ledger: Ledger) -> Self {
        Self(Arc::new(Mutex::new(ledger)))
    }

    pub fn lock(&self) -> MutexGuard<'_, Ledger> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Ledger {
    pub fn new(deadlines: Deadlines, next_hops: NextHops) -> Self {
        let state = State::new(deadlines.read(), now());
        Self {
            deadlines,
            state,
            next_hops,
            l2: None,
            services: None,
            services_at: Duration::ZERO,
            proxied: Some(BTreeSet::new()),
            peers: None,
            passwords: Passwords::new(),
            is_adopted: false,
            reports: watch::Sender::new(None),
            answers: watch::Sender::new(0),
            answered_at: now(),
            applied: watch::Sender::new(0),
        }
    }

    /// Has the node answer for addresses of L2 from now on.
    pub fn set_l2(&mut self, l2: L2) {
        self.l2 = Some(l2);
        self.publish();
    }

    /// Returns what lbaasd would be told, as it changes.
    pub fn reports(&self) -> watch::Receiver<Option<Said>> {
        self.reports.subscribe()
    }

    /// Returns the number of answers of lbaasd, as it grows.
    pub fn answers(&self) -> watch::Receiver<u64> {
        self.answers.subscribe()
    }

    /// Returns the number of answers that gobgpd was told of, as it grows.
    pub fn applied(&self) -> watch::Receiver<u64> {
        self.applied.subscribe()
    }

    /// Takes an answer of lbaasd, and returns its number.
    pub fn answered(&mut self, answer: Routes, sent: Duration) -> u64 {
        let (of_l2, routes): (Vec<Route>, Vec<Route>) = answer.routes.into_iter().partition(|route| route.l2);
        if let Some(l2) = &self.l2 {
            l2.owned().answered(&of_l2, self.state.serves(), sent, now());
        }
        self.state.answered(routes, sent);
        self.peers = Some(answer.peers);
        self.answered_at = now();
        process::set_ready(true);
        self.answers.send_modify(|number| *number += 1);
        self.publish();
        *self.answers.borrow()
    }

    /// Notes that a pass has ended which knew so many answers.
    pub fn passed(&mut self, answers: u64) {
        metrics::routes(self.state.report(now()).len(), self.state.count(Form::Lengthened));
        self.applied.send_replace(answers);
        self.publish();
    }

    /// Takes an answer of transitd.
    pub fn served(&mut self, served: Served) {
        // Two tasks hear transitd.
        if served.at < self.services_at {
            return;
        }
        (self.services, self.services_at) = (Some(served.services), served.at);
        self.serve();
    }

    /// Has routes of a former speaker wait until it is known what HAProxy serves.
    pub fn expect_haproxy(&mut self) {
        self.proxied = None;
    }

    /// Takes the addresses that HAProxy serves, with their Services.
    pub fn proxied(&mut self, proxied: BTreeSet<(IpAddr, String)>) {
        if self.proxied.as_ref() != Some(&proxied) {
            self.proxied = Some(proxied);
            self.serve();
        }
    }

    /// Returns the addresses that HAProxy serves and that the node announces, or may announce. `None`: HAProxy has not
    /// been asked yet, so routes of a former speaker stay.
    pub fn local_addresses(&self) -> Option<BTreeSet<IpAddr>> {
        let mut announced = self.state.report_granted(now());
        announced.extend(self.l2.iter().flat_map(|l2| l2.owned().report(now())));
        let proxied = self.proxied.as_ref()?.iter();
        let proxied: BTreeSet<IpAddr> = proxied.map(|(address, _)| *address).collect();
        let addresses = announced.iter().map(|announced| announced.address);
        Some(addresses.filter(|address| proxied.contains(address)).collect())
    }

    /// Returns what transitd and HAProxy serve; `None`: one of them has not said it yet.
    fn all_services(&self) -> Option<BTreeSet<(IpAddr, String)>> {
        let (services, proxied) = (self.services.as_ref()?, self.proxied.as_ref()?);
        Some(services.union(proxied).cloned().collect())
    }

    /// Notes what the node serves.
    fn serve(&mut self) {
        let Some(all) = self.all_services() else {
            return;
        };
        let addresses = all.iter().map(|(address, _)| *address);
        self.state.served(addresses.collect(), self.services_at);
        if let Some(l2) = &self.l2 {
            l2.owned().served(self.state.serves());
        }
        self.publish();
    }

    /// Takes what was read of Secrets.
    pub fn read_passwords(&mut self, passwords: Passwords) {
        self.passwords = passwords;
        self.publish();
    }

    /// Returns the names of the Secrets that are needed.
    pub fn password_secrets(&self) -> BTreeSet<String> {
        let peers = self.peers.iter().flatten();
        peers.filter_map(|peer| peer.password_secret.clone()).collect()
    }

    /// Returns what lbaasd is told. Nothing else is granted from then on, also after a restart; `None` if that can't be
    /// written, or while gobgpd has not said what it has.
    pub fn renounce(&mut self) -> Option<Told> {
        if !self.is_adopted {
            return None;
        }
        let (mut announced, renounced) = if self.is_behind() {
            (self.announced(), BTreeMap::new())
        } else {
            self.state.renounce(now())
        };
        if let Some(l2) = &self.l2 {
            announced.extend(l2.owned().renounce(now()));
        }
        if let Err(error) = self.write_deadlines() {
            warn!(%error, "lbaasd is not asked");
            return None;
        }
        self.publish();
        let said = self.said(announced);
        Some(Told { said, renounced })
    }

    /// Takes back what was renounced, for the request reached nobody.
    pub fn take_back(&mut self, renounced: BTreeMap<IpAddr, Grant>) {
        self.state.take_back(renounced);
    }

    /// Whether gobgpd was not told of the last answer yet.
    fn is_behind(&self) -> bool {
        *self.answers.borrow() != *self.applied.borrow()
    }

    /// Returns what gobgpd has or may have, and what it may be asked for before the next request.
    fn announced(&self) -> Vec<Announced> {
        if self.is_behind() {
            self.state.report_granted(now())
        } else {
            self.state.report(now())
        }
    }

    fn publish(&self) {
        let of_l2 = self.l2.as_ref().map(|l2| l2.owned().report(now()));
        metrics::l2_addresses(of_l2.as_ref().map_or(0, Vec::len));
        let mut announced = self.announced();
        announced.extend(of_l2.into_iter().flatten());
        let report = self.is_adopted.then(|| self.said(announced));
        self.reports.send_if_modified(|known| {
            let is_new = *known != report;
            *known = report;
            is_new
        });
    }

    fn said(&self, announced: Vec<Announced>) -> Said {
        let can_announce = |address: &IpAddr| self.next_hops.of(*address).is_some();
        let adopted = || {
            self.state
                .serves()
                .iter()
                .map(|address| (*address, String::new()))
        };
        let services = self.all_services().unwrap_or_else(|| adopted().collect());
        let is_heard = now().saturating_sub(self.services_at) < L2_WITHOUT_TRANSITD;
        let can_answer = |address| is_heard && self.l2.as_ref().is_some_and(|l2| l2.can_answer(address));
        let serves = services.into_iter().filter(|(address, _)| can_announce(address));
        let serves = serves.map(|(address, service)| Serving {
            address,
            service,
            on_link: can_answer(address),
        });
        Said {
            announced,
            serves: serves.collect(),
            without_password: without_password(self.peers.iter().flatten(), &self.passwords),
        }
    }

    /// Returns the time since the last answer of lbaasd, or since the start.
    pub fn since_answer(&self) -> Duration {
        now().saturating_sub(self.answered_at)
    }

    /// Returns the next time at which a pass is needed, if nothing is heard until then.
    pub fn next(&self) -> Option<Duration> {
        self.state.next(now())
    }

    /// Returns the routers to announce to; `None`: lbaasd has not answered yet.
    pub fn peers(&self) -> Option<&[Peer]> {
        self.peers.as_deref()
    }

    pub fn passwords(&self) -> &Passwords {
        &self.passwords
    }

    pub fn is_adopted(&self) -> bool {
        self.is_adopted
    }

    /// Notes that gobgpd has nothing of what it was asked for.
    pub fn emptied(&mut self) {
        let peers = self.peers.iter().flatten();
        let times = peers.map(|peer| u64::from(peer.hold_seconds) + u64::from(peer.graceful_restart_seconds));
        let kept = times.max().map_or(KEPT, Duration::from_secs);
        self.state.emptied(now().saturating_add(kept));
        self.is_adopted = true;
    }

    /// Takes what gobgpd says that it has.
    pub fn listed(&mut self, listed: BTreeSet<IpAddr>) {
        if self.is_adopted {
            self.state.listed(&listed);
            return;
        }
        if !listed.is_empty() {
            info!(count = listed.len(), "gobgpd has routes of an earlier speaker");
        }
        self.state.adopt(listed);
        self.is_adopted = true;
    }

    /// Writes until when routes may be announced.
    pub fn write_deadlines(&mut self) -> Result<(), DeadlinesError> {
        self.deadlines.write(self.state.granted())
    }

    /// Returns what gobgpd must be asked for, withdrawals first.
    pub fn steps(&self) -> Vec<Step> {
        self.state.steps(now())
    }

    /// Notes that gobgpd is going to be asked. Returns whether the step is still right. No route is announced before
    /// its deadline is in the file.
    pub fn begin(&mut self, step: &Step) -> bool {
        if let Step::Add(address, _) = step {
            let granted = self.state.granted().get(address);
            if !granted.is_some_and(|grant| self.deadlines.has(*address, grant)) {
                return false;
            }
        }
        self.state.begin(step, now())
    }

    /// Notes that gobgpd has done what it was asked.
    pub fn done(&mut self, step: &Step) {
        self.state.done(step);
    }
}

/// Returns the peers whose passwords were looked for in vain.
fn without_password<'a>(
    peers: impl Iterator<Item = &'a Peer>,
    passwords: &Passwords,
) -> Vec<WithoutPassword> {
    let problem = |peer: &Peer| {
        passwords
            .get(peer.password_secret.as_ref()?)?
            .as_ref()
            .err()
            .copied()
    };
    peers
        .filter_map(|peer| {
            Some(WithoutPassword {
                peer: peer.name.clone(),
                problem: problem(peer)?,
            })
        })
        .collect()
}

#[cfg(test)]
pub mod tests {
    #![allow(clippy::unwrap_used, clippy::missing_panics_doc)]

    use std::net::Ipv4Addr;

    use thuban_api::routes::PasswordProblem;

    use super::*;
    use crate::passwords::tests::of;

    const ADDRESS: IpAddr = IpAddr::V4(Ipv4Addr::new(203, 0, 113, 7));

    /// Returns a router.
    pub fn peer(name: &str, secret: Option<&str>) -> Peer {
        Peer {
            name: name.to_owned(),
            address: "192.0.2.1".parse().unwrap(),
            port: 179,
            asn: 64512,
            local_asn: 64513,
            bfd: None,
            graceful_restart_seconds: 0,
            hold_seconds: 9,
            password_secret: secret.map(str::to_owned),
            multihop_ttl: None,
        }
    }

    fn ledger(test: &str) -> Ledger {
        let folder = std::env::temp_dir().join(format!("ledger-{test}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(&folder).unwrap();
        let next_hops = NextHops {
            v4: Ipv4Addr::new(192, 0, 2, 9),
            v6: None,
        };
        let mut ledger = Ledger::new(Deadlines::new(&folder).unwrap(), next_hops);
        ledger.listed(BTreeSet::new());
        ledger
    }

    /// Returns the ledger of a node that serves an address and has just been granted it.
    fn granted(test: &str) -> Ledger {
        let mut ledger = ledger(test);
        ledger.served(Served {
            services: [(ADDRESS, "red/web".to_owned())].into(),
            at: now(),
        });
        let route = Route {
            uid: "v1".to_owned(),
            address: ADDRESS,
            remaining_seconds: Some(300),
            l2: false,
        };
        let answer = Routes {
            version: "1".to_owned(),
            sequence: 1,
            routes: vec![route],
            peers: vec![peer("spine", None)],
            renew_after_ms: None,
        };
        assert_eq!(ledger.answered(answer, now()), 1);
        ledger
    }

    #[test]
    fn what_haproxy_serves_is_served_as_transitds_is() {
        let mut ledger = granted("haproxy");
        let second = IpAddr::V4(Ipv4Addr::new(203, 0, 113, 8));
        ledger.proxied([(second, "red/shop".to_owned())].into());
        let serves = ledger.reports().borrow().clone().unwrap().serves;
        let addresses: Vec<IpAddr> = serves.iter().map(|serving| serving.address).collect();
        assert_eq!(addresses, [ADDRESS, second]);
        let local = ledger.local_addresses();
        assert_eq!(local, Some(BTreeSet::new()), "lbaasd has not granted it");
        ledger.proxied([(ADDRESS, "red/web".to_owned())].into());
        assert_eq!(ledger.local_addresses(), Some([ADDRESS].into()));
    }

    #[test]
    fn a_new_speaker_waits_for_what_haproxy_serves() {
        let mut ledger = ledger("haproxy-waits");
        ledger.expect_haproxy();
        let services: BTreeSet<_> = [(ADDRESS, "red/web".to_owned())].into();
        let served = Served { services, at: now() };
        ledger.served(served);
        assert!(ledger.state.serves().is_empty());
        assert_eq!(ledger.local_addresses(), None, "routes stay as they are");
        ledger.proxied(BTreeSet::new());
        assert!(ledger.state.serves().contains(&ADDRESS));
    }

    #[test]
    fn nothing_is_renounced_before_gobgpd_was_told_of_it() {
        let mut ledger = granted("renounced");
        let reports = ledger.reports();
        let told = ledger.renounce().unwrap();
        assert!(told.renounced.is_empty());
        assert_eq!(told.said.announced[0].address, ADDRESS, "gobgpd may have it soon");
        assert_eq!(*reports.borrow(), Some(told.said));
        ledger.passed(1);
        let told = ledger.renounce().unwrap();
        assert_eq!(told.said.announced, [], "the pass has failed");
        assert!(told.renounced.contains_key(&ADDRESS));
        assert_eq!(*reports.borrow(), Some(told.said));
    }

    #[test]
    fn a_route_is_announced_after_its_deadline_is_written() {
        let mut ledger = granted("written");
        let step = Step::Add(ADDRESS, Form::Plain);
        assert_eq!(ledger.steps(), std::slice::from_ref(&step));
        assert!(!ledger.begin(&step));
        ledger.write_deadlines().unwrap();
        assert!(ledger.begin(&step));
    }

    #[test]
    fn an_older_answer_of_transitd_changes_nothing() {
        let mut ledger = granted("older");
        let at = now().saturating_sub(Duration::from_secs(1));
        let services = BTreeSet::new();
        ledger.served(Served { services, at });
        assert_eq!(ledger.renounce().unwrap().said.serves.len(), 1);
    }

    #[test]
    fn addresses_of_l2_leave_a_node_whose_transitd_is_silent() {
        for (seconds, is_expected) in [(0, true), (50, true), (61, false)] {
            let mut ledger = ledger(&format!("silent-{seconds}"));
            let mask = IpAddr::from([255, 255, 255, 0]);
            ledger.set_l2(L2::played([(ADDRESS, mask)].into_iter().collect()));
            ledger.served(Served {
                services: [(ADDRESS, "red/web".to_owned())].into(),
                at: now().saturating_sub(Duration::from_secs(seconds)),
            });
            let serves = ledger.renounce().unwrap().said.serves;
            assert_eq!(serves[0].on_link, is_expected, "{seconds} s ago");
        }
    }

    #[test]
    fn only_passwords_that_were_looked_for_are_told() {
        let peers = [
            peer("spine", None),
            peer("leaf", Some("leaf")),
            peer("lost", Some("lost")),
            peer("late", Some("late")),
        ];
        let passwords: Passwords = [
            ("leaf".to_owned(), Ok(of("s3cret"))),
            ("lost".to_owned(), Err(PasswordProblem::NotFound)),
        ]
        .into();
        let told = without_password(peers.iter(), &passwords);
        let lost = WithoutPassword {
            peer: "lost".to_owned(),
            problem: PasswordProblem::NotFound,
        };
        assert_eq!(told, [lost]);
    }
}
