//! Finds the range of droplets that the uplink reaches without a gateway.
//!
//! Invariant: for each address of that range, the kernel's own look-up of a route out of the uplink would find no
//! gateway either. In doubt there is no range, and the kernel is asked for each packet.

use std::net::Ipv4Addr;

use futures::TryStreamExt;
use ipnet::Ipv4Net;
use netlink_packet_route::route::{RouteAddress, RouteAttribute, RouteMessage, RouteScope, RouteType};
use netlink_packet_route::rule::{RuleAction, RuleAttribute, RuleMessage};
use rtnetlink::{Handle, IpVersion, RouteMessageBuilder};
use thuban_common::tables::OnLinkEntry;

use super::uplink::Uplink;
use super::{NetlinkError, failed};

/// Tables of routes, of linux/rtnetlink.h. The kernel asks them in the order local, main, default.
const DEFAULT: u32 = 253;
const MAIN: u32 = 254;
const LOCAL: u32 = 255;

/// Asks the kernel. Observes only.
pub async fn find(handle: &Handle, uplink: &Uplink) -> Result<Option<Ipv4Net>, NetlinkError> {
    let rules: Vec<RuleMessage> = handle
        .rule()
        .get(IpVersion::V4)
        .execute()
        .try_collect()
        .await
        .map_err(failed("list", "rules"))?;
    let routes: Vec<RouteMessage> = handle
        .route()
        .get(RouteMessageBuilder::<Ipv4Addr>::new().build())
        .execute()
        .try_collect()
        .await
        .map_err(failed("list", "routes"))?;
    Ok(range(&rules, &routes, uplink))
}

/// Returns the entry of a range.
pub fn entry(range: Option<Ipv4Net>) -> OnLinkEntry {
    range.map_or(OnLinkEntry::NONE, |range| OnLinkEntry {
        network: range.network().octets(),
        mask: range.netmask().octets(),
    })
}

/// Returns the range of the uplink's own route in the main table, unless another route or rule may lead an address of
/// it elsewhere.
fn range(rules: &[RuleMessage], routes: &[RouteMessage], uplink: &Uplink) -> Option<Ipv4Net> {
    let tables = tables(rules)?;
    let own = routes.iter().filter(|route| {
        table(route) == MAIN && route.header.scope == RouteScope::Link && is_direct(route, uplink.ifindex)
    });
    let own = own
        .filter_map(destination)
        .filter(|to| to.contains(&uplink.address));
    let range = own
        .max_by_key(Ipv4Net::prefix_len)
        .filter(|range| range.prefix_len() > 0)?;
    let may_differ = |route: &RouteMessage| {
        let table = table(route);
        let Some(to) = destination(route) else {
            return true;
        };
        // After the main table's own route, wider routes count no more.
        let counts = range.contains(&to) || !matches!(table, MAIN | DEFAULT) && to.contains(&range);
        let is_asked = table != LOCAL && tables.contains(&table);
        is_asked && counts && !is_direct(route, uplink.ifindex) && !is_of_another(route, uplink.ifindex)
    };
    (!routes.iter().any(may_differ)).then_some(range)
}

/// Returns the tables that packets without a mark may be routed by; `None` if a rule does something else with them.
fn tables(rules: &[RuleMessage]) -> Option<Vec<u32>> {
    let is_marked = |rule: &&RuleMessage| {
        let mut attributes = rule.attributes.iter();
        attributes.any(|attribute| matches!(attribute, RuleAttribute::FwMark(mark) if *mark != 0))
    };
    let table = |rule: &RuleMessage| {
        let wide = rule.attributes.iter().find_map(|attribute| match attribute {
            RuleAttribute::Table(table) => Some(*table),
            _ => None,
        });
        (rule.header.action == RuleAction::ToTable).then_some(wide.unwrap_or(rule.header.table.into()))
    };
    let unmarked = rules.iter().filter(|rule| !is_marked(rule));
    let tables: Vec<u32> = unmarked.map(table).collect::<Option<_>>()?;
    tables.contains(&MAIN).then_some(tables)
}

fn table(route: &RouteMessage) -> u32 {
    let wide = route.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Table(table) => Some(*table),
        _ => None,
    });
    wide.unwrap_or(route.header.table.into())
}

fn destination(route: &RouteMessage) -> Option<Ipv4Net> {
    let address = route.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Destination(RouteAddress::Inet(address)) => Some(*address),
        _ => None,
    });
    let prefix = route.header.destination_prefix_length;
    Ipv4Net::new(address.unwrap_or(Ipv4Addr::UNSPECIFIED), prefix).ok()
}

/// Whether a route leads out of this interface without a gateway.
fn is_direct(route: &RouteMessage, interface: u32) -> bool {
    let has_hop = route.attributes.iter().any(|attribute| {
        matches!(
            attribute,
            RouteAttribute::Gateway(_) | RouteAttribute::Via(_) | RouteAttribute::Encap(_)
        )
    });
    is_plain(route) && !has_hop && route.attributes.contains(&RouteAttribute::Oif(interface))
}

/// Whether a route leads out of another interface. Routes out of the uplink are looked for, so it is passed over.
fn is_of_another(route: &RouteMessage, interface: u32) -> bool {
    let mut attributes = route.attributes.iter();
    let other =
        attributes.any(|attribute| matches!(attribute, RouteAttribute::Oif(index) if *index != interface));
    is_plain(route) && other
}

/// Whether a route is for packets to one destination by one interface.
fn is_plain(route: &RouteMessage) -> bool {
    let has_choice = route
        .attributes
        .iter()
        .any(|attribute| matches!(attribute, RouteAttribute::MultiPath(_) | RouteAttribute::NhId(_)));
    route.header.kind == RouteType::Unicast && !has_choice
}
