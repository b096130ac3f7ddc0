//! Which DnsZone a name belongs to.

use std::collections::BTreeMap;

use cidrd::pools::selects;
use thuban_api::{DnsZone, ZoneNames};

/// The most labels of a name. A claim in an etcd compares keys for each of them, and etcd bounds a transaction.
pub const MAX_LABELS: usize = 32;

/// Returns the DnsZone in which a namespace with these labels may have a name: the longest one that admits both; of
/// several with the same zone, the first by name.
pub fn choose<'a>(
    zones: impl IntoIterator<Item = &'a DnsZone>,
    name: &str,
    namespace: &str,
    labels: &BTreeMap<String, String>,
) -> Option<&'a DnsZone> {
    let admitting = zones
        .into_iter()
        .filter(|zone| admits(zone, name, namespace, labels));
    admitting.min_by(|one, other| {
        let length = |zone: &DnsZone| zone.spec.zone.len();
        length(other)
            .cmp(&length(one))
            .then_with(|| one.metadata.name.cmp(&other.metadata.name))
    })
}

/// Whether a namespace may have a name.
fn admits(zone: &DnsZone, name: &str, namespace: &str, labels: &BTreeMap<String, String>) -> bool {
    let below = |name: &str, domain: &str| {
        let rest = name.strip_suffix(domain)?.strip_suffix('.')?;
        Some(rest.to_owned()).filter(|rest| !rest.is_empty())
    };
    let Some(rest) = below(name, &zone.spec.zone) else {
        return false;
    };
    selects(zone.spec.allowed_namespaces.as_ref(), labels)
        && name.split('.').count() <= MAX_LABELS
        && match zone.spec.names {
            ZoneNames::Namespace => below(&rest, namespace).is_some(),
            ZoneNames::Any => true,
        }
}

#[cfg(test)]
mod tests;
