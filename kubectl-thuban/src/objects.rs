//! What the API server said: plain lists, from which reports are made. No client here.

use k8s_openapi::api::apps::v1::{DaemonSet, Deployment};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::networking::v1::ServiceCIDR;
use kube::ResourceExt;
use thiserror::Error;
use thuban_api::{Bouncer, Divider, Droplet, Endpoint, Network, VERSION_ANNOTATION, Vpc};

/// Why a list could not be looked at.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Unseen {
    #[error("you may not {verb} {resource}")]
    Forbidden {
        verb: &'static str,
        resource: &'static str,
    },
    #[error("the API server has no {0}: is this version of Thuban installed?")]
    NotInstalled(&'static str),
}

/// What was seen, or why it was not.
pub type Seen<T> = Result<T, Unseen>;

/// The operator.
#[derive(Clone, Debug)]
pub struct ControlPlane {
    pub deployment: Seen<Option<Deployment>>,
    /// The operator's pods.
    pub pods: Seen<Vec<Pod>>,
    pub lease: Seen<Option<Lease>>,
}

impl ControlPlane {
    /// Returns the version that the leading operator has written into its Lease.
    pub fn version(&self) -> Option<&str> {
        let lease = self.lease.as_ref().ok()?.as_ref()?;
        lease.annotations().get(VERSION_ANNOTATION).map(String::as_str)
    }
}

/// VPCs and what is in them.
#[derive(Clone, Debug)]
pub struct Tenancy {
    pub vpcs: Seen<Vec<Vpc>>,
    pub networks: Seen<Vec<Network>>,
    pub dividers: Seen<Vec<Divider>>,
    pub bouncers: Seen<Vec<Bouncer>>,
    pub endpoints: Endpoints,
}

/// Endpoints, and where they were looked for.
#[derive(Clone, Debug)]
pub struct Endpoints {
    pub list: Seen<Vec<Endpoint>>,
    /// The only namespace; none if all were looked at.
    pub namespace: Option<String>,
}

/// The cluster that Thuban runs on.
#[derive(Clone, Debug)]
pub struct Surroundings {
    pub nodes: Seen<Vec<Node>>,
    pub service_cidrs: Seen<Vec<ServiceCIDR>>,
    pub daemon_sets: Seen<Vec<DaemonSet>>,
}

/// All that `status` looks at.
#[derive(Clone, Debug)]
pub struct StatusObjects {
    pub control_plane: ControlPlane,
    pub droplets: Seen<Vec<Droplet>>,
    pub tenancy: Tenancy,
}

/// All that `check` looks at.
#[derive(Clone, Debug)]
pub struct CheckObjects {
    pub control_plane: ControlPlane,
    pub droplets: Seen<Vec<Droplet>>,
    pub vpcs: Seen<Vec<Vpc>>,
    pub networks: Seen<Vec<Network>>,
    pub surroundings: Surroundings,
}
