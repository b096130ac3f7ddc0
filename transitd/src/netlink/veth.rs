//! A pod's veth pair: made in one request, each end with its final name, MAC, MTU and namespace.

use std::fs::File;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::AsRawFd;

use futures::TryStreamExt;
use netlink_packet_route::address::{AddressAttribute, AddressFlags};
use netlink_packet_route::link::{InfoData, InfoVeth, LinkAttribute, LinkMessage};
use netlink_packet_route::route::{RouteAttribute, RouteMessage, RouteScope};
use rtnetlink::{Handle, LinkUnspec, LinkVeth, RouteMessageBuilder};
use thuban_common::host_stack::POD_TABLE;
use thuban_common::tables::{GATEWAY_MAC, HOST_SOURCE, HOST_SOURCE_V6};
use tracing::warn;

use super::{
    NetlinkError, add_neighbour, error_number, failed, find_link, set_up, tolerate_exists, tolerate_missing,
};

/// The properties of the pair.
#[derive(Clone, Debug)]
pub struct VethPlan {
    pub host_interface: String,
    pub pod_interface: String,
    pub pod_mac: [u8; 6],
    pub mtu: u32,
    pub address: Ipv4Addr,
    pub address6: Option<Ipv6Addr>,
}

impl VethPlan {
    fn addresses(&self) -> impl Iterator<Item = IpAddr> {
        let second = self.address6.map(IpAddr::from);
        std::iter::once(IpAddr::from(self.address)).chain(second)
    }
}

/// Makes both ends, down. Returns the host end's ifindex. An interface of that name in the pod is an error. After an
/// error no end is there.
pub async fn create(handle: &Handle, plan: &VethPlan, pod: &File) -> Result<u32, NetlinkError> {
    create_and_look(handle, plan, pod, find_link).await
}

/// Does what [`create`] does; `look` finds the host's end once it is made.
pub async fn create_and_look(
    handle: &Handle,
    plan: &VethPlan,
    pod: &File,
    look: impl AsyncFnOnce(&Handle, &str) -> Result<Option<LinkMessage>, NetlinkError>,
) -> Result<u32, NetlinkError> {
    let peer = LinkUnspec::new_with_name(&plan.pod_interface)
        .address(plan.pod_mac.to_vec())
        .mtu(plan.mtu)
        .setns_by_fd(pod.as_raw_fd())
        .build();
    let message = LinkVeth::new(&plan.host_interface, &plan.pod_interface)
        .address(GATEWAY_MAC.to_vec())
        .mtu(plan.mtu)
        .set_info_data(InfoData::Veth(InfoVeth::Peer(peer)))
        .build();
    match handle.link().add(message).execute().await {
        Ok(()) => {}
        Err(error) if error_number(&error) == Some(libc::EEXIST) => {
            return Err(NetlinkError::InterfaceExists(plan.pod_interface.clone()));
        }
        Err(source) => {
            return Err(NetlinkError::Request {
                action: "create veth",
                object: plan.host_interface.clone(),
                source,
            });
        }
    }
    let name = &plan.host_interface;
    let found = match look(handle, name).await {
        Ok(Some(link)) => return Ok(link.header.index),
        Ok(None) => NetlinkError::NoInterface(name.clone()),
        Err(error) => error,
    };
    if let Err(error) = delete(handle, name).await {
        warn!(
            interface = name,
            error = &error as &dyn std::error::Error,
            "a veth that could not be looked up could not be deleted"
        );
    }
    Err(found)
}

/// Sets the host's end up, with the pod's permanent neighbours and its routes in the table of pods. With an IPv6
/// address, it sets the interface's sysctls first, and adds the host's own address on the interface.
pub async fn connect_host(handle: &Handle, plan: &VethPlan, ifindex: u32) -> Result<(), NetlinkError> {
    let name = &plan.host_interface;
    set_up(handle, ifindex, name).await?;
    if plan.address6.is_some() {
        add_address(handle, ifindex, Ipv6Addr::from(HOST_SOURCE_V6).into(), 128).await?;
    }
    for address in plan.addresses() {
        add_neighbour(handle, (ifindex, name), address, &plan.pod_mac).await?;
        handle
            .route()
            .add(pod_route(address, ifindex))
            .replace()
            .execute()
            .await
            .map_err(failed("add the pod's route on", name))?;
    }
    Ok(())
}

/// Removes the pair; routes and neighbours of the host's end go with it. Missing is success.
pub async fn delete(handle: &Handle, host_interface: &str) -> Result<(), NetlinkError> {
    let mut request = handle.link().del(0);
    let name = LinkAttribute::IfName(host_interface.to_owned());
    request.message_mut().attributes.push(name);
    tolerate_missing(request.execute().await).map_err(failed("delete", host_interface))
}

