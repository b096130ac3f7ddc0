//! Locks for claims: one worker at a time for the claims of an owner.

use std::collections::HashSet;
use std::sync::{Mutex, PoisonError};

/// Owners whose claims are being made, counted or released right now. One worker at a time has an owner's claims,
/// because the API server may answer an earlier request late.
#[derive(Debug, Default)]
pub struct ClaimLocks(Mutex<HashSet<String>>);

/// A lock on an owner's claims: until it is dropped nothing else touches them.
pub struct ClaimGuard<'a>(&'a ClaimLocks, String);

impl ClaimLocks {
    /// Locks the owner's claims; none while they are locked.
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
