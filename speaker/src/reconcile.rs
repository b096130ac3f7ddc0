//! Brings gobgpd to what was decided: BGP, routes, then peers.
//!
//! Addresses of L2 are left to [`L2`], and wait for no pass.
//!
//! Each pass begins with what gobgpd says of itself, and ends at the first failure. The next pass goes on.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

use thiserror::Error;
use tracing::{info, warn};

use crate::deadlines::{Deadlines, DeadlinesError, now};
use crate::decide::{Form, Grant, State, Step};
use crate::gobgp::{self, Gobgp, GobgpError, Lengthening, NextHops, Wanted};
use crate::l2::L2;
use crate::lbaasd::{Said, Told};
use crate::metrics;
use crate::passwords::Passwords;
use crate::transitd::Served;
use thuban_api::routes::{Announced, Peer, Route, Routes, Serving, WithoutPassword};

/// How often gobgpd's routes are listed. Requests that gobgpd carried out too late show then.
const LIST: Duration = Duration::from_secs(30);
/// How long routes may be changed without a look at what has been heard meanwhile.
const LONGEST_PASS: Duration = Duration::from_secs(1);

/// How long a session is established before BFD begins.
const SETTLED: Duration = Duration::from_secs(1);
/// How long routers may keep routes of a gobgpd that has ended, if nothing is known of the routers.
const KEPT: Duration = Duration::from_mins(5);

