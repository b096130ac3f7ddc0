//! Remembers roles that were placed a moment ago.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::model::world::RoleKind;

/// The parent and the droplet of each role, by kind and name.
pub type Placed = HashMap<RoleKind, HashMap<String, (String, String)>>;

/// Roles that were placed a moment ago, which their store may not show yet.
#[derive(Debug, Default)]
pub struct Placements(Mutex<Placed>);

impl Placements {
    pub fn lock(&self) -> MutexGuard<'_, Placed> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets a role: the store shows its place, or it is gone.
    pub fn forget(&self, kind: RoleKind, name: &str) {
        self.lock().get_mut(&kind).and_then(|names| names.remove(name));
    }
}
