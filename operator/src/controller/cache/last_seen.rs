//! What was last seen of what decides about others: only a change wakes them.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, PoisonError};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use thuban_api::{Network, Phase};

/// By name.
#[derive(Debug)]
pub struct Sights<V>(Mutex<HashMap<String, V>>);

impl<V> Default for Sights<V> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<V> Sights<V> {
    /// Remembers what is seen now; answers what was seen before.
    pub fn replace(&self, name: &str, now: V) -> Option<V> {
        let mut sights = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        sights.insert(name.to_owned(), now)
    }

    /// It is gone.
    pub fn forget(&self, name: &str) {
        let mut sights = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        sights.remove(name);
    }
}

/// What decides whom a network lets in.
#[derive(Clone, Debug, PartialEq)]
pub struct Entrance {
    pub allowed: Option<LabelSelector>,
    pub vpc: String,
}

/// What decides whether nodes have their endpoints in the default network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DefaultNetwork {
    Gone,
    There { phase: Option<Phase>, is_leaving: bool },
}

impl DefaultNetwork {
    pub fn of(network: &Network) -> Self {
        Self::There {
            phase: network.status.as_ref().map(|status| status.phase),
            is_leaving: network.metadata.deletion_timestamp.is_some(),
        }
    }
}

#[derive(Debug, Default)]
pub struct LastSeen {
    /// Labels of namespaces.
    pub labels: Sights<BTreeMap<String, String>>,
    /// Whom VPCs let in.
    pub vpcs: Sights<Option<LabelSelector>>,
    pub networks: Sights<Entrance>,
    pub default_network: Sights<DefaultNetwork>,
}