#[derive(Debug, Error)]
pub enum ReconcileError {
    #[error(transparent)]
    Gobgp(#[from] GobgpError),
    #[error(transparent)]
    Deadlines(#[from] DeadlinesError),
}

#[derive(Debug)]
pub struct Reconciler {
    gobgp: Gobgp,
    deadlines: Deadlines,
    state: State,
    next_hops: NextHops,
    /// `None`: the node answers for no addresses.
    l2: Option<L2>,
    /// The addresses that transitd serves, with their Services. `None`: it has not answered yet.
    services: Option<BTreeSet<(IpAddr, String)>>,
    /// `None`: lbaasd has not answered yet.
    peers: Option<Vec<Peer>>,
    passwords: Passwords,
    /// The peers as they were last set in gobgpd. So a difference in how gobgpd lists a peer resets no session twice.
    set: BTreeMap<IpAddr, Wanted>,
    /// Since when sessions have been established, by addresses of peers.
    up_since: BTreeMap<String, Duration>,
    /// Whether gobgpd has been asked what it has since the speaker started.
    is_adopted: bool,
    /// Whether gobgpd rejects routes of its peers since it started.
    is_configured: bool,
    /// Whether gobgpd has started anew, and lacks peers since.
    has_restarted: bool,
    /// When gobgpd's routes are to be listed.
    list_at: Duration,
}

impl Reconciler {
    pub fn new(gobgp: Gobgp, deadlines: Deadlines, next_hops: NextHops, l2: Option<L2>) -> Self {
        let state = State::new(deadlines.read(), now());
        Self {
            gobgp,
            deadlines,
            state,
            next_hops,
            l2,
            services: None,
            peers: None,
            passwords: Passwords::new(),
            set: BTreeMap::new(),
            up_since: BTreeMap::new(),
            is_adopted: false,
            is_configured: false,
            has_restarted: false,
            list_at: Duration::ZERO,
        }
    }

    /// Takes an answer of lbaasd.
    pub fn answered(&mut self, answer: Routes, sent: Duration) {
        let (of_l2, routes): (Vec<Route>, Vec<Route>) = answer.routes.into_iter().partition(|route| route.l2);
        if let Some(l2) = &self.l2 {
            l2.owned().answered(&of_l2, self.state.serves(), sent, now());
        }
        self.state.answered(routes, sent);
        self.peers = Some(answer.peers);
    }

    /// Takes an answer of transitd.
    pub fn served(&mut self, served: Served) {
        let addresses = served.services.iter().map(|(address, _)| *address);
        self.state.served(addresses.collect(), served.at);
        self.services = Some(served.services);
        if let Some(l2) = &self.l2 {
            l2.owned().served(self.state.serves());
        }
    }

    /// Takes what was read of Secrets.
    pub fn read_passwords(&mut self, passwords: Passwords) {
        self.passwords = passwords;
    }

    /// Returns the names of the Secrets that are needed.
    pub fn password_secrets(&self) -> BTreeSet<String> {
        let peers = self.peers.iter().flatten();
        peers.filter_map(|peer| peer.password_secret.clone()).collect()
    }

    /// Returns what lbaasd would be told; `None` while gobgpd has not said what it has.
    pub fn report(&self) -> Option<Said> {
        let of_l2 = self.l2.as_ref().map(|l2| l2.owned().report(now()));
        metrics::l2_addresses(of_l2.as_ref().map_or(0, Vec::len));
        let mut announced = self.state.report(now());
        announced.extend(of_l2.into_iter().flatten());
        self.is_adopted.then(|| self.said(announced))
    }

    /// Returns what lbaasd is told. Nothing else is granted from then on, also after a restart; `None` if that can't be
    /// written.
    pub fn renounce(&mut self) -> Option<Told> {
        if !self.is_adopted {
            return None;
        }
        let (mut announced, renounced) = self.state.renounce(now());
        if let Some(l2) = &self.l2 {
            announced.extend(l2.owned().renounce(now()));
        }
        if let Err(error) = self.deadlines.write(self.state.granted()) {
            warn!(%error, "lbaasd is not asked");
            return None;
        }
        let said = self.said(announced);
        Some(Told { said, renounced })
    }

    /// Takes back what was renounced, for the request reached nobody.
    pub fn take_back(&mut self, renounced: BTreeMap<IpAddr, Grant>) {
        self.state.take_back(renounced);
    }

    fn said(&self, announced: Vec<Announced>) -> Said {
        let can_announce = |address: &IpAddr| self.next_hops.of(*address).is_some();
        let adopted = || {
            self.state
                .serves()
                .iter()
                .map(|address| (*address, String::new()))
        };
        let services = self.services.clone().unwrap_or_else(|| adopted().collect());
        let can_answer = |address| self.l2.as_ref().is_some_and(|l2| l2.can_answer(address));
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

    /// Returns the next time at which a pass is needed, if nothing is heard until then.
    pub fn next(&self) -> Option<Duration> {
        self.state.next(now())
    }

    /// Makes a pass.
    pub async fn reconcile(&mut self) -> Result<(), ReconcileError> {
        let result = self.pass().await;
        if result.is_err() {
            self.list_at = Duration::ZERO;
        }
        metrics::routes(self.state.report(now()).len(), self.state.count(Form::Lengthened));
        result
    }

    async fn pass(&mut self) -> Result<(), ReconcileError> {
        let Some(asn) = self.start().await? else {
            return Ok(());
        };
        self.list().await?;
        if self.sync_routes(asn).await? {
            self.sync_peers().await?;
        }
        Ok(())
    }

    /// Starts BGP if needed, and returns the AS number. `None`: the AS number is not known yet.
    async fn start(&mut self) -> Result<Option<u32>, ReconcileError> {
        let known = self.gobgp.asn().await?;
        let first = self.peers.as_ref().and_then(|peers| peers.first());
        let Some(asn) = known.or(first.map(|peer| peer.local_asn)) else {
            self.restarted();
            return Ok(None);
        };
        if known.is_none() {
            self.restarted();
            self.gobgp.start(asn, self.next_hops.v4).await?;
            info!(asn, router_id = %self.next_hops.v4, "BGP started");
        }
        if !self.is_configured {
            self.gobgp.reject_routes_of_peers().await?;
            self.is_configured = true;
        }
        Ok(Some(asn))
    }

    /// Notes that gobgpd has nothing of what it was asked for.
    fn restarted(&mut self) {
        let peers = self.peers.iter().flatten();
        let times = peers.map(|peer| u64::from(peer.hold_seconds) + u64::from(peer.graceful_restart_seconds));
        let kept = times.max().map_or(KEPT, Duration::from_secs);
        self.state.emptied(now().saturating_add(kept));
        self.set.clear();
        (self.is_adopted, self.is_configured, self.has_restarted) = (true, false, true);
    }

    async fn list(&mut self) -> Result<(), ReconcileError> {
        let now = now();
        if self.is_adopted && now < self.list_at {
            return Ok(());
        }
        let listed = self.gobgp.routes().await?;
        if self.is_adopted {
            self.state.listed(&listed);
        } else {
            if !listed.is_empty() {
                info!(count = listed.len(), "gobgpd has routes of an earlier speaker");
            }
            self.state.adopt(listed);
            self.is_adopted = true;
        }
        self.list_at = now.saturating_add(LIST);
        Ok(())
    }

    /// Withdraws and announces routes. Deadlines are in the file before a route is announced. Returns whether there was
    /// time for all.
    async fn sync_routes(&mut self, asn: u32) -> Result<bool, ReconcileError> {
        let end = now().saturating_add(LONGEST_PASS);
        let has_internal = self.peers.iter().flatten().any(|peer| peer.asn == peer.local_asn);
        let lengthening = if has_internal {
            Lengthening::Metric
        } else {
            Lengthening::Path(asn)
        };
        let written = self.deadlines.write(self.state.granted());
        for step in self.state.steps(now()) {
            let (address, next_hop) = match step {
                Step::Delete(address) => (address, self.next_hops.of(address).unwrap_or(address)),
                Step::Add(address, _) => match self.next_hops.of(address) {
                    Some(next_hop) if written.is_ok() => (address, next_hop),
                    _ => continue,
                },
            };
            if now() > end {
                return Ok(false);
            }
            if self.state.begin(&step, now()) {
                self.gobgp.carry_out(&step, next_hop, lengthening).await?;
                self.state.done(&step);
                log(&step, address);
            }
        }
        written?;
        Ok(true)
    }

    async fn sync_peers(&mut self) -> Result<(), ReconcileError> {
        let listed = self.gobgp.peers().await?;
        let now = now();
        let before = std::mem::take(&mut self.up_since);
        for peer in listed.iter().filter(|peer| gobgp::is_established(peer)) {
            let address = gobgp::address(peer);
            let since = before.get(address).copied().unwrap_or(now);
            self.up_since.insert(address.to_owned(), since);
        }
        let find = |address: &str| listed.iter().find(|peer| gobgp::address(peer) == address);
        let peers = self.peers.iter().flatten();
        let missing = peers.filter(|peer| find(&peer.address.to_string()).is_none());
        let down = listed.len() - self.up_since.len() + missing.count();
        metrics::peers(self.up_since.len(), down);
        let Some(wanted) = &self.peers else {
            return Ok(());
        };
        for peer in &listed {
            let address = gobgp::address(peer);
            if !wanted.iter().any(|wanted| wanted.address.to_string() == address) {
                self.gobgp.delete_peer(address.to_owned()).await?;
                info!(address, "peer deleted");
            }
        }
        let mut is_waiting = false;
        for peer in wanted {
            let (name, address) = (&peer.name, peer.address.to_string());
            let known = find(&address);
            let Some(wanted) = with_password(peer, &self.passwords) else {
                is_waiting = true;
                // A session that has a password goes on, so that a lost Secret ends none.
                if known.is_some_and(|known| !gobgp::has_password(known)) {
                    self.gobgp.delete_peer(address.clone()).await?;
                    warn!(name, address, "peer deleted: its password is not known");
                }
                continue;
            };
            match known {
                Some(known)
                    if self.set.get(&peer.address) == Some(&wanted) || gobgp::is_equal(known, &wanted) =>
                {
                    let since = self.up_since.get(&address);
                    let is_settled = since.is_some_and(|since| now.saturating_sub(*since) >= SETTLED);
                    if let Some(is_on) = gobgp::change_of_bfd(known, &wanted, is_settled) {
                        self.gobgp.set_bfd(&wanted, is_on).await?;
                        info!(name, address, is_on, "BFD of a peer");
                    }
                    continue;
                }
                Some(_) => self.gobgp.delete_peer(address.clone()).await?,
                None => {}
            }
            self.gobgp.add_peer(&wanted, self.has_restarted).await?;
            self.set.insert(peer.address, wanted);
            info!(name, address, is_new = known.is_none(), "peer set");
        }
        self.has_restarted &= is_waiting;
        Ok(())
    }
}

/// Returns a peer with its password; `None`: the password is not known.
fn with_password(peer: &Peer, passwords: &Passwords) -> Option<Wanted> {
    let password = match &peer.password_secret {
        Some(name) => Some(passwords.get(name)?.clone().ok()?),
        None => None,
    };
    Some(Wanted {
        peer: peer.clone(),
        password,
    })
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

fn log(step: &Step, address: IpAddr) {
    match step {
        Step::Add(_, Form::Plain) => info!(%address, "route announced"),
        Step::Add(_, Form::Lengthened) => {
            warn!(%address, "transitd is silent: routers are to prefer other nodes");
        }
        Step::Delete(_) => info!(%address, "route withdrawn"),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use thuban_api::routes::PasswordProblem;

    use super::*;
    use crate::passwords::tests::of;

    fn peer(name: &str, secret: Option<&str>) -> Peer {
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

    #[test]
    fn a_peer_is_not_set_before_its_password_is_known() {
        let password = |peer: &Peer, passwords: &Passwords| {
            let wanted = with_password(peer, passwords);
            wanted.map(|wanted| wanted.password)
        };
        let mut passwords = Passwords::new();
        let leaf = peer("leaf", Some("leaf"));
        assert_eq!(password(&peer("spine", None), &passwords), Some(None));
        assert_eq!(password(&leaf, &passwords), None, "not read yet");
        passwords.insert("leaf".to_owned(), Err(PasswordProblem::NotFound));
        assert_eq!(password(&leaf, &passwords), None);
        passwords.insert("leaf".to_owned(), Ok(of("s3cret")));
        assert_eq!(password(&leaf, &passwords), Some(Some(of("s3cret"))));
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
