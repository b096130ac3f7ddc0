//! Finds the interface that carries this droplet's traffic: the named one, else the one with the node's address, else
//! the default route's.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr};

use futures::TryStreamExt;
use netlink_packet_route::address::{AddressAttribute, AddressMessage, AddressScope};
use netlink_packet_route::link::LinkAttribute;
use netlink_packet_route::route::RouteAttribute;
use rtnetlink::{Handle, RouteMessageBuilder};

use super::{NetlinkError, failed, find_link};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Uplink {
    pub name: String,
    pub ifindex: u32,
    pub address: Ipv4Addr,
    pub mtu: u32,
}

impl fmt::Display for Uplink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            name,
            ifindex,
            address,
            mtu,
        } = self;
        write!(f, "{name} (index {ifindex}) with {address} and MTU {mtu}")
    }
}

/// Finds the uplink. Observes only.
pub async fn find(
    handle: &Handle,
    name: Option<&str>,
    node_ip: Option<Ipv4Addr>,
) -> Result<Uplink, NetlinkError> {
    let addresses: Vec<AddressMessage> = handle
        .address()
        .get()
        .execute()
        .try_collect()
        .await
        .map_err(failed("list", "addresses"))?;
    let ifindex = match (name, node_ip) {
        (Some(name), _) => {
            let link = find_link(handle, name).await?;
            link.ok_or_else(|| NetlinkError::NoInterface(name.to_owned()))?
                .header
                .index
        }
        (None, Some(ip)) => addresses
            .iter()
            .find(|message| address(message) == Some(ip))
            .map(|message| message.header.index)
            .ok_or(NetlinkError::NoInterfaceWith(ip))?,
        (None, None) => default_route(handle).await?,
    };
    let link = handle
        .link()
        .get()
        .match_index(ifindex)
        .execute()
        .try_next()
        .await
        .map_err(failed("look up interface", ifindex))?
        .ok_or_else(|| NetlinkError::NoInterface(ifindex.to_string()))?;
    let (mut name, mut mtu) = (String::new(), 0);
    for attribute in &link.attributes {
        match attribute {
            LinkAttribute::IfName(text) => name.clone_from(text),
            LinkAttribute::Mtu(bytes) => mtu = *bytes,
            _ => {}
        }
    }
    let on_link = addresses
        .iter()
        .filter(|m| m.header.index == ifindex && m.header.scope == AddressScope::Universe);
    let held: Vec<Ipv4Addr> = on_link.filter_map(address).collect();
    let address = node_ip.filter(|ip| held.contains(ip)).or(held.first().copied());
    Ok(Uplink {
        address: address.ok_or_else(|| NetlinkError::NoAddress(name.clone()))?,
        name,
        ifindex,
        mtu,
    })
}

fn address(message: &AddressMessage) -> Option<Ipv4Addr> {
    message.attributes.iter().find_map(|attribute| match attribute {
        AddressAttribute::Local(IpAddr::V4(address)) => Some(*address),
        _ => None,
    })
}

async fn default_route(handle: &Handle) -> Result<u32, NetlinkError> {
    let mut routes = handle
        .route()
        .get(RouteMessageBuilder::<Ipv4Addr>::new().build())
        .execute();
    let mut best: Option<(u32, u32)> = None;
    while let Some(route) = routes.try_next().await.map_err(failed("list", "routes"))? {
        // Table 254 is the main table.
        if route.header.destination_prefix_length != 0 || route.header.table != 254 {
            continue;
        }
        let (mut interface, mut metric) = (None, 0);
        for attribute in &route.attributes {
            match attribute {
                RouteAttribute::Oif(index) => interface = Some(*index),
                RouteAttribute::Priority(value) => metric = *value,
                _ => {}
            }
        }
        if let Some(interface) = interface
            && best.is_none_or(|(least, _)| metric < least)
        {
            best = Some((metric, interface));
        }
    }
    best.map(|(_, interface)| interface)
        .ok_or(NetlinkError::NoDefaultRoute)
}
