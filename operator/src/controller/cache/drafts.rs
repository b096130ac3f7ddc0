//! Endpoints of pods that are being made: droplets get their rows while the API server still makes the objects, and the
//! pod's droplet is told that one is ready before its object says Provisioned.
//!
//! Invariant: a draft has addresses that this leader claimed for its pod alone, and just now, so that nobody can have
//! decided to release them. It stands for its Endpoint until that is Provisioned, has other addresses, or is gone.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use thuban_api::{Endpoint, Phase};
use tokio::time::Instant;

use crate::model::allocation::{Owner, addresses_of};
use crate::model::world::EndpointName;

#[derive(Clone, Debug)]
struct Draft {
    endpoint: Arc<Endpoint>,
    is_ready: bool,
    /// When its object was written as Provisioned. The cache may not show it yet.
    written: Option<Instant>,
}

/// How long the cache may need to show a write.
const UNSEEN: Duration = Duration::from_secs(2);

#[derive(Debug, Default)]
pub struct Drafts(Mutex<HashMap<EndpointName, Draft>>);

impl Drafts {
    fn drafts<T>(&self, work: impl FnOnce(&mut HashMap<EndpointName, Draft>) -> T) -> T {
        // No code under the lock panics half-way through a change.
        work(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Notes an Endpoint that is about to be made. Its status has its addresses.
    pub fn begin(&self, name: EndpointName, endpoint: Endpoint) {
        let draft = Draft {
            endpoint: Arc::new(endpoint),
            is_ready: false,
            written: None,
        };
        self.drafts(|drafts| drafts.insert(name, draft));
    }

    /// Notes that the object of an Endpoint was written as Provisioned.
    pub fn note_written(&self, name: &EndpointName) {
        self.drafts(|drafts| {
            if let Some(draft) = drafts.get_mut(name) {
                draft.written = Some(Instant::now());
            }
        });
    }

    /// Whether the object of an Endpoint was written as Provisioned just now. Its droplet attaches the pod at the same
    /// time, which wakes the Endpoint: a second write would be refused.
    pub fn is_written(&self, name: &EndpointName) -> bool {
        let written = self.drafts(|drafts| drafts.get(name)?.written);
        written.is_some_and(|written| written.elapsed() < UNSEEN)
    }

    /// Returns what stands for an Endpoint: its draft, while there is one and the object has nothing newer.
    pub fn latest(&self, name: &EndpointName, object: Option<Arc<Endpoint>>) -> Option<Arc<Endpoint>> {
        let draft = self.drafts(|drafts| Some(drafts.get(name)?.endpoint.clone()));
        match (object, draft) {
            (Some(object), Some(draft)) if is_of(&draft, &object) => Some(draft),
            (None, draft) => draft,
            (object, _) => object,
        }
    }

    /// Notes that all droplets have acked the rows of an Endpoint that has been made. Returns false if it has no draft.
    pub fn make_ready(&self, name: &EndpointName, object: &Endpoint) -> bool {
        self.drafts(|drafts| {
            let draft = drafts
                .get_mut(name)
                .filter(|draft| is_of(&draft.endpoint, object));
            draft.map(|draft| draft.is_ready = true).is_some()
        })
    }

    /// Whether the droplet of an Endpoint may have been told that it is ready with these addresses.
    pub fn is_ready(&self, name: &EndpointName, endpoint: &Endpoint) -> bool {
        self.drafts(|drafts| {
            let draft = drafts.get(name);
            draft.is_some_and(|draft| draft.is_ready && is_alike(&draft.endpoint, endpoint))
        })
    }

    /// Ends a draft whose object is Provisioned, or was made with other addresses or for another pod.
    pub fn saw(&self, name: &EndpointName, object: &Endpoint) {
        let status = object.status.as_ref();
        let is_provisioned = status.is_some_and(|status| status.phase == Phase::Provisioned);
        self.drafts(|drafts| {
            let draft = drafts.get(name);
            if draft.is_some_and(|draft| is_provisioned || !is_alike(&draft.endpoint, object)) {
                drafts.remove(name);
            }
        });
    }

    /// Returns whether there was a draft.
    pub fn forget(&self, name: &EndpointName) -> bool {
        self.drafts(|drafts| drafts.remove(name).is_some())
    }
}

/// Whether the object was made from the draft, and has no addresses in its status yet.
fn is_of(draft: &Endpoint, object: &Endpoint) -> bool {
    let status = object.status.as_ref();
    status.is_none_or(|status| status.addresses.is_empty()) && is_alike(draft, object)
}

fn is_alike(draft: &Endpoint, object: &Endpoint) -> bool {
    Owner::of(object) == Owner::of(draft) && addresses_of(object) == addresses_of(draft)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::json;
    use thuban_api::Endpoint;

    use super::Drafts;

    fn endpoint(uid: &str, claimed: &str, addresses: &[&str]) -> Endpoint {
        serde_json::from_value(json!({
            "apiVersion": "thuban.dev/v1alpha1", "kind": "Endpoint",
            "metadata": {"namespace": "ns", "name": "web-u"},
            "spec": {
                "type": "Simple", "vpc": "red", "network": "web", "droplet": "d", "claimed": [claimed],
                "podRef": {"name": "web", "uid": uid, "cniUid": uid},
            },
            "status": {"phase": "Init", "addresses": addresses},
        }))
        .unwrap()
    }

    #[test]
    fn a_draft_stands_for_its_endpoint_until_that_has_addresses() {
        let (drafts, name) = (Drafts::default(), ("ns".to_owned(), "web-u".to_owned()));
        // Whether a draft stands for the object, by the addresses in the status.
        let stands = |object: Option<Endpoint>| {
            let latest = drafts.latest(&name, object.map(Arc::new));
            latest.is_some_and(|latest| latest.status.clone().unwrap_or_default().addresses == ["10.0.1.2"])
        };
        let made = endpoint("u", "10.0.1.2", &[]);
        assert!(!stands(None) && !stands(Some(made.clone())));
        drafts.begin(name.clone(), endpoint("u", "10.0.1.2", &["10.0.1.2"]));
        assert!(stands(None) && stands(Some(made.clone())));
        for newer in [
            endpoint("u", "10.0.1.2", &["10.0.1.7"]),
            endpoint("u", "10.0.1.3", &[]),
            endpoint("v", "10.0.1.2", &[]),
        ] {
            assert!(!stands(Some(newer.clone())) && !drafts.make_ready(&name, &newer));
        }
        assert!(!drafts.is_ready(&name, &made));
        assert!(drafts.make_ready(&name, &made) && drafts.is_ready(&name, &made));
        assert!(
            !drafts.is_ready(&name, &endpoint("v", "10.0.1.2", &[])),
            "another pod's"
        );
        assert!(drafts.forget(&name) && !drafts.forget(&name));
        assert!(!stands(Some(made)));
    }
}
