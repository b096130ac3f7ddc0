//! Gives addresses out, renews leases and takes addresses back.
//!
//! Invariant: no two holders have an address of one VPC or of the public pools, and no holder has two addresses of one
//! family. The first holds by the names of leases. The second holds although several cidrds may serve one holder at
//! once: a lease is first Proposed. It becomes Held only if a list that was read after the proposal shows no other
//! lease of the holder and family, or each other proposal in the list was withdrawn since. Of two proposals, the list
//! that was read later shows both.

use std::collections::{BTreeMap, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::IpAddr;

use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use kube::api::ObjectMeta;
use serde::{Deserialize, Serialize};
use thiserror::Error;
use thuban_api::cidr::Cidr;
use thuban_api::ip_lease::{IpLease, IpLeaseSpec, IpLeaseStatus, LeaseHolder, LeaseState};

use crate::store::{Store, StoreError};

/// How often a request begins anew because others changed its leases meanwhile.
const TRIES: u32 = 16;

/// The family of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Family {
    #[serde(rename = "IPv4")]
    V4,
    #[serde(rename = "IPv6")]
    V6,
}

impl From<IpAddr> for Family {
    fn from(address: IpAddr) -> Self {
        if address.is_ipv4() { Self::V4 } else { Self::V6 }
    }
}

impl Family {
    fn has(self, cidr: Cidr) -> bool {
        cidr.is_ipv4() == (self == Self::V4)
    }
}

impl std::fmt::Display for Family {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(if *self == Self::V4 { "IPv4" } else { "IPv6" })
    }
}

/// The pool that a request is for, and its terms.
#[derive(Clone, Debug)]
pub struct Terms {
    pub pool: String,
    /// Empty for a public pool.
    pub vpc: String,
    pub cidrs: Vec<Cidr>,
    pub lease_seconds: u32,
    pub quarantine_seconds: u32,
}

impl Terms {
    fn contains(&self, address: IpAddr) -> bool {
        self.cidrs.iter().any(|cidr| cidr.contains_address(address))
    }

    fn is_pool_of(&self, lease: &IpLease) -> bool {
        lease.spec.pool == self.pool && lease.spec.vpc == self.vpc
    }
}

/// What a holder asks for.
#[derive(Clone, Debug)]
pub struct Request {
    pub holder: LeaseHolder,
    /// One address of each family. `None`: any address of the pool.
    pub wanted: BTreeMap<Family, Option<IpAddr>>,
}

/// Why a holder gets no address. These are answers: to ask again without a change gives the same answer, until others
/// change something.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum Refusal {
    #[error("the pool {pool} has no free {family} address: add a range to it, or release addresses")]
    Exhausted { pool: String, family: Family },
    #[error("the address {address} is not in the pool {pool}")]
    OutsidePool { address: IpAddr, pool: String },
    #[error("the address {0} is leased, or in quarantine after a release")]
    Taken(IpAddr),
    #[error("{0} was given or renewed since: release it by the latest answer, once nobody uses it")]
    Superseded(String),
    #[error("the holder has {address} of the pool {pool}: release it first")]
    HasAnother { address: String, pool: String },
}

#[derive(Debug, Error)]
pub enum LeaseError {
    #[error(transparent)]
    Refused(#[from] Refusal),
    #[error("others change the holder's leases all the time: try again")]
    Contended,
    #[error("the API server is away: {0}")]
    Away(#[source] kube::Error),
}

impl From<StoreError> for LeaseError {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::Away(error) => Self::Away(error),
            StoreError::Conflict | StoreError::Exists => Self::Contended,
        }
    }
}

/// What a step on a lease came to.
enum Stepped<T> {
    Done(T),
    /// The lease was changed meanwhile.
    Stale,
}

fn step<T>(result: Result<T, StoreError>) -> Result<Stepped<T>, LeaseError> {
    match result {
        Ok(value) => Ok(Stepped::Done(value)),
        Err(StoreError::Conflict | StoreError::Exists) => Ok(Stepped::Stale),
        Err(error) => Err(error.into()),
    }
}

/// Returns the address of a lease; `None` if the object can't be read as one.
pub fn address(lease: &IpLease) -> Option<IpAddr> {
    lease.spec.address.parse().ok()
}

/// Returns all leases.
pub async fn list(store: &impl Store) -> Result<Vec<IpLease>, LeaseError> {
    Ok(store.all().await?)
}

