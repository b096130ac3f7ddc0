//! Remembers which NetworkPolicies this leader has reported.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

/// The generation of each policy, by UID, that this leader has reported, or found reported. So a change of labels or a
/// new list costs no request.
#[derive(Debug, Default)]
pub struct PoliciesTold(Mutex<HashMap<String, i64>>);

impl PoliciesTold {
    pub fn has(&self, uid: &str, generation: i64) -> bool {
        self.with(|told| told.get(uid) == Some(&generation))
    }

    pub fn with<T>(&self, look: impl FnOnce(&mut HashMap<String, i64>) -> T) -> T {
        look(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
