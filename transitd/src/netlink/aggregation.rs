//! Generic receive offload for Geneve: a VXLAN device that holds UDP port 6081.
//!
//! The kernel aggregates the segments of a tunnel only if a socket of a tunnel waits for them. A VXLAN header is as
//! long as a Geneve header without options and has the VNI at the same place. The kernel compares the VNI there but
//! doesn't interpret it. So segments of one inner flow reach the tc hook as one frame.
//!
//! Invariant: the device never gets a packet. Transit takes all Geneve for this droplet before. Other packets to the
//! port, by other addresses or in fragments, are dropped by table `inet thuban-overlay`, and by the device's list of
//! VNIs, which is empty.

use netlink_packet_route::link::{InfoData, InfoVxlan, LinkAttribute, LinkInfo, LinkMessage};
use rtnetlink::{Handle, LinkVxlan};
use thuban_common::tables::GENEVE_PORT;

use super::{NetlinkError, failed, find_link, tolerate_exists, tolerate_missing};

/// Name of the device.
pub const LINK: &str = "thuban-gro";

/// Makes the device; idempotent. Fails if the kernel has no VXLAN that filters VNIs, or if another tunnel has the
/// port.
pub async fn setup(handle: &Handle) -> Result<(), NetlinkError> {
    if find_link(handle, LINK)
        .await?
        .is_some_and(|link| !takes_nothing(&link))
    {
        // The device is of an earlier version. A device is made with the list or never gets it.
        teardown(handle).await?;
    }
    let link = LinkVxlan::new(LINK, 0)
        .collect_metadata(true)
        .vnifilter(true)
        .learning(false)
        .port(GENEVE_PORT)
        .build();
    tolerate_exists(handle.link().add(link).execute().await).map_err(failed("create", LINK))?;
    let link = find_link(handle, LINK)
        .await?
        .ok_or_else(|| NetlinkError::NoInterface(LINK.into()))?;
    if !takes_nothing(&link) {
        teardown(handle).await?;
        return Err(NetlinkError::NoVniFilter);
    }
    // The socket exists while the device is up.
    let up = rtnetlink::LinkUnspec::new_with_index(link.header.index)
        .up()
        .build();
    handle
        .link()
        .change(up)
        .execute()
        .await
        .map_err(failed("set up", LINK))
}

/// Removes the device. A missing device is success.
pub async fn teardown(handle: &Handle) -> Result<(), NetlinkError> {
    let Some(link) = find_link(handle, LINK).await? else {
        return Ok(());
    };
    tolerate_missing(handle.link().del(link.header.index).execute().await).map_err(failed("delete", LINK))
}

/// Whether the device takes listed VNIs alone; no VNI is ever listed.
fn takes_nothing(link: &LinkMessage) -> bool {
    let infos = link.attributes.iter().filter_map(|attribute| match attribute {
        LinkAttribute::LinkInfo(infos) => Some(infos),
        _ => None,
    });
    infos.flatten().any(|info| match info {
        LinkInfo::Data(InfoData::Vxlan(data)) => data.contains(&InfoVxlan::Vnifilter(true)),
        _ => false,
    })
}
