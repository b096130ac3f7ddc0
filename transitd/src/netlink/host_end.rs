//! The node's end of its own endpoint's veth, in the host's network namespace: its addresses, and the routes that lead
//! the node's packets for members and services of the endpoint's VPC to it.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::Path;

use futures::TryStreamExt;
use ipnet::IpNet;
use netlink_packet_route::route::{RouteAddress, RouteAttribute, RouteFlags, RouteMessage};
use rtnetlink::{Handle, RouteMessageBuilder};
use thuban_common::host_stack::{MARK_HOST_ENDPOINT, POD_TABLE, SERVICE_TABLE};
use thuban_common::tables::GATEWAY_MAC;

use super::pod::OFF;
use super::{
    NetlinkError, add_neighbour, ethtool, failed, find_link, host, set_up, sysctl, table, tolerate_exists,
    tolerate_missing, veth,
};

/// The interface by which the node reaches its VPC.
pub const HOST_END: &str = "thuban0";
/// The next hops on [`HOST_END`]. Nobody has these addresses; the agent behind the interface takes the packets.
const NEXT_HOP: Ipv4Addr = Ipv4Addr::new(169, 254, 64, 2);
const NEXT_HOP6: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0x5468, 0x7562, 0x6101, 2);

/// The addresses and routes that the interface is to have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostPlan {
    /// The node's addresses: IPv4, then IPv6 if the endpoint has it.
    pub addresses: Vec<IpAddr>,
    /// The ranges of the VPC.
    pub ranges: BTreeSet<IpNet>,
    /// The ranges of its services.
    pub services: BTreeSet<IpNet>,
}

impl HostPlan {
    /// Returns (table, destination) of each route, and its source.
    fn routes(&self) -> impl Iterator<Item = (u32, IpNet, IpAddr)> {
        let both = self.ranges.union(&self.services);
        let routes = both.flat_map(|range| [POD_TABLE, SERVICE_TABLE].map(|table| (table, *range)));
        routes.filter_map(|(table, range)| {
            let is_same = |address: &&IpAddr| address.is_ipv4() == range.addr().is_ipv4();
            let source = self.addresses.iter().find(is_same)?;
            Some((table, range, *source))
        })
    }
}

/// Brings the interface, up, and its routes in line with the plan; idempotent. Returns the interface's number.
pub async fn setup(handle: &Handle, plan: &HostPlan, proc_sys_net: &Path) -> Result<u32, NetlinkError> {
    let link = find_link(handle, HOST_END)
        .await?
        .ok_or_else(|| NetlinkError::NoInterface(HOST_END.into()))?;
    let index = link.header.index;
    if !super::is_up(&link) {
        ethtool::turn_off(HOST_END, &OFF)?;
    }
    sysctl::disable_rp_filter(proc_sys_net, HOST_END)?;
    let has_v6 = plan.addresses.iter().any(IpAddr::is_ipv6);
    if has_v6 {
        sysctl::enable_ipv6_in_pod(proc_sys_net, HOST_END)?;
    }
    for address in &plan.addresses {
        let whole = if address.is_ipv4() { 32 } else { 128 };
        veth::add_address(handle, index, *address, whole).await?;
    }
    set_up(handle, index, HOST_END).await?;
    let hops = [(true, IpAddr::from(NEXT_HOP)), (has_v6, IpAddr::from(NEXT_HOP6))];
    for (_, hop) in hops.into_iter().filter(|(is_used, _)| *is_used) {
        add_neighbour(handle, (index, HOST_END), hop, &GATEWAY_MAC).await?;
    }
    host::route_marked(handle, MARK_HOST_ENDPOINT, SERVICE_TABLE, has_v6).await?;
    set_routes(handle, index, plan).await?;
    Ok(index)
}

/// Adds missing routes, and removes routes that the plan no longer has.
async fn set_routes(handle: &Handle, index: u32, plan: &HostPlan) -> Result<(), NetlinkError> {
    let wanted: BTreeSet<(u32, IpNet)> = plan.routes().map(|(table, range, _)| (table, range)).collect();
    for (table, range, source) in plan.routes() {
        let route = route(index, table, range, source);
        tolerate_exists(handle.route().add(route).replace().execute().await)
            .map_err(failed("add the route to", range))?;
    }
    for query in [
        RouteMessageBuilder::<Ipv4Addr>::new().build(),
        RouteMessageBuilder::<Ipv6Addr>::new().build(),
    ] {
        let mut routes = handle.route().get(query).execute();
        let mut stale = Vec::new();
        while let Some(route) = routes.try_next().await.map_err(failed("list", "routes"))? {
            let is_ours = route.attributes.contains(&RouteAttribute::Oif(index));
            if is_ours
                && let Some(key) = key_of(&route)
                && !wanted.contains(&key)
            {
                stale.push(route);
            }
        }
        for route in stale {
            tolerate_missing(handle.route().del(route).execute().await)
                .map_err(failed("delete", "a stale route of the node's endpoint"))?;
        }
    }
    Ok(())
}

/// Returns table and destination, if the table is one of ours.
fn key_of(route: &RouteMessage) -> Option<(u32, IpNet)> {
    let table = Some(table(route)).filter(|table| [POD_TABLE, SERVICE_TABLE].contains(table))?;
    let address = route.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Destination(RouteAddress::Inet(address)) => Some(IpAddr::from(*address)),
        RouteAttribute::Destination(RouteAddress::Inet6(address)) => Some(IpAddr::from(*address)),
        _ => None,
    })?;
    let range = IpNet::new(address, route.header.destination_prefix_length).ok()?;
    Some((table, range))
}

fn route(index: u32, table: u32, range: IpNet, source: IpAddr) -> RouteMessage {
    let mut message = match (range, source) {
        (IpNet::V4(range), IpAddr::V4(source)) => RouteMessageBuilder::<Ipv4Addr>::new()
            .destination_prefix(range.addr(), range.prefix_len())
            .gateway(NEXT_HOP)
            .output_interface(index)
            .table_id(table)
            .pref_source(source)
            .build(),
        (range, source) => {
            let v6 = |address: IpAddr| match address {
                IpAddr::V4(address) => address.to_ipv6_mapped(),
                IpAddr::V6(address) => address,
            };
            RouteMessageBuilder::<Ipv6Addr>::new()
                .destination_prefix(v6(range.addr()), range.prefix_len())
                .gateway(NEXT_HOP6)
                .output_interface(index)
                .table_id(table)
                .pref_source(v6(source))
                .build()
        }
    };
    message.header.flags |= RouteFlags::Onlink;
    message
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_tables_have_the_routes_and_each_family_its_own_source() {
        let net = |text: &str| text.parse::<IpNet>().unwrap();
        let plan = HostPlan {
            addresses: vec!["10.42.0.9".parse().unwrap()],
            ranges: [net("10.42.0.0/16"), net("fd00:42::/64")].into(),
            services: [net("10.96.0.0/12")].into(),
        };
        let routes: Vec<_> = plan
            .routes()
            .map(|(table, range, source)| format!("{table} {range} {source}"))
            .collect();
        assert_eq!(
            routes,
            [
                "6081 10.42.0.0/16 10.42.0.9",
                "6082 10.42.0.0/16 10.42.0.9",
                "6081 10.96.0.0/12 10.42.0.9",
                "6082 10.96.0.0/12 10.42.0.9",
            ]
        );
    }
}
