//! Places of readers: how many may follow or wait for an answer at once, of all and of one namespace.
//!
//! Invariant: readers of one namespace leave room for those of others.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::view::Scope;

/// The most places, and the most of one namespace. A reader that follows holds at most 1,024 flows back there, and one
/// that takes an answer at most 10,000.
const MAX_READERS: usize = 64;
const MAX_OF_SCOPE: usize = 16;

pub struct Places {
    taken: Mutex<HashMap<Scope, usize>>,
    /// Hears how many places are taken.
    note: fn(usize),
}

impl Places {
    pub fn new(note: fn(usize)) -> Arc<Self> {
        Arc::new(Self {
            taken: Mutex::default(),
            note,
        })
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Scope, usize>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a place, until it is dropped; none if there are too many readers.
    pub fn take(self: &Arc<Self>, scope: &Scope) -> Option<Place> {
        let mut taken = self.lock();
        let all: usize = taken.values().sum();
        let of_scope = taken.get(scope).copied().unwrap_or_default();
        if all >= MAX_READERS || of_scope >= MAX_OF_SCOPE {
            return None;
        }
        taken.insert(scope.clone(), of_scope + 1);
        (self.note)(all + 1);
        Some(Place {
            places: self.clone(),
            scope: scope.clone(),
        })
    }
}

/// The place of a reader.
pub struct Place {
    places: Arc<Places>,
    scope: Scope,
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut taken = self.places.lock();
        if let Some(count) = taken.get_mut(&self.scope) {
            *count -= 1;
            if *count == 0 {
                taken.remove(&self.scope);
            }
        }
        (self.places.note)(taken.values().sum());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readers_of_a_namespace_leave_room_for_others() {
        let places = Places::new(|_| {});
        let of = |namespace: &str| Scope::Namespace(namespace.to_owned());
        let mut held: Vec<Place> = (0..100).filter_map(|_| places.take(&of("red"))).collect();
        assert_eq!(held.len(), MAX_OF_SCOPE);
        held.extend(places.take(&of("blue")));
        assert_eq!(held.len(), MAX_OF_SCOPE + 1);
        held.remove(0);
        held.extend(places.take(&of("red")));
        assert_eq!(held.len(), MAX_OF_SCOPE + 1);
        held.extend((0..100).filter_map(|number| places.take(&of(&format!("ns-{number}")))));
        assert_eq!(held.len(), MAX_READERS);
        drop(held);
        assert!(places.lock().is_empty());
    }
}
