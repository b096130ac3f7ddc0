//! The two states that persist. Deletion is `deletionTimestamp` and our finalizer, not a phase.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Latched: an object that was Provisioned stays so; what came later reports on its own object. One exception: an
/// Endpoint that a user made is in Init again when another pod gets it, and while none has it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Phase {
    #[default]
    Init,
    Provisioned,
}
