//! Reads the values that annotations ask for.

use std::collections::BTreeMap;
use std::net::IpAddr;

use thiserror::Error;
use thuban_api::identifiers::MacAddr;
use thuban_api::{ENDPOINT_ANNOTATION, IP_ANNOTATION, MAC_ANNOTATION, NETWORK_ANNOTATION};

use super::allocation::Family;
use super::bandwidth::Remark;

#[derive(Debug, Error)]
pub enum AskedError {
    #[error("{annotation}: {text:?} is not an address, such as 10.0.1.50 or fd00:1::50")]
    Address { annotation: &'static str, text: String },
    #[error("{0}: expected at most one IPv4 and one IPv6 address, separated by a comma")]
    TooMany(&'static str),
    #[error("{MAC_ANNOTATION}: {0:?} is not a unicast MAC address, such as 02:00:00:00:00:01")]
    Mac(String),
}

/// Reads the addresses that an annotation asks for, at most one of each family, IPv4 first.
pub fn asked_addresses(
    annotations: &BTreeMap<String, String>,
    annotation: &'static str,
) -> Result<Vec<IpAddr>, AskedError> {
    let value = annotations.get(annotation).map(String::as_str);
    let parts = value.unwrap_or_default().split(',').map(str::trim);
    let mut addresses: Vec<IpAddr> = Vec::new();
    for part in parts.filter(|part| !part.is_empty()) {
        let text = part.to_owned();
        let address: IpAddr = part
            .parse()
            .map_err(|_| AskedError::Address { annotation, text })?;
        let is_same = |other: &IpAddr| Family::of(*other) == Family::of(address);
        if addresses.iter().any(is_same) {
            return Err(AskedError::TooMany(annotation));
        }
        addresses.push(address);
    }
    addresses.sort_unstable();
    Ok(addresses)
}

/// Reads a MAC address; none if an interface can't have it.
pub fn unicast(text: &str) -> Option<MacAddr> {
    let mac: MacAddr = text.parse().ok()?;
    (mac.0[0] & 1 == 0 && mac.0 != [0; 6]).then_some(mac)
}

/// The annotations of pods that Thuban knows, and how all of its annotations begin.
const OF_PODS: [&str; 4] = [
    NETWORK_ANNOTATION,
    IP_ANNOTATION,
    MAC_ANNOTATION,
    ENDPOINT_ANNOTATION,
];
const PREFIX: &str = "thuban.dev/";

/// Returns a remark about each annotation of a pod that looks like Thuban's and isn't known.
pub fn unknown(annotations: &BTreeMap<String, String>) -> Vec<Remark> {
    let names = annotations.keys();
    let unknown = names.filter(|name| name.starts_with(PREFIX) && !OF_PODS.contains(&name.as_str()));
    let remark = |name: &String| Remark {
        reason: "UnknownAnnotation",
        note: format!(
            "{name} has no effect: pods may have the annotations {}. Correct its name, or remove it",
            OF_PODS.join(", ")
        ),
    };
    unknown.map(remark).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::unknown;

    #[test]
    fn annotations_that_thuban_does_not_know_are_told() {
        let annotated = |name: &str| unknown(&BTreeMap::from([(name.to_owned(), "red".to_owned())]));
        for known in [
            "thuban.dev/network",
            "thuban.dev/ip",
            "thuban.dev/mac",
            "thuban.dev/endpoint",
            "other/networks",
        ] {
            assert_eq!(annotated(known), [], "{known}");
        }
        let remarks = annotated("thuban.dev/networks");
        assert_eq!(remarks.len(), 1);
        assert_eq!(remarks[0].reason, "UnknownAnnotation");
        assert!(
            remarks[0].note.starts_with("thuban.dev/networks has no effect: "),
            "{}",
            remarks[0].note
        );
    }
}
