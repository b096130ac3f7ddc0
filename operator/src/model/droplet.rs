//! Reads a Droplet's conditions.

use thuban_api::condition::find;
use thuban_api::{ConditionStatus, Droplet};

/// Whether the droplet may be given roles.
pub fn is_accepted(droplet: &Droplet) -> bool {
    let status = droplet.status.as_ref();
    let accepted = status.and_then(|status| find(&status.conditions, "Accepted"));
    accepted.is_some_and(|accepted| accepted.status == ConditionStatus::True)
}

/// Whether the droplet had a stream, as far as the last leader knew.
pub fn was_ready(droplet: &Droplet) -> bool {
    let status = droplet.status.as_ref();
    let ready = status.and_then(|status| find(&status.conditions, "Ready"));
    ready.is_some_and(|ready| ready.status == ConditionStatus::True)
}
