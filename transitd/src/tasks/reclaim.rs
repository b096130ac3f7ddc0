//! Finds leftovers: DELs that the plugin spooled, and attachments whose DEL was lost. An attachment is a leftover if
//! both the pod's namespace and the veth are gone. It is one too if its runtime had the same interface of the same pod
//! made once more, and the operator still has one endpoint for both. A runtime does that only when it knows of no
//! sandbox of the pod (a runtime that dies between ADD and remembering the sandbox keeps the namespace and never sends
//! a DEL).
//!
//! Conservative: one source alone proves nothing, and two looks in a row must agree.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tracing::{info, warn};

use crate::attachments::{Attachment, AttachmentId};
use crate::cni::{del, spool};
use crate::dataplane::tables::TableKey;
use crate::metrics::{self, Reclaimed};
use crate::netlink::{find_link, namespace};
use crate::node::Node;
use crate::state::State;

/// Runs until the daemon ends.
pub async fn run(node: Arc<Node>) {
    let mut interval = tokio::time::interval(Duration::from_secs(node.settings.scan_interval.div_ceil(2)));
    interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut suspects = Suspects::default();
    spool::sweep(&node);
    loop {
        interval.tick().await;
        spool::drain(&node).await;
        let mut gone = gone(&node).await;
        gone.extend(superseded(&node.state()));
        for id in suspects.confirmed_by(gone) {
            match del::remove(&node, &id).await {
                Ok(()) => {
                    metrics::reclaims(Reclaimed::Attachment, 1);
                    info!(
                        container_id = id.container_id,
                        "an attachment without its pod was removed"
                    );
                }
                Err(error) => {
                    warn!(
                        container_id = id.container_id,
                        error = &error as &dyn std::error::Error,
                        "an attachment without its pod could not be removed, it is tried again"
                    );
                }
            }
        }
    }
}

/// The attachments that the last look took for gone.
#[derive(Debug, Default)]
struct Suspects(BTreeSet<AttachmentId>);

impl Suspects {
    /// Returns the attachments that both this look and the last one take for gone.
    fn confirmed_by(&mut self, gone: BTreeSet<AttachmentId>) -> Vec<AttachmentId> {
        let confirmed = gone.intersection(&self.0).cloned().collect();
        self.0 = gone;
        confirmed
    }
}

/// Returns the attachments whose pod has a newer one that carries its traffic.
fn superseded(state: &State) -> Vec<AttachmentId> {
    let carries = |newer: &Attachment| {
        let key = TableKey::Attachment(newer.host_ifindex);
        state.synced && state.tables.get(&key).is_some()
    };
    let all = state.attachments.values();
    let old = all.clone().filter(|old| {
        all.clone().any(|newer| {
            (&newer.pod_uid, &newer.id.ifname) == (&old.pod_uid, &old.id.ifname)
                && newer.generation > old.generation
                && carries(newer)
        })
    });
    old.map(|old| old.id.clone()).collect()
}

async fn gone(node: &Node) -> BTreeSet<AttachmentId> {
    let attachments: Vec<_> = node.state().attachments.values().cloned().collect();
    let mut gone = BTreeSet::new();
    for attachment in attachments {
        let no_namespace = !namespace::exists(Path::new(&attachment.netns));
        let no_veth = matches!(
            find_link(&node.netlink, &attachment.host_interface).await,
            Ok(None)
        );
        if no_namespace && no_veth {
            gone.insert(attachment.id);
        }
    }
    gone
}

#[cfg(test)]
mod tests {
    use super::{AttachmentId, Suspects};

    #[test]
    fn only_two_looks_in_a_row_prove_that_a_pod_is_gone() {
        let ids = ["c1", "c2"].map(|container| AttachmentId::new(container, "eth0").unwrap());
        let [first, second] = &ids;
        let mut suspects = Suspects::default();
        let mut look =
            |gone: &[&AttachmentId]| suspects.confirmed_by(gone.iter().copied().cloned().collect());
        assert_eq!(look(&[first]), []);
        assert_eq!(look(&[second]), [], "the first one is there again");
        assert_eq!(look(&[first, second]), ids[1..]);
        assert_eq!(look(&[]), []);
        assert_eq!(look(&[first]), []);
    }
}
