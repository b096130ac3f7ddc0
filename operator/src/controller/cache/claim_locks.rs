//! Whose claims somebody works on right now.

use std::collections::HashSet;
use std::sync::{Mutex, PoisonError};

/// Owners of claims whose claims somebody makes, counts or releases right now: one at a time, for what was asked of the API
/// server may be answered late.
#[derive(Debug, Default)]
pub struct ClaimLocks(Mutex<HashSet<String>>);

/// Until it is dropped nobody else touches the owner's claims.
pub struct ClaimGuard<'a>(&'a ClaimLocks, String);

impl ClaimLocks {
    /// None while somebody else has it.
    pub fn try_lock(&self, owner_uid: &str) -> Option<ClaimGuard<'_>> {
        let mut taken = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_free = taken.insert(owner_uid.to_owned());
        is_free.then(|| ClaimGuard(self, owner_uid.to_owned()))
    }
}

impl Drop for ClaimGuard<'_> {
    fn drop(&mut self) {
        let mut taken = self.0.0.lock().unwrap_or_else(PoisonError::into_inner);
        taken.remove(&self.1);
    }
}
