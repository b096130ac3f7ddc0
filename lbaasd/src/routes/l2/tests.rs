use kube::runtime::reflector::store;
use kube::runtime::reflector::store::Writer;
use kube::runtime::watcher::Event;
use serde_json::json;

use super::*;
use crate::routes::played::{Fault, Played};

/// Leases of nodes, with what watches say and what the API server has.
struct Rig {
    played: Arc<Played>,
    leases: NodeLeases,
    heard: Writer<Lease>,
    vips: Store<Vip>,
}

impl Rig {
    /// `owner`: the node and the number of the only Vip's entry.
    fn new(owner: Option<(&str, u64)>) -> Self {
        let played = Arc::new(Played::default());
        let (known, heard) = store();
        let (vips, mut writer) = store();
        let entry = owner.map(|(node, sequence)| json!({"node": node, "sequence": sequence}));
        writer.apply_watcher_event(&Event::Apply(vip(entry.as_slice())));
        let leases = NodeLeases::new(played.client(), known, 2, watch::Sender::new(0));
        Self {
            played,
            leases,
            heard,
            vips,
        }
    }

    /// Has the API server keep a Lease, and the watch say so.
    fn keep(&mut self, lease: &Lease) {
        self.played.keep(lease.clone());
        self.heard.apply_watcher_event(&Event::Apply(lease.clone()));
    }

    async fn look(&self, after: Duration) {
        sleep(after).await;
        self.leases.look(&self.vips).await;
    }

    fn expired(&self, node: &str) -> u64 {
        self.played
            .lease(node)
            .map_or(0, |lease| Numbers::read(&lease).expired)
    }
}

fn vip(announcers: &[serde_json::Value]) -> Vip {
    let vip = json!({"apiVersion": "thuban.dev/v1alpha1", "kind": "Vip",
        "metadata": {"name": "web", "namespace": "red", "uid": "v1"},
        "spec": {"service": "web", "ipFamilies": ["IPv4"]},
        "status": {"announce": "L2", "announcers": announcers}});
    serde_json::from_value(vip).unwrap()
}

fn lease(node: &str, answered: u64, expired: u64) -> Lease {
    let lease = json!({"metadata": {"name": node, "namespace": NAMESPACE, "uid": "l1",
            "annotations": {ANSWERED: answered.to_string(), EXPIRED: expired.to_string()}},
        "spec": {"leaseDurationSeconds": 2}});
    serde_json::from_value(lease).unwrap()
}

#[test]
fn a_request_is_answered_only_above_all_earlier_ones() {
    let first = Numbers::default().with_answer(5, 2).unwrap();
    assert_eq!((first.answered, first.expired, first.seconds), (5, 0, 2));
    assert_eq!(first.with_answer(5, 2), None, "another process answers it");
    assert_eq!(first.with_answer(4, 2), None, "given up");
    let over = Numbers { expired: 5, ..first };
    assert_eq!(over.with_answer(5, 2), None);
    assert_eq!(over.with_answer(6, 2).unwrap().expired, 5);
}

#[test]
fn a_longer_answer_counts_until_it_has_expired() {
    let long = Numbers::default().with_answer(5, 60).unwrap();
    let shorter = long.with_answer(6, 2).unwrap();
    assert_eq!(shorter.seconds, 60, "the node may use the former answer");
    let over = Numbers {
        expired: 6,
        ..shorter
    };
    assert_eq!(over.with_answer(7, 2).unwrap().seconds, 2);
    assert!(long.wait() > Duration::from_mins(1));
}

#[test]
fn clocks_that_are_slewed_end_no_answer_early() {
    let numbers = Numbers {
        seconds: 2,
        ..Numbers::default()
    };
    // One clock is slowed down by 83,333 millionths, the other one speeded up.
    let by_the_other = 2.0 * 1.083_333 / 0.916_667;
    assert!(numbers.wait() > Duration::from_secs_f64(by_the_other));
}

#[tokio::test(start_paused = true)]
async fn a_request_that_hangs_ends_no_takeovers() {
    let mut rig = Rig::new(Some(("node-b", 5)));
    rig.keep(&lease("node-b", 5, 0));
    rig.played.set_fault(Fault::Hang);
    let healed = async {
        sleep(Duration::from_secs(30)).await;
        rig.played.set_fault(Fault::None);
        sleep(Duration::from_secs(3)).await;
    };
    tokio::select! {
        () = rig.leases.watch(&rig.vips) => {}
        () = healed => {}
    }
    assert_eq!(rig.expired("node-b"), 5);
}

#[tokio::test(start_paused = true)]
async fn a_watch_that_is_late_ends_no_takeovers() {
    let mut rig = Rig::new(Some(("node-b", 5)));
    rig.keep(&lease("node-b", 5, 0));
    rig.look(Duration::ZERO).await;
    // The watch never says so.
    rig.played.keep(lease("node-b", 9, 0));
    rig.look(Duration::from_secs(3)).await;
    rig.look(Duration::from_secs(2)).await;
    assert_eq!(rig.expired("node-b"), 0, "its time counts from when it was read");
    rig.look(Duration::from_secs(1)).await;
    assert_eq!(rig.expired("node-b"), 9);
    let of_node_b = |sequence: u64| vip(&[json!({"node": "node-b", "sequence": sequence})]);
    assert!(rig.leases.is_free_for(&of_node_b(9), "node-a"));
    assert!(!rig.leases.is_free_for(&of_node_b(10), "node-a"));
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_was_deleted_is_made_with_its_seconds() {
    for is_known in [true, false] {
        let mut rig = Rig::new(Some(("node-b", 5)));
        let former = lease("node-b", 9, 0);
        if is_known {
            rig.keep(&former);
            rig.look(Duration::ZERO).await;
            rig.played.remove("node-b");
            rig.heard.apply_watcher_event(&Event::Delete(former));
        }
        rig.look(Duration::ZERO).await;
        let made = Numbers::read(&rig.played.lease("node-b").unwrap());
        let seconds = if is_known { 2 } else { MAX_SECONDS };
        assert_eq!((made.answered, made.expired, made.seconds), (5, 0, seconds));
    }
}

#[tokio::test(start_paused = true)]
async fn a_silent_nodes_lease_is_deleted_if_it_owns_nothing() {
    let mut rig = Rig::new(Some(("node-a", 5)));
    for node in ["node-a", "node-b"] {
        rig.keep(&lease(node, 5, 5));
    }
    rig.keep(&lease("node-c", 5, 0));
    rig.look(Duration::ZERO).await;
    rig.look(KEEP_UNUSED.saturating_sub(Duration::from_secs(1))).await;
    let leases = |rig: &Rig| ["node-a", "node-b", "node-c"].map(|node| rig.played.lease(node).is_some());
    assert_eq!(leases(&rig), [true; 3]);
    rig.look(Duration::from_secs(1)).await;
    // The watch has not said that node-c is silent.
    assert_eq!(leases(&rig), [true, false, true]);
}
