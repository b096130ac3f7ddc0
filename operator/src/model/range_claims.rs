//! Decides which objects of one kind may have overlapping ranges: networks of one VPC, or VPCs that nodes reach.
//!
//! An object claims the ranges of its spec as soon as the API server has the spec. A refusal in its status ends the
//! claim. The claim begins anew when the spec changes, or when the status says so.
//!
//! Invariant: ranges come into force only for an object that claimed them, then looked at all others as the API server
//! had them, and found no other claim; and only if the object was not written since. Of two that claim, the one that
//! claimed later finds the claim of the other one. So no clock decides, and no cache.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::ResourceExt;
use thuban_api::cidr::Cidr;
use thuban_api::condition::find;
use thuban_api::{Condition, ConditionStatus, Network, Vpc};

/// The reason of the condition `Accepted` of an object that claims its ranges and does not have them yet.
pub const CLAIMED: &str = "RangesClaimed";

/// An object with ranges.
pub trait Claimant: ResourceExt {
    /// Returns the ranges of the spec.
    fn asked(&self) -> &[String];
    fn in_force(&self) -> &[String];
    fn conditions(&self) -> &[Condition];
}

macro_rules! claimants {
    ($($kind:ty),*) => {
        $(impl Claimant for $kind {
            fn asked(&self) -> &[String] {
                &self.spec.cidrs
            }

            fn in_force(&self) -> &[String] {
                self.status.as_ref().map_or(&[], |status| &status.cidrs)
            }

            fn conditions(&self) -> &[Condition] {
                self.status.as_ref().map_or(&[], |status| &status.conditions)
            }
        })*
    };
}

claimants!(Network, Vpc);

/// Whether the status says that the spec, as it is now, is refused: the object claims nothing then.
pub fn is_refused<K: Claimant>(object: &K) -> bool {
    find(object.conditions(), "Accepted").is_some_and(|accepted| {
        accepted.status == ConditionStatus::False
            && accepted.reason != CLAIMED
            && accepted.observed_generation == object.meta().generation
    })
}

/// Returns the ranges that the object claims besides those in force.
fn claimed<K: Claimant>(object: &K) -> &[String] {
    let is_leaving = object.meta().deletion_timestamp.is_some();
    if is_leaving || is_refused(object) {
        &[]
    } else {
        object.asked()
    }
}

/// The ranges of an object, by its name.
pub type Named = (String, Vec<String>);

/// The claims of others, as they concern one object.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Claims {
    /// Ranges that the object can't have: they are in force, or the other object is the older one.
    pub ahead: Vec<Named>,
    /// Ranges that the object waits for: the other object is younger, and will be refused if it still can be.
    pub behind: Vec<Named>,
}

impl Claims {
    pub fn of<'a, K: Claimant + 'a>(own: &K, others: impl Iterator<Item = &'a K>) -> Self {
        let kept: Vec<Cidr> = parsed(own.in_force()).collect();
        // Nobody else can get ranges that this object has.
        let is_open = |range: &&String| {
            let range: Option<Cidr> = range.parse().ok();
            range.is_some_and(|range| !kept.iter().any(|kept| kept.overlaps(range)))
        };
        let mut claims = Self::default();
        for other in others.filter(|other| other.name_any() != own.name_any()) {
            let name = other.name_any();
            claims.ahead.push((name.clone(), other.in_force().to_vec()));
            let open = claimed(other).iter().filter(is_open).cloned().collect();
            if age(other) < age(own) {
                claims.ahead.push((name, open));
            } else {
                claims.behind.push((name, open));
            }
        }
        claims
    }

    /// Returns a claim of a younger object on a part of these ranges: (own range, other range, name).
    pub fn contested(&self, ranges: &[Cidr]) -> Option<(Cidr, Cidr, String)> {
        self.behind.iter().find_map(|(name, others)| {
            parsed(others).find_map(|other| {
                let own = ranges.iter().find(|range| range.overlaps(other))?;
                Some((*own, other, name.clone()))
            })
        })
    }
}

/// Of two new objects that overlap the older one stays. Times are whole seconds, so names decide too.
fn age<K: ResourceExt>(object: &K) -> (Option<Time>, String) {
    (object.meta().creation_timestamp.clone(), object.name_any())
}