/// Removes the route of one host end; a newer attachment's route to the same address stays.
pub async fn delete_route(handle: &Handle, address: IpAddr, ifindex: u32) -> Result<(), NetlinkError> {
    let result = handle.route().del(pod_route(address, ifindex)).execute().await;
    tolerate_missing(result).map_err(failed("delete the route to", address))
}

/// Whether the table of pods leads an address to this host end.
pub async fn has_route(handle: &Handle, address: IpAddr, ifindex: u32) -> Result<bool, NetlinkError> {
    let query = match address {
        IpAddr::V4(_) => RouteMessageBuilder::<Ipv4Addr>::new().build(),
        IpAddr::V6(_) => RouteMessageBuilder::<Ipv6Addr>::new().build(),
    };
    let wanted = [
        RouteAttribute::Table(POD_TABLE),
        RouteAttribute::Destination(address.into()),
        RouteAttribute::Oif(ifindex),
    ];
    let mut routes = handle.route().get(query).execute();
    let mut found = false;
    while let Some(route) = routes.try_next().await.map_err(failed("list", "routes"))? {
        found |= wanted
            .iter()
            .all(|attribute| route.attributes.contains(attribute));
    }
    Ok(found)
}

/// Returns names and ifindexes of all host ends on this node.
pub async fn list(handle: &Handle) -> Result<Vec<(String, u32)>, NetlinkError> {
    let mut links = handle.link().get().execute();
    let mut found = Vec::new();
    while let Some(link) = links.try_next().await.map_err(failed("list", "links"))? {
        let name = link.attributes.iter().find_map(|attribute| match attribute {
            LinkAttribute::IfName(name) => Some(name.clone()),
            _ => None,
        });
        let ours = link
            .attributes
            .contains(&LinkAttribute::Address(GATEWAY_MAC.to_vec()));
        if let Some(name) = name
            && ours
            && is_host_interface(&name)
        {
            found.push((name, link.header.index));
        }
    }
    Ok(found)
}

fn is_host_interface(name: &str) -> bool {
    name.strip_prefix(crate::attachments::HOST_PREFIX)
        .is_some_and(|rest| rest.len() == 11 && rest.bytes().all(|b| b.is_ascii_hexdigit()))
}

/// Removes routes of both families from the table of pods if their interface is not one of `known`: a crash left them.
pub async fn sweep_routes(handle: &Handle, known: &[u32]) -> Result<(), NetlinkError> {
    sweep_family(handle, known, RouteMessageBuilder::<Ipv4Addr>::new().build()).await?;
    sweep_family(handle, known, RouteMessageBuilder::<Ipv6Addr>::new().build()).await
}

async fn sweep_family(handle: &Handle, known: &[u32], query: RouteMessage) -> Result<(), NetlinkError> {
    let mut routes = handle.route().get(query).execute();
    let mut stale = Vec::new();
    while let Some(route) = routes.try_next().await.map_err(failed("list", "routes"))? {
        let in_table = route.attributes.contains(&RouteAttribute::Table(POD_TABLE));
        let interface = route.attributes.iter().find_map(|a| {
            if let RouteAttribute::Oif(i) = a {
                Some(*i)
            } else {
                None
            }
        });
        if in_table && interface.is_none_or(|interface| !known.contains(&interface)) {
            stale.push(route);
        }
    }
    for route in stale {
        tolerate_missing(handle.route().del(route).execute().await)
            .map_err(failed("delete", "a stale pod route"))?;
    }
    Ok(())
}

fn pod_route(address: IpAddr, ifindex: u32) -> RouteMessage {
    match address {
        IpAddr::V4(address) => RouteMessageBuilder::<Ipv4Addr>::new()
            .destination_prefix(address, 32)
            .output_interface(ifindex)
            .table_id(POD_TABLE)
            .scope(RouteScope::Link)
            .pref_source(HOST_SOURCE.into())
            .build(),
        IpAddr::V6(address) => RouteMessageBuilder::<Ipv6Addr>::new()
            .destination_prefix(address, 128)
            .output_interface(ifindex)
            .table_id(POD_TABLE)
            .pref_source(HOST_SOURCE_V6.into())
            .build(),
    }
}

/// Adds an address to a link, usable at once and without a route to its prefix. An address that is there already is
/// success.
pub async fn add_address(
    handle: &Handle,
    ifindex: u32,
    address: IpAddr,
    prefix: u8,
) -> Result<(), NetlinkError> {
    let mut request = handle.address().add(ifindex, address, prefix);
    let mut flags = AddressFlags::Noprefixroute;
    if address.is_ipv6() {
        flags |= AddressFlags::Nodad;
    }
    let attributes = &mut request.message_mut().attributes;
    attributes.push(AddressAttribute::Flags(flags));
    tolerate_exists(request.execute().await).map_err(failed("add the address", address))
}
