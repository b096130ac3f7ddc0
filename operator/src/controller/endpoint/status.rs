//! An Endpoint's status: what follows from its addresses, and how it is written.

use std::net::IpAddr;

use kube::Api;
use thuban_api::cidr::Cidr;
use thuban_api::identifiers::MacAddr;
use thuban_api::{Endpoint, EndpointStatus};

use crate::controller::runtime::objects::{WriteError, replace_status};
use crate::model::asked::unicast;
use crate::model::endpoint::is_users;

/// What follows from the addresses.
pub fn fill(status: &mut EndpointStatus, claimed: &[(IpAddr, Cidr)], endpoint: &Endpoint) {
    status.addresses = claimed.iter().map(|(address, _)| address.to_string()).collect();
    let asked = endpoint.spec.mac.as_deref().and_then(unicast);
    for (address, range) in claimed {
        match address {
            IpAddr::V4(address) => {
                status.mac = Some(asked.unwrap_or_else(|| MacAddr::of(*address)).to_string());
                status.gateway = Some(range.gateway().to_string());
                status.prefix_length = Some(range.prefix_length());
            }
            IpAddr::V6(_) => status.prefix_length6 = Some(range.prefix_length()),
        }
    }
    if !is_users(endpoint) {
        status.droplet = Some(endpoint.spec.droplet.clone());
    }
}

pub async fn write(
    endpoint: &Endpoint,
    endpoints: &Api<Endpoint>,
    status: EndpointStatus,
) -> Result<(), WriteError> {
    let mut endpoint = endpoint.clone();
    endpoint.status = Some(status);
    replace_status(endpoints, &endpoint).await.map(|_| ())
}
