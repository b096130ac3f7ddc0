//! Finds the range of droplets that the uplink reaches without a gateway.
//!
//! Invariant: for each address of that range, the kernel's own look-up of a route out of the uplink, for a packet
//! without a mark, would find no gateway either. In doubt there is no range, and the kernel is asked for each packet.

use std::net::Ipv4Addr;

use futures::TryStreamExt;
use ipnet::Ipv4Net;
use netlink_packet_route::route::{RouteAddress, RouteAttribute, RouteMessage, RouteScope, RouteType};
use netlink_packet_route::rule::{RuleAction, RuleAttribute, RuleFlags, RuleMessage};
use rtnetlink::{Handle, IpVersion, RouteMessageBuilder};
use thuban_common::host_stack::PROXY_TABLE;
use thuban_common::tables::OnLinkEntry;

use super::uplink::Uplink;
use super::{NetlinkError, failed, table};

/// Tables of routes, of linux/rtnetlink.h.
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
        let is_for_all = route.header.scope == RouteScope::Link && route.header.tos == 0;
        table(route) == MAIN && is_for_all && is_direct(route, uplink.ifindex)
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
        // Beside the main table's own route its wider routes don't count. Other tables may be asked before.
        let counts = range.contains(&to) || table != MAIN && to.contains(&range);
        // The kernel's own entries of the table of local addresses are of other types. HAProxy's table is for TCP.
        let is_own = table == LOCAL && route.header.kind != RouteType::Unicast || table == PROXY_TABLE;
        let is_asked = !is_own && tables.contains(&table);
        is_asked && counts && !is_direct(route, uplink.ifindex) && !is_of_another(route, uplink.ifindex)
    };
    (!routes.iter().any(may_differ)).then_some(range)
}

/// Returns the tables that packets without a mark may be routed by; `None` if a rule does something else with them.
fn tables(rules: &[RuleMessage]) -> Option<Vec<u32>> {
    let table = |rule: &RuleMessage| {
        let wide = rule.attributes.iter().find_map(|attribute| match attribute {
            RuleAttribute::Table(table) => Some(*table),
            _ => None,
        });
        // The rule of VRFs names no table: it is that of the interface.
        let is_vrfs = rule.attributes.contains(&RuleAttribute::L3MDev(true));
        let is_known = rule.header.action == RuleAction::ToTable && !is_vrfs;
        is_known.then_some(wide.unwrap_or(rule.header.table.into()))
    };
    let unmarked = rules.iter().filter(|rule| !is_for_marks(rule));
    let tables: Vec<u32> = unmarked.map(table).collect::<Option<_>>()?;
    tables.contains(&MAIN).then_some(tables)
}

/// Whether a rule matches no packet without a mark.
fn is_for_marks(rule: &RuleMessage) -> bool {
    let (mut mark, mut mask) = (0, u32::MAX);
    for attribute in &rule.attributes {
        match attribute {
            RuleAttribute::FwMark(wanted) => mark = *wanted,
            RuleAttribute::FwMask(bits) => mask = *bits,
            _ => {}
        }
    }
    mark & mask != 0 && !rule.header.flags.contains(RuleFlags::Invert)
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

#[cfg(test)]
mod tests {
    use super::*;

    const UPLINK: u32 = 2;

    fn uplink() -> Uplink {
        Uplink {
            name: "up0".into(),
            ifindex: UPLINK,
            address: Ipv4Addr::new(192, 0, 2, 1),
            mtu: 1500,
        }
    }

    fn rule(table: u8) -> RuleMessage {
        let mut rule = RuleMessage::default();
        rule.header.action = RuleAction::ToTable;
        rule.header.table = table;
        rule
    }

    fn rules() -> Vec<RuleMessage> {
        [255, 254, 253].into_iter().map(rule).collect()
    }

    fn route(to: [u8; 4], prefix: u8, table: u32) -> RouteMessage {
        RouteMessageBuilder::<Ipv4Addr>::new()
            .destination_prefix(to.into(), prefix)
            .output_interface(UPLINK)
            .table_id(table)
            .scope(RouteScope::Link)
            .build()
    }

    fn by_gateway(to: [u8; 4], prefix: u8, table: u32) -> RouteMessage {
        let mut route = route(to, prefix, table);
        let gateway = RouteAddress::Inet(Ipv4Addr::new(192, 0, 2, 9));
        route.attributes.push(RouteAttribute::Gateway(gateway));
        route
    }

    fn own() -> RouteMessage {
        route([192, 0, 2, 0], 24, MAIN)
    }

    #[test]
    fn the_uplinks_own_route_is_the_range() {
        let found = range(&rules(), &[own(), by_gateway([0; 4], 0, MAIN)], &uplink());
        assert_eq!(found, Some("192.0.2.0/24".parse().unwrap()));
        assert_eq!(range(&rules(), &[], &uplink()), None);
        let mut for_some = own();
        for_some.header.tos = 0x10;
        assert_eq!(range(&rules(), &[for_some], &uplink()), None);
    }

    #[test]
    fn a_route_that_may_lead_elsewhere_takes_the_range_away() {
        for (to, prefix, table) in [
            ([192, 0, 2, 2], 32, MAIN),
            ([192, 0, 2, 0], 24, MAIN),
            ([192, 0, 2, 2], 32, LOCAL),
            ([0; 4], 0, 253),
        ] {
            let other = by_gateway(to, prefix, table);
            assert_eq!(
                range(&rules(), &[own(), other], &uplink()),
                None,
                "{to:?} {table}"
            );
        }
        let mut local = route([192, 0, 2, 1], 32, LOCAL);
        local.header.kind = RouteType::Local;
        assert!(range(&rules(), &[own(), local], &uplink()).is_some());
        // Nothing of the tunnel goes by HAProxy's table.
        let mut proxied = route([192, 0, 2, 77], 32, PROXY_TABLE);
        proxied.header.kind = RouteType::Local;
        let mut for_tcp = rule(0);
        for_tcp.attributes.push(RuleAttribute::Table(PROXY_TABLE));
        let with_rule = [rules(), vec![for_tcp]].concat();
        assert!(range(&with_rule, &[own(), proxied], &uplink()).is_some());
    }

    #[test]
    fn a_rule_counts_if_it_matches_packets_without_a_mark() {
        let routes = [own(), by_gateway([0; 4], 0, 100)];
        let with = |mark: u32, mask: Option<u32>, is_inverted: bool| {
            let mut own = rule(100);
            own.attributes.push(RuleAttribute::FwMark(mark));
            own.attributes.extend(mask.map(RuleAttribute::FwMask));
            if is_inverted {
                own.header.flags |= RuleFlags::Invert;
            }
            let mut rules = rules();
            rules.push(own);
            range(&rules, &routes, &uplink()).is_some()
        };
        assert!(with(1, None, false));
        assert!(with(0x50, Some(0xff), false));
        assert!(!with(1, None, true));
        assert!(!with(0x10, Some(0x0f), false));
        assert!(!with(0, None, false));
        let mut vrfs = rule(0);
        vrfs.attributes.push(RuleAttribute::L3MDev(true));
        assert_eq!(range(&[rules(), vec![vrfs]].concat(), &[own()], &uplink()), None);
    }
}
