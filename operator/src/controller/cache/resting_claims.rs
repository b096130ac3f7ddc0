//! Claims that rest: their Endpoints are gone, and all droplets acked that the addresses are out of use. Only this
//! leader knows it: the next leader proves it again.
//!
//! Invariant: a rest is of one version of a claim, and of a claim that no Endpoint counts. Whoever takes the claim for
//! another Endpoint writes into it, and ends the rest by that. An Endpoint that was made soon after the claim counts it
//! without a word: such a rest ends when the Endpoint is seen. It lasts until the claim is old, and the API server is
//! asked for the Endpoint once more at its end.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use kube::{Resource, ResourceExt};
use thuban_api::IpClaim;
use tokio::time::Instant;

/// How long this leader has known a claim, if no later Endpoint can be [`FRESH`](crate::model::allocation::FRESH) for
/// it.
const SETTLED: Duration = Duration::from_secs(20);

#[derive(Debug)]
struct Rest {
    uid: Option<String>,
    version: Option<String>,
    /// When every Endpoint that is made from then on must write into the claim before it counts it; none if that was so
    /// already when the Endpoint went.
    settles: Option<Instant>,
    /// When it was proven that the address is out of use; none before.
    since: Option<Instant>,
}

impl Rest {
    /// Whether it is of this version of the claim.
    fn is_of(&self, claim: &IpClaim) -> bool {
        self.uid == claim.meta().uid && self.version == claim.meta().resource_version
    }
}

/// How far the rest of a claim is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resting {
    /// The Endpoint is gone. That its address is out of use is to be proven.
    Unproven,
    /// It rests for this time still.
    Left(Duration),
    /// The rest is over. `is_settled`: only this version of the claim need be deleted; otherwise an Endpoint may count
    /// the claim without a word in it.
    Over { is_settled: bool },
}

#[derive(Debug, Default)]
struct Claims {
    /// The rests, by the claims' names.
    rests: HashMap<String, Rest>,
    /// When this leader saw a claim, by its UID: for the youngest.
    young: HashMap<String, Instant>,
    /// When the young ones were last looked through.
    pruned: Option<Instant>,
}

#[derive(Debug, Default)]
pub struct RestingClaims(Mutex<Claims>);

