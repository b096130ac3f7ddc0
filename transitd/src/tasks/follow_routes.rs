//! Follows the node's routes, so that programs know which droplets the uplink reaches without a gateway.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use ipnet::Ipv4Net;
use rtnetlink::MulticastGroup;
use tokio::time::{MissedTickBehavior, interval, sleep};
use tracing::{info, warn};

use crate::dataplane::tables::write_on_link;
use crate::netlink::{self, on_link};
use crate::node::Node;

/// How long to wait after a change: changes come in crowds.
const SETTLE: Duration = Duration::from_millis(100);

/// Runs until the daemon ends.
pub async fn run(node: Arc<Node>) {
    let mut changes = netlink::changes(&[
        MulticastGroup::Link,
        MulticastGroup::Ipv4Ifaddr,
        MulticastGroup::Ipv4Route,
        MulticastGroup::Ipv4Rule,
    ]);
    let mut scan = interval(Duration::from_secs(node.settings.scan_interval));
    scan.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut known = None;
    loop {
        tokio::select! {
            _ = scan.tick() => {}
            Some(_) = changes.next() => sleep(SETTLE).await,
        }
        while changes.try_recv().is_ok() {}
        let range = find(&node).await;
        if known == Some(range) {
            continue;
        }
        match write_on_link(&node.settings.pins.maps(), on_link::entry(range)) {
            Ok(()) => {
                known = Some(range);
                info!(
                    range = range.map(tracing::field::display),
                    "the range of droplets that are reached without a gateway"
                );
            }
            Err(error) => warn!(
                error = &error as &dyn std::error::Error,
                "packets may go to droplets by the routes that the node had before"
            ),
        }
    }
}

/// Returns the range, or nothing if the kernel does not tell.
async fn find(node: &Node) -> Option<Ipv4Net> {
    let look = async { on_link::find(&netlink::connect()?, &node.uplink).await };
    netlink::in_time(look).await.unwrap_or_else(|error| {
        warn!(
            error = &error as &dyn std::error::Error,
            "the kernel routes each packet to other droplets"
        );
        None
    })
}
