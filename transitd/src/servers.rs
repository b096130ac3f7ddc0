//! How this node finds the servers that it dials, by the daemon's flags.

use crate::dial::lease::Locator;
use crate::flows::relay;
use crate::operator::client;
use crate::settings::RunSettings;

/// Returns how to find the operator.
pub fn operator(settings: &RunSettings, kubernetes: Option<&kube::Client>) -> Locator {
    match kubernetes {
        Some(kubernetes) => Locator::by_lease(kubernetes.clone(), &settings.namespace, client::LEASE),
        None => Locator::Fixed {
            address: settings.operator_address.clone().unwrap_or_default(),
            bundle: settings.operator_ca.clone().unwrap_or_default(),
        },
    }
}

/// Returns how to find thuban-observe; `None`: the cluster has none.
pub fn observe(settings: &RunSettings, kubernetes: Option<&kube::Client>) -> Option<Locator> {
    let namespace = settings.observe_namespace()?;
    if let (Some(address), Some(bundle)) = (&settings.observe_address, &settings.observe_ca) {
        return Some(Locator::Fixed {
            address: address.clone(),
            bundle: bundle.clone(),
        });
    }
    let kubernetes = kubernetes?.clone();
    Some(Locator::by_lease(kubernetes, namespace, relay::LEASE))
}
