//! The pod's end of the veth, inside the pod's network namespace: offloads, addresses, up, default routes.
//!
//! All network namespaces of a node share one kernel table of neighbours, with room for 1,024 addresses. So a pod asks
//! for no neighbour: its only next hop is the gateway, with a permanent entry, which the table doesn't count. ARP is
//! off, because a program may ask the kernel to send past the routes (`SO_DONTROUTE`): the entries that this makes are
//! complete at once, and the kernel drops such entries first.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::PathBuf;

use ipnet::Ipv6Net;
use netlink_packet_route::link::{LinkAttribute, LinkFlags, LinkMessage};
use netlink_packet_route::route::{RouteMessage, RouteScope};
use rtnetlink::{Handle, RouteMessageBuilder};
use thuban_common::tables::{GATEWAY_MAC, HOST_SOURCE_V6};
use thuban_rows::ByteRate;

use super::{
    NetlinkError, add_neighbour, connect, ethtool, failed, find_link, set_up_with, shaper, sysctl,
    tolerate_exists, veth,
};

/// Offloads that decapsulation by `bpf_skb_adjust_room` cannot restore on the receiving side.
pub(super) const OFF: [&str; 4] = [
    "tx-udp_tnl-segmentation",
    "tx-udp_tnl-csum-segmentation",
    "tx-udp-segmentation",
    "tx-sctp-segmentation",
];
/// Offloads that must be off besides when the agent is at XDP: frames must then leave the pod whole and checksummed.
const OFF_XDP: [&str; 5] = [
    "tx-checksum-ip-generic",
    "tx-tcp-segmentation",
    "tx-tcp6-segmentation",
    "tx-tcp-ecn-segmentation",
    "tx-generic-segmentation",
];

/// The properties that the pod's end gets.
#[derive(Clone, Debug)]
pub struct PodPlan {
    pub interface: String,
    pub address: Ipv4Addr,
    pub prefix_length: u8,
    pub gateway: Ipv4Addr,
    /// The IPv6 address with the length of its network's prefix.
    pub address6: Option<Ipv6Net>,
    pub agent_at_xdp: bool,
    /// How much the pod may send; none: no limit.
    pub egress_rate: Option<ByteRate>,
    /// A writable /proc/sys/net.
    pub proc_sys_net: PathBuf,
}

/// Sets up the pod's end. Runs in the pod's namespace, as the last step of ADD: afterwards the pod can send.
pub async fn setup(plan: PodPlan) -> Result<(), NetlinkError> {
    let handle = connect()?;
    let name = &plan.interface;
    ethtool::turn_off(name, &OFF)?;
    if plan.agent_at_xdp {
        ethtool::turn_off(name, &OFF_XDP)?;
    }
    let link = find_link(&handle, name)
        .await?
        .ok_or_else(|| NetlinkError::NoInterface(name.clone()))?;
    let index = link.header.index;
    if let Some(rate) = plan.egress_rate {
        shaper::limit(&handle, (index, name), rate).await?;
    }
    if plan.address6.is_some() {
        sysctl::enable_ipv6_in_pod(&plan.proc_sys_net, name)?;
    }
    veth::add_address(&handle, index, plan.address.into(), plan.prefix_length).await?;
    set_up_with(&handle, index, name, LinkFlags::Noarp).await?;
    if plan.agent_at_xdp {
        // XDP_REDIRECT into a veth needs NAPI at this end; the kernel takes the request only from a link that is up.
        ethtool::turn_on(name, &["rx-gro"])?;
    }
    add_neighbour(&handle, (index, name), plan.gateway.into(), &GATEWAY_MAC).await?;
    let link = RouteMessageBuilder::<Ipv4Addr>::new()
        .destination_prefix(plan.gateway, 32)
        .scope(RouteScope::Link)
        .output_interface(index)
        .build();
    let default = RouteMessageBuilder::<Ipv4Addr>::new()
        .destination_prefix(Ipv4Addr::UNSPECIFIED, 0)
        .gateway(plan.gateway)
        .output_interface(index)
        .build();
    add_routes(&handle, plan.gateway.into(), link, default).await?;
    match plan.address6 {
        Some(address) => setup_ipv6(&handle, (index, name), address).await,
        None => Ok(()),
    }
}

/// Makes a running pod's limit this one. `peer`: the host's end, by which the pod's end is known: whoever has rights on
/// the pod's network may have given the name to another interface. Runs in the pod's namespace.
pub async fn shape(interface: &str, peer: u32, rate: Option<ByteRate>) -> Result<(), NetlinkError> {
    let handle = connect()?;
    let is_peer = |link: &LinkMessage| link.attributes.contains(&LinkAttribute::Link(peer));
    let link = find_link(&handle, interface).await?.filter(is_peer);
    let link = link.ok_or_else(|| NetlinkError::NoInterface(interface.to_owned()))?;
    shaper::set(&handle, (link.header.index, interface), rate).await
}

/// Sets up IPv6 once the interface is up: the kernel accepts no IPv6 routes before.
async fn setup_ipv6(
    handle: &Handle,
    (index, name): (u32, &str),
    address: Ipv6Net,
) -> Result<(), NetlinkError> {
    let gateway = Ipv6Addr::from(HOST_SOURCE_V6);
    veth::add_address(handle, index, address.addr().into(), address.prefix_len()).await?;
    add_neighbour(handle, (index, name), gateway.into(), &GATEWAY_MAC).await?;
    // The kernel's own route comes with the link-local address, which may be a moment later.
    let link = RouteMessageBuilder::<Ipv6Addr>::new()
        .destination_prefix(Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 0), 64)
        .output_interface(index)
        .priority(256)
        .build();
    let default = RouteMessageBuilder::<Ipv6Addr>::new()
        .destination_prefix(Ipv6Addr::UNSPECIFIED, 0)
        .gateway(gateway)
        .output_interface(index)
        .build();
    add_routes(handle, gateway.into(), link, default).await
}

/// Adds the route to the gateway, unless the kernel has made it, and the default route by the gateway.
async fn add_routes(
    handle: &Handle,
    gateway: IpAddr,
    link: RouteMessage,
    default: RouteMessage,
) -> Result<(), NetlinkError> {
    tolerate_exists(handle.route().add(link).execute().await)
        .map_err(failed("add the route to the gateway", gateway))?;
    handle
        .route()
        .add(default)
        .execute()
        .await
        .map_err(failed("add the default route via", gateway))
}
