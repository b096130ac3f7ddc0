//! Decides whether a namespace may enter a network, and whether the network works.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Namespace;
use kube::ResourceExt;
use kube::runtime::reflector::ObjectRef;
use thuban_api::{Condition, DEFAULT_NAME, Network, Phase};

use crate::controller::context::Context;
use crate::controller::runtime::objects::condition;
use crate::model::admission::{Refusal, admit};

/// The reason why a network can't be used.
pub enum Unusable {
    Refused(Refusal),
    NotProvisioned,
}

impl Unusable {
    pub fn condition(&self, network: &str) -> Condition {
        match self {
            Self::Refused(refusal) => {
                condition("Accepted", false, refusal.reason(), &refusal.to_string(), None)
            }
            Self::NotProvisioned => {
                let message = format!("network {network:?} is not Provisioned yet");
                condition("Ready", false, "NetworkNotProvisioned", &message, None)
            }
        }
    }
}

/// Returns the network if pods of the namespace may enter it and it works.
pub fn usable_network(namespace: &str, network: &str, context: &Context) -> Result<Arc<Network>, Unusable> {
    let name = network;
    let network = context.network(name);
    admitted(namespace, name, network.as_deref(), context).map_err(Unusable::Refused)?;
    if let Some(refusal) = network.as_deref().and_then(|network| leaving(network, context)) {
        return Err(Unusable::Refused(refusal));
    }
    network
        .filter(|network| is_provisioned(network))
        .ok_or(Unusable::NotProvisioned)
}

/// Returns the reason why a network that goes, or whose VPC goes, takes no new members.
fn leaving(network: &Network, context: &Context) -> Option<Refusal> {
    let name = network.name_any();
    if network.metadata.deletion_timestamp.is_some() {
        return Some(Refusal::NetworkDeleting { network: name });
    }
    let vpc = context.vpc(&network.spec.vpc)?;
    // Nodes need the default VPC, whoever deletes it by mistake.
    let is_leaving = vpc.metadata.deletion_timestamp.is_some() && vpc.name_any() != DEFAULT_NAME;
    is_leaving.then(|| Refusal::VpcDeleting {
        network: name,
        vpc: vpc.name_any(),
    })
}

/// Whether a network and its VPC let a namespace in.
pub fn admitted(
    namespace: &str,
    name: &str,
    network: Option<&Network>,
    context: &Context,
) -> Result<(), Refusal> {
    let vpc = network.and_then(|network| context.vpc(&network.spec.vpc));
    let space = context
        .stores
        .namespaces
        .get(&ObjectRef::<Namespace>::new(namespace));
    // The cache may not have the namespace yet. No selector admits a namespace that is not known.
    let Some(space) = space else {
        return Err(Refusal::NamespaceNotFound {
            namespace: namespace.to_owned(),
        });
    };
    admit(namespace, space.labels(), name, network, vpc.as_deref())
}

fn is_provisioned(network: &Network) -> bool {
    let status = network.status.as_ref();
    network.metadata.deletion_timestamp.is_none()
        && status.is_some_and(|status| status.phase == Phase::Provisioned)
}
