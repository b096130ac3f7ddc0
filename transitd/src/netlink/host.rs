//! Host state that the node needs once, no matter which pods it has: the source address towards pods, the rules to the
//! table of pods, rp_filter, and the route that ends what is sent to the address that only conntrack knows. IPv6 needs
//! only the rules and that route, and only once a pod has IPv6: the source address is link-local, on each host end.
//!
//! This module doesn't change IP forwarding: only the way out of a VPC needs it, and Kubernetes nodes have it on.

use std::net::{Ipv4Addr, Ipv6Addr};
use std::path::Path;

use netlink_packet_route::route::{RouteMessage, RouteType};
use netlink_packet_route::rule::{RuleAction, RuleAttribute};
use rtnetlink::{Handle, RouteMessageBuilder, RuleAddRequest};
use thuban_common::host_stack::{MARK_ANSWER, MARK_MASK, POD_TABLE, RULE_PRIORITY};
use thuban_common::tables::{HOST_SOURCE, HOST_TRACKED, HOST_TRACKED_V6};

use super::{NetlinkError, failed, find_link, sysctl, tolerate_exists, veth};

/// The link with the host's source address towards pods. A dummy link would do as well, but not every kernel has them.
const HOST_LINK: &str = "lo";

/// Sets up the host; idempotent. Runs at each start.
pub async fn setup(handle: &Handle, proc_sys_net: &Path, uplink: &str) -> Result<(), NetlinkError> {
    sysctl::disable_rp_filter(proc_sys_net, "all")?;
    sysctl::disable_rp_filter(proc_sys_net, uplink)?;
    let link = find_link(handle, HOST_LINK)
        .await?
        .ok_or_else(|| NetlinkError::NoInterface(HOST_LINK.into()))?;
    veth::add_address(handle, link.header.index, Ipv4Addr::from(HOST_SOURCE).into(), 32).await?;
    let tracked = RouteMessageBuilder::<Ipv4Addr>::new().destination_prefix(HOST_TRACKED.into(), 32);
    end_here(handle, tracked.build()).await?;
    add_rules(|| handle.rule().add().v4()).await
}

/// Sets up the rules and the route for IPv6; idempotent. Runs before a pod with IPv6 is connected, and at each start
/// with such pods.
pub async fn setup_ipv6(handle: &Handle) -> Result<(), NetlinkError> {
    let tracked = RouteMessageBuilder::<Ipv6Addr>::new().destination_prefix(HOST_TRACKED_V6.into(), 128);
    end_here(handle, tracked.build()).await?;
    add_rules(|| handle.rule().add().v6()).await
}

/// Drops packets to the destination that conntrack has not translated, whatever rules of netfilter the node has. Routes
/// of the local table come before all others.
async fn end_here(handle: &Handle, mut route: RouteMessage) -> Result<(), NetlinkError> {
    route.header.table = libc::RT_TABLE_LOCAL;
    route.header.kind = RouteType::BlackHole;
    let added = handle.route().add(route).execute().await;
    tolerate_exists(added).map_err(failed("add a route to", "the address that conntrack alone knows"))
}

/// Adds the rules by which the table of pods is used for packets that the host itself sends, and for answers from
/// outside. The kernel knows whether a rule is there. Listing rules first would fail while another request of this
/// socket lists anything.
async fn add_rules<T>(rule: impl Fn() -> RuleAddRequest<T>) -> Result<(), NetlinkError> {
    add_rule(rule().input_interface("lo"), POD_TABLE).await?;
    add_rule(marked(rule(), MARK_ANSWER), POD_TABLE).await
}

/// Makes packets with this mark use a table. Idempotent.
pub async fn route_marked(handle: &Handle, mark: u32, table: u32, with_v6: bool) -> Result<(), NetlinkError> {
    add_rule(marked(handle.rule().add().v4(), mark), table).await?;
    if with_v6 {
        add_rule(marked(handle.rule().add().v6(), mark), table).await?;
    }
    Ok(())
}

fn marked<T>(rule: RuleAddRequest<T>, mark: u32) -> RuleAddRequest<T> {
    let mut rule = rule.fw_mark(mark);
    let mask = RuleAttribute::FwMask(MARK_MASK);
    rule.message_mut().attributes.push(mask);
    rule
}

async fn add_rule<T>(rule: RuleAddRequest<T>, table: u32) -> Result<(), NetlinkError> {
    let rule = rule
        .table_id(table)
        .priority(RULE_PRIORITY)
        .action(RuleAction::ToTable);
    tolerate_exists(rule.execute().await).map_err(failed("add a rule to table", table))
}
