//! Claims that rest: all droplets acked that their addresses are out of use, and their Endpoints are gone. Only this
//! leader knows it: the next leader proves it again.
//!
//! Invariant: a rest is of one version of a claim. Whoever takes the claim for another Endpoint writes into it, and
//! ends the rest by that.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use kube::{Resource, ResourceExt};
use thuban_api::IpClaim;
use tokio::time::Instant;

#[derive(Debug)]
struct Rest {
    version: Option<String>,
    since: Instant,
}

/// The rests, by the claims' UIDs.
#[derive(Debug, Default)]
pub struct RestingClaims(Mutex<HashMap<String, Rest>>);

impl RestingClaims {
    fn rests<T>(&self, work: impl FnOnce(&mut HashMap<String, Rest>) -> T) -> T {
        // No code under the lock panics half-way through a change.
        work(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Begins the rest of this version of the claim, now.
    pub fn begin(&self, claim: &IpClaim) {
        let rest = Rest {
            version: claim.resource_version(),
            since: Instant::now(),
        };
        self.rests(|rests| rests.insert(claim.uid().unwrap_or_default(), rest));
    }

    /// Returns how long this version of the claim still rests, of `time` in all: zero if the rest is over. None if the
    /// claim does not rest.
    pub fn left(&self, claim: &IpClaim, time: Duration) -> Option<Duration> {
        let uid = claim.meta().uid.as_ref()?;
        self.rests(|rests| {
            let rest = rests.get(uid)?;
            let is_same = rest.version == claim.meta().resource_version;
            is_same.then(|| time.saturating_sub(rest.since.elapsed()))
        })
    }

    /// Whether this version of the claim rests.
    pub fn has(&self, claim: &IpClaim) -> bool {
        self.left(claim, Duration::ZERO).is_some()
    }

    /// Forgets a claim that is gone.
    pub fn forget(&self, claim: &IpClaim) {
        self.rests(|rests| rests.remove(&claim.uid().unwrap_or_default()));
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::json;
    use thuban_api::IpClaim;

    use super::RestingClaims;

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
        let rest = Duration::from_secs(30);
        let claims = RestingClaims::default();
        assert_eq!(claims.left(&claim("a", "7"), rest), None);
        claims.begin(&claim("a", "7"));
        tokio::time::advance(Duration::from_secs(20)).await;
        assert_eq!(claims.left(&claim("a", "7"), rest), Some(Duration::from_secs(10)));
        assert!(claims.has(&claim("a", "7")));
        assert!(!claims.has(&claim("a", "8")), "it was confirmed since");
        assert!(!claims.has(&claim("b", "7")), "made again under its name");
        tokio::time::advance(Duration::from_secs(20)).await;
        assert_eq!(claims.left(&claim("a", "7"), rest), Some(Duration::ZERO));
        claims.forget(&claim("a", "9"));
        assert!(!claims.has(&claim("a", "7")));
    }
}
