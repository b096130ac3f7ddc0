//! Claims that rest: their Endpoints are gone, and all droplets acked that the addresses are out of use. Only this
//! leader knows it: the next leader proves it again.
//!
//! Invariant: a rest is of one version of a claim, and of a claim that no Endpoint counts. Whoever takes the claim for
//! another Endpoint writes into it, and ends the rest by that. An Endpoint that was made soon after the claim counts it
//! without a word: such a rest ends when the Endpoint is seen, and the API server is asked once more at its end.

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
    /// Whether every Endpoint that comes must write into the claim before it counts it.
    is_settled: bool,
    /// When it was proven that the address is out of use; none before.
    since: Option<Instant>,
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
    pub fn expect(&self, claim: &IpClaim, is_settled: bool) {
        self.put(claim, is_settled, None);
    }

    /// Begins the rest of this version of the claim, now.
    pub fn begin(&self, claim: &IpClaim, is_settled: bool) {
        self.put(claim, is_settled, Some(Instant::now()));
    }

    fn put(&self, claim: &IpClaim, is_settled: bool, since: Option<Instant>) {
        let rest = Rest {
            uid: claim.uid(),
            version: claim.resource_version(),
            is_settled,
            since,
        };
        self.claims(|claims| claims.rests.insert(claim.name_any(), rest));
    }

    /// Notes that the address of this version of the claim is proven to be out of use: it rests from now on.
    pub fn prove(&self, claim: &IpClaim) {
        self.claims(|claims| {
            if let Some(rest) = claims.rests.get_mut(&claim.name_any()) {
                rest.since = Some(Instant::now());
            }
        });
    }

    /// Whether no Endpoint that is made from now on can count the claim without a word in it.
    pub fn is_settled(&self, claim: &IpClaim) -> bool {
        let uid = claim.uid().unwrap_or_default();
        self.claims(|claims| {
            claims
                .young
                .get(&uid)
                .is_none_or(|seen| seen.elapsed() >= SETTLED)
        })
    }

    /// Returns how far the rest of this version of the claim is, of `time` in all. None if it does not rest.
    pub fn of(&self, claim: &IpClaim, time: Duration) -> Option<Resting> {
        self.claims(|claims| {
            let rest = claims.rests.get(claim.meta().name.as_ref()?)?;
            if rest.uid != claim.meta().uid || rest.version != claim.meta().resource_version {
                return None;
            }
            let left = rest.since.map(|since| time.saturating_sub(since.elapsed()));
            Some(match left {
                None => Resting::Unproven,
                Some(left) if !left.is_zero() => Resting::Left(left),
                Some(_) => Resting::Over {
                    is_settled: rest.is_settled,
                },
            })
        })
    }

    /// Whether the address of this version of the claim is proven to be out of use, and rests.
    pub fn has(&self, claim: &IpClaim) -> bool {
        matches!(self.of(claim, Duration::ZERO), Some(Resting::Over { .. }))
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
        claims.begin(&claim("a", "7"), true);
        tokio::time::advance(Duration::from_secs(20)).await;
        let left = Resting::Left(Duration::from_secs(10));
        assert_eq!(claims.of(&claim("a", "7"), REST), Some(left));
        assert!(claims.has(&claim("a", "7")));
        assert!(!claims.has(&claim("a", "8")), "it was confirmed since");
        assert!(!claims.has(&claim("b", "7")), "made again under its name");
        tokio::time::advance(Duration::from_secs(20)).await;
        let over = Resting::Over { is_settled: true };
        assert_eq!(claims.of(&claim("a", "7"), REST), Some(over));
        claims.forget("red.10.0.1.2");
        assert!(!claims.has(&claim("a", "7")));
    }

    #[tokio::test(start_paused = true)]
    async fn a_claim_rests_from_the_proof_on() {
        let claims = RestingClaims::default();
        claims.prove(&claim("a", "7"));
        assert_eq!(claims.of(&claim("a", "7"), REST), None, "nobody expects it");
        claims.expect(&claim("a", "7"), false);
        tokio::time::advance(REST).await;
        assert_eq!(claims.of(&claim("a", "7"), REST), Some(Resting::Unproven));
        assert!(!claims.has(&claim("a", "7")));
        claims.prove(&claim("a", "7"));
        assert!(claims.has(&claim("a", "7")));
        assert_eq!(claims.of(&claim("a", "7"), REST), Some(Resting::Left(REST)));
        tokio::time::advance(REST).await;
        let over = Resting::Over { is_settled: false };
        assert_eq!(claims.of(&claim("a", "7"), REST), Some(over));
    }

    #[tokio::test(start_paused = true)]
    async fn a_claim_is_settled_after_twenty_seconds() {
        let claims = RestingClaims::default();
        for pause in [19, 1, 40] {
            claims.saw(&claim("a", "7"));
            tokio::time::advance(Duration::from_secs(19)).await;
            assert!(!claims.is_settled(&claim("a", "7")), "{pause}");
            claims.saw(&claim("b", "7"));
            tokio::time::advance(Duration::from_secs(pause)).await;
            assert!(claims.is_settled(&claim("a", "7")), "{pause}");
            assert_eq!(claims.is_settled(&claim("b", "7")), pause > 20, "{pause}");
        }
    }
}