impl RestingClaims {
    fn claims<T>(&self, work: impl FnOnce(&mut Claims) -> T) -> T {
        // No code under the lock panics half-way through a change.
        work(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Notes that the claim was seen. One that was changed counts as new, because that costs one request at most.
    pub fn saw(&self, claim: &IpClaim) {
        let now = Instant::now();
        self.claims(|claims| {
            if claims.pruned.is_none_or(|pruned| now - pruned >= SETTLED) {
                claims.young.retain(|_, seen| now - *seen < SETTLED);
                claims.pruned = Some(now);
            }
            claims.young.insert(claim.uid().unwrap_or_default(), now);
        });
    }

    /// Notes that the Endpoint of this version of the claim is gone, and that its address may be in use still.
    /// `settles`: from before the Endpoint went.
    pub fn expect(&self, claim: &IpClaim, settles: Option<Instant>) {
        self.put(claim, settles, None);
    }

    /// Begins the rest of this version of the claim, now. `settles`: from before the Endpoint went.
    pub fn begin(&self, claim: &IpClaim, settles: Option<Instant>) {
        self.put(claim, settles, Some(Instant::now()));
    }

    fn put(&self, claim: &IpClaim, settles: Option<Instant>, since: Option<Instant>) {
        let rest = Rest {
            uid: claim.uid(),
            version: claim.resource_version(),
            settles,
            since,
        };
        self.claims(|claims| claims.rests.insert(claim.name_any(), rest));
    }

    /// Notes that the address of this version of the claim is proven to be out of use: it rests from now on.
    pub fn prove(&self, claim: &IpClaim) {
        self.claims(|claims| {
            let rest = claims.rests.get_mut(&claim.name_any());
            if let Some(rest) = rest.filter(|rest| rest.is_of(claim)) {
                rest.since = Some(Instant::now());
            }
        });
    }

    /// Returns when an Endpoint that is made can no longer count the claim without a word in it; none if that is so
    /// now.
    pub fn settles(&self, claim: &IpClaim) -> Option<Instant> {
        let uid = claim.uid().unwrap_or_default();
        let seen = self.claims(|claims| claims.young.get(&uid).copied());
        seen.map(|seen| seen + SETTLED)
            .filter(|settles| *settles > Instant::now())
    }

    /// Returns how far the rest of this version of the claim is, of `time` in all. None if it does not rest.
    pub fn of(&self, claim: &IpClaim, time: Duration) -> Option<Resting> {
        self.claims(|claims| {
            let rest = claims.rests.get(claim.meta().name.as_ref()?)?;
            if !rest.is_of(claim) {
                return None;
            }
            let Some(since) = rest.since else {
                return Some(Resting::Unproven);
            };
            let end = rest
                .settles
                .map_or(since + time, |settles| settles.max(since + time));
            let left = end.saturating_duration_since(Instant::now());
            Some(if left.is_zero() {
                Resting::Over {
                    is_settled: rest.settles.is_none(),
                }
            } else {
                Resting::Left(left)
            })
        })
    }

    /// Ends the rest of a claim that is gone, or that an Endpoint counts.
    pub fn forget(&self, claim: &str) {
        self.claims(|claims| claims.rests.remove(claim));
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::json;
    use thuban_api::IpClaim;

    use super::{Resting, RestingClaims};

    const REST: Duration = Duration::from_secs(30);

    fn claim(uid: &str, version: &str) -> IpClaim {
        serde_json::from_value(json!({
            "apiVersion": "thuban.dev/v1alpha1", "kind": "IpClaim",
            "metadata": {"name": "red.10.0.1.2", "uid": uid, "resourceVersion": version},
            "spec": {
                "vpc": "red", "network": "web", "address": "10.0.1.2", "endpointNamespace": "ns",
                "endpointName": "web-u", "ownerUid": "u",
            },
        }))
        .unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn one_version_of_a_claim_rests_until_it_is_forgotten() {
        let claims = RestingClaims::default();
        assert_eq!(claims.of(&claim("a", "7"), REST), None);
        claims.begin(&claim("a", "7"), None);
        tokio::time::advance(Duration::from_secs(20)).await;
        let left = Resting::Left(Duration::from_secs(10));
        assert_eq!(claims.of(&claim("a", "7"), REST), Some(left));
        assert_eq!(claims.of(&claim("a", "8"), REST), None, "it was confirmed since");
        assert_eq!(
            claims.of(&claim("b", "7"), REST),
            None,
            "made again under its name"
        );
        tokio::time::advance(Duration::from_secs(20)).await;
        let over = Resting::Over { is_settled: true };
        assert_eq!(claims.of(&claim("a", "7"), REST), Some(over));
        claims.forget("red.10.0.1.2");
        assert_eq!(claims.of(&claim("a", "7"), REST), None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_claim_rests_from_the_proof_on() {
        let claims = RestingClaims::default();
        claims.prove(&claim("a", "7"));
        assert_eq!(claims.of(&claim("a", "7"), REST), None, "nobody expects it");
        claims.expect(&claim("a", "7"), None);
        tokio::time::advance(REST).await;
        claims.prove(&claim("a", "8"));
        assert_eq!(claims.of(&claim("a", "7"), REST), Some(Resting::Unproven));
        claims.prove(&claim("a", "7"));
        assert_eq!(claims.of(&claim("a", "7"), REST), Some(Resting::Left(REST)));
        tokio::time::advance(REST).await;
        let over = Resting::Over { is_settled: true };
        assert_eq!(claims.of(&claim("a", "7"), REST), Some(over));
    }

    #[tokio::test(start_paused = true)]
    async fn a_young_claim_rests_until_it_is_settled() {
        let claims = RestingClaims::default();
        claims.saw(&claim("a", "7"));
        tokio::time::advance(Duration::from_secs(4)).await;
        let settles = claims.settles(&claim("a", "7"));
        claims.begin(&claim("a", "7"), settles);
        let short = Duration::from_secs(5);
        let left = |seconds| Some(Resting::Left(Duration::from_secs(seconds)));
        assert_eq!(claims.of(&claim("a", "7"), short), left(16));
        assert_eq!(claims.of(&claim("a", "7"), REST), left(30));
        tokio::time::advance(Duration::from_secs(16)).await;
        let over = Resting::Over { is_settled: false };
        assert_eq!(claims.of(&claim("a", "7"), short), Some(over));
    }

    #[tokio::test(start_paused = true)]
    async fn a_claim_is_settled_after_twenty_seconds() {
        let claims = RestingClaims::default();
        let is_settled = |uid| claims.settles(&claim(uid, "7")).is_none();
        for pause in [1, 40] {
            claims.saw(&claim("a", "7"));
            tokio::time::advance(Duration::from_secs(19)).await;
            assert!(!is_settled("a"), "{pause}");
            claims.saw(&claim("b", "7"));
            tokio::time::advance(Duration::from_secs(pause)).await;
            assert!(is_settled("a"), "{pause}");
            assert_eq!(is_settled("b"), pause > 20, "{pause}");
        }
    }
}
