//! Observes a pod's interface from inside the pod's namespace, as the kernel reports it. Reads only.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use futures::TryStreamExt;
use netlink_packet_route::address::AddressAttribute;
use netlink_packet_route::link::{LinkAttribute, LinkFlags};
use netlink_packet_route::neighbour::{NeighbourAddress, NeighbourAttribute, NeighbourState};
use netlink_packet_route::route::{RouteAddress, RouteAttribute, RouteMessage};
use rtnetlink::{Handle, RouteMessageBuilder};

use super::{NetlinkError, connect, failed, find_link, is_up, mac};

/// One interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Observed {
    /// Index of a veth's other end, if that is in another namespace.
    pub peer: Option<u32>,
    pub mac: Vec<u8>,
    pub is_up: bool,
    pub addresses: Vec<IpAddr>,
    /// The gateways of default routes, both families.
    pub gateways: Vec<IpAddr>,
    /// Whether it asks for neighbours' MACs.
    pub asks: bool,
    /// Neighbours that stay, with their MACs.
    pub neighbours: Vec<(IpAddr, Vec<u8>)>,
}

/// Observes an interface in the calling thread's namespace.
pub async fn interface(name: &str) -> Result<Option<Observed>, NetlinkError> {
    let handle = connect()?;
    let Some(link) = find_link(&handle, name).await? else {
        return Ok(None);
    };
    let index = link.header.index;
    let mut addresses = Vec::new();
    let mut listed = handle.address().get().set_link_index_filter(index).execute();
    while let Some(message) = listed
        .try_next()
        .await
        .map_err(failed("list addresses of", name))?
    {
        addresses.extend(message.attributes.iter().find_map(|attribute| match attribute {
            AddressAttribute::Address(address) => Some(*address),
            _ => None,
        }));
    }
    let mut gateways =
        default_gateways(&handle, index, RouteMessageBuilder::<Ipv4Addr>::new().build()).await?;
    gateways.extend(default_gateways(&handle, index, RouteMessageBuilder::<Ipv6Addr>::new().build()).await?);
    let is_elsewhere = link
        .attributes
        .iter()
        .any(|attribute| matches!(attribute, LinkAttribute::LinkNetNsId(_)));
    let peer = link.attributes.iter().find_map(|attribute| match attribute {
        LinkAttribute::Link(index) => Some(*index),
        _ => None,
    });
    Ok(Some(Observed {
        peer: peer.filter(|_| is_elsewhere),
        mac: mac(&link).unwrap_or_default().to_vec(),
        is_up: is_up(&link),
        addresses,
        gateways,
        asks: !link.header.flags.contains(LinkFlags::Noarp),
        neighbours: neighbours(&handle, index).await?,
    }))
}

async fn default_gateways(
    handle: &Handle,
    index: u32,
    query: RouteMessage,
) -> Result<Vec<IpAddr>, NetlinkError> {
    let mut routes = handle.route().get(query).execute();
    let mut gateways = Vec::new();
    while let Some(route) = routes.try_next().await.map_err(failed("list", "routes"))? {
        let leaves_here = route.attributes.contains(&RouteAttribute::Oif(index));
        if route.header.destination_prefix_length == 0 && leaves_here {
            gateways.extend(route.attributes.iter().find_map(|attribute| match attribute {
                RouteAttribute::Gateway(RouteAddress::Inet(address)) => Some(IpAddr::V4(*address)),
                RouteAttribute::Gateway(RouteAddress::Inet6(address)) => Some(IpAddr::V6(*address)),
                _ => None,
            }));
        }
    }
    Ok(gateways)
}

async fn neighbours(handle: &Handle, index: u32) -> Result<Vec<(IpAddr, Vec<u8>)>, NetlinkError> {
    let mut listed = handle.neighbours().get().execute();
    let mut neighbours = Vec::new();
    while let Some(message) = listed.try_next().await.map_err(failed("list", "neighbours"))? {
        let is_permanent = message.header.state == NeighbourState::Permanent;
        if message.header.ifindex != index || !is_permanent {
            continue;
        }
        let (mut address, mut mac) = (None, None);
        for attribute in message.attributes {
            match attribute {
                NeighbourAttribute::Destination(NeighbourAddress::Inet(v4)) => address = Some(v4.into()),
                NeighbourAttribute::Destination(NeighbourAddress::Inet6(v6)) => address = Some(v6.into()),
                NeighbourAttribute::LinkLayerAddress(bytes) => mac = Some(bytes),
                _ => {}
            }
        }
        neighbours.extend(address.zip(mac));
    }
    Ok(neighbours)
}
