//! Finds out that the uplink has changed: it was made anew, or has another address or another MTU.
//!
//! transit, the rules and the node's configuration are made for one uplink at start. So the daemon ends when the
//! uplink changes, and its supervisor starts it anew. Until then packets of other nodes go nowhere. If the uplink is
//! away, the task waits for it.

use std::time::Duration;

use futures::StreamExt;
use rtnetlink::MulticastGroup;
use tokio::time::{MissedTickBehavior, interval, sleep};

use crate::netlink::uplink::{self, Uplink};
use crate::netlink::{self, NetlinkError};
use crate::node::Node;

/// How long to wait after a change: a new uplink gets its address and its MTU one after the other, and pods' links
/// come in crowds.
const SETTLE: Duration = Duration::from_secs(1);

/// Returns the uplink that there is now, when it is not the one that the daemon was started with.
pub async fn run(node: &Node) -> Uplink {
    let mut changes = netlink::changes(&[MulticastGroup::Link, MulticastGroup::Ipv4Ifaddr]);
    let mut scan = interval(Duration::from_secs(node.settings.scan_interval));
    scan.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut seen = node.uplink.clone();
    loop {
        if seen == node.uplink {
            tokio::select! {
                _ = scan.tick() => {}
                Some(_) = changes.next() => {}
            }
        }
        sleep(SETTLE).await;
        while changes.try_recv().is_ok() {}
        let Ok(now) = find(node).await else {
            continue;
        };
        if now != node.uplink && now == seen {
            return now;
        }
        seen = now;
    }
}

async fn find(node: &Node) -> Result<Uplink, NetlinkError> {
    let settings = &node.settings;
    let look = async {
        uplink::find(
            &netlink::connect()?,
            settings.interface.as_deref(),
            settings.node_ip,
        )
        .await
    };
    netlink::in_time(look).await
}
