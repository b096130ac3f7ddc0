//! The caches of reconcilers: objects as the watches brought them, indexes over them, and this leader's own writes that
//! the objects may not show yet.

pub mod claim_locks;
pub mod drafts;
pub mod index;
pub mod last_seen;
pub mod path_traces;
pub mod placements;
pub mod policies_told;
pub mod reservations;
pub mod resting_claims;
pub mod service_addresses;
pub mod slices;
pub mod stores;
pub mod strip;
