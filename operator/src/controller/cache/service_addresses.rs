//! Addresses of VPCs that Endpoints of Services are about to get: the world does not show them yet, and they count.

use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};

use crate::model::world::{EndpointName, MAX_OWN_ADDRESSES};

/// Addresses that an Endpoint asks for.
#[derive(Debug)]
pub struct Asked {
    pub uid: String,
    pub vpc: String,
    pub addresses: Vec<IpAddr>,
}

/// Addresses that Endpoints claim right now, so that no two of them take the last room of a VPC. A claim that is
/// refused is released. Everything else ends by itself: the world shows the addresses, or the Endpoint is gone.
#[derive(Debug, Default)]
pub struct ServiceAddresses(Mutex<HashMap<EndpointName, Asked>>);

impl ServiceAddresses {
    /// Reserves addresses for an Endpoint. Returns false, and reserves none, if the VPC has no room for them.
    /// `held`: the addresses that the VPC's Services have. `is_under_way`: whether another's reservation still counts.
    pub fn reserve(
        &self,
        endpoint: &EndpointName,
        asked: Asked,
        held: BTreeSet<IpAddr>,
        is_under_way: impl Fn(&EndpointName, &Asked) -> bool,
    ) -> bool {
        let mut reserved = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        reserved.retain(|name, asked| name != endpoint && is_under_way(name, asked));
        let others = reserved.values().filter(|other| other.vpc == asked.vpc);
        let mut addresses = held;
        addresses.extend(
            others
                .chain([&asked])
                .flat_map(|asked| asked.addresses.iter().copied()),
        );
        let has_room = addresses.len() <= MAX_OWN_ADDRESSES;
        if has_room {
            reserved.insert(endpoint.clone(), asked);
        }
        has_room
    }

    /// Releases what is reserved for an Endpoint, because its claim was refused.
    pub fn release(&self, endpoint: &EndpointName) {
        let mut reserved = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        reserved.remove(endpoint);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::net::{IpAddr, Ipv4Addr};

    use super::{Asked, ServiceAddresses};
    use crate::model::world::{EndpointName, MAX_OWN_ADDRESSES};

    fn address(last: usize) -> IpAddr {
        Ipv4Addr::from(0x0a00_0000 + u32::try_from(last).unwrap()).into()
    }

    fn name(service: &str) -> EndpointName {
        ("east".to_owned(), service.to_owned())
    }

    /// A VPC whose Services have all addresses but so many, and the reservations beside them.
    struct Vpc {
        reservations: ServiceAddresses,
        held: BTreeSet<IpAddr>,
    }

    impl Vpc {
        fn with_room_for(free: usize) -> Self {
            let held = (0..MAX_OWN_ADDRESSES - free).map(address).collect();
            Self {
                reservations: ServiceAddresses::default(),
                held,
            }
        }

        /// Reserves these addresses for a Service in a VPC. `over`: Services whose reservations don't count any more.
        fn reserve(&self, service: &str, vpc: &str, lasts: &[usize], over: &[&str]) -> bool {
            let asked = Asked {
                uid: service.to_owned(),
                vpc: vpc.to_owned(),
                addresses: lasts.iter().copied().map(address).collect(),
            };
            let held = if vpc == "red" {
                self.held.clone()
            } else {
                BTreeSet::new()
            };
            let is_under_way = |_: &EndpointName, other: &Asked| !over.contains(&other.uid.as_str());
            self.reservations
                .reserve(&name(service), asked, held, is_under_way)
        }
    }

    #[test]
    fn the_last_room_of_a_vpc_goes_to_one_service() {
        let vpc = Vpc::with_room_for(1);
        assert!(vpc.reserve("a", "red", &[1000], &[]));
        assert!(!vpc.reserve("b", "red", &[1001], &[]));
        assert!(vpc.reserve("a", "red", &[1000], &[]), "its own, in the next try");
        assert!(vpc.reserve("c", "blue", &[1001], &[]), "another VPC");
    }

    #[test]
    fn a_service_gets_all_its_addresses_or_none() {
        let vpc = Vpc::with_room_for(2);
        assert!(vpc.reserve("a", "red", &[1000], &[]));
        assert!(!vpc.reserve("b", "red", &[1001, 1002], &[]));
        assert!(
            vpc.reserve("c", "red", &[1001], &[]),
            "what was refused takes no room"
        );
    }

    #[test]
    fn a_refused_claim_leaves_its_room_to_others() {
        let vpc = Vpc::with_room_for(1);
        assert!(vpc.reserve("a", "red", &[1000], &[]));
        vpc.reservations.release(&name("a"));
        assert!(vpc.reserve("b", "red", &[1001], &[]));
        assert!(!vpc.reserve("a", "red", &[1000], &[]));
    }

    #[test]
    fn a_reservation_ends_with_its_endpoint() {
        let vpc = Vpc::with_room_for(1);
        assert!(vpc.reserve("a", "red", &[1000], &[]));
        assert!(vpc.reserve("b", "red", &[1001], &["a"]));
        assert!(!vpc.reserve("a", "red", &[1000], &[]), "it asks again");
    }

    #[test]
    fn an_address_that_is_held_already_counts_once() {
        let mut vpc = Vpc::with_room_for(2);
        assert!(vpc.reserve("a", "red", &[1000], &[]));
        vpc.held.insert(address(1000));
        assert!(vpc.reserve("b", "red", &[1001], &[]));
        assert!(!vpc.reserve("c", "red", &[1002], &["a"]));
    }
}
