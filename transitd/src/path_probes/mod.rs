//! Probes of paths: the operator asks what this droplet's programs do with the first packet of a flow. If the flow's
//! pod is here, the pod also sends the packet.
//!
//! Invariant: a probe ends within [`TRACE_TIME`] and little more. A droplet has [`MAX_PROBES`] at once, so that there
//! is always room for `transitd trace`. A pod sends one packet in [`SEND_PAUSE`], whoever asks.

mod flow;
mod send;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use thuban_common::tables::TraceRecord;
use thuban_proto::transit::droplet_message::Message;
use thuban_proto::transit::{Probe, ProbeAnswer, Probed};
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout, timeout_at};
use tokio_stream::StreamExt;
use tracing::warn;

use crate::attachments::Attachment;
use crate::dataplane::ring::decode;
use crate::follow::followers::Replies;
use crate::netlink::{NetlinkError, namespace};
use crate::node::Node;
use flow::{Flow, Seen};

/// The most probes of a droplet at once: fewer than may follow the ring buffer.
const MAX_PROBES: usize = 4;
/// The time between two packets of a pod.
const SEND_PAUSE: Duration = Duration::from_secs(1);
/// How long programs' records of a flow are awaited.
const TRACE_TIME: Duration = Duration::from_secs(3);
/// How long further records of the packet are awaited after the first one. TCP sends a packet again after 1 s.
const PASS_TIME: Duration = Duration::from_millis(300);
/// How long the records of a packet are awaited after its answer.
const SETTLE_TIME: Duration = Duration::from_millis(500);

/// The bounds of this droplet's probes.
#[derive(Debug)]
pub struct PathProbes {
    slots: Semaphore,
    /// When pods sent their last packet, by UID.
    sent: Mutex<HashMap<String, Instant>>,
}

impl Default for PathProbes {
    fn default() -> Self {
        Self {
            slots: Semaphore::new(MAX_PROBES),
            sent: Mutex::default(),
        }
    }
}

impl PathProbes {
    /// Whether a pod may send a packet now. Notes that the pod does.
    fn may_send(&self, pod_uid: &str) -> bool {
        let mut sent = self.sent.lock().unwrap_or_else(PoisonError::into_inner);
        sent.retain(|_, at| at.elapsed() < SEND_PAUSE);
        if sent.contains_key(pod_uid) {
            return false;
        }
        sent.insert(pod_uid.to_owned(), Instant::now());
        true
    }
}

/// Does what the operator asks, and tells the operator.
pub async fn run(node: Arc<Node>, asked: Probe) {
    let Some(flow) = Flow::read(&asked) else {
        return;
    };
    let (seen, answer) = match node.path_probes.slots.try_acquire() {
        Ok(_slot) => probe(&node, flow, asked.send).await,
        Err(_) if asked.send => (Seen::default(), ProbeAnswer::Busy),
        Err(_) => (Seen::default(), ProbeAnswer::Unspecified),
    };
    let probed = Probed {
        id: asked.id,
        sightings: seen.sightings(),
        answer: answer.into(),
    };
    node.state().send(Message::Probed(probed));
}

async fn probe(node: &Node, flow: Flow, is_sent: bool) -> (Seen, ProbeAnswer) {
    // The records come from here on.
    let following = node.traces.follow(vec![flow.source]).inspect_err(|error| {
        warn!(
            error = error as &dyn std::error::Error,
            "a probe's packet can't be followed on this node"
        );
    });
    let collecting = following.ok().map(|replies| tokio::spawn(collect(replies, flow)));
    let (answer, limit) = if is_sent {
        (send_from_pod(node, flow).await, SETTLE_TIME)
    } else {
        (ProbeAnswer::Unspecified, TRACE_TIME + SETTLE_TIME)
    };
    let Some(mut collecting) = collecting else {
        return (Seen::default(), answer);
    };
    let Ok(seen) = timeout(limit, &mut collecting).await else {
        collecting.abort();
        // The task must not outlast the probe, because it takes the place of a follower.
        let _ = collecting.await;
        return (Seen::default(), answer);
    };
    (seen.unwrap_or_default(), answer)
}

/// Collects the records of a flow's first packet.
async fn collect(mut replies: Replies, flow: Flow) -> Seen {
    let mut seen = Seen::default();
    let mut end = Instant::now() + TRACE_TIME;
    // The pod may send so much else that there is always a record.
    while Instant::now() < end {
        let Ok(Some(Ok(reply))) = timeout_at(end, replies.next()).await else {
            break;
        };
        // Replies without a record tell of losses.
        let record = decode::<TraceRecord>(&reply.record).filter(|record| flow.has(record));
        let Some(record) = record else {
            continue;
        };
        if seen.is_empty() {
            end = end.min(Instant::now() + PASS_TIME);
        }
        seen.note(record);
    }
    seen
}

/// Has the pod send the packet, and waits for the answer.
async fn send_from_pod(node: &Node, flow: Flow) -> ProbeAnswer {
    let Some(attachment) = attachment_of(node, flow) else {
        return ProbeAnswer::NoPod;
    };
    if !node.path_probes.may_send(&attachment.pod_uid) {
        return ProbeAnswer::TooOften;
    }
    let path = PathBuf::from(&attachment.netns);
    let Ok(pod_namespace) = namespace::open(&path) else {
        return ProbeAnswer::NoPod;
    };
    let sent = namespace::run(pod_namespace, &path, async move || {
        Ok::<_, NetlinkError>(send::send(flow).await)
    })
    .await;
    sent.unwrap_or_else(|error| {
        warn!(
            pod = attachment.pod(),
            error = &error as &dyn std::error::Error,
            "a probe's packet can't be sent from the pod"
        );
        ProbeAnswer::Failed
    })
}

/// Returns the attachment that carries the traffic of the flow's pod.
fn attachment_of(node: &Node, flow: Flow) -> Option<Attachment> {
    let state = node.state();
    let attached = state.attachments.values();
    // The node's own endpoint is no pod.
    let own = attached
        .filter(|attachment| !attachment.is_host() && attachment.keys().any(|key| key == flow.source));
    own.max_by_key(|attachment| attachment.generation).cloned()
}

#[cfg(test)]
mod tests {
    use super::{PathProbes, SEND_PAUSE};

    #[tokio::test(start_paused = true)]
    async fn a_pod_sends_once_in_a_while_and_holds_up_no_other() {
        let probes = PathProbes::default();
        assert!(probes.may_send("one"));
        assert!(!probes.may_send("one"));
        assert!(probes.may_send("other"));
        tokio::time::advance(SEND_PAUSE).await;
        assert!(probes.may_send("one"));
        assert_eq!(probes.sent.lock().unwrap().len(), 1, "older ones are forgotten");
    }
}
