//! Reads the values that annotations ask for.

use std::collections::BTreeMap;
use std::net::IpAddr;

use thiserror::Error;
use thuban_api::MAC_ANNOTATION;
use thuban_api::identifiers::MacAddr;

use super::allocation::Family;

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
