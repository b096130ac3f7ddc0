//! The room that the sets of a namespace's pods may take in a VPC: droplets with pods of the VPC have all of them.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use thiserror::Error;
use thuban_rows::PolicyId;

use super::limits::MAX_SET_ENTRIES;
use super::sets::SetContent;

/// The entries of the sets of a VPC, by the namespace whose pods had them first.
#[derive(Debug, Default)]
pub struct SetRoom {
    sizes: BTreeMap<PolicyId, (Arc<str>, usize)>,
    used: HashMap<Arc<str>, usize>,
}

/// There is no room for the sets of a pod, so that all its packets are denied.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error(
    "the rules for pods of the namespace have more than {MAX_SET_ENTRIES} entries in this VPC, because policies select \
     its pods in so many ways: all packets of this pod are denied; join policies, or let them select the same pods"
)]
pub struct NoSetRoom;

impl SetRoom {
    /// Returns an error unless a set of a namespace's pod may be added.
    pub fn admit(&self, namespace: &str, set: &SetContent) -> Result<(), NoSetRoom> {
        let used = self.used.get(namespace).copied().unwrap_or_default();
        // A set without rules denies all.
        if set.entries() > 0 && used + set.entries() > MAX_SET_ENTRIES {
            return Err(NoSetRoom);
        }
        Ok(())
    }

    pub fn take(&mut self, namespace: &str, id: PolicyId, set: &SetContent) {
        let namespace: Arc<str> = namespace.into();
        *self.used.entry(Arc::clone(&namespace)).or_default() += set.entries();
        self.sizes.insert(id, (namespace, set.entries()));
    }

    /// Gives a set's place to the same set with another id.
    pub fn rename(&mut self, old: PolicyId, new: PolicyId) {
        if let Some(size) = self.sizes.remove(&old) {
            self.sizes.insert(new, size);
        }
    }

    /// Gives back the room of sets that are gone. Returns whether there were any.
    pub fn retain(&mut self, is_there: impl Fn(PolicyId) -> bool) -> bool {
        let count = self.sizes.len();
        self.sizes.retain(|id, (namespace, size)| {
            let stays = is_there(*id);
            if !stays && let Some(used) = self.used.get_mut(namespace) {
                *used -= *size;
            }
            stays
        });
        self.used.retain(|_, used| *used > 0);
        self.sizes.len() < count
    }
}
