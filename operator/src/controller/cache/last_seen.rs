//! The last seen values of fields that decide about other objects: only a change of such a field wakes those objects.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use thuban_api::{Network, Phase, Vpc};

use crate::model::bandwidth::{Limits, Remark};

/// The last seen value of each object, by the object's name.
#[derive(Debug)]
pub struct Sights<V>(Mutex<HashMap<String, V>>);

impl<V> Default for Sights<V> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<V> Sights<V> {
    /// Stores the value that is seen now, and returns the value that was seen before.
    pub fn replace(&self, name: &str, now: V) -> Option<V> {
        let mut sights = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        sights.insert(name.to_owned(), now)
    }

    /// Forgets an object that is gone.
    pub fn forget(&self, name: &str) {
        let mut sights = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        sights.remove(name);
    }
}

/// The fields of a VPC that decide about its networks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VpcState {
    pub generation: Option<i64>,
    pub vni: Option<u32>,
    pub cidrs: Vec<String>,
    pub phase: Phase,
    /// It has been checked.
    pub is_judged: bool,
    pub is_leaving: bool,
}

impl VpcState {
    pub fn of(vpc: &Vpc) -> Self {
        let status = vpc.status.clone().unwrap_or_default();
        Self {
            generation: vpc.metadata.generation,
            vni: status.vni,
            cidrs: status.cidrs,
            phase: status.phase,
            is_judged: !status.conditions.is_empty(),
            is_leaving: vpc.metadata.deletion_timestamp.is_some(),
        }
    }
}

/// The fields that decide which namespaces a network lets in.
#[derive(Clone, Debug, PartialEq)]
pub struct Entrance {
    pub allowed: Option<LabelSelector>,
    pub vpc: String,
}

/// The fields that decide whether nodes have their endpoints in the default network.
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
    pub node_addresses: Sights<Vec<IpAddr>>,
    /// The addresses that droplets say they have.
    pub droplet_addresses: Sights<String>,
    /// Labels of namespaces.
    pub labels: Sights<BTreeMap<String, String>>,
    /// The namespaces that VPCs let in.
    pub vpcs: Sights<Option<LabelSelector>>,
    pub vpc_states: Sights<VpcState>,
    pub networks: Sights<Entrance>,
    pub default_network: Sights<DefaultNetwork>,
    /// The limits of networks' pods.
    pub limits: Sights<Limits>,
    /// What was told of pods' bandwidth, by the pod's UID.
    pub remarks: Sights<Vec<Remark>>,
    /// The annotations without effect that were told, by the UID of their object.
    pub unknown_annotations: Sights<BTreeSet<String>>,
    /// What was told of policies' annotation for denied packets, by the policy's UID.
    pub report_denied: Sights<String>,
}
