//! What the node needs once, whatever pods it has: the source address towards pods, the rule to the table of pods, rp_filter.
//!
//! IP forwarding is not touched: only a default VPC's way out of the node needs it, and Kubernetes nodes have it on.

use std::net::Ipv4Addr;
use std::path::Path;

use futures::TryStreamExt;
use netlink_packet_route::rule::{RuleAction, RuleAttribute, RuleMessage};
use rtnetlink::{Handle, IpVersion};
use thuban_common::tables::HOST_SOURCE;

use super::{NetlinkError, POD_TABLE, failed, find_link, sysctl, veth};

/// Carries the host's source address towards pods; a dummy link would do as well, but not every kernel has them.
const HOST_LINK: &str = "lo";
/// Before the main table (32766), after the local one (0).
const RULE_PRIORITY: u32 = 6081;

/// Idempotent; run at each start.
pub async fn setup(handle: &Handle, proc_sys_net: &Path, uplink: &str) -> Result<(), NetlinkError> {
    sysctl::disable_rp_filter(proc_sys_net, "all")?;
    sysctl::disable_rp_filter(proc_sys_net, uplink)?;
    let link = find_link(handle, HOST_LINK)
        .await?
        .ok_or_else(|| NetlinkError::NoInterface(HOST_LINK.into()))?;
    veth::add_address(handle, link.header.index, Ipv4Addr::from(HOST_SOURCE), 32).await?;
    if !has_rule(handle).await? {
        handle
            .rule()
            .add()
            .v4()
            .input_interface("lo")
            .table_id(POD_TABLE)
            .priority(RULE_PRIORITY)
            .action(RuleAction::ToTable)
            .execute()
            .await
            .map_err(failed("add the rule to table", POD_TABLE))?;
    }
    Ok(())
}

async fn has_rule(handle: &Handle) -> Result<bool, NetlinkError> {
    let rules: Vec<RuleMessage> = handle
        .rule()
        .get(IpVersion::V4)
        .execute()
        .try_collect()
        .await
        .map_err(failed("list", "rules"))?;
    Ok(rules.iter().any(|rule| {
        rule.attributes.contains(&RuleAttribute::Table(POD_TABLE))
            && rule.attributes.contains(&RuleAttribute::Priority(RULE_PRIORITY))
            && rule.attributes.contains(&RuleAttribute::Iifname("lo".into()))
    }))
}