/// Returns the leases of a holder, those in quarantine too.
pub async fn of_holder(store: &impl Store, uid: &str) -> Result<Vec<IpLease>, LeaseError> {
    Ok(store.of_holder(uid).await?)
}

/// Gives a holder one address of each family that it wants. A repeated request gets the same addresses. Nothing is
/// leased if one family can't be.
pub async fn assign(
    store: &impl Store,
    terms: &Terms,
    request: &Request,
) -> Result<Vec<IpLease>, LeaseError> {
    for _ in 0..TRIES {
        let known = store.of_holder(&request.holder.uid).await?;
        if let Some(leases) = advance(store, terms, request, &known).await? {
            return Ok(leases);
        }
    }
    Err(LeaseError::Contended)
}

/// Takes one step towards the leases that a holder wants. Returns them if it has them all; else the leases must be read
/// again.
async fn advance(
    store: &impl Store,
    terms: &Terms,
    request: &Request,
    known: &[IpLease],
) -> Result<Option<Vec<IpLease>>, LeaseError> {
    let mut live = BTreeMap::new();
    for (family, wanted) in &request.wanted {
        let own: Vec<&IpLease> = known
            .iter()
            .filter(|lease| address(lease).map(Family::from) == Some(*family) && !is_going(lease))
            .collect();
        let held = own.iter().find(|lease| lease.state() == LeaseState::Held);
        if let Some(held) = held {
            check_held(held, terms, *wanted)?;
        }
        let chosen = held.copied().or_else(|| choose(&own, terms, *wanted));
        let Some(chosen) = chosen else {
            let proposed = propose(store, terms, request, &own, *family, *wanted).await;
            if let Err(LeaseError::Refused(refusal)) = proposed {
                return abandon(store, request, known, refusal).await;
            }
            return proposed.map(|()| None);
        };
        live.insert(*family, chosen.clone());
    }
    for lease in known.iter().filter(|lease| lease.state() == LeaseState::Proposed) {
        let kept = address(lease).and_then(|address| live.get(&Family::from(address)));
        let is_rival = kept.is_some_and(|kept| kept.name_any() != lease.name_any());
        if is_rival && let Stepped::Stale = withdraw(store, lease).await? {
            return Ok(None);
        }
    }
    // What the holder has already is renewed: it takes the answer for a lease that begins with its request.
    for lease in live.values_mut() {
        match step(store.set_status(lease, renewed(lease)).await)? {
            Stepped::Done(held) => *lease = held,
            Stepped::Stale => return Ok(None),
        }
    }
    Ok(Some(live.into_values().collect()))
}

/// Whether a lease is deleted and waits for somebody's finalizer: nobody gets it any more.
fn is_going(lease: &IpLease) -> bool {
    lease.metadata.deletion_timestamp.is_some()
}

/// Renews what a holder has, if that is all that it asks for of a pool, whatever became of the pool.
pub async fn renew_held(
    store: &impl Store,
    pool: &str,
    request: &Request,
) -> Result<Option<Vec<IpLease>>, LeaseError> {
    let is_held = |lease: &IpLease| {
        let Some(address) = address(lease) else {
            return false;
        };
        let wanted = request.wanted.get(&Family::from(address));
        let is_wanted = wanted.is_some_and(|wanted| is_at(lease, *wanted));
        lease.state() == LeaseState::Held && lease.spec.pool == pool && is_wanted
    };
    let known = store.of_holder(&request.holder.uid).await?;
    if known.iter().filter(|lease| is_held(lease)).count() < request.wanted.len() {
        return Ok(None);
    }
    let renewed = renew(store, &request.holder.uid).await?;
    let leases: Vec<IpLease> = renewed.into_iter().filter(|lease| is_held(lease)).collect();
    Ok((leases.len() == request.wanted.len()).then_some(leases))
}

/// Whether somebody has a lease, or soon may.
fn is_live(lease: &IpLease) -> bool {
    lease.state() != LeaseState::Quarantined
}

/// Whether a lease has the address that is wanted. `None`: any.
fn is_at(lease: &IpLease, wanted: Option<IpAddr>) -> bool {
    wanted.is_none_or(|wanted| address(lease) == Some(wanted))
}

/// Whether a lease that the holder has is what it asks for.
fn check_held(held: &IpLease, terms: &Terms, wanted: Option<IpAddr>) -> Result<(), Refusal> {
    if is_at(held, wanted) && terms.is_pool_of(held) {
        return Ok(());
    }
    Err(Refusal::HasAnother {
        address: held.spec.address.clone(),
        pool: held.spec.pool.clone(),
    })
}

