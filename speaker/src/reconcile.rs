//! Brings gobgpd to what was decided: BGP, routes, then peers.
//!
//! Each pass begins with what gobgpd says of itself, and ends at the first failure. The next pass goes on.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use thiserror::Error;
use tracing::{info, warn};

use crate::deadlines::{DeadlinesError, now};
use crate::decide::{Form, Step};
use crate::gobgp::{self, Gobgp, GobgpError, Lengthening, NextHops, Wanted};
use crate::ledger::SharedLedger;
use crate::metrics;
use crate::passwords::Passwords;
use thuban_api::routes::Peer;

/// How often gobgpd's routes are listed. Requests that gobgpd carried out too late show then.
const LIST: Duration = Duration::from_secs(30);
/// How long routes may be changed without a look at what has been heard meanwhile.
const LONGEST_PASS: Duration = Duration::from_secs(1);

/// How long a session is established before BFD begins.
const SETTLED: Duration = Duration::from_secs(1);

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
    ledger: SharedLedger,
    next_hops: NextHops,
    /// The peers as they were last set in gobgpd. So a difference in how gobgpd lists a peer resets no session twice.
    set: BTreeMap<IpAddr, Wanted>,
    /// Since when sessions have been established, by addresses of peers.
    up_since: BTreeMap<String, Duration>,
    /// Whether gobgpd rejects routes of its peers since it started.
    is_configured: bool,
    /// Whether gobgpd has started anew, and lacks peers since.
    has_restarted: bool,
    /// When gobgpd's routes are to be listed.
    list_at: Duration,
}

impl Reconciler {
    pub fn new(gobgp: Gobgp, ledger: SharedLedger, next_hops: NextHops) -> Self {
        Self {
            gobgp,
            ledger,
            next_hops,
            set: BTreeMap::new(),
            up_since: BTreeMap::new(),
            is_configured: false,
            has_restarted: false,
            list_at: Duration::ZERO,
        }
    }

    /// Makes a pass.
    pub async fn reconcile(&mut self) -> Result<(), ReconcileError> {
        let answers = *self.ledger.lock().answers().borrow();
        let result = self.pass().await;
        if result.is_err() {
            self.list_at = Duration::ZERO;
        }
        self.ledger.lock().passed(answers);
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
        let first = {
            let ledger = self.ledger.lock();
            let first = ledger.peers().and_then(|peers| peers.first());
            first.map(|peer| peer.local_asn)
        };
        let Some(asn) = known.or(first) else {
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
        self.ledger.lock().emptied();
        self.set.clear();
        (self.is_configured, self.has_restarted) = (false, true);
    }

    async fn list(&mut self) -> Result<(), ReconcileError> {
        let now = now();
        let is_adopted = self.ledger.lock().is_adopted();
        if is_adopted && now < self.list_at {
            return Ok(());
        }
        let listed = self.gobgp.routes().await?;
        self.ledger.lock().listed(listed);
        self.list_at = now.saturating_add(LIST);
        Ok(())
    }

    /// Withdraws and announces routes. Deadlines are in the file before a route is announced. Returns whether there was
    /// time for all.
    async fn sync_routes(&mut self, asn: u32) -> Result<bool, ReconcileError> {
        let end = now().saturating_add(LONGEST_PASS);
        let (written, steps, has_internal) = {
            let mut ledger = self.ledger.lock();
            let mut peers = ledger.peers().unwrap_or_default().iter();
            let has_internal = peers.any(|peer| peer.asn == peer.local_asn);
            (ledger.write_deadlines(), ledger.steps(), has_internal)
        };
        let lengthening = if has_internal {
            Lengthening::Metric
        } else {
            Lengthening::Path(asn)
        };
        for step in steps {
            let (address, next_hop) = match step {
                Step::Delete(address) => (address, self.next_hops.of(address).unwrap_or(address)),
                Step::Add(address, _) => match self.next_hops.of(address) {
                    Some(next_hop) => (address, next_hop),
                    None => continue,
                },
            };
            if now() > end {
                return Ok(false);
            }
            let is_right = self.ledger.lock().begin(&step);
            if is_right {
                self.gobgp.carry_out(&step, next_hop, lengthening).await?;
                self.ledger.lock().done(&step);
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
        let (wanted, passwords) = {
            let ledger = self.ledger.lock();
            (ledger.peers().map(<[Peer]>::to_vec), ledger.passwords().clone())
        };
        let find = |address: &str| listed.iter().find(|peer| gobgp::address(peer) == address);
        let peers = wanted.iter().flatten();
        let missing = peers.filter(|peer| find(&peer.address.to_string()).is_none());
        let down = listed.len() - self.up_since.len() + missing.count();
        metrics::peers(self.up_since.len(), down);
        let Some(wanted) = &wanted else {
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
            let Some(wanted) = with_password(peer, &passwords) else {
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
    use crate::ledger::tests::peer;
    use crate::passwords::tests::of;

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
}
