//! Brings new ranges of VPCs and networks into force, only if nothing else claims a part of them
//! ([`range_claims`](crate::model::range_claims)).

use std::time::Duration;

use thuban_api::cidr::Cidr;

use crate::model::range_claims::{Claimant, Claims};
use crate::model::validation::RangeError;

/// How long an object that claims ranges waits for a change of others.
const CLAIM_RETRY: Duration = Duration::from_secs(1);
/// How long an object waits for a fix by a person.
const USER_RETRY: Duration = Duration::from_mins(1);

/// Whether the ranges of the spec are those in force.
pub fn is_settled<K: Claimant>(object: &K) -> bool {
    object.asked() == object.in_force()
}

/// Decides whether an object whose ranges passed the checks has them, by all others as the API server has them now.
pub fn uncontested<'a, K: Claimant + 'a>(
    object: &K,
    own: Vec<Cidr>,
    others: impl Iterator<Item = &'a K>,
) -> Result<Vec<Cidr>, RangeError> {
    match Claims::of(object, others).contested(&own) {
        Some((cidr, other, rival)) => Err(RangeError::Contested { cidr, other, rival }),
        None => Ok(own),
    }
}

/// Returns when an object that was refused looks again.
pub fn retry(error: &RangeError) -> Duration {
    if error.is_passing() {
        CLAIM_RETRY
    } else {
        USER_RETRY
    }
}
