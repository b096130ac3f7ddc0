//! Finds out that the uplink has changed: it was made anew, or has another address or another MTU.
//!
//! transit, the rules and the node's configuration are made for one uplink at start. So the daemon ends when the
//! uplink changes, and its supervisor starts it anew. Until then packets of other nodes go nowhere. If the uplink is
//! away, the task waits for it.

use std::io;
use std::time::Duration;

use futures::StreamExt;
use futures::channel::mpsc::UnboundedReceiver;
use rtnetlink::packet_core::NetlinkMessage;
use rtnetlink::packet_route::RouteNetlinkMessage;
use rtnetlink::sys::SocketAddr;
use rtnetlink::{Handle, MulticastGroup, new_multicast_connection};
use tokio::time::{MissedTickBehavior, interval, sleep};
use tracing::warn;

use crate::netlink::uplink::{self, Uplink};
use crate::netlink::{self, NetlinkError};
use crate::node::Node;

/// How long to wait after a change: a new uplink gets its address and its MTU one after the other, and pods' links
/// come in crowds.
const SETTLE: Duration = Duration::from_secs(1);

type Changes = UnboundedReceiver<(NetlinkMessage<RouteNetlinkMessage>, SocketAddr)>;

/// Returns the uplink that there is now, when it is not the one that the daemon was started with.
pub async fn run(node: &Node) -> Uplink {
    let mut changes = changes().unwrap_or_else(|error| {
        warn!(
            error = &error as &dyn std::error::Error,
            "changes of links are not heard of, only looked for at each scan"
        );
        futures::channel::mpsc::unbounded().1
    });
    // The kernel refuses a second dump on a connection that has one (EBUSY), and other tasks list things on the node's
    // connection.
    let netlink = netlink::connect().unwrap_or_else(|_| node.netlink.clone());
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
        let Ok(now) = find(node, &netlink).await else {
            continue;
        };
        if now != node.uplink && now == seen {
            return now;
        }
        seen = now;
    }
}

async fn find(node: &Node, netlink: &Handle) -> Result<Uplink, NetlinkError> {
    let settings = &node.settings;
    uplink::find(netlink, settings.interface.as_deref(), settings.node_ip).await
}

/// Opens a socket that reports each change of a link or an IPv4 address.
fn changes() -> io::Result<Changes> {
    let groups = [MulticastGroup::Link, MulticastGroup::Ipv4Ifaddr];
    let (connection, _, changes) = new_multicast_connection(&groups)?;
    tokio::spawn(connection);
    Ok(changes)
}
