//! The node's uplink: the interface with the node's address, and the subnets of its addresses.

use std::net::IpAddr;

use nix::errno::Errno;
use nix::ifaddrs::{InterfaceAddress, getifaddrs};
use nix::sys::socket::{LinkAddr, SockaddrStorage};
use thiserror::Error;

use super::frames::Mac;

#[derive(Debug, Error)]
pub enum LinkError {
    #[error("listing the node's interfaces: {0}")]
    List(#[source] Errno),
    #[error("no interface has an address of the node ({0:?})")]
    NoUplink(Vec<IpAddr>),
    #[error("{0} is no Ethernet interface")]
    NoEthernet(String),
}

/// An address of an interface, and its netmask.
type Subnet = (IpAddr, IpAddr);

/// The subnets of a link.
#[derive(Clone, Debug, Default)]
pub struct Subnets(Vec<Subnet>);

impl Subnets {
    /// Whether neighbours look for an address on the link.
    pub fn hold(&self, address: IpAddr) -> bool {
        self.0.iter().any(|subnet| is_within(address, subnet))
    }
}

impl FromIterator<Subnet> for Subnets {
    fn from_iter<T: IntoIterator<Item = Subnet>>(subnets: T) -> Self {
        Self(subnets.into_iter().collect())
    }
}

#[derive(Clone, Debug)]
pub struct Link {
    pub name: String,
    pub mac: Mac,
    /// The interface, as a packet socket is bound to it.
    pub address: LinkAddr,
    pub subnets: Subnets,
}

impl Link {
    /// Finds the uplink of a node with these addresses. The first one counts.
    pub fn find(node_ips: &[IpAddr]) -> Result<Self, LinkError> {
        let all: Vec<InterfaceAddress> = getifaddrs().map_err(LinkError::List)?.collect();
        let has = |node_ip: &IpAddr| {
            all.iter()
                .find(|found| found.address.as_ref().and_then(ip) == Some(*node_ip))
        };
        let uplink = node_ips.iter().find_map(has);
        let uplink = uplink.ok_or_else(|| LinkError::NoUplink(node_ips.to_vec()))?;
        let name = &uplink.interface_name;
        let of_uplink = || all.iter().filter(|found| found.interface_name == *name);
        let address = of_uplink().find_map(|found| found.address.as_ref()?.as_link_addr());
        let address = address.filter(|address| address.halen() == size_of::<Mac>());
        let (address, mac) = address
            .and_then(|address| Some((*address, address.addr()?)))
            .ok_or_else(|| LinkError::NoEthernet(name.clone()))?;
        let subnet = |found: &InterfaceAddress| {
            let (address, mask) = (found.address.as_ref()?, found.netmask.as_ref()?);
            Some((ip(address)?, ip(mask)?))
        };
        Ok(Self {
            name: name.clone(),
            mac,
            address,
            subnets: of_uplink().filter_map(subnet).collect(),
        })
    }

    /// Whether it is the same interface with the same MAC.
    pub fn is_same(&self, other: &Self) -> bool {
        (self.address.ifindex(), self.mac) == (other.address.ifindex(), other.mac)
    }
}

fn ip(address: &SockaddrStorage) -> Option<IpAddr> {
    let v4 = address.as_sockaddr_in().map(|v4| IpAddr::V4(v4.ip()));
    v4.or_else(|| Some(IpAddr::V6(address.as_sockaddr_in6()?.ip())))
}

fn is_within(address: IpAddr, subnet: &Subnet) -> bool {
    match (address, subnet) {
        (IpAddr::V4(address), (IpAddr::V4(own), IpAddr::V4(mask))) => {
            (address.to_bits() ^ own.to_bits()) & mask.to_bits() == 0
        }
        (IpAddr::V6(address), (IpAddr::V6(own), IpAddr::V6(mask))) => {
            (address.to_bits() ^ own.to_bits()) & mask.to_bits() == 0
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_subnet_has_the_addresses_that_its_mask_says() {
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        let v4 = (ip("192.0.2.9"), ip("255.255.255.128"));
        assert!(is_within(ip("192.0.2.127"), &v4));
        assert!(!is_within(ip("192.0.2.128"), &v4));
        assert!(!is_within(ip("2001:db8::1"), &v4));
        let v6 = (ip("2001:db8::9"), ip("ffff:ffff:ffff:ffff::"));
        assert!(is_within(ip("2001:db8::7"), &v6));
        assert!(!is_within(ip("2001:db8:0:1::7"), &v6));
    }

    #[test]
    fn an_interface_with_another_mac_is_another_one() {
        let address = |found: InterfaceAddress| found.address.as_ref()?.as_link_addr().copied();
        let link = Link {
            name: "uplink".to_owned(),
            mac: [2, 0, 0, 0, 0, 1],
            address: getifaddrs().unwrap().find_map(address).unwrap(),
            subnets: Subnets::default(),
        };
        assert!(link.is_same(&link.clone()));
        let other = Link {
            mac: [2, 0, 0, 0, 0, 2],
            ..link.clone()
        };
        assert!(!link.is_same(&other));
    }

    #[test]
    fn a_node_without_the_address_has_no_uplink() {
        let nobodys = [IpAddr::from([192, 0, 2, 1])];
        assert!(matches!(Link::find(&nobodys), Err(LinkError::NoUplink(_))));
    }
}
