//! The two states that persist. Deletion is `deletionTimestamp` and our finalizer, not a phase.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Init: the droplets concerned do not have all they need yet. Provisioned: they have.
/// A Provisioned object stays Provisioned. Conditions, and objects that are created later, report on later changes.
/// One exception: an Endpoint that a user created is in Init while no pod has it, and when another pod gets it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Phase {
    #[default]
    Init,
    Provisioned,
}
