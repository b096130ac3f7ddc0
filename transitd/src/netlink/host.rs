//! What the node needs once, whatever pods it has: the source address towards pods, the rule to the table of pods, rp_filter.
//!
//! IP forwarding is not touched: only a default VPC's way out of the node needs it, and Kubernetes nodes have it on.

use std::net::Ipv4Addr;
use std::path::Path;

use futures::TryStreamExt;
use netlink_packet_route::rule::{RuleAction, RuleAttribute, RuleMessage};
use rtnetlink::{Handle, IpVersion, LinkDummy, LinkUnspec};
use thuban_common::tables::HOST_SOURCE;

use super::{NetlinkError, POD_TABLE, error_number, failed, find_link, sysctl, veth};

/// Carries the host's source address towards pods.
pub const HOST_LINK: &str = "thuban0";
/// Before the main table (32766), after the local one (0).
const RULE_PRIORITY: u32 = 6081;

/// Idempotent; run at each start.
pub async fn setup(handle: &Handle, proc_sys_net: &Path, uplink: &str) -> Result<(), NetlinkError> {
    sysctl::disable_rp_filter(proc_sys_net, "all")?;
    sysctl::disable_rp_filter(proc_sys_net, uplink)?;
    let index = host_link(handle).await?;
    let up = LinkUnspec::new_with_index(index).up().build();
    handle.link().change(up).execute().await.map_err(failed("set up", HOST_LINK))?;
    veth::add_address(handle, index, Ipv4Addr::from(HOST_SOURCE), 32).await?;
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

async fn host_link(handle: &Handle) -> Result<u32, NetlinkError> {
    if let Some(link) = find_link(handle, HOST_LINK).await? {
        return Ok(link.header.index);
    }
    match handle.link().add(LinkDummy::new(HOST_LINK).build()).execute().await {
        Ok(()) => {}
        Err(error) if error_number(&error) == Some(libc::EEXIST) => {}
        Err(source) => return Err(NetlinkError::Request { action: "create", object: HOST_LINK.into(), source }),
    }
    let link = find_link(handle, HOST_LINK).await?;
    link.map(|link| link.header.index).ok_or_else(|| NetlinkError::NoInterface(HOST_LINK.into()))
}

async fn has_rule(handle: &Handle) -> Result<bool, NetlinkError> {
    let rules: Vec<RuleMessage> =
        handle.rule().get(IpVersion::V4).execute().try_collect().await.map_err(failed("list", "rules"))?;
    Ok(rules.iter().any(|rule| {
        rule.attributes.contains(&RuleAttribute::Table(POD_TABLE))
            && rule.attributes.contains(&RuleAttribute::Priority(RULE_PRIORITY))
            && rule.attributes.contains(&RuleAttribute::Iifname("lo".into()))
    }))
}
