//! The bytes that interfaces have received and sent, as the kernel counts them. Reads only.

use std::collections::HashMap;

use futures::TryStreamExt;
use netlink_packet_route::link::LinkAttribute;
use rtnetlink::Handle;

use super::{NetlinkError, failed};

/// Bytes of one interface since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    pub received: u64,
    pub sent: u64,
}

/// Returns the bytes of all interfaces of the calling thread's namespace, by ifindex.
pub async fn read(handle: &Handle) -> Result<HashMap<u32, Traffic>, NetlinkError> {
    let mut links = handle.link().get().execute();
    let mut found = HashMap::new();
    while let Some(link) = links.try_next().await.map_err(failed("list", "links"))? {
        let counted = link.attributes.iter().find_map(|attribute| match attribute {
            LinkAttribute::Stats64(counted) => Some(Traffic {
                received: counted.rx_bytes,
                sent: counted.tx_bytes,
            }),
            _ => None,
        });
        found.extend(counted.map(|traffic| (link.header.index, traffic)));
    }
    Ok(found)
}