/// Chooses among a holder's proposals: all that look at the same list choose the same one.
fn choose<'a>(own: &[&'a IpLease], terms: &Terms, wanted: Option<IpAddr>) -> Option<&'a IpLease> {
    own.iter()
        .copied()
        .filter(|lease| {
            lease.state() == LeaseState::Proposed && terms.is_pool_of(lease) && is_at(lease, wanted)
        })
        .min_by_key(|lease| lease.name_any())
}

/// Makes a proposal: the address that is wanted, the one that the holder had last, or a free one.
async fn propose(
    store: &impl Store,
    terms: &Terms,
    request: &Request,
    own: &[&IpLease],
    family: Family,
    wanted: Option<IpAddr>,
) -> Result<(), LeaseError> {
    if let Some(wanted) = wanted
        && !terms.contains(wanted)
    {
        return Err(Refusal::OutsidePool {
            address: wanted,
            pool: terms.pool.clone(),
        }
        .into());
    }
    let former = own
        .iter()
        .filter(|lease| {
            lease.state() == LeaseState::Quarantined && is_of(lease, terms) && is_at(lease, wanted)
        })
        .min_by_key(|lease| lease.name_any());
    if let Some(former) = former {
        let status = with_state(former, LeaseState::Proposed);
        step(store.set_status(former, status).await)?;
        return Ok(());
    }
    if let Some(wanted) = wanted {
        return match store.create(&new_lease(terms, request, wanted)).await {
            Err(StoreError::Exists) if is_anothers(store, terms, request, wanted).await? => {
                Err(Refusal::Taken(wanted).into())
            }
            created => step(created).map(drop),
        };
    }
    let mut used: HashSet<String> = store.all().await?.iter().map(ResourceExt::name_any).collect();
    while let Some(address) = free_address(terms, &request.holder.uid, family, &used) {
        match store.create(&new_lease(terms, request, address)).await {
            // Another cidrd may have proposed it for this holder: a second proposal would only be withdrawn.
            Err(StoreError::Exists) if !is_anothers(store, terms, request, address).await? => return Ok(()),
            Err(StoreError::Exists) => used.insert(IpLease::name_of(&terms.vpc, address)),
            created => return step(created).map(drop),
        };
    }
    Err(Refusal::Exhausted {
        pool: terms.pool.clone(),
        family,
    }
    .into())
}

/// Whether a lease may be the holder's again under these terms: it keeps its own, so they must be the same.
fn is_of(lease: &IpLease, terms: &Terms) -> bool {
    terms.is_pool_of(lease) && address(lease).is_some_and(|address| terms.contains(address))
}

/// Whether an address that has a lease has it for somebody else.
async fn is_anothers(
    store: &impl Store,
    terms: &Terms,
    request: &Request,
    wanted: IpAddr,
) -> Result<bool, LeaseError> {
    let name = IpLease::name_of(&terms.vpc, wanted);
    let known = store.of_holder(&request.holder.uid).await?;
    Ok(!known
        .iter()
        .any(|lease| lease.name_any() == name && is_of(lease, terms)))
}

/// Withdraws the proposals of a request that can't be met, and refuses it. If the holder has got something since its
/// leases were read, nothing is decided: the same request elsewhere may have taken the last address.
async fn abandon(
    store: &impl Store,
    request: &Request,
    known: &[IpLease],
    refusal: Refusal,
) -> Result<Option<Vec<IpLease>>, LeaseError> {
    let names = |leases: &[IpLease]| -> HashSet<String> {
        leases
            .iter()
            .filter(|lease| is_live(lease))
            .map(ResourceExt::name_any)
            .collect()
    };
    let now = store.of_holder(&request.holder.uid).await?;
    if !names(&now).is_subset(&names(known)) {
        return Ok(None);
    }
    for lease in now.iter().filter(|lease| lease.state() == LeaseState::Proposed) {
        withdraw(store, lease).await?;
    }
    Err(refusal.into())
}

