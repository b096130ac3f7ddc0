//! The names in rows, in the form in which tables key them.
//!
//! Pure. Addresses within VPCs are 16 bytes, IPv4 mapped; ports of services are in network order.

use std::net::{IpAddr, Ipv6Addr};

use thuban_api::identifiers::{Vni, mapped};
use thuban_common::services::{BackendEntry, FRONTS, ServiceKey};
use thuban_common::tables::EndpointKey;
use thuban_rows::{Backend, LocalEndpoint, RowKey, Service};

/// Returns the key of an address of a VPC.
pub fn endpoint_key(vni: Vni, address: impl Into<IpAddr>) -> EndpointKey {
    EndpointKey {
        vni: vni.get(),
        address: mapped(address),
    }
}

/// Returns the keys of all addresses of an endpoint.
pub fn endpoint_keys(endpoint: &LocalEndpoint) -> impl Iterator<Item = EndpointKey> + use<> {
    let vni = endpoint.vni;
    endpoint
        .addresses()
        .map(move |address| endpoint_key(vni, address))
}

/// Returns the key of the row of a kind that is about an address; `None` if no VPC can have the VNI.
pub fn row_key(kind: fn(Vni, IpAddr) -> RowKey, key: &EndpointKey) -> Option<RowKey> {
    let address = Ipv6Addr::from(key.address).to_canonical();
    Some(kind(Vni::new(key.vni)?, address))
}

/// Returns the key of a service's address.
pub fn key_of(service: &Service) -> EndpointKey {
    endpoint_key(service.vni, service.address)
}

/// Returns the key of a front's address.
pub fn front_key(address: IpAddr) -> EndpointKey {
    EndpointKey {
        vni: FRONTS,
        address: mapped(address),
    }
}

/// Returns the key of a port of a service or front.
pub fn service_key(of: EndpointKey, protocol: u8, port: u16) -> ServiceKey {
    ServiceKey {
        vni: of.vni,
        address: of.address,
        port: port.to_be(),
        protocol,
        former: 0,
    }
}

/// Returns the entry of a backend. A port's slots follow from the order of entries, so they are the same on all
/// droplets.
pub fn backend_entry(backend: &Backend) -> BackendEntry {
    BackendEntry {
        address: mapped(backend.address),
        port: backend.port.to_be(),
        padding: 0,
    }
}

#[cfg(test)]
mod tests {
    use thuban_rows::builders;

    use super::*;

    #[test]
    fn a_services_port_and_backends_are_in_network_order() {
        let service = builders::service();
        let key = key_of(&service);
        assert_eq!(
            (key.vni, &key.address[10..]),
            (7, &[0xff, 0xff, 10, 96, 0, 10][..])
        );
        let port = &service.ports[0];
        assert_eq!(service_key(key, port.protocol, port.port).port, 80_u16.to_be());
        let entries: Vec<_> = port.backends.iter().map(backend_entry).collect();
        assert_eq!(
            entries
                .iter()
                .map(|entry| (entry.address[15], entry.port))
                .collect::<Vec<_>>(),
            [(5, 8080_u16.to_be())]
        );
    }

    #[test]
    fn a_tables_key_names_the_row_it_is_of() {
        let key = endpoint_key(builders::VNI, [10, 0, 1, 5]);
        let row = row_key(RowKey::Direct, &key);
        assert_eq!(row, Some(RowKey::Direct(builders::VNI, [10, 0, 1, 5].into())));
        assert_eq!(row_key(RowKey::Direct, &EndpointKey { vni: 0, ..key }), None);
    }
}
