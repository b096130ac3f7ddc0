//! Brings new ranges of VPCs and networks into force, only if nothing else claims a part of them
//! ([`range_claims`](crate::model::range_claims)).

use std::sync::Arc;
use std::time::Duration;

use kube::Api;
use thuban_api::Condition;
use thuban_api::cidr::Cidr;

use crate::controller::context::Context;
use crate::controller::runtime::objects::{Object, WriteError, condition, list, list_where};
use crate::model::range_claims::{Claimant, Claims, is_refused};
use crate::model::validation::RangeError;

/// How long an object that claims ranges waits for a change of others.
const CLAIM_RETRY: Duration = Duration::from_secs(1);
/// How long an object waits for a fix by a person.
const USER_RETRY: Duration = Duration::from_mins(1);

/// Whether the ranges of the spec are those in force.
pub fn are_in_force<K: Claimant>(object: &K) -> bool {
    object.asked() == object.in_force()
}

/// Checks new ranges once more, against all rivals as the API server has them now: the objects with this field. The
/// status that brings the ranges into force must be written to this version of the object.
pub async fn contend<K: Claimant + Object>(
    object: &K,
    objects: &Api<K>,
    rivals: Option<(&str, &str)>,
    check: impl FnOnce(&[Arc<K>]) -> Result<Vec<Cidr>, RangeError> + Send,
) -> Result<Result<Vec<Cidr>, RangeError>, WriteError> {
    if is_refused(object) {
        return Ok(Err(RangeError::Claimed));
    }
    let rivals = match rivals {
        Some((field, value)) => list_where(objects, field, value).await?,
        None => list(objects).await?,
    };
    let rivals: Vec<_> = rivals.into_iter().map(Arc::new).collect();
    let own = match check(&rivals) {
        Ok(own) => own,
        refused => return Ok(refused),
    };
    let claims = Claims::of(object, rivals.iter().map(AsRef::as_ref));
    Ok(match claims.contested(&own) {
        Some((cidr, other, rival)) => Err(RangeError::Contested { cidr, other, rival }),
        None => Ok(own),
    })
}

/// Returns the condition that says whether the ranges of the spec may come into force.
pub fn accepted(verdict: &Result<Vec<Cidr>, RangeError>, generation: Option<i64>) -> Condition {
    match verdict {
        Ok(_) => condition("Accepted", true, "Valid", "ranges are usable", generation),
        Err(error) => condition("Accepted", false, error.reason(), &error.to_string(), generation),
    }
}

/// Tells people by an event that ranges are refused, unless that may pass by itself.
pub fn tell<K: Object>(object: &K, error: &RangeError, context: &Context) {
    if !error.is_passing() {
        context
            .events
            .event(object, true, error.reason(), &error.to_string());
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
