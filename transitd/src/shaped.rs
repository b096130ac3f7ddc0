//! The limits of bandwidth that the ends of pods' veths have.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};

use thuban_rows::{ByteRate, LocalEndpoint};

use crate::attachments::Attachment;
use crate::state::State;

/// The limits of an attachment; none: no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rates {
    /// What the pod may send. The limit is at the pod's end.
    pub egress: Option<ByteRate>,
    /// What the pod may receive. The limit is at the host's end.
    pub ingress: Option<ByteRate>,
}

impl From<&LocalEndpoint> for Rates {
    fn from(endpoint: &LocalEndpoint) -> Self {
        Self {
            egress: endpoint.egress_rate,
            ingress: endpoint.ingress_rate,
        }
    }
}

impl State {
    /// Returns the limits that an attachment should have. `None`: none are known, and the attachment keeps its limits.
    pub fn rates(&self, attachment: &Attachment) -> Option<Rates> {
        let endpoint = self.program.local_of_pod(&attachment.pod_uid)?;
        (!attachment.is_host()).then(|| endpoint.into())
    }
}

/// The limits that this transitd has set, by the generation of the attachment. Those of attachments that an earlier
/// transitd made are not known.
#[derive(Debug, Default)]
pub struct Shaped(Mutex<HashMap<u64, Rates>>);

impl Shaped {
    fn known(&self) -> MutexGuard<'_, HashMap<u64, Rates>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn note(&self, generation: u64, rates: Rates) {
        self.known().insert(generation, rates);
    }

    pub fn has(&self, generation: u64, rates: Rates) -> bool {
        self.known().get(&generation) == Some(&rates)
    }

    /// Forgets all attachments but these.
    pub fn retain(&self, generations: &BTreeSet<u64>) {
        self.known()
            .retain(|generation, _| generations.contains(generation));
    }
}