/// Returns a free address of a pool. A holder's search always begins at the same place, so that it gets the same
/// address again, if that is free. `used`: names of leases.
fn free_address(terms: &Terms, uid: &str, family: Family, used: &HashSet<String>) -> Option<IpAddr> {
    let ranges: Vec<Cidr> = terms
        .cidrs
        .iter()
        .copied()
        .filter(|cidr| family.has(*cidr))
        .collect();
    let size: u128 = ranges.iter().map(|cidr| cidr.size()).sum();
    let mut hasher = DefaultHasher::new();
    uid.hash(&mut hasher);
    let start = u128::from(hasher.finish()).checked_rem(size)?;
    // One more than can be used up: among so many one is free.
    let tries = size.min(used.len() as u128 + 1);
    (0..tries)
        .filter_map(|tried| nth(&ranges, (start + tried) % size))
        .find(|address| !used.contains(&IpLease::name_of(&terms.vpc, *address)))
}

fn nth(ranges: &[Cidr], mut index: u128) -> Option<IpAddr> {
    for range in ranges {
        if index < range.size() {
            return range.nth(index);
        }
        index -= range.size();
    }
    None
}

fn new_lease(terms: &Terms, request: &Request, address: IpAddr) -> IpLease {
    IpLease {
        metadata: ObjectMeta {
            name: Some(IpLease::name_of(&terms.vpc, address)),
            ..ObjectMeta::default()
        },
        spec: IpLeaseSpec {
            pool: terms.pool.clone(),
            vpc: terms.vpc.clone(),
            address: address.to_string(),
            holder: request.holder.clone(),
            lease_seconds: terms.lease_seconds,
            quarantine_seconds: terms.quarantine_seconds,
        },
        status: None,
    }
}

fn with_state(lease: &IpLease, state: LeaseState) -> IpLeaseStatus {
    IpLeaseStatus {
        state,
        ..lease.status.clone().unwrap_or_default()
    }
}

fn renewed(lease: &IpLease) -> IpLeaseStatus {
    let status = with_state(lease, LeaseState::Held);
    IpLeaseStatus {
        renewed_at: Some(Timestamp::now().to_string()),
        renewals: status.renewals.saturating_add(1),
        ..status
    }
}

/// Takes a lease from its holder. An address that nobody has had is free at once.
async fn withdraw(store: &impl Store, lease: &IpLease) -> Result<Stepped<()>, LeaseError> {
    let was_held = lease.status.as_ref().is_some_and(|status| status.renewals > 0);
    let withdrawn = if was_held {
        let status = with_state(lease, LeaseState::Quarantined);
        store.set_status(lease, status).await.map(drop)
    } else {
        store.delete(lease).await
    };
    step(withdrawn)
}

/// Renews a holder's leases. Returns those that it has: only a lease that is missing here is lost. Each lease is valid
/// for its time from the moment when the request was sent.
pub async fn renew(store: &impl Store, uid: &str) -> Result<Vec<IpLease>, LeaseError> {
    'again: for _ in 0..TRIES {
        let known = store.of_holder(uid).await?;
        let mut renewals = Vec::new();
        for lease in known.iter().filter(|lease| lease.state() == LeaseState::Held) {
            match step(store.set_status(lease, renewed(lease)).await)? {
                Stepped::Done(lease) => renewals.push(lease),
                Stepped::Stale => continue 'again,
            }
        }
        return Ok(renewals);
    }
    Err(LeaseError::Contended)
}

/// Takes back what a holder was given. `grants`: their names, [`IpLease::grant`], as in the last answers. A lease that
/// was given or renewed since stays, and the release is refused: somebody uses the address by a later answer. Repeats
/// change nothing.
pub async fn release(store: &impl Store, uid: &str, grants: &[String]) -> Result<(), LeaseError> {
    'again: for _ in 0..TRIES {
        let known = store.of_holder(uid).await?;
        let (named, others): (Vec<_>, Vec<_>) = known
            .iter()
            .filter(|lease| is_live(lease))
            .partition(|lease| grants.contains(&lease.grant()));
        for lease in named {
            if let Stepped::Stale = withdraw(store, lease).await? {
                continue 'again;
            }
        }
        return match others.first() {
            Some(lease) => Err(Refusal::Superseded(lease.spec.address.clone()).into()),
            None => Ok(()),
        };
    }
    Err(LeaseError::Contended)
}

/// Takes a lease from a holder that did not renew it, or frees an address after its quarantine. Returns false if the
/// lease was changed meanwhile: it stays as it is.
pub async fn expire(store: &impl Store, lease: &IpLease) -> Result<bool, LeaseError> {
    let ended = match lease.state() {
        LeaseState::Held | LeaseState::Proposed => withdraw(store, lease).await?,
        LeaseState::Quarantined => step(store.delete(lease).await)?,
    };
    Ok(matches!(ended, Stepped::Done(())))
}