fn parsed(ranges: &[String]) -> impl Iterator<Item = Cidr> {
    ranges.iter().filter_map(|range| range.parse().ok())
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use thuban_api::Network;

    use super::{CLAIMED, Claims, is_refused};

    /// Makes a network of the name and the second of its creation, with ranges of spec and status.
    fn network(name: &str, second: u8, asked: &[&str], in_force: &[&str], reason: &str) -> Network {
        let accepted = json!({
            "type": "Accepted", "status": if reason == "Valid" { "True" } else { "False" }, "reason": reason,
            "message": "", "lastTransitionTime": "", "observedGeneration": 1,
        });
        let conditions = if reason.is_empty() {
            json!([])
        } else {
            json!([accepted])
        };
        serde_json::from_value(json!({
            "metadata": {
                "name": name, "generation": 1, "creationTimestamp": format!("2026-01-01T00:00:0{second}Z"),
            },
            "spec": {"vpc": "red", "cidrs": asked},
            "status": {"cidrs": in_force, "conditions": conditions},
        }))
        .unwrap()
    }

    fn named(name: &str, ranges: &[&str]) -> (String, Vec<String>) {
        (name.into(), ranges.iter().map(ToString::to_string).collect())
    }

    const WEB: &[&str] = &["10.0.1.0/24"];

    /// Returns the ranges ahead of `b`, which was made in second 1, and the name that it waits for.
    fn rivals(own: &Network, other: &Network) -> (bool, Option<String>) {
        let claims = Claims::of(own, [other, own].into_iter());
        let ranges: Vec<_> = own
            .spec
            .cidrs
            .iter()
            .map(|range| range.parse().unwrap())
            .collect();
        let ahead = claims.ahead.iter().flat_map(|(_, ranges)| ranges);
        let mut ahead = ahead.map(|range| range.parse::<thuban_api::cidr::Cidr>().unwrap());
        let is_behind = ahead.any(|ahead| {
            ranges
                .iter()
                .any(|range: &thuban_api::cidr::Cidr| range.overlaps(ahead))
        });
        (is_behind, claims.contested(&ranges).map(|(_, _, name)| name))
    }

    #[test]
    fn of_two_that_claim_the_younger_loses_and_the_older_waits() {
        let own = network("b", 1, WEB, &[], "");
        let judge = |name: &str, second, in_force: &[&str], reason: &str| {
            rivals(&own, &network(name, second, WEB, in_force, reason))
        };
        let waits_for = |name: &str| (false, Some(name.to_owned()));
        assert_eq!(judge("c", 0, &[], ""), (true, None), "it is older");
        assert_eq!(judge("a", 1, &[], ""), (true, None), "the name decides");
        assert_eq!(judge("c", 1, &[], ""), waits_for("c"));
        assert_eq!(judge("a", 2, &[], ""), waits_for("a"));
        assert_eq!(judge("a", 2, &[], CLAIMED), waits_for("a"));
        assert!(judge("a", 2, WEB, "Valid").0, "what is in force is ahead of all");
        assert_eq!(
            judge("c", 0, &[], "RangeOverlaps"),
            (false, None),
            "it is refused"
        );
        assert_eq!(judge("a", 2, &[], "RangeOverlaps"), (false, None));
    }

    #[test]
    fn ranges_in_force_are_lost_to_nobody_who_asks_for_them() {
        let own = network("b", 1, &["10.0.1.0/24", "10.0.2.0/24"], WEB, "Valid");
        let asks = |ranges: &[&str]| rivals(&own, &network("a", 0, ranges, &[], ""));
        assert_eq!(asks(WEB), (false, None));
        assert_eq!(asks(&["10.0.2.0/25"]), (true, None), "this one is new");
    }

    #[test]
    fn a_refusal_ends_with_a_change_of_the_spec() {
        let mut refused = network("b", 1, WEB, &[], "RangeOverlaps");
        assert!(is_refused(&refused));
        refused.metadata.generation = Some(2);
        assert!(!is_refused(&refused));
        let claims = Claims::of(&network("c", 2, WEB, &[], ""), [&refused].into_iter());
        assert_eq!(claims.ahead, [named("b", &[]), named("b", WEB)]);
    }

    #[test]
    fn a_network_that_goes_claims_only_what_it_has() {
        let mut leaving = network("a", 0, &["10.0.1.0/24", "10.0.2.0/24"], WEB, "Valid");
        leaving.metadata.deletion_timestamp = leaving.metadata.creation_timestamp.clone();
        let own = network("b", 1, &["10.0.2.0/24"], &[], "");
        assert_eq!(rivals(&own, &leaving), (false, None));
        assert!(rivals(&network("b", 1, WEB, &[], ""), &leaving).0);
    }
}
